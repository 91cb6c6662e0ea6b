//! Why a request of a session was not met.

use std::time::Duration;

use vgpu_transport::ir::BufferId;
use vgpu_transport::link::LinkError;
use vgpu_transport::wire::{Reply, VersionNotOffered, WireError};

/// Why a request was not met, and who is at fault.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum SessionError {
    /// The session is lost. Final: every later call of this session fails with the same error.
    #[error("the executor is lost: {0}")]
    Lost(LossReason),
    /// The executor's fault: the link is open, and no answer to HELLO has come.
    #[error(
        "the executor has accepted the connection and has not answered for {:.1} s; its log and \
         `vgpu dump` on its machine say what it does",
        .waited.as_secs_f64()
    )]
    NoWelcome {
        /// How long the guest has waited.
        waited: Duration,
    },
    /// The executor refuses the request, with this reason. The session goes on.
    #[error("the executor refuses: {0}")]
    Refused(String),
    /// An earlier one-way request failed in the executor, with this reason. The session goes on.
    #[error("the executor failed: {0}")]
    Failed(String),
    /// The program accesses bytes that its buffer does not have.
    #[error("bytes {offset}..+{len} are outside buffer {}, which has {size} bytes", buffer.0)]
    OutOfRange {
        /// The buffer.
        buffer: BufferId,
        /// The first byte of the access.
        offset: u64,
        /// The bytes of the access.
        len: usize,
        /// The bytes of the buffer.
        size: u64,
    },
    /// The program passes a tensor whose address is not in the tensor's buffer.
    #[error("address {address:#x} is not in buffer {}", buffer.0)]
    NotInBuffer {
        /// The buffer.
        buffer: BufferId,
        /// The address in the tensor.
        address: usize,
    },
}

/// Why a session is lost.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum LossReason {
    /// The link is broken.
    #[error(transparent)]
    Link(LinkError),
    /// The program has called `fork`, and this process is the child. Only the parent may use the
    /// session.
    #[error("the session belongs to the parent of this forked process")]
    Forked,
    /// The executor has ended the session, with this reason.
    #[error("{0}")]
    Ended(String),
    /// The session has used all numbers of a kind.
    #[error("the session has no {what} left")]
    NoneLeft {
        /// The kind.
        what: &'static str,
    },
    /// The executor's fault: the message is not one.
    #[error("it sent a broken message: {0}")]
    BrokenMessage(WireError),
    /// The executor's fault: it has chosen a version of the messages that the plugin has not
    /// offered.
    #[error(transparent)]
    Version(VersionNotOffered),
    /// The executor's fault: the reply answers no request, or is not one of the replies to the
    /// request.
    #[error("it sent {0:?} out of turn")]
    UnexpectedReply(Box<Reply>),
    /// The executor's fault: it skipped a request.
    #[error("it answered request {got} instead of {expected}")]
    WrongRequest {
        /// The request that the executor answered.
        got: u64,
        /// The request whose answer was due.
        expected: u64,
    },
    /// The executor's fault: the payload has another length than the request asked for.
    #[error("it sent {got} bytes instead of {expected}")]
    WrongLength {
        /// The bytes that the executor sent.
        got: usize,
        /// The bytes that the request asked for.
        expected: usize,
    },
    /// The executor's fault: the memory that it shares as a buffer is smaller than the buffer.
    #[error("it shares {shared} bytes as buffer {}, which has {size}", buffer.0)]
    SharedTooSmall {
        /// The buffer.
        buffer: BufferId,
        /// The bytes of the buffer.
        size: u64,
        /// The bytes that the executor shares.
        shared: u64,
    },
}

impl SessionError {
    /// The error for a reply that must not come at this point.
    pub(super) fn unexpected(reply: Reply) -> SessionError {
        SessionError::Lost(LossReason::UnexpectedReply(Box::new(reply)))
    }
}

impl From<LossReason> for SessionError {
    fn from(reason: LossReason) -> SessionError {
        SessionError::Lost(reason)
    }
}

impl From<LinkError> for SessionError {
    fn from(error: LinkError) -> SessionError {
        SessionError::Lost(LossReason::Link(error))
    }
}

impl From<VersionNotOffered> for SessionError {
    fn from(error: VersionNotOffered) -> SessionError {
        SessionError::Lost(LossReason::Version(error))
    }
}

impl From<WireError> for SessionError {
    fn from(error: WireError) -> SessionError {
        SessionError::Lost(LossReason::BrokenMessage(error))
    }
}
