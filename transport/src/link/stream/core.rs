//! Frames into and out of a channel. Shared by a link's own thread and the one that beats.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::channel::{Channel, Wait};
use crate::link::LinkError;
use crate::wire::{MAX_MESSAGE, MAX_PAYLOAD};

/// Bytes of a frame's head.
const HEAD: usize = 24;

/// Bytes read in one go.
const CHUNK: usize = 256 << 10;

/// Most bytes of frames that have come and have not been taken.
const MAX_WAITING: usize = 256 << 20;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Request = 1,
    Reply = 2,
    Retired = 3,
    Beat = 4,
}

/// A frame with a message, as it came.
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

    pub(super) fn message(&self) -> &[u8] {
        &self.bytes[..self.message]
    }

    pub(super) fn payload(&self) -> &[u8] {
        &self.bytes[self.message..]
    }
}

/// A frame that is still coming.
#[derive(Debug)]
struct Partial {
    kind: Kind,
    number: u64,
    message: usize,
    len: usize,
    bytes: Vec<u8>,
}

pub(super) struct Core {
    channel: Box<dyn Channel>,
    socket: Option<Arc<OwnedFd>>,
    /// Bytes on their way out, from `sent` on.
    out: Vec<u8>,
    sent: usize,
    /// Whether the channel itself holds bytes back.
    is_held: bool,
    /// A head that has not come whole.
    head: Vec<u8>,
    partial: Option<Partial>,
    frames: VecDeque<Frame>,
    waiting: usize,
    retired: u64,
    heard: bool,
    error: Option<LinkError>,
    chunk: Vec<u8>,
}

impl Core {
    pub(super) fn new(channel: Box<dyn Channel>) -> Core {
        let socket = channel.socket().ok().map(Arc::new);
        Core {
            channel,
            socket,
            out: Vec::new(),
            sent: 0,
            is_held: false,
            head: Vec::with_capacity(HEAD),
            partial: None,
            frames: VecDeque::new(),
            waiting: 0,
            retired: 0,
            heard: false,
            error: None,
            chunk: vec![0; CHUNK],
        }
    }

    /// Remembers an error for ever, unless there is one already.
    pub(super) fn fail(&mut self, error: LinkError) -> LinkError {
        self.error.get_or_insert(error).clone()
    }

    pub(super) fn check(&self) -> Result<(), LinkError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    pub(super) fn retired(&self) -> u64 {
        self.retired
    }

    /// Whether anything has come since the last call.
    pub(super) fn take_heard(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    /// Bytes that have not gone out.
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent + usize::from(self.is_held)
    }

    /// The next frame with a message.
    pub(super) fn take_frame(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        self.waiting -= frame.bytes.len();
        Some(frame)
    }

    /// Bytes of payload of the next frame.
    pub(super) fn front_payload(&self) -> Option<usize> {
        self.frames.front().map(|frame| frame.payload().len())
    }

    /// Puts a frame into the queue; `fill` writes its payload.
    pub(super) fn push(
        &mut self,
        kind: Kind,
        number: u64,
        message: &[u8],
        payload: usize,
        fill: impl FnOnce(&mut [u8]),
    ) {
        self.push_if(kind, number, message, payload, |room| {
            fill(room);
            true
        });
    }

    /// The same, but `fill` says whether there is a frame at all. One without payload is.
    pub(super) fn push_if(
        &mut self,
        kind: Kind,
        number: u64,
        message: &[u8],
        payload: usize,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> bool {
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        }
        let before = self.out.len();
        for word in [kind as u32, message.len() as u32, payload as u32, 0] {
            self.out.extend_from_slice(&word.to_le_bytes());
        }
        self.out.extend_from_slice(&number.to_le_bytes());
        self.out.extend_from_slice(message);
        let start = self.out.len();
        self.out.resize(start + payload, 0);
        let is_sent = payload == 0 || fill(&mut self.out[start..]);
        if !is_sent {
            self.out.truncate(before);
        }
        is_sent
    }

    /// Moves what can be moved, both ways.
    pub(super) fn pump(&mut self) -> Result<(), LinkError> {
        let out = self.push_out();
        self.pull_in()?;
        out
    }

