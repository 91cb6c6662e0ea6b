//! A ring: records in order from one producer to one consumer.
//!
//! ```text
//!      position 0                                                       size
//!        +--------+----------------+-------------------+--------+---------+
//!        |  free  | record         | record            |  free  |   pad   |
//!        +--------+----------------+-------------------+--------+---------+
//!                 ^ head % size                        ^ tail % size
//!
//!  record:  0 size | 4 kind | 8 request | 16 message | 20 payload | 24 place | 32 message ... payload ...
//! ```
//!
//! `head` and `tail` count bytes since the link began; they never wrap (at 100 GB/s that takes five years).
//! A record lies in one piece and begins on a cache line; a pad fills the end of the ring when the
//! next record does not fit there. A short message and its header share one cache line.
//!
//! Invariants, each kept by the side that owns the word and checked by the other:
//!
//! - `head <= tail <= head + size`, both multiples of [`RECORD_ALIGN`], and neither ever goes back;
//! - between `head` and `tail` lie whole records, and the producer does not touch them;
//! - a pad is followed by a record in the same publication.
//!
//! A cursor or header that breaks a rule is the peer's fault, ends the link and is never followed: the
//! consumer works on a private copy of the tail and of the header, each read once.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::memory::Memory;
use crate::link::LinkError;

/// Records begin at multiples of this: a cache line.
pub const RECORD_ALIGN: usize = 64;

/// Bytes of a record's header.
pub const HEADER: usize = 32;

const _: () = assert!(HEADER < RECORD_ALIGN && HEADER.is_multiple_of(8));

/// The kinds of record.
const KIND_PAD: u32 = 0;
const KIND_INLINE: u32 = 1;
const KIND_BULK: u32 = 2;

/// Where a ring is: its bytes, and its two cursors. A private value, not read from the window.
#[derive(Debug, Clone)]
pub struct RingArea {
    /// The bytes of the ring; their number is a power of two.
    pub data: Range<usize>,
    /// Offset of the word with the tail.
    pub tail: usize,
    /// Offset of the word with the head.
    pub head: usize,
}

impl RingArea {
    fn size(&self) -> u64 {
        self.data.len() as u64
    }

    fn offset(&self, cursor: u64) -> usize {
        self.data.start + (cursor & (self.size() - 1)) as usize
    }

    /// Bytes from the cursor to the ring's end.
    fn rest(&self, cursor: u64) -> u64 {
        self.size() - (cursor & (self.size() - 1))
    }
}

/// What is sent with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// So many bytes, in the record itself.
    Inline(usize),
    /// Bytes that lie in the bulk area.
    Bulk {
        /// Where, from the window's beginning.
        offset: usize,
        /// How many.
        len: usize,
    },
}

/// Room for a record, not yet visible to the consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Room {
    /// Where the payload goes, if it goes into the record.
    pub payload: Range<usize>,
    record: usize,
    header: Header,
    tail: u64,
    pad: u64,
}

/// The sending end of a ring.
#[derive(Debug)]
pub struct Producer {
    place: RingArea,
    tail: u64,
    /// The head as last seen: at most the true one.
    head: u64,
}

impl Producer {
    /// The sending end of a ring that nothing has gone through yet.
    pub fn new(place: RingArea) -> Producer {
        assert!(place.data.len().is_power_of_two(), "ring of {place:?}");
        Producer {
            place,
            tail: 0,
            head: 0,
        }
    }

    /// Whether a record with so much in it can ever go through this ring.
    pub fn can_hold(&self, message: usize, inline: usize) -> bool {
        // Half: behind a pad that is shorter than the record it must still fit.
        record_size(message, inline) <= self.place.size() / 2
    }

    /// Finds room for a record. `None` while the ring is too full.
    ///
    /// # Panics
    ///
    /// If the ring [can never hold](Producer::can_hold) it.
    pub fn reserve(
        &mut self,
        memory: &impl Memory,
        request: u64,
        message: usize,
        payload: Payload,
    ) -> Result<Option<Room>, LinkError> {
        let inline = match payload {
            Payload::Inline(len) => len,
            Payload::Bulk { .. } => 0,
        };
        assert!(
            self.can_hold(message, inline),
            "record of {message} + {inline} bytes in a ring of {}",
            self.place.size()
        );
        let size = record_size(message, inline);
        let rest = self.place.rest(self.tail);
        let pad = if rest < size { rest } else { 0 };
        let tail = self.tail + pad + size;
        if tail - self.head > self.place.size() {
            self.head = checked_head(memory.load(self.place.head), self.head, self.tail)?;
            if tail - self.head > self.place.size() {
                return Ok(None);
            }
        }
        let record = self.place.offset(self.tail + pad);
        let place = payload_offset(message, inline);
        let start = record + place;
        Ok(Some(Room {
            payload: start..start + inline,
            record,
            header: Header {
                size: size as u32,
                kind: match payload {
                    Payload::Inline(_) => KIND_INLINE,
                    Payload::Bulk { .. } => KIND_BULK,
                },
                request,
                message: message as u32,
                payload: match payload {
                    Payload::Inline(len) | Payload::Bulk { len, .. } => len as u32,
                },
                place: match payload {
                    Payload::Inline(_) => place as u64,
                    Payload::Bulk { offset, .. } => offset as u64,
                },
            },
            tail,
            pad,
        }))
    }

