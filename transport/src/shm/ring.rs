//! A single-producer single-consumer queue of records in shared memory.
//!
//! ```text
//!      position 0                                                       size
//!        +--------+----------------+-------------------+--------+---------+
//!        |  free  | record         | record            |  free  |   pad   |
//!        +--------+----------------+-------------------+--------+---------+
//!                 ^ head % size                        ^ tail % size
//!
//!  record:  0 size | 4 kind | 8 request | 16 message | 20 payload | 24 offset
//!           | 32 message ... payload ...
//! ```
//!
//! `head` and `tail` count bytes since the link was opened. The counters do not wrap: at 100 GB/s a
//! wrap takes five years. A record is contiguous and begins on a cache line. A pad record fills the
//! end of the ring when the next record does not fit there. A short message shares one cache line
//! with its header.
//!
//! Invariants. The side that writes a word keeps its invariants, and the other side checks them:
//!
//! - `head <= tail <= head + size`. Both are multiples of [`RECORD_ALIGN`], and neither decreases.
//! - The bytes from `head` to `tail` are whole records, which the producer does not modify.
//! - The producer publishes a pad and the record behind the pad together.
//!
//! A cursor or header that violates an invariant is the peer's fault and ends the link. The
//! consumer works on a private copy of the tail and of each header, and reads each of them from
//! shared memory once.
//!
//! # Ordering
//!
//! - The release store of `tail` in [`Producer::publish`] pairs with the acquire load of `tail` in
//!   `Consumer::load_tail`: a consumer that sees the tail sees the record.
//! - The release store of `head` in [`Consumer::release`] pairs with the acquire load of `head` in
//!   [`Producer::reserve`]: the consumer has finished its reads of the bytes that the producer
//!   reuses.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::memory::SharedWords;
use crate::error::{LinkError, LinkViolation};

/// The alignment of records, in bytes: one cache line.
pub const RECORD_ALIGN: usize = 64;

/// The size of a record's header, in bytes.
pub const HEADER: usize = 32;

const _: () = assert!(HEADER < RECORD_ALIGN && HEADER.is_multiple_of(8));

/// The kinds of record on the wire.
const KIND_PAD: u32 = 0;
const KIND_INLINE: u32 = 1;
const KIND_BULK: u32 = 2;

/// The offsets of a ring and of its two cursors. A private value, not one read from shared memory.
#[derive(Debug, Clone)]
pub struct RingArea {
    /// The bytes of the ring. The size is a power of two.
    pub data: Range<usize>,
    /// The offset of the tail.
    pub tail: usize,
    /// The offset of the head.
    pub head: usize,
}

impl RingArea {
    fn size(&self) -> u64 {
        self.data.len() as u64
    }

    fn offset(&self, cursor: u64) -> usize {
        self.data.start + (cursor & (self.size() - 1)) as usize
    }

    /// The number of bytes from the cursor to the end of the ring.
    fn rest(&self, cursor: u64) -> u64 {
        self.size() - (cursor & (self.size() - 1))
    }
}

/// The payload of a message to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload {
    /// A payload of this many bytes inside the record.
    Inline(usize),
    /// A payload in the bulk area.
    Bulk {
        /// The offset from the start of the window, in bytes.
        offset: usize,
        /// The size in bytes.
        len: usize,
    },
}

/// A reserved record. The consumer does not see it before [`Producer::publish`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Reservation {
    /// The range for an inline payload; empty for a payload in the bulk area.
    pub payload: Range<usize>,
    record: usize,
    header: Header,
    tail: u64,
    pad: u64,
}

/// The producer of a ring.
#[derive(Debug)]
pub struct Producer {
    area: RingArea,
    tail: u64,
    /// The last value of the head that this side has loaded: at most the current one.
    head: u64,
}

impl Producer {
    /// The producer of an unused ring.
    ///
    /// # Panics
    ///
    /// If the size of the ring is not a power of two.
    pub fn new(area: RingArea) -> Producer {
        assert!(area.data.len().is_power_of_two(), "ring of {area:?}");
        Producer {
            area,
            tail: 0,
            head: 0,
        }
    }

    /// Whether a record with a message of `message` bytes and `inline` bytes of payload fits an
    /// empty ring.
    pub fn can_hold(&self, message: usize, inline: usize) -> bool {
        // Half of the ring, because a pad shorter than the record may precede the record.
        record_size(message, inline) <= self.area.size() / 2
    }

