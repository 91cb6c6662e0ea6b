//! The listening socket of the host.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};

use super::arrival::{Arrival, ListenOptions};
use super::socket;
use crate::error::LinkError;
use crate::poll::poll;
use crate::shm::layout::{Layout, LayoutError};

/// Why the host cannot listen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum ListenError {
    #[error("{path}: an executor already listens here", path = path.display())]
    InUse { path: PathBuf },
    #[error("{path}: the file exists and is not a socket", path = path.display())]
    NotASocket { path: PathBuf },
    #[error("{path}: the directory for this socket does not exist", path = path.display())]
    NoDirectory { path: PathBuf },
    #[error("{0}")]
    Window(#[from] LayoutError),
    #[error("{path}: {what}: {error}", path = path.display())]
    System {
        path: PathBuf,
        what: &'static str,
        error: Errno,
    },
}

/// A listening socket for guests. Dropping the listener removes its socket file.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// The device and inode of the socket file. The listener removes no other file.
    file: (u64, u64),
    options: ListenOptions,
}

impl Listener {
    /// Listens at `path`. The listener replaces the socket file of a dead executor, but no other
    /// file.
    ///
    /// # Errors
    ///
    /// [`ListenError::InUse`] when another executor listens at `path`; [`ListenError::Window`] when
    /// `options` has a wrong window size; the other variants name the failed step.
    pub fn bind(path: &Path, options: ListenOptions) -> Result<Listener, ListenError> {
        Layout::new(options.window_size, 1)?;
        let at = |what| {
            let path = path.to_path_buf();
            move |error| ListenError::System { path, what, error }
        };
        let socket = socket::new().map_err(at("creating a socket"))?;
        let address = SocketAddrUnix::new(path).map_err(at("the path of the socket"))?;
        match rustix::net::bind(&socket, &address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => {
                remove_stale(path)?;
                rustix::net::bind(&socket, &address).map_err(at("binding the socket"))?;
            }
            Err(Errno::NOENT) => return Err(ListenError::NoDirectory { path: path.into() }),
            Err(error) => return Err(at("binding the socket")(error)),
        }
        // No client can connect between `bind` and `listen`, so the file never has other
        // permissions while the socket accepts connections.
        rustix::fs::chmod(path, Mode::from_raw_mode(options.mode))
            .map_err(at("setting the permissions of the socket"))?;
        let file = rustix::fs::lstat(path).map_err(at("reading the inode of the socket"))?;
        rustix::net::listen(&socket, 64).map_err(at("listening"))?;
        Ok(Listener {
            socket,
            path: path.into(),
            file: (file.st_dev, file.st_ino),
            options,
        })
    }

    /// The path of the socket file.
    pub fn path(&self) -> &Path {
        &self.path
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

impl Drop for Listener {
    fn drop(&mut self) {
        let is_ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|file| (file.dev(), file.ino()) == self.file);
        if is_ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket file on which no process listens.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let file = match std::fs::symlink_metadata(path) {
        Ok(file) => file,
        // Another process has removed the file meanwhile.
        Err(_) => return Ok(()),
    };
    if !socket::is_socket(&file) {
        return Err(ListenError::NotASocket { path: path.into() });
    }
    let at = |what| {
        let path = path.to_path_buf();
        move |error| ListenError::System { path, what, error }
    };
    let socket = socket::new().map_err(at("creating a socket"))?;
    match socket::connect(&socket, path) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(path).map_err(at("removing a stale socket")),
        // Connected, a full backlog, or a socket of another type: a process listens.
        _ => Err(ListenError::InUse { path: path.into() }),
    }
}
