//! What a request calls for, besides being retired.

use std::error::Error;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vgpu_engine::{EngineError, Memory};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{GraphId, Reply};

use super::error::AllocError;
use crate::activity::GraphInfo;
use crate::sched::InFlight;

/// What a request calls for.
pub(super) enum Answer {
    /// No reply.
    Nothing,
    /// A reply without payload.
    Message(Reply),
    /// The request could not be carried out. The session goes on.
    Failure {
        reply: Reply,
        /// For the log.
        reason: String,
    },
    /// Bytes of a buffer.
    Data(ReadRange),
    /// A buffer that the guest may map: the sealed file and its size in bytes.
    Shared { file: OwnedFd, size: u64 },
    /// A graph that the device is executing.
    InFlight(Submitted),
}

/// Bytes of a buffer that a guest reads. The range has been checked.
pub(super) struct ReadRange {
    pub(super) memory: Arc<dyn Memory>,
    pub(super) offset: u64,
    pub(super) len: usize,
}

/// A graph that the device is executing.
pub(super) struct Submitted {
    /// The number of the SUBMIT request.
    pub(super) request: u64,
    pub(super) graph: GraphId,
    pub(super) info: GraphInfo,
    pub(super) run: InFlight,
}

/// The answer to a one-way request of `kind` on `buffer` that the engine has carried out or
/// refused.
pub(super) fn done(
    request: u64,
    kind: &'static str,
    buffer: BufferId,
    outcome: Result<(), EngineError>,
) -> Answer {
    match outcome {
        Ok(()) => Answer::Nothing,
        Err(error) => failed(request, kind, buffer.0, &error),
    }
}

/// The answer to a request of `kind` on the object with number `on` that failed.
pub(super) fn failed(request: u64, kind: &'static str, on: u64, error: &dyn Error) -> Answer {
    let reason = format!("{kind} {on} failed: {error}");
    Answer::Failure {
        reply: Reply::Failed {
            request,
            reason: reason.clone(),
        },
        reason,
    }
}

/// The answer to an ALLOC that is refused.
pub(super) fn refused(request: u64, buffer: BufferId, error: &AllocError) -> Answer {
    Answer::Failure {
        reply: Reply::Refused {
            request,
            reason: error.to_string(),
        },
        reason: format!("ALLOC {} refused: {error}", buffer.0),
    }
}
