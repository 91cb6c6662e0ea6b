//! Why sessions end, and why a buffer is refused.

use std::time::Duration;

use vgpu_engine::EngineError;
use vgpu_transport::ir::{BufferId, DecodeError, Invalid};
use vgpu_transport::link::LinkError;
use vgpu_transport::link::stream::tls::CertificateFault;
use vgpu_transport::wire::{
    ContentHash, DeviceCount, DeviceIndex, GraphId, MAX_EXTENTS, MAX_QUERIED, MIN_EXTENT,
    ProtocolVersion, VersionMismatch, WireError,
};

use crate::pool::PoolError;
use crate::stop::{StopFlag, StopReason};
#[cfg(feature = "server")]
use crate::tenant_registry::AdmissionError;

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// The guest disconnected: the normal end of a session.
    #[error("the guest disconnected")]
    Closed,
    /// The link failed, or the guest broke its rules.
    #[error("the link failed: {0}")]
    Link(LinkError),
    /// The guest broke the protocol.
    #[error("the guest broke the protocol: {0}")]
    Violation(#[from] Violation),
    /// The guest connected and did not send HELLO in time.
    #[error("the guest did not send HELLO within {0:?}")]
    NoHello(Duration),
    /// The host shuts down.
    #[error("the host is shutting down")]
    Shutdown,
    /// The host accepts no new sessions.
    #[error(
        "the host drains: it accepts no new sessions, and serves those that it has; use another \
         host, or try again later"
    )]
    Draining,
    /// The host drains, and the session has not ended by itself.
    #[error("the host drains, and ends the sessions that are open after {0:?}")]
    Drained(Duration),
    /// An operator of the host has ended the session.
    #[error("an operator of the host has ended this session")]
    Killed,
    /// The guest of the session was removed, as when the pod of a container has ended.
    #[error("the host has removed this guest, and ends its sessions")]
    Removed,
    /// The host has served this guest, and does so no longer.
    #[error("the host no longer serves this guest: {0}")]
    Refused(CertificateFault),
    /// A rule of the host rejects this guest.
    #[error("the host does not serve this guest: {0}")]
    Rejected(#[from] RejectReason),
    /// The host serves as many guests as its limit allows.
    #[error("the host already serves {sessions} guests, its limit is {limit}")]
    Full {
        /// Open sessions.
        sessions: usize,
        /// The limit.
        limit: usize,
    },
    /// The engine could not read or write its own memory.
    #[error("the engine failed: {0}")]
    Engine(EngineError),
    /// Code of the host panicked while it served this guest: a bug of the host.
    #[error("the host failed while it executed a request: {0}")]
    Panic(String),
}

/// Kinds of ends, for statistics.
pub(crate) const END_KINDS: [&str; 15] = [
    "closed",
    "link",
    "violation",
    "no-hello",
    "shutdown",
    "refused",
    "rejected",
    "full",
    "engine",
    "panic",
    "draining",
    "drained",
    "killed",
    "evicted",
    "removed",
];

impl SessionEnd {
    /// The index of this kind of end in [`END_KINDS`].
    pub(crate) fn kind(&self) -> usize {
        match self {
            SessionEnd::Closed => 0,
            SessionEnd::Link(LinkError::Evicted) => 13,
            SessionEnd::Link(_) => 1,
            SessionEnd::Violation(_) => 2,
            SessionEnd::NoHello(_) => 3,
            SessionEnd::Shutdown => 4,
            SessionEnd::Refused(_) => 5,
            SessionEnd::Rejected(_) => 6,
            SessionEnd::Full { .. } => 7,
            SessionEnd::Engine(_) => 8,
            SessionEnd::Panic(_) => 9,
            SessionEnd::Draining => 10,
            SessionEnd::Drained(_) => 11,
            SessionEnd::Killed => 12,
            SessionEnd::Removed => 14,
        }
    }

