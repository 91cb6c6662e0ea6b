//! A ring whose other side writes any value, anywhere, at any time.
//!
//! Received records are in the ring or in the bulk area and within the limits. A side that has
//! detected a violation does not continue. Records of a correct producer arrive unchanged at a
//! correct consumer.

use vgpu_transport::shm::memory::SharedWords as _;
use vgpu_transport::shm::ring::{Consumer, Limits, Payload, Producer, RingArea};

use super::memory::Bytes;
use super::session::input::Input;

const HEAD: usize = 0;
const TAIL: usize = 8;
const RING: std::ops::Range<usize> = 64..64 + 2048;
const BULK: std::ops::Range<usize> = 4096..4096 + 2048;
const MESSAGE: usize = 256;
const PAYLOAD: usize = 1024;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let memory = Bytes::new(BULK.end);
    let place = RingArea {
        data: RING,
        tail: TAIL,
        head: HEAD,
    };
    let mut producer = Producer::new(place.clone());
    let limits = Limits {
        message: MESSAGE,
        payload: PAYLOAD,
        bulk: BULK,
    };
    let mut consumer = Consumer::new(place, limits);
    // No hostile write so far: all records must arrive.
    let mut is_honest = true;
    let mut sent = std::collections::VecDeque::new();
    let mut number = 0;
    while !input.is_empty() {
        match input.below(8) {
            0 => {
                is_honest = false;
                let tail = match input.chance(3) {
                    true => input.odd_number(),
                    false => u64::from(input.byte()) * 64,
                };
                memory.store(TAIL, tail);
            }
            1 => {
                is_honest = false;
                memory.store(HEAD, u64::from(input.byte()) * 64);
            }
            // An almost valid header somewhere in the ring.
            2 => {
                is_honest = false;
                let at = RING.start + 64 * input.below(32);
                let size = u64::from(input.byte()) * 64;
                let kind = u64::from(input.byte() % 4) << 32;
                let lengths = u64::from(input.byte()) | u64::from(input.byte()) << 34;
                let place = match input.below(3) {
                    0 => input.odd_number(),
                    1 => BULK.start as u64 + u64::from(input.byte()) * 16,
                    _ => u64::from(input.byte()),
                };
                for (i, word) in [size | kind, 7, lengths, place].into_iter().enumerate() {
                    memory.store(at + 8 * i, word);
                }
            }
            3 => {
                is_honest = false;
                let at = input.u64() as usize % BULK.end;
                let len = input.below(40);
                memory.scribble(at, input.take(len));
            }
            4 | 5 => {
                let message = vec![input.byte(); input.below(MESSAGE)];
                let payload = match input.chance(3) {
                    true => Payload::Bulk {
                        offset: BULK.start,
                        len: 64,
                    },
                    false => Payload::Inline(input.below(200) * 3),
                };
                number += 1;
                let reserved = producer.reserve(&memory, number, message.len(), payload);
                match reserved {
                    Ok(Some(room)) => {
                        assert!(room.payload.start >= RING.start && room.payload.end <= RING.end);
                        producer.publish(&memory, room, &message);
                        sent.push_back((number, message));
                    }
                    Ok(None) => {}
                    Err(error) => {
                        assert!(!is_honest, "{error}");
                        return;
                    }
                }
            }
            _ => match consumer.peek(&memory) {
                Ok(Some(arrived)) => {
                    assert!(arrived.message.len() <= MESSAGE && arrived.payload.len() <= PAYLOAD);
                    assert!(arrived.message.start >= RING.start && arrived.message.end <= RING.end);
                    let within = |range: &std::ops::Range<usize>| {
                        range.start <= arrived.payload.start && arrived.payload.end <= range.end
                    };
                    assert!(within(&RING) || within(&BULK), "{arrived:?}");
                    let mut message = vec![0; arrived.message.len()];
                    memory.read(arrived.message.start, &mut message);
                    if is_honest {
                        assert_eq!(sent.pop_front(), Some((arrived.request, message)));
                    }
                    consumer.release(&memory, &arrived);
                }
                Ok(None) => assert!(!is_honest || sent.is_empty()),
                Err(error) => {
                    assert!(!is_honest, "{error}");
                    return;
                }
            },
        }
    }
}
