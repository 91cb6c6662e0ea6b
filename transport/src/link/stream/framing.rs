//! Frames over a channel. The link's own thread and its heartbeat thread share one `Framing`.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::channel::{self, Channel};
use crate::error::{LinkError, LinkViolation};
use crate::fork::OwnFd;
use crate::limits::{MAX_MESSAGE, MAX_PAYLOAD};
use crate::link::side::Side;
use crate::link::stream_state::StreamFigures;
use crate::shm::liveness::{SILENCE, STALL, Silence, StillTime};

/// The size of a frame's header, in bytes.
const HEADER: usize = 24;

/// The size of one read, in bytes.
const CHUNK: usize = 256 << 10;

/// Reads of the channel after a write has failed: as much as the peer may have queued.
const LAST_READS: usize = 64;

/// The size of received frames that the host's end has not consumed, in bytes, from which on it
/// leaves further bytes in the kernel's buffer. One read more and one incomplete frame can be there
/// besides.
pub(super) const HOST_RECEIVED: usize = 4 << 20;

/// The same for the guest's end. A guest must read replies while its request waits for room, so the
/// limit is generous.
const GUEST_RECEIVED: usize = 256 << 20;

/// The maximum number of received frames that the link has not consumed.
const MAX_FRAMES: usize = 256;

/// The number of unsent bytes at which a sender waits.
pub(super) const HIGH_WATER: usize = 8 << 20;

/// The memory of an end for outgoing bytes: those at which a sender waits, one frame, and as much
/// again, so that the bytes that are left are moved once for as many that were sent.
const MAX_OUT: usize = 2 * HIGH_WATER + HEADER + MAX_MESSAGE + MAX_PAYLOAD;

/// The maximum time of one wait. After it, a link checks whether the peer is alive.
pub(super) const POLL_PERIOD: Duration = Duration::from_millis(200);

/// The time without bytes after which the kernel probes whether the peer still answers, over TCP.
pub(super) const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);

/// The time between two probes.
pub(super) const KEEPALIVE_PERIOD: Duration = Duration::from_secs(2);

/// The number of probes without an answer after which the kernel gives up the peer, unless
/// [`Side::user_timeout`] says when.
pub(super) const KEEPALIVE_PROBES: u32 = 5;

impl Side {
    /// The size of the received frames from which on this side reads no more, in bytes.
    fn max_received(self) -> usize {
        match self {
            Side::Guest => GUEST_RECEIVED,
            Side::Host => HOST_RECEIVED,
        }
    }

    /// The time that the kernel of this side waits for a peer over TCP that acknowledges nothing or
    /// takes no bytes (`TCP_USER_TIMEOUT`). A host waits as long for a paused machine as on every
    /// other link. A guest has no such limit: a busy host takes no bytes, and lives. The heartbeat
    /// thread of a guest looks whether its host does ([`Framing::listen`]).
    pub(super) fn user_timeout(self) -> Option<Duration> {
        match self {
            Side::Guest => None,
            Side::Host => Some(SILENCE),
        }
    }

    /// How long the peer has answered nothing, at least, when the kernel of this side gives it up.
    fn given_up_after(self) -> Duration {
        self.user_timeout().unwrap_or(STALL)
    }
}

/// The framing of a link, shared with the heartbeat thread.
pub(super) type SharedFraming = Arc<Mutex<Framing>>;

/// The kind of a frame, as on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    Request = 1,
    Reply = 2,
    Retired = 3,
    Heartbeat = 4,
}

impl FrameKind {
    fn name(self) -> &'static str {
        match self {
            FrameKind::Request => "request",
            FrameKind::Reply => "reply",
            FrameKind::Retired => "retirement",
            FrameKind::Heartbeat => "heartbeat",
        }
    }
}

/// A received frame with a message.
#[derive(Debug)]
pub(super) struct Frame {
    number: u64,
    bytes: Vec<u8>,
    message: usize,
}

impl Frame {
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The bytes of memory that the frame takes.
    fn size(&self) -> usize {
        size_of::<Frame>() + self.bytes.capacity()
    }

    pub(super) fn message(&self) -> &[u8] {
        &self.bytes[..self.message]
    }