    /// Reserves a record. `None` while the ring is too full.
    ///
    /// # Errors
    ///
    /// [`LinkError::PeerMisbehaved`] when the consumer's head violates an invariant.
    ///
    /// # Panics
    ///
    /// If the ring cannot [hold](Producer::can_hold) such a record.
    pub fn reserve(
        &mut self,
        memory: &impl SharedWords,
        request: u64,
        message: usize,
        payload: Payload,
    ) -> Result<Option<Reservation>, LinkError> {
        let inline = match payload {
            Payload::Inline(len) => len,
            Payload::Bulk { .. } => 0,
        };
        assert!(
            self.can_hold(message, inline),
            "record of {message} + {inline} bytes in a ring of {}",
            self.area.size()
        );
        let size = record_size(message, inline);
        let rest = self.area.rest(self.tail);
        let pad = if rest < size { rest } else { 0 };
        let tail = self.tail + pad + size;
        if tail - self.head > self.area.size() {
            self.head = checked_head(memory.load(self.area.head), self.head, self.tail)?;
            if tail - self.head > self.area.size() {
                return Ok(None);
            }
        }
        let record = self.area.offset(self.tail + pad);
        let inline_offset = payload_offset(message, inline);
        let start = record + inline_offset;
        Ok(Some(Reservation {
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
                offset: match payload {
                    Payload::Inline(_) => inline_offset as u64,
                    Payload::Bulk { offset, .. } => offset as u64,
                },
            },
            tail,
            pad,
        }))
    }

    /// Writes the header and the message of a reserved record and publishes the record. The caller
    /// has written the payload.
    ///
    /// # Panics
    ///
    /// If the length of the message differs from the reserved one.
    pub fn publish(&mut self, memory: &impl SharedWords, reservation: Reservation, message: &[u8]) {
        assert_eq!(
            message.len(),
            reservation.header.message as usize,
            "message's length"
        );
        if reservation.pad > 0 {
            let pad = Header {
                size: reservation.pad as u32,
                ..Header::default()
            };
            memory.write(self.area.offset(self.tail), &pad.encode());
        }
        memory.write(reservation.record, &reservation.header.encode());
        memory.write(reservation.record + HEADER, message);
        // Pairs with the acquire load of the tail in `Consumer::load_tail`: a consumer that sees
        // the new tail sees the header, the message and the payload, including those in
        // write-combining buffers.
        memory.drain_writes();
        self.tail = reservation.tail;
        memory.store(self.area.tail, self.tail);
    }
}

/// The limits that a consumer enforces.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The maximum size of a message, in bytes.
    pub message: usize,
    /// The maximum size of a payload, in bytes.
    pub payload: usize,
    /// The area for payloads outside the ring. Empty: such payloads are forbidden.
    pub bulk: Range<usize>,
}

/// A checked record in the ring, in place until its [release](Consumer::release).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The number of the request or reply.
    pub request: u64,
    /// The range of the message in the window.
    pub message: Range<usize>,
    /// The range of the payload in the window.
    pub payload: Range<usize>,
    next: u64,
}

/// The consumer of a ring.
#[derive(Debug)]
pub struct Consumer {
    area: RingArea,
    limits: Limits,
    head: u64,
    /// The last value of the tail that this side has loaded: at most the current one.
    tail: u64,
}

impl Consumer {
    /// The consumer of an unused ring.
    ///
    /// # Panics
    ///
    /// If the size of the ring is not a power of two.
    pub fn new(area: RingArea, limits: Limits) -> Consumer {
        assert!(area.data.len().is_power_of_two(), "ring of {area:?}");
        Consumer {
            area,
            limits,
            head: 0,
            tail: 0,
        }
    }

    /// The next record, if there is one. The call does not consume the record.
    ///
    /// # Errors
    ///
    /// [`LinkError::PeerMisbehaved`] when the producer's tail or the record's header violates an
    /// invariant or a limit.
    pub fn peek(&mut self, memory: &impl SharedWords) -> Result<Option<Record>, LinkError> {
        self.peek_from(memory, self.head)
    }

    /// The record behind an unreleased record, if there is one. The release of the second record
    /// releases both.
    ///
    /// # Errors
    ///
    /// As [`peek`](Consumer::peek).
    pub fn peek_behind(
        &mut self,
        memory: &impl SharedWords,
        record: &Record,
    ) -> Result<Option<Record>, LinkError> {
        self.peek_from(memory, record.next)
    }

    /// The record at `from`. `from` is the head or the end of a checked record, so it is at most
    /// the tail.
    fn peek_from(
        &mut self,
        memory: &impl SharedWords,
        from: u64,
    ) -> Result<Option<Record>, LinkError> {
        if from == self.tail {
            self.load_tail(memory)?;
            if from == self.tail {
                return Ok(None);
            }
        }
        let header = self.header(memory, from)?;
        if header.kind != KIND_PAD {
            return self.record_at(header, from).map(Some);
        }
        // A pad reaches to the end of the ring, and a record follows the pad in the same
        // publication.
        let size = u64::from(header.size);
        let next = from + size;
        if size == self.area.size() || size != self.area.rest(from) || next == self.tail {
            return Err(LinkViolation::Pad {
                size,
                at: from,
                ring: self.area.size(),
                tail: self.tail,
            }
            .into());
        }
        let header = self.header(memory, next)?;
        self.record_at(header, next).map(Some)
    }

