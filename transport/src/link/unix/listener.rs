//! The listening socket of the host.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType};

use super::arrival::{Arrival, ListenOptions};
use crate::error::LinkError;
use crate::link::socket_file::{self, SocketFile, SocketFileError};
use crate::poll::poll;
use crate::shm::layout::{Layout, LayoutError};

/// Why the host cannot listen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListenError {
    /// The socket cannot be bound.
    #[error(transparent)]
    Socket(#[from] SocketFileError),
    /// The options have a wrong window size.
    #[error(transparent)]
    Window(#[from] LayoutError),
}

/// A listening socket for guests. Dropping the listener removes its socket file.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    file: SocketFile,
    options: ListenOptions,
}

impl Listener {
    /// Listens at `path`. The listener replaces the socket file of a dead executor, but no other
    /// file.
    ///
    /// # Errors
    ///
    /// [`ListenError::Socket`] when the socket cannot be bound, for example because another
    /// executor listens at `path`; [`ListenError::Window`] when `options` has a wrong window size.
    pub fn bind(path: &Path, options: ListenOptions) -> Result<Listener, ListenError> {
        Layout::new(options.window_size, 1)?;
        let (socket, file) = socket_file::bind(path, SocketType::SEQPACKET, options.mode, None)?;
        Ok(Listener {
            socket,
            file,
            options,
        })
    }

    /// The path of the socket file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The socket file.
    pub fn file(&mut self) -> &mut SocketFile {
        &mut self.file
    }

    /// Accepts guests on `socket` from now on, which [`SocketFile::bind_again`] has returned.
    pub fn use_socket(&mut self, socket: OwnedFd) {
        self.socket = socket;
    }

    /// Waits up to `timeout` for a guest to connect. `None` when no guest has connected.
    ///
    /// The call exchanges no packets with the guest. [`Arrival::handshake`] does, and may run on
    /// another thread.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] when a system call fails.
    pub fn accept(&self, timeout: Duration) -> Result<Option<Arrival>, LinkError> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        if poll(&mut fds, timeout).map_err(LinkError::system("waiting for a guest"))? == 0 {
            return Ok(None);
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Arrival::from_socket(socket, self.options.clone()).map(Some),
            // The guest has closed its socket already.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(error) => Err(LinkError::system("accepting a guest")(error)),
        }
    }
}

impl AsFd for Listener {
    /// The descriptor is readable when a guest has connected.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