    /// Completes the record, whose payload has been written, and shows it to the consumer.
    ///
    /// # Panics
    ///
    /// If the message has another length than `room` was asked for.
    pub fn publish(&mut self, memory: &impl Memory, room: Room, message: &[u8]) {
        assert_eq!(
            message.len(),
            room.header.message as usize,
            "message's length"
        );
        if room.pad > 0 {
            let pad = Header {
                size: room.pad as u32,
                ..Header::default()
            };
            memory.write(self.place.offset(self.tail), &pad.encode());
        }
        memory.write(room.record, &room.header.encode());
        memory.write(room.record + HEADER, message);
        // The consumer's acquire load of the tail sees the record, header, message and payload.
        memory.drain_writes();
        self.tail = room.tail;
        memory.store(self.place.tail, self.tail);
    }
}

/// What a consumer accepts.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a message.
    pub message: usize,
    /// Bytes of a payload.
    pub payload: usize,
    /// Where payloads outside the ring may lie. Empty: nowhere.
    pub bulk: Range<usize>,
}

/// A record that has arrived: checked, and in place until it is [released](Consumer::release).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrived {
    /// Its number.
    pub request: u64,
    /// Where its message lies.
    pub message: Range<usize>,
    /// Where its payload lies.
    pub payload: Range<usize>,
    next: u64,
}

/// The receiving end of a ring.
#[derive(Debug)]
pub struct Consumer {
    place: RingArea,
    limits: Limits,
    head: u64,
    /// The tail as last seen: at most the true one.
    tail: u64,
}

impl Consumer {
    /// The receiving end of a ring that nothing has gone through yet.
    pub fn new(place: RingArea, limits: Limits) -> Consumer {
        assert!(place.data.len().is_power_of_two(), "ring of {place:?}");
        Consumer {
            place,
            limits,
            head: 0,
            tail: 0,
        }
    }

    /// The next record, if there is one. Looking does not consume it.
    pub fn peek(&mut self, memory: &impl Memory) -> Result<Option<Arrived>, LinkError> {
        self.peek_from(memory, self.head)
    }

    /// The record behind one that has arrived and is not released, if there is one. Releasing that releases both.
    pub fn peek_behind(
        &mut self,
        memory: &impl Memory,
        arrived: &Arrived,
    ) -> Result<Option<Arrived>, LinkError> {
        self.peek_from(memory, arrived.next)
    }

    /// The record at `from`: the head, or a boundary of records that was checked, so at most the tail.
    fn peek_from(&mut self, memory: &impl Memory, from: u64) -> Result<Option<Arrived>, LinkError> {
        if from == self.tail {
            self.look(memory)?;
            if from == self.tail {
                return Ok(None);
            }
        }
        let header = self.header(memory, from)?;
        if header.kind != KIND_PAD {
            return self.arrived(header, from).map(Some);
        }
        // A pad ends the ring, and the record it made room for was published with it.
        let size = u64::from(header.size);
        let next = from + size;
        if size == self.place.size() || size != self.place.rest(from) || next == self.tail {
            return Err(misbehaved(format!(
                "a pad of {size} bytes at {} of a ring of {}, tail {}",
                from,
                self.place.size(),
                self.tail
            )));
        }
        let header = self.header(memory, next)?;
        self.arrived(header, next).map(Some)
    }

    /// Gives the record's memory back to the producer.
    pub fn release(&mut self, memory: &impl Memory, arrived: &Arrived) {
        self.head = arrived.next;
        // The producer's acquire load of the head keeps it from overwriting what is still being read.
        memory.store(self.place.head, self.head);
    }

    /// Whether more than a quarter of the ring is in use, so that the producer may be waiting.
    pub fn is_filling(&mut self, memory: &impl Memory) -> Result<bool, LinkError> {
        self.look(memory)?;
        Ok(self.tail - self.head > self.place.size() / 4)
    }