    pub(super) fn payload(&self) -> &[u8] {
        &self.bytes[self.message..]
    }
}

/// A frame of which the payload is incomplete.
#[derive(Debug)]
struct Partial {
    kind: FrameKind,
    number: u64,
    message: usize,
    len: usize,
    bytes: Vec<u8>,
}

impl Partial {
    /// Makes room for `bytes` more of the payload. The memory doubles up to the size of the frame.
    fn make_room(&mut self, bytes: usize) {
        let wanted = self.bytes.len() + bytes;
        if wanted > self.bytes.capacity() {
            let doubled = (2 * self.bytes.capacity()).min(self.len);
            let all = wanted.max(doubled);
            self.bytes.reserve_exact(all - self.bytes.len());
        }
    }
}

/// Both directions of a link over a channel.
pub(super) struct Framing {
    channel: Box<dyn Channel>,
    socket: Option<Arc<OwnFd>>,
    figures: Arc<StreamFigures>,
    /// Outgoing bytes. The channel has accepted the first `sent` of them.
    out: Vec<u8>,
    sent: usize,
    /// Whether the channel itself has buffered bytes.
    is_buffered: bool,
    /// The bytes of an incomplete header.
    header: Vec<u8>,
    partial: Option<Partial>,
    /// The number of frames of which the header is complete.
    begun: u64,
    frames: VecDeque<Frame>,
    /// The size of `frames`, in bytes.
    received: usize,
    side: Side,
    /// The last retired request that the peer has reported.
    retired: u64,
    /// Whether bytes have arrived since the last call of `take_activity`.
    activity: bool,
    /// Whether bytes have arrived since the last call of `check_heartbeat`.
    is_heard: bool,
    /// Whether a thread waits for bytes of the peer, and reads them itself.
    pub(super) is_awaited: bool,
    /// The bytes of the first frame at most, until that frame is consumed.
    first_limit: Option<usize>,
    /// Whether the peer has sent a heartbeat.
    has_heartbeat: bool,
    /// The time without bytes of a peer that has a heartbeat.
    still: StillTime,
    /// The first error, which is final.
    error: Option<LinkError>,
    /// The buffer of one read.
    chunk: Vec<u8>,
}

impl Framing {
    pub(super) fn new(channel: Box<dyn Channel>, side: Side) -> Framing {
        let socket = channel.socket().ok().map(OwnFd::new).map(Arc::new);
        Framing {
            channel,
            socket,
            figures: Arc::default(),
            out: Vec::new(),
            sent: 0,
            is_buffered: false,
            header: Vec::with_capacity(HEADER),
            partial: None,
            begun: 0,
            frames: VecDeque::new(),
            received: 0,
            side,
            retired: 0,
            activity: false,
            is_heard: false,
            is_awaited: false,
            first_limit: None,
            has_heartbeat: false,
            still: StillTime::new(),
            error: None,
            chunk: Vec::new(),
        }
    }

    /// The first frame with a message has at most `bytes`, and as long as it is not consumed, no
    /// more is held of the frames behind it.
    pub(super) fn limit_first(&mut self, bytes: usize) {
        self.first_limit = Some(bytes);
    }

    /// What this end has sent and received, for other threads.
    pub(super) fn figures(&self) -> &Arc<StreamFigures> {
        &self.figures
    }

    /// Stores the first error and returns it.
    pub(super) fn fail(&mut self, error: LinkError) -> LinkError {
        self.error.get_or_insert(error).clone()
    }

    pub(super) fn check(&self) -> Result<(), LinkError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    pub(super) fn retired(&self) -> u64 {
        self.retired
    }

    /// Whether bytes have arrived since the last call.
    pub(super) fn take_activity(&mut self) -> bool {
        std::mem::take(&mut self.activity)
    }

    /// Checks, after a [`pump`](Framing::pump), that a peer with a heartbeat has sent something
    /// within `limit`. The process of the peer may have ended without a message of its machine.
    pub(super) fn check_heartbeat(&mut self, limit: Duration) -> Result<(), LinkError> {
        let is_heard = std::mem::take(&mut self.is_heard);
        // An end that does not read hears nothing.
        let still = self.still.check(is_heard || !self.reads());
        if !self.has_heartbeat || still < limit {
            return Ok(());
        }
        let seconds = still.as_secs();
        Err(self.fail(LinkError::Stalled { seconds }))
    }