    /// The end that a flag asks for. `None`: the flag is not set.
    pub(super) fn asked_by(stop: &StopFlag) -> Option<SessionEnd> {
        Some(match stop.reason()? {
            StopReason::Shutdown => SessionEnd::Shutdown,
            StopReason::Evicted => SessionEnd::Link(LinkError::Evicted),
            StopReason::Killed => SessionEnd::Killed,
            StopReason::Removed => SessionEnd::Removed,
            StopReason::Refused(fault) => SessionEnd::Refused(fault.clone()),
            StopReason::Drained(limit) => SessionEnd::Drained(*limit),
        })
    }
}

impl From<LinkError> for SessionEnd {
    fn from(error: LinkError) -> SessionEnd {
        match error {
            LinkError::Closed => SessionEnd::Closed,
            other => SessionEnd::Link(other),
        }
    }
}

/// The rule that rejects a guest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum RejectReason {
    #[cfg(feature = "server")]
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error("guest {guest}: {error}")]
    Pool { guest: String, error: PoolError },
    #[error(
        "{who} {own} programs here, its limit is {limit}: three quarters of the {max_sessions} of \
         --max-guests"
    )]
    TooManyPrograms {
        who: String,
        own: usize,
        limit: usize,
        max_sessions: usize,
    },
    #[error(
        "the host has {} for this guest, and it has asked for device {}, counted from 0",
        match devices.0 {
            1 => "one device".to_owned(),
            count => format!("{count} devices"),
        },
        device.0
    )]
    NoDevice {
        device: DeviceIndex,
        devices: DeviceCount,
    },
    /// What a supervisor has told its worker.
    #[error("{0}")]
    OfSupervisor(String),
}