    fn look(&mut self, memory: &impl Memory) -> Result<(), LinkError> {
        let tail = memory.load(self.place.tail);
        let size = self.place.size();
        let used = tail.wrapping_sub(self.head);
        if tail < self.tail || used > size || !tail.is_multiple_of(RECORD_ALIGN as u64) {
            return Err(misbehaved(format!(
                "ring tail {tail} with head {}, tail {} before and {size} bytes",
                self.head, self.tail
            )));
        }
        self.tail = tail;
        Ok(())
    }

    /// A copy of the header at `cursor`, with a size that lies in what was published.
    fn header(&self, memory: &impl Memory, cursor: u64) -> Result<Header, LinkError> {
        let mut bytes = [0; HEADER];
        memory.read(self.place.offset(cursor), &mut bytes);
        let header = Header::decode(&bytes);
        let size = u64::from(header.size);
        let room = (self.tail - cursor).min(self.place.rest(cursor));
        if size == 0 || !size.is_multiple_of(RECORD_ALIGN as u64) || size > room {
            return Err(misbehaved(format!(
                "a record of {size} bytes where {room} are published"
            )));
        }
        Ok(header)
    }

    fn arrived(&self, header: Header, cursor: u64) -> Result<Arrived, LinkError> {
        let record = self.place.offset(cursor);
        let size = header.size as usize;
        let (message, payload) = (header.message as usize, header.payload as usize);
        let wrong = |what: &str| {
            misbehaved(format!(
                "{what}: kind {}, {size} bytes, message {message}, payload {payload} at {:#x}",
                header.kind, header.place
            ))
        };
        if message > self.limits.message || message > size - HEADER {
            return Err(wrong("a record with too long a message"));
        }
        if payload > self.limits.payload {
            return Err(wrong("a record with too long a payload"));
        }
        let (start, within) = match header.kind {
            KIND_INLINE => (
                usize::try_from(header.place)
                    .ok()
                    .and_then(|place| record.checked_add(place)),
                record + HEADER + message..record + size,
            ),
            KIND_BULK => (usize::try_from(header.place).ok(), self.limits.bulk.clone()),
            _ => return Err(wrong("a record of an unknown kind")),
        };
        let payload = start
            .and_then(|start| Some(start..start.checked_add(payload)?))
            .filter(|range| within.start <= range.start && range.end <= within.end)
            .ok_or_else(|| wrong("a record with its payload out of place"))?;
        let message = record + HEADER..record + HEADER + message;
        Ok(Arrived {
            request: header.request,
            message,
            payload,
            next: cursor + size as u64,
        })
    }
}

/// The header of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Header {
    /// Bytes of the whole record.
    size: u32,
    kind: u32,
    request: u64,
    /// Bytes of the message, directly behind the header.
    message: u32,
    /// Bytes of the payload.
    payload: u32,
    /// Where the payload begins: in the record, or (bulk) in the window.
    place: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let words = [
            u64::from(self.size) | u64::from(self.kind) << 32,
            self.request,
            u64::from(self.message) | u64::from(self.payload) << 32,
            self.place,
        ];
        let mut bytes = [0; HEADER];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; HEADER]) -> Header {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[i * 8..i * 8 + 8]);
            u64::from_le_bytes(word)
        };
        Header {
            size: word(0) as u32,
            kind: (word(0) >> 32) as u32,
            request: word(1),
            message: word(2) as u32,
            payload: (word(2) >> 32) as u32,
            place: word(3),
        }
    }
}

fn checked_head(head: u64, before: u64, tail: u64) -> Result<u64, LinkError> {
    if head < before || head > tail || !head.is_multiple_of(RECORD_ALIGN as u64) {
        return Err(misbehaved(format!(
            "ring head {head} with tail {tail} and head {before} before"
        )));
    }
    Ok(head)
}

/// Where an inline payload begins in its record: a small one right behind the message, so that both may
/// share a cache line; one worth a fast copy on a cache line of its own.
fn payload_offset(message: usize, inline: usize) -> usize {
    let align = if inline < 4 * RECORD_ALIGN {
        8
    } else {
        RECORD_ALIGN
    };
    (HEADER + message).next_multiple_of(align)
}

fn record_size(message: usize, inline: usize) -> u64 {
    (payload_offset(message, inline) + inline).next_multiple_of(RECORD_ALIGN) as u64
}

fn misbehaved(what: String) -> LinkError {
    LinkError::PeerMisbehaved(what)
}
