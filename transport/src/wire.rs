//! What guest and host say to each other.
//!
//! A session is a sequence of [`Request`]s from the guest, executed strictly in order, and of
//! [`Reply`]s from the host. Most requests are one-way: the guest learns that they are done when a later
//! reply arrives or when the link says so, and that one has failed from a [`Reply::Failed`] ahead of the
//! next reply it waits for. Payloads (tensor bytes, graph images) travel beside the message.
//!
//! Bytes are little-endian. A message is decoded from a private copy; nothing here is unsafe.
#![forbid(unsafe_code)]

use std::fmt;

use crate::ir::{BufferId, Capabilities, DecodeError};

pub use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};

/// Version of the messages. Both sides must speak the same.
pub const PROTOCOL_VERSION: u32 = 3;

/// The largest graph image a host assembles, in bytes.
pub const MAX_GRAPH: u64 = 64 << 20;

/// Most graphs a host keeps for a session. A guest forgets one before it sends one more.
pub const MAX_GRAPHS: usize = 1024;

/// The least bytes of an extent of weights. Smaller ones are not worth a question.
pub const MIN_EXTENT: u64 = 64 << 10;

/// Most extents of one buffer. A guest writes what goes beyond without naming it.
pub const MAX_EXTENTS: usize = 4096;

/// Most lengths in one [`Reply::Held`].
pub const MAX_LENGTHS: usize = 4096;

/// Most extents in one [`Request::Query`].
pub const MAX_QUERIED: usize = 1024;

/// The BLAKE3 hash of an extent's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash(pub [u8; 32]);

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A graph of a session. Chosen by the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GraphId(pub u64);

/// Why a message is not one. The sender's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum WireError {
    #[error("message of {len} bytes ends where byte {wanted} was expected")]
    Truncated { len: usize, wanted: usize },
    #[error("message has {extra} bytes behind its end")]
    Trailing { extra: usize },
    #[error("unknown message kind {kind}")]
    UnknownKind { kind: u32 },
    #[error("a text is not UTF-8")]
    Text,
    #[error("the capabilities are broken: {0}")]
    Capabilities(#[from] DecodeError),
}

macro_rules! messages {
    ($(#[$doc:meta])* $enum:ident {
        $($(#[$vdoc:meta])* $id:literal $variant:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty),* $(,)? },)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub enum $enum {
            $($(#[$vdoc])* $variant { $($(#[$fdoc])* $field: $ty,)* },)*
        }

        impl $enum {
            /// Appends the message to `out`.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $($enum::$variant { $($field,)* } => {
                        u32::put(&$id, out);
                        $($field.put(out);)*
                    })*
                }
            }

            /// Reads a message.
            pub fn decode(bytes: &[u8]) -> Result<$enum, WireError> {
                let mut bytes = Reader { bytes, at: 0 };
                let message = match u32::get(&mut bytes)? {
                    $($id => {
                        $(let $field = <$ty as Field>::get(&mut bytes)?;)*
                        $enum::$variant { $($field,)* }
                    })*
                    kind => return Err(WireError::UnknownKind { kind }),
                };
                match bytes.bytes.len() - bytes.at {
                    0 => Ok(message),
                    extra => Err(WireError::Trailing { extra }),
                }
            }
        }
    };
}

