//! Links over a byte stream: the properties beyond those of every link, and encryption.

use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::link::stream::{Channel, Plain, StreamGuest, StreamHost, tcp};
use vgpu_transport::link::{GuestEnd, HostEnd, LinkError};
use vgpu_transport::wire::{MAX_MESSAGE, MAX_PAYLOAD};

const WAIT: Duration = Duration::from_secs(20);

fn channels() -> (Box<dyn Channel>, Box<dyn Channel>) {
    let (a, b) = UnixStream::pair().unwrap();
    a.set_nonblocking(true).unwrap();
    b.set_nonblocking(true).unwrap();
    (Box::new(Plain::new(a)), Box::new(Plain::new(b)))
}

fn pair() -> (StreamGuest, StreamHost) {
    let (a, b) = channels();
    (StreamGuest::new(a), StreamHost::new(b).unwrap())
}

/// A host that answers each request with its message and payload reversed.
fn mirror(mut host: StreamHost) -> thread::JoinHandle<LinkError> {
    thread::spawn(move || {
        let mut message = Vec::new();
        loop {
            message.clear();
            let incoming = match host.receive(&mut message, WAIT) {
                Ok(Some(incoming)) => incoming,
                Ok(None) => continue,
                Err(error) => return error,
            };
            let mut payload = vec![0; incoming.payload_len];
            host.payload().copy_to(&mut payload);
            message.reverse();
            payload.reverse();
            let sent = host.send(&message, payload.len(), &mut |mut room: BytesMut<'_>| {
                room.copy_from(Bytes::from(&payload[..]));
            });
            if let Err(error) = sent {
                return error;
            }
            host.retire();
        }
    })
}

#[test]
fn messages_cross_both_ways() {
    let (mut guest, host) = pair();
    let host = mirror(host);
    let mut room = vec![0; MAX_PAYLOAD];
    for (i, len) in [0, 1, 63, 4096, 70_000, MAX_PAYLOAD - 1, MAX_PAYLOAD]
        .into_iter()
        .enumerate()
    {
        let message: Vec<u8> = (0..12 + i * 31).map(|b| b as u8).collect();
        let payload: Vec<u8> = (0..len).map(|b| (b * 7 % 251) as u8).collect();
        let request = guest.send(&message, Bytes::from(&payload[..])).unwrap();
        assert_eq!(request, i as u64 + 1);
        let mut reply = Vec::new();
        let got = guest
            .receive(&mut reply, BytesMut::from(&mut room[..]))
            .unwrap();
        assert_eq!(got, len);
        assert!(reply.iter().eq(message.iter().rev()));
        assert!(room[..got].iter().eq(payload.iter().rev()));
    }
    // The host sent the last reply before the host retired the request. An idle host reports the
    // retirement.
    guest.wait_retired(7).unwrap();
    assert_eq!(guest.retired(), 7);
    drop(guest);
    assert_eq!(host.join().unwrap(), LinkError::Closed);
}

#[test]
fn continuous_messages_both_ways_do_not_block() {
    let (mut guest, host) = pair();
    let host = mirror(host);
    let payload = vec![5; MAX_PAYLOAD];
    // Neither the kernel nor the queues have room for all replies, so the guest must receive while
    // it sends.
    for _ in 0..64 {
        guest.send(b"x", Bytes::from(&payload[..])).unwrap();
    }
    let mut room = vec![0; MAX_PAYLOAD];
    for _ in 0..64 {
        let got = guest
            .receive(&mut Vec::new(), BytesMut::from(&mut room[..]))
            .unwrap();
        assert_eq!(got, MAX_PAYLOAD);
    }
    drop(guest);
    host.join().unwrap();
}