    /// Moves out what can be moved.
    pub(super) fn push_out(&mut self) -> Result<(), LinkError> {
        self.check()?;
        while self.sent < self.out.len() {
            match self.channel.write(&self.out[self.sent..]) {
                Ok(0) => return Err(self.fail(LinkError::Closed)),
                Ok(count) => self.sent += count,
                Err(error) if would_block(&error) => break,
                Err(error) => return Err(self.broken(&error)),
            }
        }
        if self.sent > CHUNK && self.sent * 2 > self.out.len() {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        match self.channel.flush() {
            Ok(is_empty) => self.is_held = !is_empty,
            Err(error) if would_block(&error) => self.is_held = true,
            Err(error) => return Err(self.broken(&error)),
        }
        Ok(())
    }

    fn pull_in(&mut self) -> Result<(), LinkError> {
        self.check()?;
        // A frame that is complete is taken out before more is read, so a flood waits in the kernel; replies have to be taken
        // in while a request waits for room.
        while self.waiting < MAX_WAITING {
            let mut chunk = std::mem::take(&mut self.chunk);
            let got = self.channel.read(&mut chunk);
            let outcome = match got {
                // What little came was the alert of a side that speaks TLS.
                Ok(0) if self.head.starts_with(&[0x15, 0x03]) => Err(LinkError::PeerMisbehaved(
                    "it wants TLS, and this side has no certificates (VGPU_CERTS)".into(),
                )),
                Ok(0) => Err(LinkError::Closed),
                Ok(count) => {
                    self.heard = true;
                    self.parse(&chunk[..count]).map(|()| true)
                }
                Err(error) if would_block(&error) => Ok(false),
                Err(error) => Err(broken(&error)),
            };
            self.chunk = chunk;
            match outcome {
                // The host's requests are taken one at a time: what came behind this one stays in the kernel.
                Ok(true) if self.frames.len() < 256 => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(self.fail(error)),
            }
        }
        Ok(())
    }

    fn parse(&mut self, mut bytes: &[u8]) -> Result<(), LinkError> {
        while !bytes.is_empty() || self.partial.as_ref().is_some_and(|p| p.len == 0) {
            let Some(partial) = &mut self.partial else {
                let wanted = (HEAD - self.head.len()).min(bytes.len());
                self.head.extend_from_slice(&bytes[..wanted]);
                bytes = &bytes[wanted..];
                if self.head.len() == HEAD {
                    self.partial = Some(open(&self.head)?);
                    self.head.clear();
                }
                continue;
            };
            let wanted = (partial.len - partial.bytes.len()).min(bytes.len());
            partial.bytes.extend_from_slice(&bytes[..wanted]);
            bytes = &bytes[wanted..];
            if partial.bytes.len() == partial.len
                && let Some(partial) = self.partial.take()
            {
                self.take(partial)?;
            }
        }
        Ok(())
    }

    fn take(&mut self, partial: Partial) -> Result<(), LinkError> {
        let Partial {
            kind,
            number,
            message,
            bytes,
            ..
        } = partial;
        if matches!(kind, Kind::Reply | Kind::Retired) {
            if number < self.retired {
                return Err(LinkError::PeerMisbehaved(format!(
                    "{number} requests retired after {}",
                    self.retired
                )));
            }
            self.retired = number;
        }
        if matches!(kind, Kind::Reply | Kind::Request) {
            self.waiting += bytes.len();
            self.frames.push_back(Frame {
                number,
                bytes,
                message,
            });
        }
        Ok(())
    }

    /// What to wait for: bytes to come, and room if there is something to go out.
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

    /// Room for what is to go out.
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
        self.fail(broken(error))
    }
}

/// A wait that needs no lock.
pub(super) struct Waiting {
    socket: Option<Arc<OwnedFd>>,
    events: PollFlags,
}

impl Waiting {
    pub(super) fn wait(&self, timeout: Duration) -> Result<(), LinkError> {
        match &self.socket {
            Some(socket) => Wait {
                socket,
                events: self.events,
            }
            .wait(timeout),
            // No descriptor was left for a copy: look again and again.
            None => {
                std::thread::sleep(timeout.min(Duration::from_millis(1)));
                Ok(())
            }
        }
    }
}

/// Reads the head of a frame.
fn open(head: &[u8]) -> Result<Partial, LinkError> {
    let word = |i: usize| {
        head[i * 4..i * 4 + 4]
            .iter()
            .rev()
            .fold(0u32, |word, byte| word << 8 | u32::from(*byte))
    };
    let (message, payload) = (word(1) as usize, word(2) as usize);
    let number = u64::from(word(4)) | u64::from(word(5)) << 32;
    let kind = match word(0) {
        1 => Kind::Request,
        2 => Kind::Reply,
        3 => Kind::Retired,
        4 => Kind::Beat,
        other => {
            return Err(LinkError::PeerMisbehaved(format!(
                "a frame of kind {other}: not a vgpu, or not the encryption that this end expects"
            )));
        }
    };
    let is_empty = matches!(kind, Kind::Retired | Kind::Beat);
    if message > MAX_MESSAGE || payload > MAX_PAYLOAD || (is_empty && message + payload > 0) {
        return Err(LinkError::PeerMisbehaved(format!(
            "a frame {kind:?} with {message} bytes of message and {payload} of payload"
        )));
    }
    Ok(Partial {
        kind,
        number,
        message,
        len: message + payload,
        // As it comes, not as it is announced.
        bytes: Vec::with_capacity((message + payload).min(CHUNK)),
    })
}

fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

fn broken(error: &io::Error) -> LinkError {
    match error.kind() {
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionAborted => LinkError::Closed,
        // TLS says why in words.
        io::ErrorKind::InvalidData => LinkError::PeerMisbehaved(error.to_string()),
        io::ErrorKind::TimedOut => LinkError::Stalled { seconds: 15 },
        _ => LinkError::System {
            what: "a stream",
            error: Errno::from_io_error(error).unwrap_or(Errno::IO),
        },
    }
}
