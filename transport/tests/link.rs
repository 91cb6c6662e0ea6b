//! The contract of every link, tested on each link.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::link::unix::{ListenOptions, Listener, connect};
use vgpu_transport::link::window::{WindowGuest, WindowHost, inproc_pair};
use vgpu_transport::link::{GuestEnd, HostEnd, LinkError};
use vgpu_transport::wire::{MAX_MESSAGE, MAX_PAYLOAD};

const WAIT: Duration = Duration::from_secs(20);

/// A temporary directory for sockets.
struct Dir(PathBuf, #[allow(dead_code)] tempfile::TempDir);

impl Dir {
    fn new(name: &str) -> Dir {
        let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        Dir(folder.path().to_owned(), folder)
    }
}

fn unix_pair(name: &str) -> (WindowGuest, WindowHost) {
    let dir = Dir::new(name);
    let path = dir.0.join("s");
    let listener = Listener::bind(&path, ListenOptions::default()).unwrap();
    let guest = thread::spawn(move || connect(&path, WAIT).unwrap());
    let arrival = listener.accept(WAIT).unwrap().unwrap();
    assert_eq!(arrival.peer().pid, std::process::id() as i32);
    let host = arrival.handshake().unwrap();
    (guest.join().unwrap(), host)
}

/// Runs a test body on every kind of link.
macro_rules! on_each_link {
    ($($name:ident)*) => {
        mod inproc { $(#[test] fn $name() { super::$name(super::inproc_pair().unwrap()); })* }
        mod unix { $(#[test] fn $name() { super::$name(super::unix_pair(stringify!($name))); })* }
    };
}

on_each_link! {
    messages_cross_both_ways
    many_messages_arrive_complete
    replies_do_not_block_a_guest_that_sends_continuously
    final_message_of_a_host_arrives
    a_guest_waits_for_a_message_for_a_limited_time
    disconnected_guest_is_detected
    limits_are_kept
    staged_payloads
    host_receives_selected_requests_ahead
}

fn a_guest_waits_for_a_message_for_a_limited_time(
    (mut guest, mut host): (WindowGuest, WindowHost),
) {
    let mut message = Vec::new();
    assert_eq!(
        guest.receive_within(&mut message, Duration::ZERO),
        Ok(false)
    );
    assert_eq!(
        guest.receive_within(&mut message, Duration::from_millis(20)),
        Ok(false)
    );
    // The link stays usable.
    assert_eq!(guest.send(b"request", Bytes::from(&[][..])), Ok(1));
    assert!(host.receive(&mut Vec::new(), WAIT).unwrap().is_some());
    host.send(b"reply", 0, &mut |_| {}).unwrap();
    assert_eq!(guest.receive_within(&mut message, WAIT), Ok(true));
    assert_eq!(message, b"reply");
    drop(host);
    assert_eq!(
        guest.receive_within(&mut message, WAIT),
        Err(LinkError::Closed)
    );
}

/// A byte pattern that depends on its seed and position.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (seed.wrapping_mul(0x9e37_79b9).wrapping_add(i * 7) >> 3) as u8)
        .collect()
}

/// A host that answers each request with its message and payload reversed.
fn mirror(mut host: WindowHost) -> thread::JoinHandle<Result<(), LinkError>> {
    thread::spawn(move || {
        let mut message = Vec::new();
        loop {
            message.clear();
            let Some(incoming) = host.receive(&mut message, WAIT)? else {
                continue;
            };
            let mut payload = vec![0; incoming.payload_len];
            host.payload().copy_to(&mut payload);
            message.reverse();
            payload.reverse();
            host.send(&message, payload.len(), &mut |mut room: BytesMut<'_>| {
                room.copy_from(Bytes::from(&payload[..]));
            })?;
            host.retire();
        }
    })
}

fn messages_cross_both_ways((mut guest, host): (WindowGuest, WindowHost)) {
    let host = mirror(host);
    let mut room = vec![0; MAX_PAYLOAD];
    let sizes = [
        0,
        1,
        7,
        64,
        100,
        4096,
        4097,
        65536,
        MAX_PAYLOAD - 1,
        MAX_PAYLOAD,
    ];
    let mut requests = 0;
    for round in 0..30 {
        for (i, &len) in sizes.iter().enumerate() {
            let message = pattern(round, 12 + i * 31);
            let payload = pattern(round + 1, len);
            requests += 1;
            assert_eq!(
                guest.send(&message, Bytes::from(&payload[..])),
                Ok(requests)
            );
            let mut reply = Vec::new();
            let got = guest
                .receive(&mut reply, BytesMut::from(&mut room[..]))
                .unwrap();
            assert_eq!(got, len);
            assert!(reply.iter().eq(message.iter().rev()));
            assert!(room[..got].iter().eq(payload.iter().rev()));
        }
    }
    guest.wait_retired(requests).unwrap();
    assert_eq!(guest.retired(), requests);
    assert_eq!(guest.counters().messages_in, requests);
    assert_eq!(guest.counters().messages_out, requests);
    assert_eq!(guest.counters().bytes_in, guest.counters().bytes_out);
    drop(guest);
    assert_eq!(host.join().unwrap(), Err(LinkError::Closed));
}

/// One-way requests of many sizes, more than fit into the link at once.
fn many_messages_arrive_complete((mut guest, mut host): (WindowGuest, WindowHost)) {
    const REQUESTS: u64 = 3000;
    let len = |request: u64| match request % 50 {
        0 => MAX_PAYLOAD,
        i => (i as usize * 577) % 20000,
    };
    let host = thread::spawn(move || {
        let (mut message, mut payload) = (Vec::new(), Vec::new());
        for request in 1..=REQUESTS {
            message.clear();
            let incoming = host.receive(&mut message, WAIT).unwrap().unwrap();
            assert_eq!(incoming.request, request);
            assert_eq!(message, pattern(request, 20));
            payload.resize(incoming.payload_len, 0);
            host.payload().copy_to(&mut payload);
            assert!(payload == pattern(request, len(request)), "{request}");
            host.retire();
        }
        host
    });
    for request in 1..=REQUESTS {
        let payload = pattern(request, len(request));
        guest
            .send(&pattern(request, 20), Bytes::from(&payload[..]))
            .unwrap();
    }
    guest.wait_retired(REQUESTS).unwrap();
    assert_eq!(guest.retired(), REQUESTS);
    assert!(guest.counters().round_trips <= 1);
    drop(host.join().unwrap());
    assert!(guest.is_closed());
}

/// The host sends large replies at once, and the guest sends further requests without receiving.
fn replies_do_not_block_a_guest_that_sends_continuously(
    (mut guest, host): (WindowGuest, WindowHost),
) {
    let _host = mirror(host);
    let payload = pattern(5, MAX_PAYLOAD / 2);
    for request in 1..=60 {
        assert_eq!(guest.send(b"flood", Bytes::from(&payload[..])), Ok(request));
    }
    guest.wait_retired(60).unwrap();
    let mut room = vec![0; payload.len()];
    for _ in 0..60 {
        let mut reply = Vec::new();
        let got = guest.receive(&mut reply, BytesMut::from(&mut room[..]));
        assert_eq!((got, &reply[..]), (Ok(payload.len()), &b"doolf"[..]));
        assert!(room.iter().eq(payload.iter().rev()));
    }
}

fn final_message_of_a_host_arrives((mut guest, mut host): (WindowGuest, WindowHost)) {
    host.send(b"first", 3, &mut |mut room: BytesMut<'_>| {
        room.copy_from(Bytes::from(&b"abc"[..]));
    })
    .unwrap();
    host.send(b"last", 0, &mut |_| {}).unwrap();
    drop(host);
    assert!(guest.is_closed());
    assert_eq!(
        guest.send(b"x", Bytes::from(&[][..])),
        Err(LinkError::Closed)
    );
    let (mut message, mut room) = (Vec::new(), [0; 3]);
    // `try_receive` does not consume a reply with a payload.
    assert_eq!(guest.try_receive(&mut message), Ok(false));
    assert_eq!(
        guest.receive(&mut message, BytesMut::from(&mut room[..])),
        Ok(3)
    );
    assert_eq!((&message[..], &room), (&b"first"[..], b"abc"));
    assert_eq!(guest.try_receive(&mut message), Ok(true));
    assert_eq!(message, b"firstlast");
    assert_eq!(guest.try_receive(&mut message), Err(LinkError::Closed));
    assert_eq!(
        guest.receive(&mut message, BytesMut::from(&mut room[..])),
        Err(LinkError::Closed)
    );
    assert_eq!(guest.wait_retired(1), Ok(()), "nothing was sent");
}

fn disconnected_guest_is_detected((guest, mut host): (WindowGuest, WindowHost)) {
    let host = thread::spawn(move || {
        loop {
            match host.receive(&mut Vec::new(), WAIT) {
                Ok(None) => {}
                other => return other,
            }
        }
    });
    thread::sleep(Duration::from_millis(20));
    drop(guest);
    assert_eq!(host.join().unwrap(), Err(LinkError::Closed));
}

fn limits_are_kept((mut guest, mut host): (WindowGuest, WindowHost)) {
    let (long, large) = (vec![1; MAX_MESSAGE + 1], vec![2; MAX_PAYLOAD + 1]);
    let too_large = |len, payload| LinkError::TooLarge { len, payload };
    let nothing = || Bytes::from(&[][..]);
    assert_eq!(
        guest.send(&long, nothing()),
        Err(too_large(MAX_MESSAGE + 1, 0))
    );
    assert_eq!(
        guest.send(b"x", Bytes::from(&large[..])),
        Err(too_large(1, MAX_PAYLOAD + 1))
    );
    assert_eq!(
        host.send(b"x", MAX_PAYLOAD + 1, &mut |_| {}),
        Err(too_large(1, MAX_PAYLOAD + 1))
    );
    assert_eq!(guest.send(&long[..MAX_MESSAGE], nothing()), Ok(1));
    let mut message = Vec::new();
    assert!(host.receive(&mut message, WAIT).unwrap().is_some());
    assert_eq!(message, &long[..MAX_MESSAGE]);
    host.retire();
    assert_eq!(host.receive(&mut message, Duration::ZERO), Ok(None));
    // A reply larger than the guest's buffer breaks the link.
    host.send(b"x", 2, &mut |_| {}).unwrap();
    let misbehaved = guest.receive(&mut Vec::new(), BytesMut::from(&mut [0u8][..]));
    assert!(matches!(misbehaved, Err(LinkError::PeerMisbehaved(_))));
    assert_eq!(guest.send(b"x", nothing()), misbehaved.map(|_| 0));
}

/// Payloads that lie in a staging region are not copied.
fn staged_payloads((mut guest, mut host): (WindowGuest, WindowHost)) {
    let region = guest.alloc_staging(100_000).unwrap();
    let shared = region.range.clone();
    assert!(shared.len() >= 100_000);
    let data = pattern(3, 5000);
    let part = shared.start + 64..shared.start + 64 + data.len();
    guest
        .window()
        .bytes_mut(part.clone())
        .copy_from(Bytes::from(&data[..]));
    assert_eq!(guest.send_staged(b"here", part), Ok(1));
    let mut message = Vec::new();
    let incoming = host.receive(&mut message, WAIT).unwrap().unwrap();
    assert_eq!(
        (&message[..], incoming.payload_len),
        (&b"here"[..], data.len())
    );
    let mut seen = vec![0; data.len()];
    host.payload().copy_to(&mut seen);
    assert_eq!(seen, data);
    host.retire();
    guest.wait_retired(1).unwrap();
    guest.free_staging(region);
    // The host refuses a payload outside the bulk area.
    assert_eq!(guest.send_staged(b"there", 0..100), Ok(2));
    let refused = host.receive(&mut message, WAIT);
    assert!(
        matches!(refused, Err(LinkError::PeerMisbehaved(_))),
        "{refused:?}"
    );
}

fn host_receives_selected_requests_ahead((mut guest, mut host): (WindowGuest, WindowHost)) {
    let mut message = Vec::new();
    let none = (&[][..]).into();
    let any = |_: &[u8]| true;
    // The guest has sent nothing yet.
    assert_eq!(host.receive_ahead(&any, &mut message, WAIT), Ok(None));
    for word in [b"one", b"two", b"six"] {
        guest.send(word, none).unwrap();
    }
    host.receive(&mut message, WAIT).unwrap().unwrap();
    message.clear();
    // A request that the host does not want stays in the ring.
    let is_six = |m: &[u8]| m == b"six";
    assert_eq!(host.receive_ahead(&is_six, &mut message, WAIT), Ok(None));
    assert!(message.is_empty());
    let is_two = |m: &[u8]| m == b"two";
    let ahead = host.receive_ahead(&is_two, &mut message, WAIT).unwrap();
    assert_eq!(ahead.map(|next| next.request), Some(2));
    assert_eq!(message, b"two");
    assert_eq!(guest.retired(), 0, "the first is not finished with");
    assert!(host.has_room(3, 4) && !host.has_room(MAX_MESSAGE + 1, 0));
    // Room that is not used leaves nothing in the ring.
    let mut room = host.reserve(2, 4).unwrap();
    room.copy_from((&b"left"[..]).into());
    host.send(b"yes", 0, &mut |_| {}).unwrap();
    host.retire();
    guest.wait_retired(2).unwrap();
    assert_eq!(guest.retired(), 2, "both are");
    let mut reply = Vec::new();
    guest.receive(&mut reply, (&mut [][..]).into()).unwrap();
    assert_eq!(reply, b"yes");
    // The next reply arrives in order, and no other follows.
    message.clear();
    let next = host.receive(&mut message, WAIT).unwrap().unwrap();
    assert_eq!((next.request, &message[..]), (3, &b"six"[..]));
    let soon = Duration::from_millis(1);
    assert_eq!(host.receive_ahead(&any, &mut message, soon), Ok(None));
}

#[test]
fn socket_is_limited_to_owner_and_group_and_is_removed() {
    let dir = Dir::new("mode");
    let path = dir.0.join("s");
    let listener = Listener::bind(&path, ListenOptions::default()).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    assert_eq!(listener.accept(Duration::ZERO).unwrap().map(|_| ()), None);
    drop(listener);
    assert!(!path.exists());
}
