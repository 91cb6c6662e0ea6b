//! Rings with arbitrary sequences of records, and rings whose peer violates the invariants.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;

use proptest::prelude::*;

use vgpu_transport::link::LinkError;
use vgpu_transport::shm::memory::SharedWords;
use vgpu_transport::shm::ring::{
    Consumer, HEADER, Limits, Payload, Producer, RECORD_ALIGN, Record, RingArea,
};

const TAIL: usize = 0;
const HEAD: usize = 8;
const DATA: Range<usize> = 64..64 + 4096;
const BULK: Range<usize> = DATA.end..DATA.end + 10_000;

/// Memory of one thread. An access outside the ring and its words panics.
struct Plain(RefCell<Vec<u8>>);

impl Plain {
    fn new() -> Plain {
        Plain(RefCell::new(vec![0; DATA.end]))
    }

    fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        self.0.borrow()[range].to_vec()
    }

    fn fill(&self, range: Range<usize>, value: u8) {
        self.0.borrow_mut()[range].fill(value);
    }
}

impl SharedWords for Plain {
    fn load(&self, offset: usize) -> u64 {
        assert!(offset == TAIL || offset == HEAD);
        u64::from_le_bytes(self.bytes(offset..offset + 8).try_into().unwrap())
    }

    fn store(&self, offset: usize, value: u64) {
        assert!(offset == TAIL || offset == HEAD);
        self.0.borrow_mut()[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset >= DATA.start && offset.is_multiple_of(8));
        out.copy_from_slice(&self.0.borrow()[offset..offset + out.len()]);
    }

    fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset >= DATA.start && offset.is_multiple_of(8));
        let padded = data.len().next_multiple_of(8);
        let mut bytes = self.0.borrow_mut();
        bytes[offset..offset + padded].fill(0);
        bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    fn drain_writes(&self) {}

    fn full_fence(&self) {}
}

fn place() -> RingArea {
    RingArea {
        data: DATA,
        tail: TAIL,
        head: HEAD,
    }
}

fn limits() -> Limits {
    Limits {
        message: 512,
        payload: 8192,
        bulk: BULK,
    }
}

#[derive(Debug, Clone)]
enum RingAction {
    Put { message: usize, payload: Payload },
    Take,
}

fn steps() -> impl Strategy<Value = Vec<RingAction>> {
    let inline = prop_oneof![Just(0), 0..64usize, 0..1400usize].prop_map(Payload::Inline);
    let bulk = (0..BULK.len()).prop_flat_map(|start| {
        (0..=8192.min(BULK.len() - start)).prop_map(move |len| Payload::Bulk {
            offset: BULK.start + start,
            len,
        })
    });
    let put = (0..=500usize, prop_oneof![3 => inline, 1 => bulk])
        .prop_map(|(message, payload)| RingAction::Put { message, payload });
    prop::collection::vec(prop_oneof![4 => put, 3 => Just(RingAction::Take)], 1..120)
}

/// Publishes a record whose bytes are all `request`, if the ring has room.
fn put(
    memory: &Plain,
    producer: &mut Producer,
    request: u64,
    message: usize,
    payload: Payload,
) -> Result<bool, LinkError> {
    let Some(room) = producer.reserve(memory, request, message, payload)? else {
        return Ok(false);
    };
    assert!(room.payload.start >= DATA.start && room.payload.end <= DATA.end);
    memory.fill(room.payload.clone(), request as u8);
    producer.publish(memory, room, &vec![request as u8; message]);
    Ok(true)
}

