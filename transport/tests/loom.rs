//! The ring and the sleep protocol under every interleaving that the C11 memory model permits, up
//! to the number of preemptions that each model states.
//!
//! The models run the production code on memory that detects races. Words are loom's atomics. Each
//! cache line of records is a loom cell, which fails the model when both sides access it at once. A
//! sleep has no time limit, so a lost wake-up is a deadlock, which loom reports.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use vgpu_transport::shm::memory::SharedWords;
use vgpu_transport::shm::notify::{SleepWords, Sleeper, Waker};
use vgpu_transport::shm::ring::{Consumer, Limits, Payload, Producer, Record, RingArea};

const LINE: usize = 64;

// The offsets of the model's words.
const TAIL: usize = 0;
const HEAD: usize = 8;
const CONSUMER: SleepWords = SleepWords {
    sleeping: 16,
    wake_on: 24,
};
const PRODUCER: SleepWords = SleepWords {
    sleeping: 32,
    wake_on: 40,
};
const WORDS: usize = 6;
const DATA: usize = WORDS * 8;

struct ModelMemory {
    words: Vec<AtomicU64>,
    lines: Vec<UnsafeCell<[u8; LINE]>>,
}

// SAFETY: the lines are accessed through loom's cells, which fail the model when two threads do so
// at once.
unsafe impl Sync for ModelMemory {}

impl ModelMemory {
    fn new(ring: usize) -> ModelMemory {
        ModelMemory {
            words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(),
            lines: (0..ring / LINE)
                .map(|_| UnsafeCell::new([0; LINE]))
                .collect(),
        }
    }

    /// The line of the `len` bytes at `offset`, and the range of these bytes in the line.
    fn line(&self, offset: usize, len: usize) -> (&UnsafeCell<[u8; LINE]>, std::ops::Range<usize>) {
        let at = offset - DATA;
        let begin = at % LINE;
        assert!(
            begin + len <= LINE,
            "the models' messages share the header's line"
        );
        (&self.lines[at / LINE], begin..begin + len)
    }
}

impl SharedWords for ModelMemory {
    fn load(&self, offset: usize) -> u64 {
        self.words[offset / 8].load(Ordering::Acquire)
    }

    fn store(&self, offset: usize, value: u64) {
        self.words[offset / 8].store(value, Ordering::Release);
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        let (line, range) = self.line(offset, out.len());
        // SAFETY: loom has checked that no other thread writes the line now.
        line.with(|bytes| out.copy_from_slice(unsafe { &(&*bytes)[range] }));
    }

    fn write(&self, offset: usize, data: &[u8]) {
        let (line, range) = self.line(offset, data.len());
        // SAFETY: loom has checked that no other thread accesses the line now.
        line.with_mut(|bytes| unsafe { (&mut (*bytes))[range].copy_from_slice(data) });
    }

    fn drain_writes(&self) {
        fence(Ordering::Release);
    }

    fn full_fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// A doorbell with the semantics of an eventfd: a ring is pending until it is cleared.
#[derive(Default)]
struct TestDoorbell {
    rung: Mutex<bool>,
    waiting: Condvar,
}

impl TestDoorbell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.waiting.notify_one();
    }

    fn clear(&self) {
        *self.rung.lock().unwrap() = false;
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.waiting.wait(rung).unwrap();
        }
    }
}

fn place(ring: usize) -> RingArea {
    RingArea {
        data: DATA..DATA + ring,
        tail: TAIL,
        head: HEAD,
    }
}

fn limits() -> Limits {
    Limits {
        message: 64,
        payload: 256,
        bulk: 0..0,
    }
}

/// Publishes a record if the ring has room.
fn try_put(producer: &mut Producer, memory: &ModelMemory, request: u64, payload: usize) -> bool {
    let room = producer
        .reserve(memory, request, 8, Payload::Inline(payload))
        .unwrap();
    let Some(room) = room else { return false };
    if payload > 0 {
        // An access to the payload's last line represents all accesses.
        memory.write(
            room.payload.end.next_multiple_of(8) - 8,
            &request.to_le_bytes(),
        );
    }
    producer.publish(memory, room, &request.to_le_bytes());
    true
}

/// Checks and releases a record.
fn take(consumer: &mut Consumer, memory: &ModelMemory, arrived: &Record, expected: u64) {
    assert_eq!(arrived.request, expected);
    let mut message = [0; 8];
    memory.read(arrived.message.start, &mut message);
    assert_eq!(u64::from_le_bytes(message), expected);
    if !arrived.payload.is_empty() {
        memory.read(arrived.payload.end.next_multiple_of(8) - 8, &mut message);
        assert_eq!(u64::from_le_bytes(message), expected);
    }
    consumer.release(memory, arrived);
}

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Records of different sizes arrive whole and in order through a ring that cannot hold all of
/// them, and no line is accessed by both sides at once. The records wrap, need pads, and fill and
/// empty the ring.
#[test]
fn records_are_never_accessed_by_both_sides() {
    /// Payload sizes in bytes: records of one and of two lines. The third needs a pad in a ring of
    /// four lines.
    const PAYLOADS: [usize; 4] = [0, 64, 72, 0];
    check(4, || {
        let memory = Arc::new(ModelMemory::new(4 * LINE));
        let shared = Arc::clone(&memory);
        let sender = thread::spawn(move || {
            let mut producer = Producer::new(place(4 * LINE));
            for (request, payload) in (1..).zip(PAYLOADS) {
                while !try_put(&mut producer, &shared, request, payload) {
                    thread::yield_now();
                }
            }
        });
        let mut consumer = Consumer::new(place(4 * LINE), limits());
        for expected in 1..=PAYLOADS.len() as u64 {
            let arrived = loop {
                match consumer.peek(&*memory).unwrap() {
                    Some(arrived) => break arrived,
                    None => thread::yield_now(),
                }
            };
            take(&mut consumer, &memory, &arrived, expected);
        }
        assert_eq!(consumer.peek(&*memory), Ok(None));
        sender.join().unwrap();
    });
}

