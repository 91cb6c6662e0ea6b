//! The messages of a session.
//!
//! The guest sends [`Request`]s, which the host executes strictly in order. The host sends
//! [`Reply`]s. Most requests are one-way. A guest learns of their completion from a later reply or
//! from the link, and of a failure from a [`Reply::Failed`] ahead of the next reply. Payloads
//! (tensor bytes, graph images) travel beside the message.
//!
//! All numbers are little-endian. The input of this module is hostile: a receiver decodes a message
//! from a private copy. The module contains no unsafe code.
#![forbid(unsafe_code)]

mod version;

use std::fmt;

use crate::ir::{BufferId, Capabilities, DecodeError};

pub use crate::limits::{MAX_FIRST_MESSAGE, MAX_MESSAGE, MAX_PAYLOAD};
pub use version::{Offer, ProtocolVersion, VersionMismatch, VersionNotOffered, VersionRange};

/// The maximum size of a graph image, in bytes.
pub const MAX_GRAPH: u64 = 64 << 20;

/// The maximum number of graphs of a session. A guest at the limit sends [`Request::Forget`] first.
pub const MAX_GRAPHS: usize = 1024;

/// The minimum size of an extent of weights, in bytes. For smaller extents a lookup costs more than
/// the upload.
pub const MIN_EXTENT: u64 = 64 << 10;

/// The maximum number of extents of one buffer. A guest writes further bytes without an extent.
pub const MAX_EXTENTS: usize = 4096;

/// The maximum number of lengths in one [`Reply::Held`].
pub const MAX_LENGTHS: usize = 4096;

/// The maximum number of extents in one [`Request::Query`].
pub const MAX_QUERIED: usize = 1024;

/// The maximum number of devices of a host.
pub const MAX_DEVICES: u32 = 16;

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

/// The id of a graph of a session. The guest chooses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GraphId(pub u64);

/// Why a message cannot be decoded. The sender is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum WireError {
    #[error("the message of {len} bytes is truncated: byte {wanted} was expected")]
    Truncated { len: usize, wanted: usize },
    #[error("the message has {extra} bytes behind its end")]
    Trailing { extra: usize },
    #[error("unknown message kind {kind}")]
    UnknownKind { kind: u32 },
    #[error("a string is not UTF-8")]
    Text,
    #[error("HELLO names the protocol versions from {oldest} to {newest}, which is no range")]
    VersionRange { oldest: u32, newest: u32 },
    #[error(
        "WELCOME names the protocol version {version}, this side speaks {}",
        VersionRange::SERVED
    )]
    Version { version: u32 },
    #[error("WELCOME says that the host serves versions {oldest} to {newest}, which is no range")]
    HostVersions { oldest: u32, newest: u32 },
    #[error("HELLO names device 0 in a field that only further devices have")]
    FirstDevice,
    #[error("WELCOME counts {devices} devices, and one device is not counted: 2 to {MAX_DEVICES}")]
    DeviceCount { devices: u32 },
    #[error("the capabilities are malformed: {0}")]
    Capabilities(#[from] DecodeError),
}