messages! {
    /// From the guest.
    Request {
        /// The first message of a session. Answered by [`Reply::Welcome`], or by [`Reply::Ended`] when the
        /// host does not want this guest.
        1 Hello {
            /// [`PROTOCOL_VERSION`] of the guest.
            protocol: u32,
            /// [`IR_VERSION`](crate::ir::IR_VERSION) of the guest.
            ir: u32,
            /// Who it is, for logs: program, process id, ggml version.
            name: String,
        },
        /// Makes a buffer of zero bytes. Answered by [`Reply::Done`], [`Reply::Shared`] or [`Reply::Refused`].
        2 Alloc {
            /// A name not used before in this session.
            buffer: BufferId,
            /// Size in bytes.
            size: u64,
        },
        /// Gives a buffer up. One-way.
        3 Free {
            /// The buffer.
            buffer: BufferId,
        },
        /// Writes the payload into a buffer. One-way.
        4 Write {
            /// The buffer.
            buffer: BufferId,
            /// Where in it, in bytes.
            offset: u64,
        },
        /// Reads from a buffer. Answered by [`Reply::Data`].
        5 Read {
            /// The buffer.
            buffer: BufferId,
            /// Where in it, in bytes.
            offset: u64,
            /// How many bytes, at most [`MAX_PAYLOAD`].
            len: u64,
        },
        /// Sets bytes of a buffer to a value. One-way.
        6 Fill {
            /// The buffer.
            buffer: BufferId,
            /// Where in it, in bytes.
            offset: u64,
            /// How many bytes.
            len: u64,
            /// The value.
            value: u8,
        },
        /// Copies between buffers (or within one). One-way.
        7 Copy {
            /// The buffer written.
            dst: BufferId,
            /// Where in it, in bytes.
            dst_offset: u64,
            /// The buffer read.
            src: BufferId,
            /// Where in it, in bytes.
            src_offset: u64,
            /// How many bytes.
            len: u64,
        },
        /// A part of a graph image, in order; with the last part the graph is validated and compiled.
        /// One-way.
        8 Graph {
            /// The name of the graph; an earlier graph of this name is replaced.
            graph: GraphId,
            /// Bytes of the image before this part.
            offset: u64,
            /// Bytes of the whole image.
            total: u64,
        },
        /// Runs a graph. One-way.
        9 Submit {
            /// The graph.
            graph: GraphId,
        },
        /// Forgets a graph. One-way.
        10 Forget {
            /// The graph.
            graph: GraphId,
        },
        /// Asks for the device's memory. Answered by [`Reply::Memory`].
        11 Memory {},
        /// Answered by [`Reply::Done`] when everything before it is done.
        12 Fence {},
        /// A graph that differs from an earlier one in the words that the payload says
        /// ([`patch`](crate::ir::patch)); it is validated and compiled. One-way.
        13 Patch {
            /// The name of the graph; an earlier graph of this name is replaced.
            graph: GraphId,
            /// The graph it differs from, which stays.
            base: GraphId,
        },
        /// Turns a buffer into one for weights: memory that is written once, and that the host may hold once for
        /// several buffers. It is zero again, the graphs that use it are forgotten, and a mapping of it shows
        /// nothing any more. Answered by [`Reply::Held`], or, when the host keeps no weights, by [`Reply::Refused`],
        /// and nothing has happened.
        14 Weights {
            /// The buffer.
            buffer: BufferId,
        },
        /// Asks for bytes that the host has already. Answered by [`Reply::Done`], and they are in the buffer, by
        /// [`Reply::Missing`], or by [`Reply::Prove`].
        15 Lookup {
            /// A buffer for weights.
            buffer: BufferId,
            /// Where in it, in bytes.
            offset: u64,
            /// How many bytes, at least [`MIN_EXTENT`].
            len: u64,
            /// What they are.
            hash: ContentHash,
        },
        /// The answer to [`Reply::Prove`]. Answered by [`Reply::Done`] or [`Reply::Missing`].
        16 Proof {
            /// BLAKE3 of the extent's bytes, keyed with the nonce.
            proof: ContentHash,
        },
        /// Says that these bytes of a buffer for weights are a unit that others may ask for by its hash: at
        /// least [`MIN_EXTENT`] bytes, at most [`MAX_EXTENTS`] such units in a buffer. One-way.
        17 Extent {
            /// The buffer.
            buffer: BufferId,
            /// Where in it, in bytes.
            offset: u64,
            /// How many bytes.
            len: u64,
        },
        /// Asks which extents the host has for this guest, to be taken later. Answered by [`Reply::Have`].
        19 Query {
            /// A buffer for weights that is not settled.
            buffer: BufferId,
            /// What is wanted.
            wanted: Wanted,
        },
        /// Puts bytes that the host [has](Reply::Have) for this buffer into it. One-way.
        20 Attach {
            /// The buffer.
            buffer: BufferId,
            /// Where in it, in bytes.
            offset: u64,
            /// How many bytes.
            len: u64,
            /// What they are.
            hash: ContentHash,
        },
        /// The weights of a buffer are complete. It can still be written; that costs the host a copy. One-way.
        18 Seal {
            /// The buffer.
            buffer: BufferId,
        },
    }
}

