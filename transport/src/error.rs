//! The error of a link. Every layer above reports it, so the module imports no other.

use rustix::io::Errno;

/// Why a link does not work. The error is final: a link never recovers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum LinkError {
    /// The peer ended the link, or its process died.
    #[error("the peer closed the link")]
    Closed,
    /// The peer's process exists, but its heartbeat has stopped or it reads no data.
    #[error("the peer has made no progress for {seconds} s")]
    Stalled { seconds: u64 },
    /// The peer sent something that the link's protocol forbids.
    #[error("the peer violated the link's protocol: {0}")]
    PeerMisbehaved(String),
    /// A system call of this process failed.
    #[error("{what}: {error}")]
    System { what: &'static str, error: Errno },
    /// The caller's message exceeds the limits of the link.
    #[error(
        "a message of {len} bytes with a payload of {payload} bytes exceeds the limits of the link"
    )]
    TooLarge { len: usize, payload: usize },
}

impl LinkError {
    /// For `map_err`: the failure of the system call that `what` names.
    pub(crate) fn system(what: &'static str) -> impl FnOnce(Errno) -> LinkError {
        move |error| LinkError::System { what, error }
    }

    /// For `map_err`: the same for a call of the standard library.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> LinkError {
        move |error| LinkError::System {
            what,
            error: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        }
    }
}