macro_rules! messages {
    ($(#[$doc:meta])* $enum:ident {
        $($(#[$vdoc:meta])* $id:literal $variant:ident {
            $($(#[$fdoc:meta])* $field:ident: $ty:ty),* $(,)?
        },)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq)]
        pub enum $enum {
            $($(#[$vdoc])* $variant { $($(#[$fdoc])* $field: $ty,)* },)*
        }

        impl $enum {
            /// Appends the message in the form of `version` to `out`.
            pub fn encode(&self, version: ProtocolVersion, out: &mut Vec<u8>) {
                let mut out = Writer { bytes: out, version };
                let out = &mut out;
                match self {
                    $($enum::$variant { $($field,)* } => {
                        u32::put(&$id, out);
                        $($field.put(out);)*
                    })*
                }
            }

            /// Decodes a message in the form of `version`.
            ///
            /// # Errors
            ///
            /// A [`WireError`] that names the malformed part.
            pub fn decode(version: ProtocolVersion, bytes: &[u8]) -> Result<$enum, WireError> {
                let mut bytes = Reader { bytes, at: 0, version };
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
    /// A message of the guest.
    Request {
        /// The first message of a session, the same in every version. Answered by
        /// [`Reply::Welcome`], or by [`Reply::Ended`] when the host does not want this guest.
        1 Hello {
            /// The versions of the guest.
            offer: Offer,
            /// The guest's program, process id and ggml version, for logs.
            name: String,
            /// The device that the session is for. A guest asks for the first device in its first
            /// session, and for others after WELCOME has counted them.
            device: DeviceIndex,
        },
        /// Allocates a zeroed buffer. Answered by [`Reply::Done`], [`Reply::Shared`] or
        /// [`Reply::Refused`].
        2 Alloc {
            /// An id greater than that of every buffer that the session has had. The id of a
            /// refused request is not used.
            buffer: BufferId,
            /// The size in bytes.
            size: u64,
        },
        /// Frees a buffer. One-way.
        3 Free {
            /// The buffer.
            buffer: BufferId,
        },
        /// Writes the payload into a buffer. One-way.
        4 Write {
            /// The buffer.
            buffer: BufferId,
            /// The offset in the buffer, in bytes.
            offset: u64,
        },
        /// Reads from a buffer. Answered by [`Reply::Data`].
        5 Read {
            /// The buffer.
            buffer: BufferId,
            /// The offset in the buffer, in bytes.
            offset: u64,
            /// The number of bytes, at most [`MAX_PAYLOAD`].
            len: u64,
        },
        /// Sets bytes of a buffer to a value. One-way.
        6 Fill {
            /// The buffer.
            buffer: BufferId,
            /// The offset in the buffer, in bytes.
            offset: u64,
            /// The number of bytes.
            len: u64,
            /// The value.
            value: u8,
        },
        /// Copies bytes between two buffers or within one. One-way.
        7 Copy {
            /// The destination buffer.
            dst: BufferId,
            /// The offset in the buffer, in bytes.
            dst_offset: u64,
            /// The source buffer.
            src: BufferId,
            /// The offset in the buffer, in bytes.
            src_offset: u64,
            /// The number of bytes.
            len: u64,
        },
        /// A part of a graph image. The parts arrive in order. After the last part the host
        /// validates and compiles the graph. One-way.
        8 Graph {
            /// The id of the graph. The graph replaces an earlier one with this id.
            graph: GraphId,
            /// The offset of this part in the image, in bytes.
            offset: u64,
            /// The size of the whole image, in bytes.
            total: u64,
        },
        /// Runs a graph. One-way.
        9 Submit {
            /// The graph.
            graph: GraphId,
        },
        /// Deletes a graph. One-way.
        10 Forget {
            /// The graph.
            graph: GraphId,
        },
        /// Reads the size of the device's memory. Answered by [`Reply::Memory`].
        11 Memory {},
        /// Waits for all earlier requests. Answered by [`Reply::Done`].
        12 Fence {},
        /// A graph that differs from an earlier graph by the [`patch`](crate::ir::patch) in the
        /// payload. The host validates and compiles the graph. One-way.
        13 Patch {
            /// The id of the graph. The graph replaces an earlier one with this id.
            graph: GraphId,
            /// The earlier graph, which stays valid.
            base: GraphId,
        },
        /// Turns a buffer into a buffer for weights: memory that the guest writes once, and that
        /// the host may share between several buffers. The host zeroes the buffer, deletes the
        /// graphs that use it, and detaches a mapping of it. Answered by [`Reply::Held`]. A host
        /// that keeps no weights answers [`Reply::Refused`] and leaves the buffer as it is. A host
        /// that finds no memory to share answers [`Reply::Held`] and then shares nothing.
        14 Weights {
            /// The buffer.
            buffer: BufferId,
        },
        /// Looks up bytes that the host may have already. Answered by [`Reply::Done`] after the
        /// host has put the bytes into the buffer, by [`Reply::Missing`], or by [`Reply::Prove`].
        15 Lookup {
            /// A buffer for weights.
            buffer: BufferId,
            /// The offset in the buffer, in bytes.
            offset: u64,
            /// The number of bytes, at least [`MIN_EXTENT`].
            len: u64,
            /// The hash of the bytes.
            hash: ContentHash,
        },
        /// The answer to [`Reply::Prove`]. Answered by [`Reply::Done`] or [`Reply::Missing`].
        16 Proof {
            /// The BLAKE3 hash of the extent's bytes, keyed with the nonce.
            proof: ContentHash,
        },
        /// Declares bytes of a buffer for weights as an extent, which other sessions may look up by
        /// its hash. An extent has at least [`MIN_EXTENT`] bytes, and a buffer at most
        /// [`MAX_EXTENTS`] extents. One-way.
        17 Extent {
            /// The buffer.
            buffer: BufferId,
            /// The offset in the buffer, in bytes.
            offset: u64,
            /// The number of bytes.
            len: u64,
        },
        /// Queries which extents the host has for this guest. The guest attaches them later.
        /// Answered by [`Reply::Have`].
        19 Query {
            /// A buffer for weights that is not sealed.
            buffer: BufferId,
            /// The wanted extents.
            wanted: Wanted,
        },
        /// Attaches an extent to the buffer for which the host [has](Reply::Have) the extent.
        /// One-way.
        20 Attach {
            /// The buffer.
            buffer: BufferId,
            /// The offset in the buffer, in bytes.
            offset: u64,
            /// The number of bytes.
            len: u64,
            /// The hash of the bytes.
            hash: ContentHash,
        },
        /// Seals a buffer for weights: its contents are complete. A later write costs the host a
        /// copy. One-way.
        18 Seal {
            /// The buffer.
            buffer: BufferId,
        },
    }
}

messages! {
    /// A message of the host. `request` is the number of the request that the message answers.
    Reply {
        /// The session is open.
        1 Welcome {
            /// The version of this message and of all further ones, in both directions.
            protocol: ProtocolVersion,
            /// The versions that the host serves. A WELCOME of version 3 does not name them: then
            /// it is that version.
            served: HostVersions,
            /// The number of the session, for the logs of both sides.
            session: u64,
            /// The engine's name, `cpu` or `cuda:0`.
            engine: String,
            /// The engine's description.
            description: String,
            /// The memory that the guest may use, in bytes.
            memory_total: u64,
            /// The free part of that memory, in bytes.
            memory_free: u64,
            /// The capabilities of the engine.
            capabilities: Capabilities,
            /// The devices that the host has for this guest.
            devices: DeviceCount,
        },
        /// The request is done.
        2 Done {
            /// The request.
            request: u64,
        },
        /// The host has refused the request. The session goes on.
        3 Refused {
            /// The request.
            request: u64,
            /// The reason, in English.
            reason: String,
        },
        /// The requested bytes, as payload.
        4 Data {
            /// The request.
            request: u64,
        },
        /// The size of the device's memory.
        5 Memory {
            /// The request.
            request: u64,
            /// The memory that the guest may use, in bytes.
            total: u64,
            /// The free part of that memory, in bytes.
            free: u64,
        },
        /// A one-way request has failed. The session goes on.
        6 Failed {
            /// The request.
            request: u64,
            /// The reason, in English.
            reason: String,
        },
        /// The session has ended: the guest has violated the protocol, or the host shuts down. The
        /// last message, the same in every version.
        7 Ended {
            /// The reason, in English.
            reason: String,
        },
        /// The buffer is allocated, and the link has delivered a file to map it. The guest may
        /// access the mapping while no request of its session is in progress. Requests on the
        /// buffer work as well.
        8 Shared {
            /// The request.
            request: u64,
            /// The size of the file, in bytes: the size of the buffer, rounded up to whole pages.
            size: u64,
        },
        /// The buffer is a buffer for weights now.
        9 Held {
            /// The request.
            request: u64,
            /// The lengths of the extents that the host may have for this guest, at most
            /// [`MAX_LENGTHS`]. The guest need not hash extents of other lengths.
            lengths: Lengths,
        },
        /// The host does not have the bytes, or does not share them with this guest.
        10 Missing {
            /// The request.
            request: u64,
        },
        /// The queried extents that the host has. The host reserves them for this buffer until the
        /// guest seals the buffer. The host may have further extents, which [`Request::Lookup`]
        /// finds.
        12 Have {
            /// The request.
            request: u64,
            /// Indices into the queried extents, from 0.
            indices: Indices,
        },
        /// The host has the bytes from another tenant. The guest must prove that it has the bytes
        /// too, with [`Request::Proof`] as its next request.
        11 Prove {
            /// The request.
            request: u64,
            /// The key of the proof.
            nonce: ContentHash,
        },
    }
}

/// The versions that a host serves, as the host says in WELCOME.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostVersions(pub VersionRange);

/// A device of a host, by its position among those that the host has for the guest, from 0.
///
/// The last field of HELLO, which is absent for device 0: a host without this field serves a guest
/// that asks for no other device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceIndex(pub u32);

/// The number of devices that a host has for a guest, 1 to [`MAX_DEVICES`].
///
/// The last field of WELCOME, which is absent for one device, and in version 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceCount(pub u32);

/// Lengths of extents, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lengths(pub Vec<u64>);

/// Indices into a list of the message that is answered.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Indices(pub Vec<u64>);

/// Extents by hash and length in bytes, at most [`MAX_QUERIED`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wanted(pub Vec<(ContentHash, u64)>);

/// A value in a message.
trait Field: Sized {
    fn put(&self, out: &mut Writer<'_>);
    fn get(bytes: &mut Reader<'_>) -> Result<Self, WireError>;
}

/// A message that is being encoded.
struct Writer<'a> {
    bytes: &'a mut Vec<u8>,
    version: ProtocolVersion,
}

/// A message that is being decoded.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    version: ProtocolVersion,
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

    fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }
}

macro_rules! integer_fields {
    ($($ty:ty)*) => {
        $(impl Field for $ty {
            fn put(&self, out: &mut Writer<'_>) {
                out.bytes.extend_from_slice(&self.to_le_bytes());
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
    fn put(&self, out: &mut Writer<'_>) {
        (self.len() as u32).put(out);
        out.bytes.extend_from_slice(self.as_bytes());
    }

    fn get(bytes: &mut Reader<'_>) -> Result<String, WireError> {
        let len = u32::get(bytes)? as usize;
        String::from_utf8(bytes.take(len)?.to_vec()).map_err(|_| WireError::Text)
    }
}

impl Field for Offer {
    fn put(&self, out: &mut Writer<'_>) {
        self.words().iter().for_each(|word| word.put(out));
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Offer, WireError> {
        let words = [u32::get(bytes)?, u32::get(bytes)?];
        let offer = Offer::of_words(words);
        offer.map_err(|(oldest, newest)| WireError::VersionRange { oldest, newest })
    }
}

/// The number of the version, which the rest of the message has.
impl Field for ProtocolVersion {
    fn put(&self, out: &mut Writer<'_>) {
        self.number().put(out);
        out.version = *self;
    }

    fn get(bytes: &mut Reader<'_>) -> Result<ProtocolVersion, WireError> {
        let version = u32::get(bytes)?;
        let known = ProtocolVersion::of_number(version);
        bytes.version = known.ok_or(WireError::Version { version })?;
        Ok(bytes.version)
    }
}

/// The oldest and the newest version, in a version that has them.
impl Field for HostVersions {
    fn put(&self, out: &mut Writer<'_>) {
        if out.version.welcome_names_range() {
            self.0.oldest().put(out);
            self.0.newest().put(out);
        }
    }

    fn get(bytes: &mut Reader<'_>) -> Result<HostVersions, WireError> {
        if !bytes.version.welcome_names_range() {
            return Ok(HostVersions(VersionRange::only(bytes.version)));
        }
        let (oldest, newest) = (u32::get(bytes)?, u32::get(bytes)?);
        let range = VersionRange::new(oldest, newest);
        let range = range.ok_or(WireError::HostVersions { oldest, newest })?;
        Ok(HostVersions(range))
    }
}

impl Field for DeviceIndex {
    fn put(&self, out: &mut Writer<'_>) {
        if self.0 > 0 {
            self.0.put(out);
        }
    }

    fn get(bytes: &mut Reader<'_>) -> Result<DeviceIndex, WireError> {
        if bytes.is_at_end() {
            return Ok(DeviceIndex(0));
        }
        match u32::get(bytes)? {
            0 => Err(WireError::FirstDevice),
            device => Ok(DeviceIndex(device)),
        }
    }
}

impl Field for DeviceCount {
    fn put(&self, out: &mut Writer<'_>) {
        if self.0 > 1 && out.version.welcome_counts_devices() {
            self.0.put(out);
        }
    }

    fn get(bytes: &mut Reader<'_>) -> Result<DeviceCount, WireError> {
        if !bytes.version.welcome_counts_devices() || bytes.is_at_end() {
            return Ok(DeviceCount(1));
        }
        match u32::get(bytes)? {
            devices @ 2..=MAX_DEVICES => Ok(DeviceCount(devices)),
            devices => Err(WireError::DeviceCount { devices }),
        }
    }
}

impl Field for BufferId {
    fn put(&self, out: &mut Writer<'_>) {
        self.0.put(out);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<BufferId, WireError> {
        u64::get(bytes).map(BufferId)
    }
}

impl Field for GraphId {
    fn put(&self, out: &mut Writer<'_>) {
        self.0.put(out);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<GraphId, WireError> {
        u64::get(bytes).map(GraphId)
    }
}

impl Field for ContentHash {
    fn put(&self, out: &mut Writer<'_>) {
        out.bytes.extend_from_slice(&self.0);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<ContentHash, WireError> {
        let mut raw = [0; 32];
        raw.copy_from_slice(bytes.take(32)?);
        Ok(ContentHash(raw))
    }
}

/// A count, then the numbers.
impl Field for Vec<u64> {
    fn put(&self, out: &mut Writer<'_>) {
        (self.len() as u32).put(out);
        self.iter().for_each(|number| number.put(out));
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Vec<u64>, WireError> {
        let count = u32::get(bytes)? as usize;
        let raw = bytes.take(count.saturating_mul(8))?;
        let numbers = raw.chunks_exact(8).map(|number| {
            let mut raw = [0; 8];
            raw.copy_from_slice(number);
            u64::from_le_bytes(raw)
        });
        Ok(numbers.collect())
    }
}

impl Field for Lengths {
    fn put(&self, out: &mut Writer<'_>) {
        self.0.put(out);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Lengths, WireError> {
        Vec::get(bytes).map(Lengths)
    }
}

impl Field for Indices {
    fn put(&self, out: &mut Writer<'_>) {
        self.0.put(out);
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Indices, WireError> {
        Vec::get(bytes).map(Indices)
    }
}

impl Field for Wanted {
    fn put(&self, out: &mut Writer<'_>) {
        (self.0.len() as u32).put(out);
        for (hash, len) in &self.0 {
            hash.put(out);
            len.put(out);
        }
    }

    fn get(bytes: &mut Reader<'_>) -> Result<Wanted, WireError> {
        let count = u32::get(bytes)? as usize;
        // The capacity follows the received bytes, not the announced count. An extent has 40 bytes.
        let left = (bytes.bytes.len() - bytes.at.min(bytes.bytes.len())) / 40;
        let mut wanted = Vec::with_capacity(count.min(left));
        for _ in 0..count {
            wanted.push((ContentHash::get(bytes)?, u64::get(bytes)?));
        }
        Ok(Wanted(wanted))
    }
}

impl Field for Capabilities {
    fn put(&self, out: &mut Writer<'_>) {
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

    const CURRENT: ProtocolVersion = ProtocolVersion::CURRENT;

    fn welcome(protocol: ProtocolVersion, served: VersionRange) -> Reply {
        let rule = Rule::uniform(OpKind::Add, TypeSet::of(&[Type::F32, Type::F16]), 2).dense(1);
        Reply::Welcome {
            protocol,
            served: HostVersions(served),
            session: 7,
            engine: "cpu".into(),
            description: "a processor".into(),
            memory_total: u64::MAX,
            memory_free: 1,
            capabilities: Capabilities::new(vec![rule]),
            devices: DeviceCount(1),
        }
    }

    #[test]
    fn messages_round_trip() {
        for version in ProtocolVersion::ALL {
            let served = match version.welcome_names_range() {
                true => VersionRange::SERVED,
                false => VersionRange::only(version),
            };
            let welcome = welcome(version, served);
            let mut bytes = Vec::new();
            welcome.encode(version, &mut bytes);
            // WELCOME says its version itself.
            for reader in ProtocolVersion::ALL {
                assert_eq!(Reply::decode(reader, &bytes).as_ref(), Ok(&welcome));
            }
            for cut in 0..bytes.len() {
                assert!(
                    Reply::decode(version, &bytes[..cut]).is_err(),
                    "accepted {cut} of {} bytes",
                    bytes.len()
                );
            }
            bytes.push(0);
            // Version 4 may have a number of devices there.
            let wrong = match version {
                ProtocolVersion::V3 => WireError::Trailing { extra: 1 },
                ProtocolVersion::V4 => WireError::Truncated {
                    len: bytes.len(),
                    wanted: bytes.len() + 3,
                },
            };
            assert_eq!(Reply::decode(version, &bytes), Err(wrong));
        }
    }

    /// What a guest and a host of the commit d8283f75, which speak version 3 only, send.
    #[test]
    fn recorded_handshake_of_version_3_is_that_of_this_build() {
        const HELLO: &[u8] = b"\x01\0\0\0\x03\0\0\0\x01\0\0\0\x08\0\0\0llama[7]";
        const WELCOME: &[u8] = b"\x01\0\0\0\x03\0\0\0\x07\0\0\0\0\0\0\0\x03\0\0\0cpu\
            \x0b\0\0\0a processor\xff\xff\xff\xff\xff\xff\xff\xff\x01\0\0\0\0\0\0\0\
            \x0a\0\0\0\x01\0\0\0";
        let v3 = ProtocolVersion::V3;
        let hello = Request::Hello {
            offer: Offer::only(v3),
            name: "llama[7]".into(),
            device: DeviceIndex(0),
        };
        let mut bytes = Vec::new();
        for version in ProtocolVersion::ALL {
            assert_eq!(Request::decode(version, HELLO).as_ref(), Ok(&hello));
            bytes.clear();
            hello.encode(version, &mut bytes);
            assert_eq!(bytes, HELLO);
        }
        bytes.clear();
        welcome(v3, VersionRange::only(v3)).encode(v3, &mut bytes);
        assert_eq!(&bytes[..WELCOME.len()], WELCOME);
    }

    #[test]
    fn a_host_of_version_3_reads_the_newest_version_in_every_hello() {
        let hello = Request::Hello {
            offer: Offer::SERVED,
            name: "new".into(),
            device: DeviceIndex(0),
        };
        let mut bytes = Vec::new();
        hello.encode(CURRENT, &mut bytes);
        // Kind, version and a second word, as version 3 has them; then the name.
        let words = bytes.chunks_exact(4).map(|word| {
            let mut raw = [0; 4];
            raw.copy_from_slice(word);
            u32::from_le_bytes(raw)
        });
        let words: Vec<u32> = words.collect();
        assert_eq!(words[..4], [1, CURRENT.number(), 3 << 16 | 1, 3]);
        assert_eq!(&bytes[16..], b"new");
    }

    #[test]
    fn wrong_versions_are_refused_with_their_numbers() {
        let mut bytes = Vec::new();
        Request::Hello {
            offer: Offer::SERVED,
            name: String::new(),
            device: DeviceIndex(0),
        }
        .encode(CURRENT, &mut bytes);
        bytes[10] = 7;
        let (oldest, newest) = (7, 4);
        let wrong = Err(WireError::VersionRange { oldest, newest });
        assert_eq!(Request::decode(CURRENT, &bytes), wrong);

        bytes.clear();
        welcome(CURRENT, VersionRange::SERVED).encode(CURRENT, &mut bytes);
        bytes[12] = 2;
        let (oldest, newest) = (3, 2);
        let wrong = Err(WireError::HostVersions { oldest, newest });
        assert_eq!(Reply::decode(CURRENT, &bytes), wrong);
        bytes[4] = 99;
        let wrong = Err(WireError::Version { version: 99 });
        assert_eq!(Reply::decode(CURRENT, &bytes), wrong);
    }

    #[test]
    fn one_device_takes_no_bytes_and_further_ones_round_trip() {
        let hello = |device| {
            let mut bytes = Vec::new();
            let hello = Request::Hello {
                offer: Offer::SERVED,
                name: "llama[7]".into(),
                device: DeviceIndex(device),
            };
            hello.encode(CURRENT, &mut bytes);
            assert_eq!(Request::decode(CURRENT, &bytes), Ok(hello));
            bytes
        };
        let first = hello(0);
        for device in [1, MAX_DEVICES - 1, u32::MAX] {
            let further = hello(device);
            assert_eq!(further[..first.len()], first);
            assert_eq!(further[first.len()..], device.to_le_bytes());
        }
        let mut twice = first.clone();
        twice.extend(0u32.to_le_bytes());
        let wrong = Err(WireError::FirstDevice);
        assert_eq!(Request::decode(CURRENT, &twice), wrong);

        let mut one = Vec::new();
        welcome(CURRENT, VersionRange::SERVED).encode(CURRENT, &mut one);
        for (count, is_valid) in [(0, false), (1, false), (2, true), (16, true), (17, false)] {
            let mut bytes = one.clone();
            bytes.extend(u32::to_le_bytes(count));
            match Reply::decode(CURRENT, &bytes) {
                Ok(Reply::Welcome { devices, .. }) => {
                    assert_eq!((devices, is_valid), (DeviceCount(count), true));
                }
                other => {
                    let wrong = WireError::DeviceCount { devices: count };
                    assert_eq!((other, is_valid), (Err(wrong), false));
                }
            }
        }
        // A guest of version 3 is told of one device.
        let v3 = ProtocolVersion::V3;
        let encoded = [1, 4].map(|count| {
            let mut welcome = welcome(v3, VersionRange::only(v3));
            let Reply::Welcome { devices, .. } = &mut welcome else {
                unreachable!("a WELCOME");
            };
            *devices = DeviceCount(count);
            let mut bytes = Vec::new();
            welcome.encode(v3, &mut bytes);
            bytes
        });
        assert_eq!(encoded[0], encoded[1]);
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
        request.encode(CURRENT, &mut bytes);
        assert_eq!(Request::decode(CURRENT, &bytes), Ok(request));
        assert!(hash.to_string().starts_with("00010203"));

        let held = Reply::Held {
            request: 1,
            lengths: Lengths(vec![u64::MAX; MAX_LENGTHS]),
        };
        bytes.clear();
        held.encode(CURRENT, &mut bytes);
        assert!(bytes.len() <= MAX_MESSAGE, "{} bytes", bytes.len());
        assert_eq!(Reply::decode(CURRENT, &bytes), Ok(held));

        let ask = Request::Query {
            buffer: BufferId(3),
            wanted: Wanted(vec![(hash, 1 << 50); MAX_QUERIED]),
        };
        bytes.clear();
        ask.encode(CURRENT, &mut bytes);
        assert!(bytes.len() <= MAX_MESSAGE, "{} bytes", bytes.len());
        assert_eq!(Request::decode(CURRENT, &bytes), Ok(ask));
        assert!(Request::decode(CURRENT, &bytes[..bytes.len() - 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_cleanly(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok(request) = Request::decode(CURRENT, &bytes) {
                let mut again = Vec::new();
                request.encode(CURRENT, &mut again);
                prop_assert_eq!(&again, &bytes);
            }
            let _ = Reply::decode(CURRENT, &bytes);
        }
    }
}