messages! {
    /// From the host. `request` is the sequence number of the request it answers.
    Reply {
        /// The session is open.
        1 Welcome {
            /// [`PROTOCOL_VERSION`] of the host.
            protocol: u32,
            /// Number of the session, for logs on both sides.
            session: u64,
            /// The engine's name, `cpu` or `cuda:0`.
            engine: String,
            /// The engine's description.
            description: String,
            /// Memory the guest may use, in bytes.
            memory_total: u64,
            /// What of it is free.
            memory_free: u64,
            /// What the engine runs.
            capabilities: Capabilities,
        },
        /// The request is done.
        2 Done {
            /// The request.
            request: u64,
        },
        /// The request could not be met; the session goes on.
        3 Refused {
            /// The request.
            request: u64,
            /// Why, for people.
            reason: String,
        },
        /// The bytes asked for, as payload.
        4 Data {
            /// The request.
            request: u64,
        },
        /// The device's memory.
        5 Memory {
            /// The request.
            request: u64,
            /// Memory the guest may use, in bytes.
            total: u64,
            /// What of it is free.
            free: u64,
        },
        /// A one-way request failed while it ran; the session goes on.
        6 Failed {
            /// The request.
            request: u64,
            /// Why, for people.
            reason: String,
        },
        /// The session is over: the guest broke the protocol, or the host shuts down. The last message.
        7 Ended {
            /// Why, for people.
            reason: String,
        },
        /// The buffer is there, and the link has brought a file to map it by: the guest may read and write it
        /// itself whenever no request of its session is under way. Requests on it work all the same.
        8 Shared {
            /// The request.
            request: u64,
            /// Bytes of the file: those of the buffer, rounded up to whole pages.
            size: u64,
        },
        /// The buffer is for weights now.
        9 Held {
            /// The request.
            request: u64,
            /// Lengths of extents that the host may have for this guest, at most [`MAX_LENGTHS`]: it need not
            /// hash others.
            lengths: Lengths,
        },
        /// The host does not have these bytes, or not for this guest.
        10 Missing {
            /// The request.
            request: u64,
        },
        /// Which of the extents asked for the host has: it keeps them for this buffer until that is settled. Others
        /// may be there all the same, for those who ask for one ([`Request::Lookup`]).
        12 Have {
            /// The request.
            request: u64,
            /// Places in what was asked for, from 0.
            places: Lengths,
        },
        /// The host has the bytes from somebody else: this guest is to prove that it has them, too, with
        /// [`Request::Proof`] as its next request.
        11 Prove {
            /// The request.
            request: u64,
            /// The key of the proof.
            nonce: ContentHash,
        },
    }
}

/// Lengths of extents, or places in a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lengths(pub Vec<u64>);

/// Extents by hash and length, at most [`MAX_QUERIED`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wanted(pub Vec<(ContentHash, u64)>);

/// A value in a message.
trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(bytes: &mut Reader<'_>) -> Result<Self, WireError>;
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let wanted = self.at.saturating_add(count);
        let taken = self.bytes.get(self.at..wanted);
        self.at = wanted;
        taken.ok_or(WireError::Truncated {
            len: self.bytes.len(),
            wanted,
        })
    }
}

macro_rules! integer_fields {
    ($($ty:ty)*) => {
        $(impl Field for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn get(bytes: &mut Reader<'_>) -> Result<$ty, WireError> {
                let mut raw = [0; size_of::<$ty>()];
                raw.copy_from_slice(bytes.take(size_of::<$ty>())?);
                Ok(<$ty>::from_le_bytes(raw))
            }
        })*
    };
}

integer_fields! { u8 u32 u64 }

impl Field for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self.as_bytes());
    }

    fn get(bytes: &mut Reader<'_>) -> Result<String, WireError> {
        let len = u32::get(bytes)? as usize;
        String::from_utf8(bytes.take(len)?.to_vec()).map_err(|_| WireError::Text)
    }
}

impl Field for BufferId {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<BufferId, WireError> {
        u64::get(bytes).map(BufferId)
    }
}

impl Field for GraphId {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<GraphId, WireError> {
        u64::get(bytes).map(GraphId)
    }
}