    /// What the heartbeat thread does once per period. A guest reads, also while its program asks
    /// for nothing: the heartbeats of its host would fill its window, and the lack of them shows
    /// that the host is gone. The kernel does not: it sends no keep-alive probes while heartbeats
    /// of this end are not acknowledged.
    pub(super) fn listen(&mut self) -> Result<(), LinkError> {
        // Bytes that another thread waits for are that thread's to read, or it would sleep on.
        match self.side {
            Side::Guest if !self.is_awaited => {
                self.pump()?;
                self.check_heartbeat(STALL)
            }
            Side::Guest | Side::Host => self.push_out(),
        }
    }

    /// How long a peer with a heartbeat has sent nothing, for other threads.
    pub(super) fn silence(&self) -> Option<Silence> {
        self.has_heartbeat.then(|| self.still.silence())
    }

    /// Whether this end takes further bytes of the peer.
    fn reads(&self) -> bool {
        match self.first_limit {
            Some(_) => self.frames.is_empty(),
            None => self.received < self.side.max_received() && self.frames.len() < MAX_FRAMES,
        }
    }

    /// The number of outgoing bytes that the socket has not accepted.
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent + usize::from(self.is_buffered)
    }

    /// Consumes the next frame with a message.
    pub(super) fn take_frame(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        self.received -= frame.size();
        self.first_limit = None;
        Some(frame)
    }

    /// The payload size of the next frame with a message, in bytes.
    pub(super) fn front_payload(&self) -> Option<usize> {
        self.frames.front().map(|frame| frame.payload().len())
    }

    /// The number of the frame of which a part has arrived. `None` between frames.
    pub(super) fn incomplete(&self) -> Option<u64> {
        match (&self.partial, self.header.is_empty()) {
            (Some(_), _) => Some(self.begun),
            (None, false) => Some(self.begun + 1),
            (None, true) => None,
        }
    }

    /// The size of the received frames that the link has not consumed, in bytes.
    #[cfg(test)]
    pub(super) fn received(&self) -> usize {
        self.received
    }

    /// Queues a frame. `fill` writes the payload.
    pub(super) fn push(
        &mut self,
        kind: FrameKind,
        number: u64,
        message: &[u8],
        payload: usize,
        fill: impl FnOnce(&mut [u8]),
    ) {
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        }
        self.make_room(HEADER + message.len() + payload);
        for word in [kind as u32, message.len() as u32, payload as u32, 0] {
            self.out.extend_from_slice(&word.to_le_bytes());
        }
        self.out.extend_from_slice(&number.to_le_bytes());
        self.out.extend_from_slice(message);
        let start = self.out.len();
        self.out.resize(start + payload, 0);
        fill(&mut self.out[start..]);
        self.figures.queued(self.unsent());
    }

    /// Makes room for `bytes` behind the outgoing ones. A vector that doubles would have up to
    /// twice the memory of [`MAX_OUT`].
    fn make_room(&mut self, bytes: usize) {
        if self.out.capacity() - self.out.len() >= bytes {
            return;
        }
        self.out.drain(..self.sent);
        self.sent = 0;
        let wanted = self.out.len() + bytes;
        let doubled = (2 * self.out.capacity()).min(MAX_OUT);
        let all = wanted.max(doubled);
        self.out.reserve_exact(all - self.out.len());
    }

    /// Writes and reads as much as possible without blocking.
    pub(super) fn pump(&mut self) -> Result<(), LinkError> {
        let out = self.push_out();
        self.pull_in()?;
        out
    }

    /// Writes as much as possible without blocking.
    pub(super) fn push_out(&mut self) -> Result<(), LinkError> {
        self.check()?;
        while self.sent < self.out.len() {
            match self.channel.write(&self.out[self.sent..]) {
                Ok(0) => return Err(self.fail(LinkError::Closed)),
                Ok(count) => {
                    self.sent += count;
                    self.figures.sent(count);
                }
                Err(error) if would_block(&error) => break,
                Err(error) => return Err(self.cannot_write(&error)),
            }
        }
        if self.sent > CHUNK && self.sent * 2 > self.out.len() {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        match self.channel.flush() {
            Ok(is_empty) => self.is_buffered = !is_empty,
            Err(error) if would_block(&error) => self.is_buffered = true,
            Err(error) => return Err(self.cannot_write(&error)),
        }
        self.figures.queued(self.unsent());
        Ok(())
    }

    /// The link fails because of a write. What the peer has sent before it closed the stream, such
    /// as the reason, is received first: a limited part, since a peer that only reads no more can
    /// send without an end, and the thread may be that of all heartbeats.
    fn cannot_write(&mut self, error: &io::Error) -> LinkError {
        match self.pull_in_at_most(LAST_READS) {
            Ok(()) => self.broken(error),
            Err(first) => first,
        }
    }

    fn pull_in(&mut self) -> Result<(), LinkError> {
        self.pull_in_at_most(usize::MAX)
    }

    /// Receives what has arrived, with at most `reads` reads of the channel.
    fn pull_in_at_most(&mut self, reads: usize) -> Result<(), LinkError> {
        self.check()?;
        for _ in 0..reads {
            // The limits leave further bytes in the kernel's buffer, and so apply backpressure.
            let is_full = match self.first_limit {
                Some(_) => !self.frames.is_empty(),
                None => self.received >= self.side.max_received(),
            };
            if is_full {
                break;
            }
            let mut chunk = std::mem::take(&mut self.chunk);
            let len = self.chunk_len();
            if chunk.len() < len {
                chunk.resize(len, 0);
            }
            let got = self.channel.read(&mut chunk[..len]);
            let outcome = match got {
                // The received bytes are the alert record of a peer that expects TLS.
                Ok(0) if self.header.starts_with(&[0x15, 0x03]) => {
                    Err(LinkViolation::ExpectsTls.into())
                }
                Ok(0) => Err(LinkError::Closed),
                Ok(count) => {
                    self.activity = true;
                    self.is_heard = true;
                    self.figures.received(count);
                    self.parse(&chunk[..count]).map(|()| true)
                }
                Err(error) if would_block(&error) => Ok(false),
                Err(error) => Err(broken(&error, self.side)),
            };
            self.chunk = chunk;
            match outcome {
                Ok(true) if self.frames.len() < MAX_FRAMES => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(self.fail(error)),
            }
        }
        Ok(())
    }

    fn parse(&mut self, mut bytes: &[u8]) -> Result<(), LinkError> {
        while !bytes.is_empty() || self.partial.as_ref().is_some_and(|p| p.len == 0) {
            let Some(partial) = &mut self.partial else {
                let wanted = (HEADER - self.header.len()).min(bytes.len());
                self.header.extend_from_slice(&bytes[..wanted]);
                bytes = &bytes[wanted..];
                if self.header.len() == HEADER {
                    let partial = parse_header(&self.header, self.chunk_len())?;
                    self.check_first(&partial)?;
                    self.partial = Some(partial);
                    self.begun += 1;
                    self.header.clear();
                }
                continue;
            };
            let wanted = (partial.len - partial.bytes.len()).min(bytes.len());
            partial.make_room(wanted);
            partial.bytes.extend_from_slice(&bytes[..wanted]);
            bytes = &bytes[wanted..];
            if partial.bytes.len() == partial.len
                && let Some(partial) = self.partial.take()
            {
                self.complete(partial)?;
            }
        }
        Ok(())
    }

    /// The size of one read now, in bytes.
    fn chunk_len(&self) -> usize {
        self.first_limit.map_or(CHUNK, |limit| limit.min(CHUNK))
    }

    /// Checks the length of the first frame with a message.
    fn check_first(&self, partial: &Partial) -> Result<(), LinkError> {
        match self.first_limit {
            Some(limit) if partial.len > limit && self.frames.is_empty() => {
                let bytes = partial.len;
                Err(LinkViolation::FirstFrame { bytes, limit }.into())
            }
            _ => Ok(()),
        }
    }

    /// Processes a complete frame.
    fn complete(&mut self, partial: Partial) -> Result<(), LinkError> {
        let Partial {
            kind,
            number,
            message,
            bytes,
            ..
        } = partial;
        if matches!(kind, FrameKind::Reply | FrameKind::Retired) {
            if number < self.retired {
                let last = self.retired;
                return Err(LinkViolation::RetirementOrder { number, last }.into());
            }
            self.retired = number;
            self.figures.retired(number);
        }
        self.has_heartbeat |= kind == FrameKind::Heartbeat;
        if matches!(kind, FrameKind::Reply | FrameKind::Request) {
            let frame = Frame {
                number,
                bytes,
                message,
            };
            self.received += frame.size();
            self.frames.push_back(frame);
        }
        Ok(())
    }

    /// The wait for incoming bytes, and for room in the socket if bytes are outgoing.
    pub(super) fn waiting(&self) -> Waiting {
        let mut events = PollFlags::IN;
        if self.unsent() > 0 {
            events |= PollFlags::OUT;
        }
        Waiting {
            socket: self.socket.clone(),
            events,
        }
    }

    /// The wait for room in the socket.
    pub(super) fn waiting_out(&self) -> Waiting {
        Waiting {
            socket: self.socket.clone(),
            events: PollFlags::OUT,
        }
    }

    /// Closes the stream.
    pub(super) fn close(&mut self) {
        self.channel.close();
        self.fail(LinkError::Closed);
    }

    fn broken(&mut self, error: &io::Error) -> LinkError {
        self.fail(broken(error, self.side))
    }
}

