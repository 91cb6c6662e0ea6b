//! The memory that a host's end of a stream takes, whatever its guest sends and does not read. An
//! allocator counts it.
#![allow(unsafe_code)] // the allocator

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vgpu_transport::link::stream::{Plain, StreamHost};
use vgpu_transport::link::{HostEnd as _, LinkError};
use vgpu_transport::wire::{MAX_FIRST_MESSAGE, MAX_MESSAGE, MAX_PAYLOAD};

const WAIT: Duration = Duration::from_secs(60);

/// What the queues of a session over a stream take at most, as `docs/SECURITY.md` says.
const QUEUES: usize = 26 << 20;

/// What of that is for received bytes: the 4 MiB, a read and its buffer, an incomplete frame, and
/// the request under way.
const RECEIVED: usize = 7 << 20;

/// What a connection takes before its first message is received.
const BEFORE_FIRST: usize = 64 << 10;

/// Passes every call to the allocator of the system.
struct Counting;

thread_local! {
    /// Bytes that this thread has allocated and not freed, and the most since the last reset.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // The thread ends: nobody measures.
    let _ = HELD.try_with(|held| {
        let now = held.get().0 + bytes;
        held.set((now, held.get().1.max(now)));
    });
}

// SAFETY: every call is passed to the allocator of the system, which fulfils the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller fulfils the contract of `alloc`, which is that of the system's
        // allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller fulfils the contract of `dealloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The kernel moves the pages of large blocks: they do not exist twice.
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller fulfils the contract of `realloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Begins a measurement. Returns what this thread holds.
fn begin() -> isize {
    HELD.with(|held| {
        held.set((held.get().0, held.get().0));
        held.get().0
    })
}

/// The most bytes since `begin` has returned `before`.
fn most_since(before: isize) -> usize {
    usize::try_from(HELD.with(|held| held.get().1) - before).unwrap_or(0)
}

/// A host's end, and the socket of its guest, which blocks neither.
fn host() -> (StreamHost, UnixStream) {
    let (near, far) = UnixStream::pair().expect("sockets");
    near.set_nonblocking(true).expect("a socket");
    far.set_nonblocking(true).expect("a socket");
    let host = StreamHost::new(Box::new(Plain::new(near))).expect("a thread");
    (host, far)
}

/// The frame of a request, or its beginning.
fn frame(number: u64, message: usize, payload: usize) -> Vec<u8> {
    let words = [1, message as u32, payload as u32, 0];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(number.to_le_bytes());
    bytes.resize(bytes.len() + message + payload, 7);
    bytes
}

/// Sends `bytes` while the host looks for requests, until the host takes no more.
fn flood(host: &mut StreamHost, guest: &mut UnixStream, mut bytes: &[u8]) {
    let (mut idle, start) = (0, Instant::now());
    while !bytes.is_empty() && idle < 100 {
        assert!(start.elapsed() < WAIT, "the host takes bytes without end");
        match guest.write(bytes) {
            Ok(count) => (bytes, idle) = (&bytes[count..], 0),
            Err(_) => idle += 1,
        }
        host.check_guest().expect("the guest is there");
    }
}

/// Whoever can connect has no session yet, and is charged for nothing.
#[test]
fn connection_holds_little_before_its_first_message() {
    // The first message is too long: it is refused by its header.
    let long = frame(1, MAX_FIRST_MESSAGE, 1);
    // It is never complete, however much of it there is.
    let incomplete = frame(1, MAX_FIRST_MESSAGE, 0);
    // Others follow it at once: as many as the kernel takes.
    let mut others = frame(1, 8, 0);
    (2..12).for_each(|number| others.extend(frame(number, MAX_MESSAGE, MAX_PAYLOAD)));
    let mut empty = frame(1, 8, 0);
    (2..100_000).for_each(|number| empty.extend(frame(number, 0, 0)));
    for (what, bytes) in [
        ("a long first message", &long[..]),
        ("an incomplete first message", &incomplete[..4000]),
        ("messages behind the first one", &others),
        ("empty messages behind the first one", &empty),
    ] {
        let before = begin();
        let (mut host, mut guest) = host();
        host.limit_first(MAX_FIRST_MESSAGE);
        let mut message = Vec::new();
        let sent = guest.write(bytes).expect("a part");
        let received = host.receive(&mut message, Duration::from_millis(20));
        let most = most_since(before);
        println!("{what}: {sent} bytes were sent, {most} held");
        match received {
            Err(LinkError::PeerMisbehaved(violation)) => {
                let says = "the first message has 4097 bytes, the limit is 4096";
                assert_eq!(violation.to_string(), says);
                assert_eq!(bytes.len(), long.len(), "{what}");
            }
            Ok(None) => assert_eq!(bytes.len(), 4000, "{what}"),
            Ok(Some(incoming)) => assert_eq!((incoming.request, message.len()), (1, 8), "{what}"),
            Err(error) => panic!("{what}: {error}"),
        }
        assert!(most <= BEFORE_FIRST, "{what}: {most} bytes");
    }
}

/// After the first message, others have the usual limits.
#[test]
fn only_the_first_message_has_the_limit_of_the_first() {
    let (mut host, mut guest) = host();
    host.limit_first(MAX_FIRST_MESSAGE);
    guest
        .write_all(&frame(1, MAX_FIRST_MESSAGE, 0))
        .expect("it fits");
    let (mut message, start) = (Vec::new(), Instant::now());
    let mut requests = Vec::new();
    // The header of the second one arrives behind the first one, and that of the third one when
    // there is no other.
    for number in [2, 3] {
        let bytes = frame(number, MAX_MESSAGE, MAX_PAYLOAD);
        let mut rest = &bytes[..];
        while requests.len() < number as usize {
            assert!(start.elapsed() < WAIT, "{requests:?}");
            let sent = guest.write(rest).unwrap_or(0);
            rest = &rest[sent..];
            let received = host.receive(&mut message, Duration::from_millis(1));
            if let Some(incoming) = received.expect("a guest that obeys") {
                requests.push((incoming.request, incoming.payload_len));
            }
        }
    }
    assert_eq!(requests, [(1, 0), (2, MAX_PAYLOAD), (3, MAX_PAYLOAD)]);
    assert_eq!(message.len(), MAX_FIRST_MESSAGE + 2 * MAX_MESSAGE);
}

/// A guest sends as much as the host takes, and reads nothing.
#[test]
fn queues_of_a_session_have_a_bound() {
    // Frames that are just too large for a power of two, small ones, and empty ones.
    let kinds = [
        (MAX_MESSAGE, MAX_PAYLOAD),
        (1, (256 << 10) + 1),
        (1, 0),
        (0, 0),
    ];
    for (message, payload) in kinds {
        let before = begin();
        let (mut host, mut guest) = host();
        let mut bytes = Vec::new();
        let one = frame(1, message, payload);
        (0..=(12 << 20) / one.len() as u64)
            .for_each(|number| bytes.extend(frame(number + 1, message, payload)));
        // The bytes of the guest are no part of the queues.
        let of_guest = bytes.capacity() + one.capacity();
        // The request that is under way, with its payload.
        let start = Instant::now();
        let mut rest = &bytes[..];
        let mut first = Vec::with_capacity(MAX_MESSAGE);
        loop {
            assert!(start.elapsed() < WAIT);
            let sent = guest.write(rest).unwrap_or(0);
            rest = &rest[sent..];
            let received = host.receive(&mut first, Duration::from_millis(1));
            if received.expect("a guest that obeys").is_some() {
                break;
            }
        }
        flood(&mut host, &mut guest, rest);
        let received = most_since(before) - of_guest;
        assert!(
            received <= RECEIVED,
            "{message} and {payload}: {received} bytes"
        );
        // Replies: as many as are queued without a wait. An end that would wait for its guest asks
        // whether it is to wait.
        let mut replies = 0;
        let waits = Arc::new(AtomicBool::new(false));
        let would_wait = Arc::clone(&waits);
        host.set_cancel(Box::new(move || {
            would_wait.store(true, Ordering::Relaxed);
            true
        }));
        let mut reply = |host: &mut StreamHost| {
            replies += 1;
            host.send(&[7; 100], MAX_PAYLOAD, &mut |_| {})
                .expect("room");
        };
        while !waits.load(Ordering::Relaxed) {
            reply(&mut host);
            assert!(most_since(before) < 2 * QUEUES, "no reply waits");
        }
        // The guest reads less than is queued, again and again.
        let (mut room, mut read) = (vec![0; 1 << 20], 0);
        let of_guest = of_guest + room.capacity();
        for _ in 0..64 {
            let until = read + MAX_PAYLOAD;
            while read < until {
                assert!(start.elapsed() < WAIT, "{read} bytes");
                read += guest.read(&mut room).unwrap_or(0);
                host.check_guest().expect("the guest is there");
            }
            reply(&mut host);
        }
        flood(&mut host, &mut guest, &[7; 1]);
        let most = most_since(before) - of_guest;
        println!("frames of {message} and {payload} bytes: {most} bytes, {replies} replies");
        assert!(most <= QUEUES, "{message} and {payload}: {most} bytes");
        // Both queues were full.
        assert!(most >= 12 << 20, "{message} and {payload}: {most} bytes");
        // The guest reads on, and the host sends all that it has queued.
        let start = Instant::now();
        while read < replies * MAX_PAYLOAD {
            assert!(start.elapsed() < WAIT, "{read} bytes");
            read += guest.read(&mut room).unwrap_or(0);
            host.check_guest().expect("the guest is there");
        }
    }
}