#[test]
fn a_guest_waits_for_a_message_for_a_limited_time() {
    let (mut guest, mut host) = pair();
    let mut message = Vec::new();
    let short = Duration::from_millis(20);
    assert_eq!(
        guest.receive_within(&mut message, Duration::ZERO),
        Ok(false)
    );
    assert_eq!(guest.receive_within(&mut message, short), Ok(false));
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

#[test]
fn last_message_of_a_host_is_received_after_a_request_that_fails() {
    let (mut guest, mut host) = pair();
    host.send(b"the reason", 0, &mut |_| {}).unwrap();
    drop(host);
    let sent = guest.send(b"request", Bytes::from(&[][..]));
    assert_eq!(sent, Err(LinkError::Closed));
    let mut message = Vec::new();
    assert_eq!(guest.try_receive(&mut message), Ok(true));
    assert_eq!(message, b"the reason");
    assert_eq!(guest.try_receive(&mut message), Err(LinkError::Closed));
}

#[test]
fn end_of_a_peer_ends_every_wait() {
    let (mut guest, host) = pair();
    drop(host);
    assert_eq!(
        guest.receive(&mut Vec::new(), (&mut [][..]).into()),
        Err(LinkError::Closed)
    );
    assert!(guest.is_closed());
    assert!(guest.send(b"x", (&[][..]).into()).is_err());
    let (guest, mut host) = pair();
    drop(guest);
    assert_eq!(host.receive(&mut Vec::new(), WAIT), Err(LinkError::Closed));
}

#[test]
fn busy_host_is_not_reported_as_ended() {
    let (mut guest, mut host) = pair();
    guest.send(b"long", (&[][..]).into()).unwrap();
    assert!(host.receive(&mut Vec::new(), WAIT).unwrap().is_some());
    let worker = thread::spawn(move || {
        // Longer than the time without data after which a guest closes the link.
        thread::sleep(Duration::from_secs(12));
        host.send(b"done", 0, &mut |_| {}).unwrap();
        host
    });
    guest
        .receive(&mut Vec::new(), (&mut [][..]).into())
        .unwrap();
    drop(worker.join().unwrap());
}

#[test]
fn link_to_a_stopped_host_is_closed() {
    let (a, _silent) = channels();
    let mut guest = StreamGuest::new(a);
    let error = guest.receive(&mut Vec::new(), (&mut [][..]).into());
    assert_eq!(error, Err(LinkError::Stalled { seconds: 10 }));
}

#[test]
fn invalid_bytes_end_the_link() {
    let head = |words: [u32; 6]| {
        words
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let cases = [
        head([9, 0, 0, 0, 1, 0]),
        head([1, MAX_MESSAGE as u32 + 1, 0, 0, 1, 0]),
        head([1, 0, MAX_PAYLOAD as u32 + 1, 0, 1, 0]),
        head([3, 1, 0, 0, 1, 0]),
        head([1, 0, 0, 0, 2, 0]),
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n".to_vec(),
        vec![0xff; 100],
    ];
    for bytes in cases {
        let (mut a, b) = channels();
        let mut host = StreamHost::new(b).unwrap();
        assert_eq!(a.write(&bytes).unwrap(), bytes.len());
        let error = host.receive(&mut Vec::new(), WAIT).unwrap_err();
        assert!(
            matches!(error, LinkError::PeerMisbehaved(_)),
            "{bytes:?}: {error}"
        );
        assert!(
            host.receive(&mut Vec::new(), WAIT).is_err(),
            "the error of a link is final"
        );
    }
    // A host whose retired number decreases.
    let (mut a, b) = channels();
    let mut guest = StreamGuest::new(b);
    guest.send(b"x", (&[][..]).into()).unwrap();
    a.write(&head([3, 0, 0, 0, 5, 0])).unwrap();
    a.write(&head([3, 0, 0, 0, 4, 0])).unwrap();
    let error = guest
        .receive(&mut Vec::new(), (&mut [][..]).into())
        .unwrap_err();
    assert!(matches!(error, LinkError::PeerMisbehaved(_)), "{error}");
}

#[test]
fn message_received_in_parts_is_reassembled() {
    let (mut a, b) = channels();
    let mut host = StreamHost::new(b).unwrap();
    let mut bytes: Vec<u8> = [1u32, 3, 2, 0, 1, 0]
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    bytes.extend_from_slice(b"abcde");
    let writer = thread::spawn(move || {
        for byte in bytes {
            a.write(&[byte]).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        a
    });
    let mut message = Vec::new();
    let began = Instant::now();
    let incoming = loop {
        assert!(began.elapsed() < WAIT);
        if let Some(incoming) = host
            .receive(&mut message, Duration::from_millis(5))
            .unwrap()
        {
            break incoming;
        }
    };
    assert_eq!((incoming.request, incoming.payload_len), (1, 2));
    assert_eq!(message, b"abc");
    let mut payload = [0; 2];
    host.payload().copy_to(&mut payload);
    assert_eq!(&payload, b"de");
    drop(writer.join().unwrap());
}

#[test]
fn tcp_without_certificates_accepts_loopback_only() {
    for host in ["0.0.0.0", "::"] {
        let error = tcp::Listener::bind(host, 0, None).unwrap_err();
        assert!(error.to_string().contains("vgpu cert"), "{error}");
    }
    let listener = tcp::Listener::bind("127.0.0.1", 0, None).unwrap();
    let port = listener.address().unwrap().port();
    let guest = thread::spawn(move || tcp::connect("127.0.0.1", port, None, WAIT).unwrap());
    let arrival = listener.accept(WAIT).unwrap().unwrap();
    let host = mirror(arrival.handshake(WAIT).unwrap());
    let mut guest = guest.join().unwrap();
    guest.send(b"ab", (&[][..]).into()).unwrap();
    let mut reply = Vec::new();
    guest.receive(&mut reply, (&mut [][..]).into()).unwrap();
    assert_eq!(reply, b"ba");
    drop(guest);
    host.join().unwrap();
    let error = tcp::connect("192.0.2.1", 4780, None, WAIT).err().unwrap();
    assert!(error.to_string().contains("VGPU_CERTS"), "{error}");
}