    /// Returns the memory of a record to the producer.
    pub fn release(&mut self, memory: &impl SharedWords, record: &Record) {
        self.head = record.next;
        // Pairs with the acquire load of the head in `Producer::reserve`: the producer overwrites
        // the record only after the reads of this side.
        memory.store(self.area.head, self.head);
    }

    /// Whether more than a quarter of the ring is in use. The producer may then be waiting for
    /// reservation.
    ///
    /// # Errors
    ///
    /// [`LinkError::PeerMisbehaved`] when the producer's tail violates an invariant.
    pub fn is_filling(&mut self, memory: &impl SharedWords) -> Result<bool, LinkError> {
        self.load_tail(memory)?;
        Ok(self.tail - self.head > self.area.size() / 4)
    }

    /// Loads and checks the tail.
    fn load_tail(&mut self, memory: &impl SharedWords) -> Result<(), LinkError> {
        let tail = memory.load(self.area.tail);
        let size = self.area.size();
        let used = tail.wrapping_sub(self.head);
        if tail < self.tail || used > size || !tail.is_multiple_of(RECORD_ALIGN as u64) {
            return Err(LinkViolation::RingTail {
                tail,
                before: self.tail,
                head: self.head,
                ring: size,
            }
            .into());
        }
        self.tail = tail;
        Ok(())
    }

    /// A private copy of the header at `cursor`. The size of the record lies in the published
    /// bytes.
    fn header(&self, memory: &impl SharedWords, cursor: u64) -> Result<Header, LinkError> {
        let mut bytes = [0; HEADER];
        memory.read(self.area.offset(cursor), &mut bytes);
        let header = Header::decode(&bytes);
        let size = u64::from(header.size);
        let available = (self.tail - cursor).min(self.area.rest(cursor));
        if size == 0 || !size.is_multiple_of(RECORD_ALIGN as u64) || size > available {
            let published = available;
            return Err(LinkViolation::RecordSize { size, published }.into());
        }
        Ok(header)
    }

    fn record_at(&self, header: Header, cursor: u64) -> Result<Record, LinkError> {
        let record = self.area.offset(cursor);
        let size = header.size as usize;
        let (message, payload) = (header.message as usize, header.payload as usize);
        let wrong = |what| {
            LinkError::from(LinkViolation::Record {
                what,
                kind: header.kind,
                size,
                message,
                payload,
                offset: header.offset,
            })
        };
        if message > self.limits.message || message > size - HEADER {
            return Err(wrong("a record whose message is too long"));
        }
        if payload > self.limits.payload {
            return Err(wrong("a record whose payload is too long"));
        }
        let (start, within) = match header.kind {
            KIND_INLINE => (
                usize::try_from(header.offset)
                    .ok()
                    .and_then(|offset| record.checked_add(offset)),
                record + HEADER + message..record + size,
            ),
            KIND_BULK => (
                usize::try_from(header.offset).ok(),
                self.limits.bulk.clone(),
            ),
            _ => return Err(wrong("a record of unknown kind")),
        };
        let payload = start
            .and_then(|start| Some(start..start.checked_add(payload)?))
            .filter(|range| within.start <= range.start && range.end <= within.end)
            .ok_or_else(|| wrong("a record whose payload lies out of bounds"))?;
        let message = record + HEADER..record + HEADER + message;
        Ok(Record {
            request: header.request,
            message,
            payload,
            next: cursor + size as u64,
        })
    }
}

/// A private copy of a record's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Header {
    /// The size of the whole record, in bytes.
    size: u32,
    kind: u32,
    request: u64,
    /// The size of the message, in bytes. The message follows the header.
    message: u32,
    /// The size of the payload, in bytes.
    payload: u32,
    /// The offset of the payload: from the start of the record, or of the window for a bulk
    /// payload.
    offset: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let words = [
            u64::from(self.size) | u64::from(self.kind) << 32,
            self.request,
            u64::from(self.message) | u64::from(self.payload) << 32,
            self.offset,
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
            offset: word(3),
        }
    }
}

fn checked_head(head: u64, before: u64, tail: u64) -> Result<u64, LinkError> {
    if head < before || head > tail || !head.is_multiple_of(RECORD_ALIGN as u64) {
        return Err(LinkViolation::RingHead { head, before, tail }.into());
    }
    Ok(head)
}

/// The offset of an inline payload in its record. A small payload follows the message, so that both
/// may share a cache line. A larger payload begins on a cache line, for a fast copy.
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
