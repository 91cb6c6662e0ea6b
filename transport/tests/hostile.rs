//! Ends of links whose peer writes arbitrary values into the words and rings of the window. An end
//! must return valid data or an error, and an error after a finite number of calls. An end must
//! neither wait forever nor access memory outside the window.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::link::window::{WindowGuest, WindowHost};
use vgpu_transport::link::{GuestEnd, HostEnd, LinkError};
use vgpu_transport::shm::doorbell::EventDoorbell;
use vgpu_transport::shm::layout::{Layout, MIN_SIZE, STATE_CLOSED, word};
use vgpu_transport::shm::liveness::Liveness;
use vgpu_transport::shm::memory::{SharedWords, Window};
use vgpu_transport::wire::{MAX_MESSAGE, MAX_PAYLOAD};

/// The number of sessions per test.
const SESSIONS: u64 = 50;

/// A random generator with a fixed sequence for each seed.
struct Numbers(Xoshiro256PlusPlus);

impl Numbers {
    fn new(seed: u64) -> Numbers {
        Numbers(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// A value that resembles a cursor, a length or an offset.
    fn plausible(&mut self) -> u64 {
        match self.below(5) {
            0 => self.below(1 << 12) * 64,
            1 => self.below(1 << 18),
            2 => self.below(200) | self.below(200) << 32,
            3 => self.next(),
            _ => 0,
        }
    }
}

fn window() -> (Arc<Window>, Layout) {
    let window = Arc::new(Window::anonymous(MIN_SIZE).unwrap());
    let layout = Layout::new(MIN_SIZE, 5).unwrap();
    layout.write(&*window);
    (window, layout)
}

/// Overwrites words of page 0 and headers in a ring with arbitrary values until `stop` is set.
fn write_random_values(
    window: Arc<Window>,
    words: &'static [usize],
    ring: std::ops::Range<usize>,
    mut numbers: Numbers,
    stop: Arc<AtomicBool>,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..numbers.below(20) {
                // The records are at the beginning of the ring.
                let line = numbers.below(64) as usize;
                let at = ring.start + line * 64 + 8 * numbers.below(5) as usize;
                let word = numbers.plausible();
                window.write(at, &word.to_le_bytes());
            }
            let which = words[numbers.below(words.len() as u64) as usize];
            let value = numbers.plausible();
            window.store(which, value);
            thread::yield_now();
        }
    })
}

#[test]
fn host_does_not_crash_with_any_guest() {
    for session in 1..=SESSIONS {
        let (window, layout) = window();
        let (host_bell, _guest_bell) = EventDoorbell::pair().unwrap();
        let mut host = WindowHost::new(Arc::clone(&window), &layout, Box::new(host_bell), None);
        let stop = Arc::new(AtomicBool::new(false));
        let writer = write_random_values(
            Arc::clone(&window),
            &[
                word::SUBMISSION_TAIL,
                word::COMPLETION_HEAD,
                word::GUEST_SLEEPING,
                word::GUEST_WAKE_ON,
            ],
            layout.submission(),
            Numbers::new(session),
            Arc::clone(&stop),
        );
        let mut message = Vec::new();
        let error = loop {
            message.clear();
            let received = host.receive(&mut message, Duration::from_millis(1));
            match received {
                Ok(None) => {}
                Ok(Some(incoming)) => {
                    assert!(message.len() <= MAX_MESSAGE && incoming.payload_len <= MAX_PAYLOAD);
                    let mut payload = vec![0; incoming.payload_len];
                    host.payload().copy_to(&mut payload);
                    if let Err(error) = host.send(b"reply", 100, &mut |mut room: BytesMut<'_>| {
                        room.copy_from(Bytes::from(&[1u8; 100][..]));
                    }) {
                        break error;
                    }
                    host.retire();
                }
                Err(error) => break error,
            }
        };
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        assert!(matches!(error, LinkError::PeerMisbehaved(_)), "{error}");
        assert_eq!(host.receive(&mut message, Duration::ZERO), Err(error));
    }
}

#[test]
fn guest_does_not_crash_with_any_host() {
    for session in 1..=SESSIONS {
        let (window, layout) = window();
        let (guest_bell, _host_bell) = EventDoorbell::pair().unwrap();
        let mut guest = WindowGuest::new(Arc::clone(&window), &layout, Box::new(guest_bell), None);
        let stop = Arc::new(AtomicBool::new(false));
        let writer = write_random_values(
            Arc::clone(&window),
            &[
                word::COMPLETION_TAIL,
                word::SUBMISSION_HEAD,
                word::RETIRED,
                word::HOST_SLEEPING,
                word::HOST_WAKE_ON,
            ],
            layout.completion(),
            Numbers::new(session),
            Arc::clone(&stop),
        );
        let payload = vec![3; MAX_PAYLOAD / 4];
        let mut room = vec![0; 1000];
        let error = loop {
            let mut message = Vec::new();
            let sent = guest.send(b"request", Bytes::from(&payload[..session as usize * 100]));
            let got = sent.and_then(|request| {
                assert!(guest.retired() <= request);
                guest.wait_retired(request)?;
                guest.receive(&mut message, BytesMut::from(&mut room[..]))
            });
            match got {
                Ok(len) => assert!(len <= room.len() && message.len() <= MAX_MESSAGE),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, LinkError::PeerMisbehaved(_)), "{error}");
        assert!(guest.is_closed());
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    }
}

/// A removed device reads as all ones. A replaced session has another epoch.
#[test]
fn guest_detects_a_removed_window() {
    for (offset, value) in [
        (word::HOST_STATE, u64::MAX),
        (word::HOST_STATE, STATE_CLOSED),
        (word::EPOCH, 6),
    ] {
        let (window, layout) = window();
        let (guest_bell, _host_bell) = EventDoorbell::pair().unwrap();
        let mut guest = WindowGuest::new(Arc::clone(&window), &layout, Box::new(guest_bell), None);
        assert_eq!(guest.send(b"request", Bytes::from(&[][..])), Ok(1));
        let breaker = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            window.store(offset, value);
        });
        assert_eq!(guest.wait_retired(1), Err(LinkError::Closed));
        breaker.join().unwrap();
        let sent = guest.send(b"request", Bytes::from(&[][..]));
        assert_eq!(sent, Err(LinkError::Closed));
    }
}

/// The words of a removed device would otherwise be a violation of the protocol.
#[test]
fn guest_does_not_blame_the_host_for_a_removed_window() {
    let (window, layout) = window();
    let (guest_bell, _host_bell) = EventDoorbell::pair().unwrap();
    let mut guest = WindowGuest::new(Arc::clone(&window), &layout, Box::new(guest_bell), None);
    window.store(word::EPOCH, u64::MAX);
    window.store(word::COMPLETION_TAIL, u64::MAX);
    let received = guest.try_receive(&mut Vec::new());
    assert_eq!(received, Err(LinkError::Closed));
}

/// A host whose process is stopped: no descriptor closes, and no word changes.
#[test]
fn guest_closes_link_when_heartbeat_stops() {
    let (window, layout) = window();
    let (guest_bell, _host_bell) = EventDoorbell::pair().unwrap();
    let liveness = Liveness::new(&window, Duration::from_millis(1200));
    let mut guest = WindowGuest::new(window, &layout, Box::new(guest_bell), Some(liveness));
    assert_eq!(guest.send(b"request", Bytes::from(&[][..])), Ok(1));
    let stalled = Err(LinkError::Stalled { seconds: 1 });
    assert_eq!(guest.wait_retired(1), stalled);
    assert_eq!(guest.try_receive(&mut Vec::new()).map(|_| ()), stalled);
}
