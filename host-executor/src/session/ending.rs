//! Why sessions end.

use std::time::Duration;

use vgpu_transport::ir::{BufferId, DecodeError, IR_VERSION, Invalid};
use vgpu_transport::link::LinkError;
use vgpu_transport::wire::{
    ContentHash, GraphId, MAX_EXTENTS, MAX_QUERIED, MIN_EXTENT, PROTOCOL_VERSION, WireError,
};

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ending {
    /// The guest went away, which is how every good session ends.
    #[error("the guest closed it")]
    Closed,
    /// The link failed, or the guest broke its rules.
    #[error("the link failed: {0}")]
    Link(LinkError),
    /// The guest broke the protocol.
    #[error("the guest broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// The guest connected and said nothing.
    #[error("the guest has not said hello within {0:?}")]
    Silent(Duration),
    /// The host shuts down.
    #[error("the host is shutting down")]
    Shutdown,
    /// The configuration of the host does not let this guest in.
    #[error("the host does not serve this guest: {why}")]
    Refused {
        /// What it says.
        why: String,
    },
    /// The host serves as many guests as it can.
    #[error("the host already serves {sessions} guests, its limit is {limit}")]
    Full {
        /// Sessions that are open.
        sessions: usize,
        /// How many may be.
        limit: usize,
    },
    /// The engine could not read or write its own memory.
    #[error("the engine failed: {0}")]
    Engine(String),
    /// Code of the host panicked while it served this guest: a bug of the host.
    #[error("the host failed while it executed a request: {0}")]
    Panic(String),
}

impl From<LinkError> for Ending {
    fn from(error: LinkError) -> Ending {
        match error {
            LinkError::Closed => Ending::Closed,
            other => Ending::Link(other),
        }
    }
}

/// How a guest broke the protocol. Ends its session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum Violation {
    #[error("request {request} ({len} bytes) cannot be read: {error}")]
    Message {
        request: u64,
        len: usize,
        error: WireError,
    },
    #[error("the first request is {kind}, not HELLO")]
    NoHello { kind: &'static str },
    #[error("HELLO came twice")]
    SecondHello,
    #[error(
        "the guest speaks version {guest} of the protocol, this host speaks {PROTOCOL_VERSION}: update the older of the two"
    )]
    Protocol { guest: u32 },
    #[error(
        "the guest speaks version {guest} of the graph IR, this host speaks {IR_VERSION}: update the older of the two"
    )]
    Ir { guest: u32 },
    #[error("{kind} carries a payload of {payload} bytes, but takes none")]
    Payload { kind: &'static str, payload: usize },
    #[error("ALLOC names buffer 0, which is not a name")]
    BufferZero,
    #[error("ALLOC names buffer {}, a name that the session has used before", .0.0)]
    BufferReused(BufferId),
    #[error("the names of buffers fall into {ranges} separate ranges; a guest counts up")]
    ScatteredNames { ranges: usize },
    #[error("{kind} names buffer {}, which the session does not have", .buffer.0)]
    UnknownBuffer {
        kind: &'static str,
        buffer: BufferId,
    },
    #[error("{kind} touches bytes {offset}..+{len} of buffer {}, which has {size}", .buffer.0)]
    OutOfBounds {
        kind: &'static str,
        buffer: BufferId,
        offset: u64,
        len: u64,
        size: u64,
    },
    #[error("{kind} names buffer {}, which is not for weights", .buffer.0)]
    NotForWeights {
        kind: &'static str,
        buffer: BufferId,
    },
    #[error("{kind} names an extent of {len} bytes, the least is {MIN_EXTENT}")]
    ShortExtent { kind: &'static str, len: u64 },
    #[error("EXTENT names more than {MAX_EXTENTS} extents in buffer {}", .0.0)]
    TooManyExtents(BufferId),
    #[error("QUERY is for {asked} extents at once, at most {MAX_QUERIED} are possible")]
    TooMuchAsked { asked: usize },
    #[error("ATTACH names {len} bytes by {hash}, which the host does not keep for buffer {}", .buffer.0)]
    NotKept {
        buffer: BufferId,
        len: u64,
        hash: ContentHash,
    },
    #[error("PROOF comes although none was asked for by the reply before it")]
    UnaskedProof,
    #[error("READ asks for {len} bytes at once, at most {limit} are possible")]
    ReadTooLong { len: u64, limit: usize },
    #[error(
        "SUBMIT names graph {}, which was never sent, was forgotten, or used a buffer that was freed", .0.0
    )]
    UnknownGraph(GraphId),
    #[error(
        "PATCH of {bytes} bytes starts from graph {}, which was never sent, was forgotten, or used a buffer that was freed", .base.0
    )]
    UnknownBase { base: GraphId, bytes: usize },
    #[error("graph {} has an image of {total} bytes, not a multiple of 4 from 4 to {limit}", .graph.0)]
    ImageSize {
        graph: GraphId,
        total: u64,
        limit: u64,
    },
    #[error(
        "a part of graph {} has bytes {offset}..+{len} of {total}, but bytes {expected_offset}.. of {expected_total} of graph {} come next", .graph.0, .expected_graph.0
    )]
    Part {
        graph: GraphId,
        offset: u64,
        len: usize,
        total: u64,
        expected_graph: GraphId,
        expected_offset: u64,
        expected_total: u64,
    },
    #[error("graph {} cannot be read: {error}", .graph.0)]
    Image { graph: GraphId, error: DecodeError },
    #[error("graph {} names {names} buffers, the session has {buffers}", .graph.0)]
    BufferTable {
        graph: GraphId,
        names: usize,
        buffers: usize,
    },
    #[error("graph {} is invalid: {invalid}", .graph.0)]
    Graph { graph: GraphId, invalid: Invalid },
    #[error("graph {} makes {count} {what} in all that the session wants kept, at most {limit} are", .graph.0)]
    TooManyGraphs {
        graph: GraphId,
        what: &'static str,
        count: u64,
        limit: u64,
    },
}