/// Why a guest gets no buffer. The guest's session goes on.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum AllocError {
    /// The session has as many buffers as its limit allows.
    #[error("the session already has {limit} buffers, which is the limit")]
    Count { limit: usize },
    /// The tenant's account has no room.
    #[error("guest {guest}: {error}")]
    Quota { guest: String, error: EngineError },
    /// The tenant gets no more memory mappings.
    #[error("guest {guest}: {error}")]
    Pool { guest: String, error: PoolError },
    /// The engine cannot allocate.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// How a guest broke the protocol. Ends its session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum Violation {
    #[error("request {request} ({len} bytes) cannot be decoded: {error}")]
    Message {
        request: u64,
        len: usize,
        error: WireError,
    },
    #[error("the first request is {kind}, not HELLO")]
    NoHello { kind: &'static str },
    #[error("HELLO came twice")]
    SecondHello,
    #[error(transparent)]
    Protocol(#[from] VersionMismatch),
    #[error(
        "the guest speaks graph IR version {guest} with protocol version {protocol}, to which \
         version {} belongs",
        .protocol.ir()
    )]
    Ir {
        guest: u16,
        protocol: ProtocolVersion,
    },
    #[error("{kind} carries a payload of {payload} bytes, but takes none")]
    Payload { kind: &'static str, payload: usize },
    #[error("ALLOC names buffer 0, which is not a valid id")]
    BufferZero,
    #[error(
        "ALLOC names buffer {}, but the session has had buffer {last}; a guest has to count up",
        .buffer.0
    )]
    BufferOrder { buffer: BufferId, last: u64 },
    #[error("{kind} names buffer {}, which the session does not have", .buffer.0)]
    UnknownBuffer {
        kind: &'static str,
        buffer: BufferId,
    },
    #[error("{kind} accesses {len} bytes at {offset} of buffer {}, which has {size}", .buffer.0)]
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
    #[error("{kind} names an extent of {len} bytes, the minimum is {MIN_EXTENT}")]
    ShortExtent { kind: &'static str, len: u64 },
    #[error("EXTENT names more than {MAX_EXTENTS} extents in buffer {}", .0.0)]
    TooManyExtents(BufferId),
    #[error("QUERY names {asked} extents, at most {MAX_QUERIED} are allowed")]
    TooMuchAsked { asked: usize },
    #[error("ATTACH names {len} bytes with hash {hash}, which QUERY has not reserved for buffer \
     {}", .buffer.0)]
    NotReserved {
        buffer: BufferId,
        len: u64,
        hash: ContentHash,
    },
    #[error("PROOF without a challenge in the reply before it")]
    UnaskedProof,
    #[error("READ asks for {len} bytes, at most {limit} are allowed")]
    ReadTooLong { len: u64, limit: usize },
    #[error(
        "SUBMIT names graph {}, which was never sent, was forgotten, or used a buffer that was \
         freed",
        .0.0
    )]
    UnknownGraph(GraphId),
    #[error(
        "PATCH of {bytes} bytes is based on graph {}, which was never sent, was forgotten, or used \
         a buffer that was freed",
        .base.0
    )]
    UnknownBase { base: GraphId, bytes: usize },
    #[error("graph {} has an image of {total} bytes; the size is a multiple of 4 from 4 to \
     {limit}", .graph.0)]
    ImageSize {
        graph: GraphId,
        total: u64,
        limit: u64,
    },
    #[error(
        "a part of graph {} has {len} bytes at {offset} of {total}, expected are bytes from \
         {expected_offset} of {expected_total} of graph {}",
        .graph.0,
        .expected_graph.0
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
    #[error("graph {} cannot be decoded: {error}", .graph.0)]
    Image { graph: GraphId, error: DecodeError },
    #[error("graph {} names {names} buffers, the session has {buffers}", .graph.0)]
    BufferTable {
        graph: GraphId,
        names: usize,
        buffers: usize,
    },
    #[error("graph {} is invalid: {invalid}", .graph.0)]
    Graph { graph: GraphId, invalid: Invalid },
    #[error("with graph {} the session stores {count} {what}, at most {limit} are allowed",
        .graph.0)]
    TooManyGraphs {
        graph: GraphId,
        what: &'static str,
        count: u64,
        limit: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_says_why_a_session_ends() {
        let all = StopFlag::new();
        let (one, other) = (all.for_one(), all.for_one());
        assert_eq!(SessionEnd::asked_by(&one), None);
        one.set_for(StopReason::Evicted);
        let evicted = SessionEnd::asked_by(&one).expect("it is set");
        assert_eq!(evicted, SessionEnd::Link(LinkError::Evicted));
        assert_eq!(
            evicted.to_string(),
            "the link failed: the guest was evicted: its heartbeat had stopped, and another \
             program needed its slot or its memory"
        );
        assert_eq!(END_KINDS[evicted.kind()], "evicted");
        let failed = SessionEnd::Link(LinkError::Stalled { seconds: 60 });
        assert_eq!(END_KINDS[failed.kind()], "link");
        let drained = all.for_one();
        drained.set_for(StopReason::Drained(Duration::from_secs(60)));
        let end = SessionEnd::asked_by(&drained).expect("it is set");
        assert_eq!(
            end.to_string(),
            "the host drains, and ends the sessions that are open after 60s"
        );
        assert_eq!(END_KINDS[end.kind()], "drained");
        assert_eq!(END_KINDS[SessionEnd::Draining.kind()], "draining");
        let killed = all.for_one();
        killed.set_for(StopReason::Killed);
        let end = SessionEnd::asked_by(&killed).expect("it is set");
        assert_eq!(end, SessionEnd::Killed);
        assert_eq!(END_KINDS[end.kind()], "killed");
        let removed = all.for_one();
        removed.set_for(StopReason::Removed);
        let end = SessionEnd::asked_by(&removed).expect("it is set");
        assert_eq!(end, SessionEnd::Removed);
        assert_eq!(END_KINDS[end.kind()], "removed");
        // Of this session alone, whatever is asked of all later.
        assert_eq!(SessionEnd::asked_by(&other), None);
        all.set();
        assert_eq!(SessionEnd::asked_by(&one), Some(evicted));
        assert_eq!(SessionEnd::asked_by(&other), Some(SessionEnd::Shutdown));
    }
}