/// The producer wakes a sleeping consumer for every record.
#[test]
fn no_wakeup_is_lost() {
    const RECORDS: u64 = 2;
    check(5, || {
        let memory = Arc::new(ModelMemory::new(4 * LINE));
        let bell = Arc::new(TestDoorbell::default());
        let (shared, shared_bell) = (Arc::clone(&memory), Arc::clone(&bell));
        let sender = thread::spawn(move || {
            let mut producer = Producer::new(place(4 * LINE));
            let mut waker = Waker::new(CONSUMER);
            for request in 1..=RECORDS {
                assert!(try_put(&mut producer, &shared, request, 0));
                if waker.must_ring(&*shared, |_| true) {
                    shared_bell.ring();
                }
            }
        });
        let mut consumer = Consumer::new(place(4 * LINE), limits());
        let mut sleeper = Sleeper::new(CONSUMER);
        for expected in 1..=RECORDS {
            let arrived = loop {
                if let Some(arrived) = sleep_for_record(&memory, &bell, &mut sleeper, &mut consumer)
                {
                    break arrived;
                }
            };
            take(&mut consumer, &memory, &arrived, expected);
        }
        sender.join().unwrap();
    });
}

/// The producer sleeps while the ring is full, the consumer while it is empty, and each wakes the
/// other.
#[test]
fn no_wakeup_is_lost_between_two_sleepers() {
    const RECORDS: u64 = 3;
    const RING: usize = 2 * LINE;
    check(3, || {
        let memory = Arc::new(ModelMemory::new(RING));
        let (bell, room_bell) = (
            Arc::new(TestDoorbell::default()),
            Arc::new(TestDoorbell::default()),
        );
        let (shared, shared_bell, own_bell) = (
            Arc::clone(&memory),
            Arc::clone(&bell),
            Arc::clone(&room_bell),
        );
        let sender = thread::spawn(move || {
            let mut producer = Producer::new(place(RING));
            let mut waker = Waker::new(CONSUMER);
            let mut sleeper = Sleeper::new(PRODUCER);
            for request in 1..=RECORDS {
                while !try_put(&mut producer, &shared, request, 0) {
                    own_bell.clear();
                    sleeper.announce(&*shared, request);
                    let is_full = producer
                        .reserve(&*shared, request, 8, Payload::Inline(0))
                        .unwrap()
                        .is_none();
                    if is_full {
                        own_bell.wait();
                    }
                    sleeper.awake(&*shared);
                }
                if waker.must_ring(&*shared, |_| true) {
                    shared_bell.ring();
                }
            }
        });
        let mut consumer = Consumer::new(place(RING), limits());
        let mut sleeper = Sleeper::new(CONSUMER);
        let mut waker = Waker::new(PRODUCER);
        for expected in 1..=RECORDS {
            let arrived = loop {
                if let Some(arrived) = sleep_for_record(&memory, &bell, &mut sleeper, &mut consumer)
                {
                    break arrived;
                }
            };
            take(&mut consumer, &memory, &arrived, expected);
            // The producer waits for room for one record, so every release satisfies it.
            if waker.must_ring(&*memory, |_| true) {
                room_bell.ring();
            }
        }
        sender.join().unwrap();
    });
}

/// A sleeper that waits for a request's number is woken by that request and not before, and the
/// waker does not apply the wake-on value of one sleep to another sleep.
#[test]
fn waiter_for_a_sequence_number_is_woken() {
    const LAST: u64 = 3;
    check(5, || {
        let memory = Arc::new(ModelMemory::new(LINE));
        let bell = Arc::new(TestDoorbell::default());
        let (shared, shared_bell) = (Arc::clone(&memory), Arc::clone(&bell));
        let counter = thread::spawn(move || {
            let mut waker = Waker::new(CONSUMER);
            for number in 1..=LAST {
                shared.store(HEAD, number);
                if waker.must_ring(&*shared, |wake_on| wake_on <= number) {
                    shared_bell.ring();
                }
            }
        });
        let mut sleeper = Sleeper::new(CONSUMER);
        for wanted in [2, LAST] {
            while memory.load(HEAD) < wanted {
                bell.clear();
                sleeper.announce(&*memory, wanted);
                if memory.load(HEAD) < wanted {
                    bell.wait();
                }
                sleeper.awake(&*memory);
            }
        }
        counter.join().unwrap();
    });
}

/// One sleep of the sleeper's side of the protocol.
fn sleep_for_record(
    memory: &ModelMemory,
    bell: &TestDoorbell,
    sleeper: &mut Sleeper,
    consumer: &mut Consumer,
) -> Option<Record> {
    bell.clear();
    sleeper.announce(memory, 0);
    let mut found = consumer.peek(memory).unwrap();
    if found.is_none() {
        bell.wait();
        found = consumer.peek(memory).unwrap();
    }
    sleeper.awake(memory);
    found
}