/// A wait for the socket. The caller releases the lock on the `Framing` before the wait.
pub(super) struct Waiting {
    socket: Option<Arc<OwnFd>>,
    events: PollFlags,
}

impl Waiting {
    pub(super) fn wait(&self, timeout: Duration) -> Result<(), LinkError> {
        match &self.socket {
            Some(socket) => channel::wait(socket.as_fd(), self.events, timeout),
            // The process had no descriptor left for a duplicate of the socket, so the caller
            // polls.
            None => {
                std::thread::sleep(timeout.min(Duration::from_millis(1)));
                Ok(())
            }
        }
    }
}

/// Parses and checks the header of a frame. A buffer of up to `room` bytes is allocated at once.
fn parse_header(header: &[u8], room: usize) -> Result<Partial, LinkError> {
    let word = |i: usize| {
        header[i * 4..i * 4 + 4]
            .iter()
            .rev()
            .fold(0u32, |word, byte| word << 8 | u32::from(*byte))
    };
    let (message, payload) = (word(1) as usize, word(2) as usize);
    let number = u64::from(word(4)) | u64::from(word(5)) << 32;
    let kind = match word(0) {
        1 => FrameKind::Request,
        2 => FrameKind::Reply,
        3 => FrameKind::Retired,
        4 => FrameKind::Heartbeat,
        kind => return Err(LinkViolation::FrameKind { kind }.into()),
    };
    let is_empty = matches!(kind, FrameKind::Retired | FrameKind::Heartbeat);
    if message > MAX_MESSAGE || payload > MAX_PAYLOAD || (is_empty && message + payload > 0) {
        return Err(LinkViolation::Frame {
            kind: kind.name(),
            message,
            payload,
        }
        .into());
    }
    Ok(Partial {
        kind,
        number,
        message,
        len: message + payload,
        // The buffer grows with the received bytes, not with the announced size.
        bytes: Vec::with_capacity((message + payload).min(room)),
    })
}

fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

fn broken(error: &io::Error, side: Side) -> LinkError {
    match error.kind() {
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionAborted => LinkError::Closed,
        // `Secure` reports a TLS error this way.
        io::ErrorKind::InvalidData => LinkError::PeerMisbehaved(LinkViolation::Tls {
            reason: error.to_string(),
        }),
        io::ErrorKind::TimedOut => LinkError::Stalled {
            seconds: side.given_up_after().as_secs(),
        },
        _ => LinkError::System {
            what: "the peer's stream",
            error: Errno::from_io_error(error).unwrap_or(Errno::IO),
        },
    }
}
