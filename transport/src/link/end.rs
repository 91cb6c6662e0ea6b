//! The two ends of a link: what every implementation promises.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link_state::LinkWatch;
use crate::bytes::{Bytes, BytesMut};
use crate::error::{LinkError, LinkViolation};
use crate::shm::liveness::Silence;
use crate::shm::memory::Window;

/// The time that a host waits for a guest to receive replies.
pub(crate) const GUEST_STALL: Duration = Duration::from_secs(60);

/// How long a host's end that is about to be dropped tries to send its last messages to a guest
/// that takes none.
pub const LAST_MESSAGES: Duration = Duration::from_millis(500);

/// The size of the chunks of a transfer of `len` bytes, in bytes. One side copies a chunk while the
/// other side copies the next one. By measurement, smaller chunks cost more messages, and larger
/// chunks overlap less and do not stay in the cache of one core.
pub fn chunk_len(len: usize) -> usize {
    const MIN: usize = 64 << 10;
    const MAX: usize = 256 << 10;
    (len / 4).next_multiple_of(MIN).clamp(MIN, MAX)
}

/// The guest's end of a link.
///
/// The end numbers requests from 1, in the order in which the guest sends them.
///
/// # Errors
///
/// Every method that fails returns a [`LinkError`]. Apart from [`LinkError::TooLarge`], which is
/// the caller's fault, an error is final: later calls return the same error.
pub trait GuestEnd: Send {
    /// Sends a request and returns its number. The call blocks only while the link is full.
    ///
    /// # Errors
    ///
    /// [`LinkError::TooLarge`] for a message or payload above the [limits](crate::limits), and the
    /// errors of a broken link.
    fn send(&mut self, message: &[u8], payload: Bytes<'_>) -> Result<u64, LinkError>;

    /// Waits for the host's next message and appends it to `message`. The message's payload goes to
    /// the beginning of `payload`. Returns the size of the payload in bytes.
    ///
    /// # Errors
    ///
    /// The errors of a broken link. A payload longer than `payload` is the host's fault.
    fn receive(&mut self, message: &mut Vec<u8>, payload: BytesMut<'_>)
    -> Result<usize, LinkError>;

    /// [`receive`](GuestEnd::receive) for a message without payload. Returns `false` if none has
    /// arrived within `limit`; the link stays usable.
    ///
    /// # Errors
    ///
    /// As for [`receive`](GuestEnd::receive).
    fn receive_within(&mut self, message: &mut Vec<u8>, limit: Duration)
    -> Result<bool, LinkError>;

    /// Receives a message without payload, if one has arrived. Returns `false` at once if none has.
    ///
    /// # Errors
    ///
    /// The errors of a broken link.
    fn try_receive(&mut self, message: &mut Vec<u8>) -> Result<bool, LinkError>;

    /// The number of the last request that the host has finished. The effects of the request are in
    /// memory. The call does not block and sends no message.
    fn retired(&self) -> u64;

    /// Waits until [`retired`](GuestEnd::retired) reaches `request`.
    ///
    /// # Errors
    ///
    /// The errors of a broken link.
    fn wait_retired(&mut self, request: u64) -> Result<(), LinkError>;

    /// Allocates `len` bytes of shared memory, from which the host can read payloads in place.
    /// `None` when the link has no such memory, or none left.
    fn alloc_staging(&mut self, len: usize) -> Option<StagingRegion> {
        let _ = len;
        None
    }

    /// Frees a staging region. The requests whose payloads lie in the region must have retired.
    fn free_staging(&mut self, staging: StagingRegion) {
        let _ = staging;
    }

    /// Sends a request whose payload lies in a staging region. `payload` is a range of bytes of the
    /// region's window. The end does not copy the payload, so the caller must not change the
    /// payload before the request has retired.
    ///
    /// # Errors
    ///
    /// [`LinkError::TooLarge`] for a message or payload above the limits, or when the link has no
    /// staging memory; the errors of a broken link.
    fn send_staged(&mut self, message: &[u8], payload: Range<usize>) -> Result<u64, LinkError> {
        Err(LinkError::TooLarge {
            len: message.len(),
            payload: payload.len(),
        })
    }

    /// Maps the file of `size` bytes that the host has [shared](HostEnd::share) ahead of the last
    /// received reply.
    ///
    /// # Errors
    ///
    /// [`LinkError::PeerMisbehaved`] when the host has sent no such file, or an unsealed one. The
    /// link stays usable.
    fn receive_shared(&mut self, size: u64) -> Result<Window, LinkError> {
        Err(LinkViolation::LinkWithoutFiles { size }.into())
    }

    /// Where other threads read what the link does. `None` if the end publishes nothing.
    fn watch(&self) -> Option<LinkWatch> {
        None
    }

    /// Whether this end knows that the host has gone. The call does not block.
    fn is_closed(&mut self) -> bool;

    /// The traffic of this end so far.
    fn counters(&self) -> Counters;
}

/// Whether a host's end no longer waits for its guest to receive messages. An end calls this often
/// while it waits.
pub type IsCancelled = Box<dyn Fn() -> bool + Send>;

/// The host's end of a link.
///
/// # Errors
///
/// Every method that fails returns a [`LinkError`]. Apart from [`LinkError::TooLarge`], which is
/// the caller's fault, and [`LinkError::Cancelled`], an error is final: later calls return the same
/// error.
pub trait HostEnd: Send {
    /// From now on, [`reserve`](HostEnd::reserve) and [`send_reserved`](HostEnd::send_reserved)
    /// wait for the guest only while `is_cancelled` returns `false`. A message for which there is
    /// room is sent all the same. An end that never waits ignores this.
    fn set_cancel(&mut self, is_cancelled: IsCancelled) {
        drop(is_cancelled);
    }

    /// The guest's first request has at most `bytes`, its payload included, and until that request
    /// is received the end holds about as many of the guest: it may be anybody who can connect. On
    /// a link with a window, where requests lie in the window, this is ignored.
    fn limit_first(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// Waits up to `timeout` for the guest's next request and appends it to `message`. `None` when
    /// no request has arrived. The call [retires](HostEnd::retire) the request before.
    ///
    /// # Errors
    ///
    /// The errors of a broken link. A request out of sequence is the guest's fault.
    fn receive(
        &mut self,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError>;

    /// The payload of the last received request. The guest may be writing to these bytes.
    fn payload(&self) -> Bytes<'_>;

    /// Receives the next request before the last received one has retired, if it arrives within
    /// `timeout` and `wanted` accepts it. The two requests then retire together. `None` on a link
    /// without look-ahead.
    ///
    /// # Errors
    ///
    /// The errors of a broken link.
    fn receive_ahead(
        &mut self,
        wanted: &dyn Fn(&[u8]) -> bool,
        message: &mut Vec<u8>,
        timeout: Duration,
    ) -> Result<Option<Incoming>, LinkError> {
        let _ = (wanted, message, timeout);
        Ok(None)
    }

    /// Sends a message with `payload_len` bytes of payload, which `fill` writes.
    ///
    /// # Errors
    ///
    /// [`LinkError::TooLarge`] for a message or payload above the [limits](crate::limits), and the
    /// errors of a broken link.
    fn send(
        &mut self,
        message: &[u8],
        payload_len: usize,
        fill: &mut dyn FnMut(BytesMut<'_>),
    ) -> Result<(), LinkError> {
        fill(self.reserve(message.len(), payload_len)?);
        self.send_reserved(message)
    }

    /// Sends a message without a payload, the last one before the end is dropped. Waits for a guest
    /// that takes no messages for up to [`LAST_MESSAGES`], cancelled or not; on a link that queues
    /// messages, the drop of the end waits instead.
    ///
    /// # Errors
    ///
    /// As [`send`](HostEnd::send), and [`LinkError::Cancelled`] if there was no room in time.
    fn send_last(&mut self, message: &[u8]) -> Result<(), LinkError> {
        let began = Instant::now();
        self.set_cancel(Box::new(move || began.elapsed() >= LAST_MESSAGES));
        self.send(message, 0, &mut |_| {})
    }

    /// Checks, without waiting, that the guest is still there. A call costs a few system calls.
    ///
    /// # Errors
    ///
    /// [`LinkError::Closed`] if the guest has closed the link or its process has ended, and the
    /// errors of a broken link.
    fn check_guest(&mut self) -> Result<(), LinkError>;

    /// Whether the end can send a message with such a payload without waiting for the guest to
    /// receive others first. `false` on a link that does not know.
    fn has_room(&mut self, message_len: usize, payload_len: usize) -> bool {
        let _ = (message_len, payload_len);
        false
    }

    /// Room for the payload of the next message, which has `message_len` bytes. The caller writes
    /// the payload and calls [`send_reserved`](HostEnd::send_reserved), or sends another message,
    /// which gives up the room. The end holds no lock meanwhile: an engine may write the payload.
    ///
    /// # Errors
    ///
    /// As [`send`](HostEnd::send), and [`LinkError::Cancelled`].
    fn reserve(
        &mut self,
        message_len: usize,
        payload_len: usize,
    ) -> Result<BytesMut<'_>, LinkError>;

    /// Sends a message with the payload in the room of the last [`reserve`](HostEnd::reserve).
    ///
    /// # Errors
    ///
    /// The errors of a broken link.
    ///
    /// # Panics
    ///
    /// If no room is reserved for a message of this length.
    fn send_reserved(&mut self, message: &[u8]) -> Result<(), LinkError>;

    /// The verified certificate of the guest, in DER, and those of authorities that the guest has
    /// sent with it. Empty on a link without certificates.
    fn certificates(&self) -> &[Vec<u8>] {
        &[]
    }

    /// How long the guest has had no heartbeat. `None` on a link whose guests have none.
    fn silence(&self) -> Option<Silence> {
        None
    }

    /// Whether this end can share files with the guest.
    fn can_share(&self) -> bool {
        false
    }

    /// The window that holds the payloads. `None` on a link without shared memory.
    fn window(&self) -> Option<&Arc<Window>> {
        None
    }

    /// Where other threads read what the link does. `None` if the end publishes nothing.
    fn watch(&self) -> Option<LinkWatch> {
        self.window().cloned().map(LinkWatch::Window)
    }

    /// Sends the guest a sealed file to map. The host then sends the message that announces the
    /// file. `false`, without an error, when the guest does not read its socket. The call does not
    /// block.
    fn share(&mut self, file: BorrowedFd<'_>) -> bool {
        let _ = file;
        false
    }

    /// Tells the guest that the host has finished the last received request. No message crosses the
    /// link.
    fn retire(&mut self);

    /// The traffic of this end so far.
    fn counters(&self) -> Counters;
}

/// A part of a window that the guest has allocated with [`GuestEnd::alloc_staging`] and frees with
/// [`GuestEnd::free_staging`].
#[derive(Debug, Clone)]
pub struct StagingRegion {
    /// The window.
    pub window: Arc<Window>,
    /// The bytes of the window.
    pub range: Range<usize>,
}

/// A received request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incoming {
    /// The number of the request.
    pub request: u64,
    /// The size of the payload, in bytes.
    pub payload_len: usize,
}

/// The traffic of a link, as one end counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Messages sent.
    pub messages_out: u64,
    /// Messages received.
    pub messages_in: u64,
    /// Bytes sent, of messages and payloads.
    pub bytes_out: u64,
    /// Bytes received, of messages and payloads.
    pub bytes_in: u64,
    /// Times this end has waited for a reply or for the retirement of a request. Waits for room do
    /// not count.
    pub round_trips: u64,
    /// Waits that ended while spinning.
    pub spins: u64,
    /// Waits that went on to sleep.
    pub sleeps: u64,
    /// Times this end has woken the sleeping peer.
    pub kicks: u64,
}
