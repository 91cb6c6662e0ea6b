//! The errors of a link. Every layer above reports it, so the module imports no other.

use rustix::io::Errno;

/// Why a link does not work. The error is final, but for [`Cancelled`](LinkError::Cancelled) and
/// [`TooLarge`](LinkError::TooLarge): a link never recovers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum LinkError {
    /// The peer ended the link, or its process died.
    #[error("the peer closed the link")]
    Closed,
    /// The guest's program had no heartbeat, and another program of its virtual machine needed its
    /// slot or its memory.
    #[error(
        "the guest was evicted: its heartbeat had stopped, and another program needed its slot or \
         its memory"
    )]
    Evicted,
    /// The peer's process exists, but its heartbeat has stopped or it reads no data.
    #[error("the peer has made no progress for {seconds} s")]
    Stalled { seconds: u64 },
    /// The caller no longer waits for the peer to receive messages. Shorter ones may still have
    /// room.
    #[error("the peer has not received its messages before the link was to end")]
    Cancelled,
    /// The peer sent something that the link's protocol forbids.
    #[error("the peer violated the link's protocol: {0}")]
    PeerMisbehaved(LinkViolation),
    /// A system call of this process failed.
    #[error("{what}: {error}")]
    System { what: &'static str, error: Errno },
    /// The guest has sent as many requests as there are numbers.
    #[error("the link has no request numbers left")]
    NoNumberLeft,
    /// The caller's message exceeds the limits of the link.
    #[error(
        "a message of {len} bytes with a payload of {payload} bytes exceeds the limits of the link"
    )]
    TooLarge { len: usize, payload: usize },
}

/// What a peer has sent that the link's protocol forbids. Sizes are in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the messages name every field
pub enum LinkViolation {
    /// A packet of the handshake, or one with a file, has the wrong size.
    #[error(
        "a packet of {bytes} bytes with {files} files, expected {expected} bytes and at most \
         {max_files} files"
    )]
    Packet {
        bytes: usize,
        files: usize,
        expected: usize,
        max_files: usize,
    },
    /// A packet has the wrong first word.
    #[error("a packet that begins with {found:#018x}")]
    PacketMagic { found: u64 },
    /// The guest's last packet of the handshake names another session.
    #[error("the guest opened session {found:#x} instead of {expected:#x}")]
    Session { found: u64, expected: u64 },
    #[error("the host announced a file and sent none")]
    NoFile,
    #[error("the host shares a file of {size} bytes over a link that cannot carry files")]
    LinkWithoutFiles { size: u64 },
    /// The sender of a window's file has not sealed it.
    #[error("the window's file is not sealed against shrinking (seals {seals:#x})")]
    FileNotSealed { seals: u32 },
    #[error("the window's file has {found} bytes, not the announced {said}")]
    FileSize { found: u64, said: u64 },
    #[error("{len} bytes at {offset} lie outside the window's file of {size} bytes")]
    OutOfFile { offset: u64, len: usize, size: u64 },
    /// A record that fills the rest of a ring does not.
    #[error("a pad of {size} bytes at {at} of a ring of {ring} bytes with tail {tail}")]
    Pad {
        size: u64,
        at: u64,
        ring: u64,
        tail: u64,
    },
    #[error("ring tail {tail} after tail {before}, with head {head} and a ring of {ring} bytes")]
    RingTail {
        tail: u64,
        before: u64,
        head: u64,
        ring: u64,
    },
    #[error("ring head {head} after head {before}, with tail {tail}")]
    RingHead { head: u64, before: u64, tail: u64 },
    #[error("a record of {size} bytes with {published} bytes published")]
    RecordSize { size: u64, published: u64 },
    /// The header of a ring's record contradicts itself or the limits of the link.
    #[error(
        "{what}: kind {kind}, {size} bytes, message of {message}, payload of {payload} at \
         {offset:#x}"
    )]
    Record {
        what: &'static str,
        kind: u32,
        size: usize,
        message: usize,
        payload: usize,
        offset: u64,
    },
    #[error("the submission ring is full although all {retired} requests have retired")]
    RingFull { retired: u64 },
    #[error(
        "the host sent {bytes} bytes of replies while this end waited for the host, more than \
         {most}"
    )]
    Backlog { bytes: usize, most: usize },
    #[error("a reply has a payload of {sent} bytes; the guest asked for at most {wanted}")]
    ReplyPayload { sent: usize, wanted: usize },
    #[error("request {number} follows request {last}")]
    RequestOrder { number: u64, last: u64 },
    #[error("request {number} retired after request {last}")]
    RetirementOrder { number: u64, last: u64 },
    #[error("the first message has {bytes} bytes, the limit is {limit}")]
    FirstFrame { bytes: usize, limit: usize },
    #[error("a frame of kind {kind}: the peer is not vgpu, or only one side uses TLS")]
    FrameKind { kind: u32 },
    #[error("a {kind} frame with a message of {message} bytes and a payload of {payload} bytes")]
    Frame {
        kind: &'static str,
        message: usize,
        payload: usize,
    },
    /// The peer has sent an alert of TLS on a link without TLS.
    #[error("the peer expects TLS, and this side has no certificates (VGPU_CERTS)")]
    ExpectsTls,
    /// The TLS library has refused the peer's bytes.
    #[error("{reason}")]
    Tls { reason: String },
    #[error("the socket of the virtual machine accepts no 8 bytes")]
    MachineSocket,
}

impl From<LinkViolation> for LinkError {
    fn from(violation: LinkViolation) -> LinkError {
        LinkError::PeerMisbehaved(violation)
    }
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