proptest! {
    /// Records arrive in order and unchanged, and the producer reports a full ring only when the
    /// ring is full.
    #[test]
    fn records_are_read_as_written(steps in steps()) {
        let memory = Plain::new();
        let mut producer = Producer::new(place());
        let mut consumer = Consumer::new(place(), limits());
        let mut inside = VecDeque::new();
        let mut request = 0;
        for step in steps {
            match step {
                RingAction::Put { message, payload } => {
                    if put(&memory, &mut producer, request + 1, message, payload).unwrap() {
                        request += 1;
                        inside.push_back((request, message, payload));
                    } else {
                        prop_assert!(!inside.is_empty(), "an empty ring refused a record");
                    }
                }
                RingAction::Take => {
                    let arrived = consumer.peek(&memory).unwrap();
                    prop_assert_eq!(consumer.peek(&memory).unwrap(), arrived.clone());
                    let Some((request, message, payload)) = inside.pop_front() else {
                        prop_assert_eq!(arrived, None);
                        continue;
                    };
                    let arrived = arrived.unwrap();
                    prop_assert_eq!(arrived.request, request);
                    let expected = vec![request as u8; message];
                    prop_assert_eq!(memory.bytes(arrived.message.clone()), expected);
                    match payload {
                        Payload::Inline(len) => prop_assert_eq!(
                            memory.bytes(arrived.payload.clone()),
                            vec![request as u8; len]
                        ),
                        Payload::Bulk { offset, len } => {
                            prop_assert_eq!(arrived.payload.clone(), offset..offset + len);
                        }
                    }
                    consumer.release(&memory, &arrived);
                }
            }
        }
    }

    /// The producer writes arbitrary values to its ring and tail at any time. The consumer returns
    /// records within bounds or an error, and terminates.
    #[test]
    fn hostile_producer_does_not_crash_the_consumer(
        steps in steps(),
        mutations in prop::collection::vec((0..120usize, mutation()), 1..8),
    ) {
        let memory = Plain::new();
        let mut producer = Producer::new(place());
        let mut consumer = Consumer::new(place(), limits());
        for (i, step) in steps.into_iter().enumerate() {
            for (_, mutation) in mutations.iter().filter(|(when, _)| *when == i) {
                apply(&memory, mutation);
            }
            match step {
                RingAction::Put { message, payload } => {
                    // The consumer may have accepted a tail that the producer has never written
                    // regularly.
                    if put(&memory, &mut producer, 1, message, payload).is_err() {
                        return Ok(());
                    }
                }
                RingAction::Take => {
                    if drain(&memory, &mut consumer).is_err() {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// The consumer writes arbitrary values to its head. The producer stays within bounds or
    /// returns an error.
    #[test]
    fn hostile_consumer_does_not_crash_the_producer(
        steps in steps(),
        heads in prop::collection::vec(cursor(), 1..60),
    ) {
        let memory = Plain::new();
        let mut producer = Producer::new(place());
        let mut heads = heads.into_iter().cycle();
        for step in steps {
            match step {
                RingAction::Put { message, payload } => {
                    match put(&memory, &mut producer, 1, message, payload) {
                        Ok(_) => {}
                        Err(LinkError::PeerMisbehaved(_)) => return Ok(()),
                        Err(other) => panic!("{other}"),
                    }
                }
                RingAction::Take => memory.store(HEAD, heads.next().unwrap_or(0)),
            }
        }
    }
}

/// One action of a hostile producer.
#[derive(Debug, Clone)]
enum Mutation {
    Tail(u64),
    /// Writes a word of a header at any position.
    Word {
        line: usize,
        word: usize,
        value: u64,
    },
    Garbage(Vec<u8>),
}

fn cursor() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => (0..200u64).prop_map(|line| line * RECORD_ALIGN as u64),
        1 => 0..10_000u64,
        1 => any::<u64>(),
    ]
}

fn mutation() -> impl Strategy<Value = Mutation> {
    // 32-bit fields close to valid values.
    let field = prop_oneof![
        0..3u32,
        (0..70u32).prop_map(|line| line * RECORD_ALIGN as u32),
        0..10_000u32,
        any::<u32>()
    ];
    let value = prop_oneof![
        2 => (field.clone(), field).prop_map(|(low, high)| u64::from(low) | u64::from(high) << 32),
        1 => any::<u64>()
    ];
    prop_oneof![
        2 => cursor().prop_map(Mutation::Tail),
        4 => (0..DATA.len() / RECORD_ALIGN, 0..HEADER / 8, value)
            .prop_map(|(line, word, value)| Mutation::Word { line, word, value }),
        1 => prop::collection::vec(any::<u8>(), DATA.len()).prop_map(Mutation::Garbage),
    ]
}

fn apply(memory: &Plain, mutation: &Mutation) {
    match mutation {
        Mutation::Tail(tail) => memory.store(TAIL, *tail),
        Mutation::Word { line, word, value } => memory.write(
            DATA.start + line * RECORD_ALIGN + word * 8,
            &value.to_le_bytes(),
        ),
        Mutation::Garbage(bytes) => memory.write(DATA.start, bytes),
    }
}

/// Consumes all records. With a constant tail there is at most one record per line of the ring.
fn drain(memory: &Plain, consumer: &mut Consumer) -> Result<(), LinkError> {
    for _ in 0..=DATA.len() / RECORD_ALIGN {
        let Some(arrived) = consumer.peek(memory)? else {
            return Ok(());
        };
        assert_allowed(&arrived);
        consumer.release(memory, &arrived);
    }
    panic!("more records than the ring has lines");
}

fn assert_allowed(arrived: &Record) {
    let Record {
        message, payload, ..
    } = arrived;
    assert!(message.start >= DATA.start + HEADER && message.end <= DATA.end);
    assert!(message.len() <= limits().message && payload.len() <= limits().payload);
    let is_inline = payload.start >= message.end && payload.end <= DATA.end;
    let is_bulk = payload.start >= BULK.start && payload.end <= BULK.end;
    assert!(is_inline || is_bulk, "{arrived:?}");
}

/// Violations of one invariant at a time, and the errors that name them.
#[test]
fn violations_are_reported_by_kind() {
    let header = |size: u32, kind: u32, message: u32, payload: u32, place: u64| {
        [
            u64::from(size) | u64::from(kind) << 32,
            7,
            u64::from(message) | u64::from(payload) << 32,
            place,
        ]
    };
    const INLINE: u32 = 1;
    const IN_BULK: u32 = 2;
    let bulk = BULK.start as u64;
    let cases: [(&str, u64, [u64; 4]); 17] = [
        ("tail 4160 ", 4160, header(64, INLINE, 0, 0, 32)),
        ("tail 65 ", 65, header(64, INLINE, 0, 0, 32)),
        ("record of 0 bytes", 64, header(0, INLINE, 0, 0, 32)),
        ("record of 65 bytes", 128, header(65, INLINE, 0, 0, 32)),
        ("record of 128 bytes", 64, header(128, INLINE, 0, 0, 32)),
        ("unknown kind: kind 3", 64, header(64, 3, 0, 0, 32)),
        ("message is too long", 64, header(64, INLINE, 33, 0, 65)),
        ("message is too long", 640, header(640, INLINE, 513, 0, 545)),
        (
            "payload is too long",
            64,
            header(64, IN_BULK, 0, 8193, bulk),
        ),
        (
            "payload lies out of bounds",
            64,
            header(64, INLINE, 8, 1, 32),
        ),
        (
            "payload lies out of bounds",
            64,
            header(64, INLINE, 8, 25, 40),
        ),
        (
            "payload lies out of bounds",
            64,
            header(64, INLINE, 8, 8, u64::MAX),
        ),
        (
            "payload lies out of bounds",
            64,
            header(64, IN_BULK, 0, 8, bulk - 1),
        ),
        (
            "payload lies out of bounds",
            64,
            header(64, IN_BULK, 0, 8, bulk + 9_993),
        ),
        (
            "payload lies out of bounds",
            64,
            header(64, IN_BULK, 0, 8, u64::MAX),
        ),
        ("a pad of 64 bytes", 128, header(64, 0, 0, 0, 0)),
        ("a pad of 4096 bytes", 4096, header(4096, 0, 0, 0, 0)),
    ];
    for (said, tail, header) in cases {
        let memory = Plain::new();
        let words: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write(DATA.start, &words);
        memory.store(TAIL, tail);
        match Consumer::new(place(), limits()).peek(&memory) {
            Err(LinkError::PeerMisbehaved(why)) => {
                assert!(why.to_string().contains(said), "{why} / {said}");
            }
            other => panic!("{said}: {other:?}"),
        }
    }

    let memory = Plain::new();
    let mut producer = Producer::new(place());
    for _ in 0..2 {
        assert_eq!(
            put(&memory, &mut producer, 1, 8, Payload::Inline(1900)),
            Ok(true)
        );
    }
    for head in [1, 64 * 65, u64::MAX - 63] {
        memory.store(HEAD, head);
        match put(&memory, &mut producer, 1, 8, Payload::Inline(1900)) {
            Err(LinkError::PeerMisbehaved(why)) => {
                let said = format!("ring head {head} ");
                assert!(why.to_string().contains(&said), "{why}");
            }
            other => panic!("{head}: {other:?}"),
        }
    }
}
