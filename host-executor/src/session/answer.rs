//! What a request calls for, besides being retired.

use std::error::Error;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vgpu_engine::{EngineError, Memory, RunError};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{GraphId, Reply};

use super::error::AllocError;
use crate::activity::GraphInfo;
use crate::sched::InFlight;
use crate::stats::FailureReason;

/// What a request calls for.
pub(super) enum Answer {
    /// No reply.
    Nothing,
    /// A reply without payload.
    Message(Reply),
    /// The request could not be carried out. The session goes on.
    Failure {
        reply: Reply,
        kind: FailureReason,
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
pub(super) fn failed(
    request: u64,
    kind: &'static str,
    on: u64,
    error: &(dyn Error + 'static),
) -> Answer {
    let reason = format!("{kind} {on} failed: {error}");
    Answer::Failure {
        kind: reason_of(error),
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
        kind: match error {
            AllocError::Quota { error, .. } | AllocError::Engine(error) => of_engine(error),
            AllocError::Count { .. } | AllocError::Pool { .. } => FailureReason::Limit,
        },
        reply: Reply::Refused {
            request,
            reason: error.to_string(),
        },
        reason: format!("ALLOC {} refused: {error}", buffer.0),
    }
}

fn reason_of(error: &(dyn Error + 'static)) -> FailureReason {
    if let Some(error) = error.downcast_ref::<EngineError>() {
        return of_engine(error);
    }
    match error.downcast_ref::<RunError>() {
        Some(RunError::OutOfMemory { .. }) => FailureReason::Memory,
        Some(RunError::Kernel { .. }) => FailureReason::Device,
        Some(RunError::Index { .. } | RunError::Stale) | None => FailureReason::Other,
    }
}

fn of_engine(error: &EngineError) -> FailureReason {
    match error {
        EngineError::OutOfMemory { .. }
        | EngineError::OutOfHostMemory { .. }
        | EngineError::OutOfSharedHostMemory { .. } => FailureReason::Memory,
        EngineError::TooMuchWork(_) => FailureReason::Limit,
        EngineError::Unsupported { .. } => FailureReason::Unsupported,
        EngineError::Device { .. } | EngineError::DeviceLost { .. } => FailureReason::Device,
        EngineError::OutOfBounds { .. }
        | EngineError::ForeignMemory
        | EngineError::ForeignGraph
        | EngineError::Cancelled
        | EngineError::Shared { .. } => FailureReason::Other,
    }
}