impl Field for ContentHash {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<ContentHash, WireError> {
        let mut raw = [0; 32];
        raw.copy_from_slice(bytes.take(32)?);
        Ok(ContentHash(raw))
    }
}

impl Field for Lengths {
    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u32).put(out);
        self.0.iter().for_each(|length| length.put(out));
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Lengths, WireError> {
        let count = u32::get(bytes)? as usize;
        let raw = bytes.take(count.saturating_mul(8))?;
        let lengths = raw.chunks_exact(8).map(|length| {
            let mut raw = [0; 8];
            raw.copy_from_slice(length);
            u64::from_le_bytes(raw)
        });
        Ok(Lengths(lengths.collect()))
    }
}

impl Field for Wanted {
    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u32).put(out);
        for (hash, len) in &self.0 {
            hash.put(out);
            len.put(out);
        }
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Wanted, WireError> {
        let count = u32::get(bytes)? as usize;
        // No more room than there are bytes for.
        let left = (bytes.bytes.len() - bytes.at.min(bytes.bytes.len())) / 40;
        let mut wanted = Vec::with_capacity(count.min(left));
        for _ in 0..count {
            wanted.push((ContentHash::get(bytes)?, u64::get(bytes)?));
        }
        Ok(Wanted(wanted))
    }
}

impl Field for Capabilities {
    fn put(&self, out: &mut Vec<u8>) {
        let words = self.encode();
        (words.len() as u32).put(out);
        for word in words {
            word.put(out);
        }
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Capabilities, WireError> {
        let count = u32::get(bytes)? as usize;
        let raw = bytes.take(count.saturating_mul(4))?;
        let words: Vec<u32> = raw
            .chunks_exact(4)
            .map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]))
            .collect();
        Ok(Capabilities::decode(&words)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{OpKind, Rule, Type, TypeSet};
    use proptest::prelude::*;

    #[test]
    fn messages_round_trip() {
        let rule = Rule::uniform(OpKind::Add, TypeSet::of(&[Type::F32, Type::F16]), 2).dense(1);
        let welcome = Reply::Welcome {
            protocol: PROTOCOL_VERSION,
            session: 7,
            engine: "cpu".into(),
            description: "a processor".into(),
            memory_total: u64::MAX,
            memory_free: 1,
            capabilities: Capabilities::new(vec![rule]),
        };
        let mut bytes = Vec::new();
        welcome.encode(&mut bytes);
        assert_eq!(Reply::decode(&bytes), Ok(welcome));
        for cut in 0..bytes.len() {
            assert!(
                Reply::decode(&bytes[..cut]).is_err(),
                "accepted {cut} of {} bytes",
                bytes.len()
            );
        }
        bytes.push(0);
        assert_eq!(Reply::decode(&bytes), Err(WireError::Trailing { extra: 1 }));
    }

    #[test]
    fn hashes_and_lengths_round_trip() {
        let hash = ContentHash(std::array::from_fn(|i| i as u8));
        let request = Request::Lookup {
            buffer: BufferId(3),
            offset: 1 << 40,
            len: MIN_EXTENT,
            hash,
        };
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        assert_eq!(Request::decode(&bytes), Ok(request));
        assert!(hash.to_string().starts_with("00010203"));

        let held = Reply::Held {
            request: 1,
            lengths: Lengths(vec![u64::MAX; MAX_LENGTHS]),
        };
        bytes.clear();
        held.encode(&mut bytes);
        assert!(bytes.len() <= MAX_MESSAGE, "{} bytes", bytes.len());
        assert_eq!(Reply::decode(&bytes), Ok(held));

        let ask = Request::Query {
            buffer: BufferId(3),
            wanted: Wanted(vec![(hash, 1 << 50); MAX_QUERIED]),
        };
        bytes.clear();
        ask.encode(&mut bytes);
        assert!(bytes.len() <= MAX_MESSAGE, "{} bytes", bytes.len());
        assert_eq!(Request::decode(&bytes), Ok(ask));
        assert!(Request::decode(&bytes[..bytes.len() - 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_cleanly(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(request) = Request::decode(&bytes) {
                let mut again = Vec::new();
                request.encode(&mut again);
                prop_assert_eq!(&again, &bytes);
            }
            let _ = Reply::decode(&bytes);
        }
    }
}
