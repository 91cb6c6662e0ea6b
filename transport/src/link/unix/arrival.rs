//! The host's side of the handshake.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handshake::{
    HELLO_WORDS, OPENED_WORDS, VERDICT_ACCEPTED, VERDICT_OTHER_LAYOUT, WELCOME_FILES, WELCOME_WORDS,
};
use crate::error::{LinkError, LinkViolation};
use crate::link::credentials::{self, PeerCredentials};
use crate::link::epoch::new_epoch;
use crate::link::fd_passing::Files;
use crate::link::packet::{self, PacketError};
use crate::link::socket_file::DEFAULT_MODE;
use crate::link::window::WindowHost;
use crate::link::window_end::unmapped;
use crate::shm::doorbell::{EventDoorbell, new_eventfd};
use crate::shm::layout::{self, DEFAULT_SIZE, Layout, LayoutError, MIN_SIZE};
use crate::shm::liveness;
use crate::shm::memory::{Window, sealed_file};

/// The options of a listening host.
#[derive(Debug, Clone)]
pub struct ListenOptions {
    /// The size of each guest's window, in bytes: a power of two.
    pub window_size: usize,
    /// The permission bits of the socket file.
    pub mode: u32,
    /// The time limit of a guest's handshake.
    pub handshake_timeout: Duration,
}

impl Default for ListenOptions {
    fn default() -> ListenOptions {
        ListenOptions {
            window_size: DEFAULT_SIZE,
            mode: DEFAULT_MODE,
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

/// A connected guest before the handshake.
#[derive(Debug)]
pub struct Arrival {
    socket: OwnedFd,
    peer: PeerCredentials,
    /// When the kernel has told `peer`, at the latest: the time since the machine started.
    known_at: Duration,
    options: ListenOptions,
}

/// Why the handshake with a guest has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum HandshakeError {
    #[error("the guest did not complete the handshake within {ms} ms")]
    Timeout { ms: u128 },
    #[error("the guest violated the handshake: {0}")]
    Garbage(LinkViolation),
    #[error(
        "the guest supports window layouts {from} to {to}, this host supports {}: update \
         ggml-vgpu {}",
        layout::VERSION,
        layout::outdated(*.to, layout::VERSION)
    )]
    OtherLayout { from: u64, to: u64 },
    /// The host's options have a wrong window size.
    #[error("the options of this host: {0}")]
    Window(LayoutError),
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl AsFd for Arrival {
    /// The guest's socket.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Arrival {
    /// The guest at the other end of `socket`. Another process may have accepted the socket and
    /// passed it on from [`into_socket`](Arrival::into_socket).
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] when the kernel does not tell the guest's credentials.
    pub fn from_socket(socket: OwnedFd, options: ListenOptions) -> Result<Arrival, LinkError> {
        Ok(Arrival {
            known_at: credentials::now(),
            peer: credentials::of(&socket)?,
            socket,
            options,
        })
    }

    /// The socket, for a handshake in another process.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// The credentials of the guest's process.
    pub fn peer(&self) -> PeerCredentials {
        self.peer
    }

    /// Creates the guest's window and completes the handshake. The options limit the time.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::Timeout`], [`HandshakeError::Garbage`] and [`HandshakeError::OtherLayout`]
    /// are the guest's fault. [`HandshakeError::Window`] is the fault of the host's options.
    /// [`HandshakeError::Link`] is a system call of the host that has failed, or a guest that has
    /// closed its socket.
    pub fn handshake(self) -> Result<WindowHost, HandshakeError> {
        let timeout = self.options.handshake_timeout;
        let deadline = Instant::now() + timeout;
        let failed = |error| match error {
            PacketError::Late => HandshakeError::Timeout {
                ms: timeout.as_millis(),
            },
            PacketError::Garbage(why) => HandshakeError::Garbage(why),
            PacketError::Link(error) => HandshakeError::Link(error),
        };
        let (words, _) = packet::receive(&self.socket, HELLO_WORDS, 0, deadline).map_err(failed)?;
        let (from, to) = (words[1], words[2]);
        if !(from..=to).contains(&layout::VERSION) {
            let verdict = [packet::MAGIC, VERDICT_OTHER_LAYOUT, layout::VERSION, 0];
            packet::send(&self.socket, &verdict, &[], deadline).map_err(failed)?;
            return Err(HandshakeError::OtherLayout { from, to });
        }
        let size = match usize::try_from(words[3]) {
            Ok(0) => self.options.window_size,
            Ok(wanted) if wanted <= self.options.window_size => wanted
                .next_power_of_two()
                .clamp(MIN_SIZE, self.options.window_size),
            _ => self.options.window_size,
        };

        let epoch = new_epoch();
        let layout = Layout::new(size, epoch).map_err(HandshakeError::Window)?;
        let file = sealed_file(size).map_err(unmapped)?;
        let window = Arc::new(Window::map(file.as_fd(), size).map_err(unmapped)?);
        layout.write(&*window);
        let (guest_bell, host_bell) = (new_eventfd()?, new_eventfd()?);
        let welcome: [u64; WELCOME_WORDS] = [
            packet::MAGIC,
            VERDICT_ACCEPTED,
            layout::VERSION,
            size as u64,
        ];
        let fds: [BorrowedFd<'_>; WELCOME_FILES] =
            [file.as_fd(), guest_bell.as_fd(), host_bell.as_fd()];
        packet::send(&self.socket, &welcome, &fds, deadline).map_err(failed)?;
        let (words, _) =
            packet::receive(&self.socket, OPENED_WORDS, 0, deadline).map_err(failed)?;
        if words[1] != epoch {
            return Err(HandshakeError::Garbage(LinkViolation::Session {
                found: words[1],
                expected: epoch,
            }));
        }
        liveness::start(&window).map_err(LinkError::io("starting the heartbeat thread"))?;
        let files = self.socket.try_clone().ok().map(Files::of_host);
        // A child that the guest's process has forked may keep the socket open.
        let process = credentials::process(&self.socket, self.peer, self.known_at);
        let doorbell =
            EventDoorbell::new(host_bell, guest_bell, Some(self.socket)).watching(process);
        let host = WindowHost::new(window, &layout, Box::new(doorbell), None);
        Ok(host.with_files(files))
    }
}
