//! Links: how messages cross.
//!
//! A link is a pair of ends, [`GuestEnd`] and [`HostEnd`], that carry messages with payloads in order,
//! both ways. What the messages mean is not its business ([`wire`](crate::wire)); that they arrive whole, that waiting
//! is cheap and ends when the peer dies, is.

pub mod connect;
mod credentials;
pub mod endpoint;
mod fd_passing;
pub mod pci;
pub mod scm_rights;
mod socket;
pub mod stream;
pub mod unix;
pub mod window;
mod window_end;

pub use endpoint::{Endpoint, EndpointError};

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::bytes::{Bytes, BytesMut};
use crate::shm::memory::Window;

/// Into pieces of how many bytes to cut a transfer of `len`, so that one side copies a piece while the other copies the
/// next. Measured: smaller ones cost messages; larger ones overlap less and fall out of the processors' own caches.
pub fn piece_len(len: usize) -> usize {
    const LEAST: usize = 64 << 10;
    const MOST: usize = 256 << 10;
    (len / 4).next_multiple_of(LEAST).clamp(LEAST, MOST)
}

/// The guest's end.
///
/// Requests are numbered from 1 in the order they are sent.
pub trait GuestEnd: Send {
    /// Sends a request and returns its number. Waits only while the link is full.
    fn send(&mut self, message: &[u8], payload: Bytes<'_>) -> Result<u64, LinkError>;

    /// Waits for the host's next message, which is appended to `message`; its payload goes into the
    /// beginning of `payload`. Returns the number of payload bytes.
    fn receive(&mut self, message: &mut Vec<u8>, payload: BytesMut<'_>)
    -> Result<usize, LinkError>;

    /// Like [`receive`](GuestEnd::receive) without a payload, but returns `false` at once when there is no message.
    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError>;

    /// The number of the last request that the host has finished with: its effects are in memory.
    /// Does not wait, and needs no message.
    fn retired(&self) -> u64;

    /// Waits until [`retired`](GuestEnd::retired) reaches `request`.
    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError>;

    /// Memory that the host can take payloads from where they lie. `None` when the link has none (left).
    fn alloc_staging(&mut self, len: usize) -> Option<StagingRegion> {
        let _ = len;
        None
    }

    /// Takes lent memory back. Requests that name it must have retired.
    fn free_staging(&mut self, staging: StagingRegion) {
        let _ = staging;
    }

    /// Sends a request whose payload lies in lent memory, at these bytes of its window: it is not copied, and must
    /// stay as it is until the request has retired.
    fn send_staged(&mut self, message: &[u8], payload: Range<usize>) -> Result<u64, LinkError> {
        Err(LinkError::TooLarge {
            len: message.len(),
            payload: payload.len(),
        })
    }

    /// Maps the memory of `size` bytes that the host has [shared](HostEnd::share) with the reply received last.
    fn receive_shared(&mut self, size: u64) -> Result<Window, LinkError> {
        Err(LinkError::PeerMisbehaved(format!(
            "it shares {size} bytes over a link that cannot"
        )))
    }

    /// Whether the host is known to be gone. Does not wait.
    fn is_closed(&mut self) -> bool;

    /// What crossed so far.
    fn counters(&self) -> Counters;
}

/// The host's end.
pub trait HostEnd: Send {
    /// Waits up to `timeout` for the guest's next request and appends it to `message`. `None` when none
    /// came. A request is finished with by [`retire`](HostEnd::retire) before the next is received.
    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError>;

    /// The payload of the request received last. The guest may be writing to it.
    fn payload(&self) -> Bytes<'_>;

    /// The same while the request received last is not finished with: the next one, if it comes before `patience` is over
    /// and is `wanted`. Then both are finished with together. Links that cannot look ahead say `None`.
    fn receive_ahead(
        &mut self,
        wanted: &dyn Fn(&[u8]) -> bool,
        message: &mut Vec<u8>,
        patience: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        let _ = (wanted, message, patience);
        Ok(None)
    }

    /// Sends a message with `payload_len` bytes of payload, which `fill` writes in place.
    fn send(
        &mut self,
        message: &[u8],
        payload_len: usize,
        fill: &mut dyn FnMut(BytesMut<'_>),
    ) -> Result<(), LinkError> {
        let mut fill = |out: BytesMut<'_>| {
            fill(out);
            true
        };
        self.send_if(message, payload_len, &mut fill).map(|_| ())
    }

    /// Whether a message with so much payload can be sent without waiting for the guest to take others first. Links that
    /// cannot tell say no.
    fn has_room(&mut self, message_len: usize, payload_len: usize) -> bool {
        let _ = (message_len, payload_len);
        false
    }

    /// Sends as [`send`](HostEnd::send) does, but `fill` says whether anything is sent at all. A message without payload is.
    fn send_if(
        &mut self,
        message: &[u8],
        payload_len: usize,
        fill: &mut dyn FnMut(BytesMut<'_>) -> bool,
    ) -> Result<bool, LinkError>;

    /// The certificate that the guest has shown and that was found good, in DER; `None` on links without any.
    fn certificate(&self) -> Option<&[u8]> {
        None
    }

    /// Whether memory of this machine can be shared with the guest.
    fn can_share(&self) -> bool {
        false
    }

    /// The memory that payloads lie in, if it is the same all the time.
    fn window(&self) -> Option<&Arc<Window>> {
        None
    }

    /// Sends the guest a sealed file to map, ahead of the message that says so. `false` when the guest does not
    /// take it; that is no error. Does not wait.
    fn share(&mut self, file: BorrowedFd<'_>) -> bool {
        let _ = file;
        false
    }

    /// Tells the guest that the request received last is finished with, without waking it for a message.
    fn retire(&mut self);

    /// What crossed so far.
    fn counters(&self) -> Counters;
}

/// A part of a window that is lent to somebody in the guest. Given back with [`GuestEnd::free_staging`].
#[derive(Debug, Clone)]
pub struct StagingRegion {
    /// The window.
    pub window: Arc<Window>,
    /// Which bytes of it.
    pub range: Range<usize>,
}

/// A request that has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incoming {
    /// Its number.
    pub request: u64,
    /// Bytes of payload.
    pub payload_len: usize,
}

/// What crossed a link, from the point of view of the end that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Messages sent.
    pub messages_out: u64,
    /// Messages received.
    pub messages_in: u64,
    /// Bytes sent: messages and payloads.
    pub bytes_out: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Times this end had to wait for the peer to answer or finish (not: for space).
    pub round_trips: u64,
    /// Waits that ended while spinning.
    pub spins: u64,
    /// Waits that went to sleep.
    pub sleeps: u64,
    /// Times the peer was asleep and had to be woken.
    pub kicks: u64,
}

/// Why a link does not work. Final: a link never recovers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum LinkError {
    #[error("the peer closed the link")]
    Closed,
    #[error("the peer has not moved for {seconds} s")]
    Stalled { seconds: u64 },
    #[error("the peer broke the link's rules: {0}")]
    PeerMisbehaved(String),
    #[error("{what}: {error}")]
    System {
        what: &'static str,
        error: rustix::io::Errno,
    },
    #[error(
        "a message of {len} bytes with {payload} bytes of payload exceeds the limits of the link"
    )]
    TooLarge { len: usize, payload: usize },
}
