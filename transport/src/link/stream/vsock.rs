//! vsock: out of a virtual machine that has no window, to its host.
//!
//! A guest always opens a socket of the family `AF_VSOCK`. What the host sees depends on the monitor: with the kernel's
//! own vhost-vsock it is such a socket too; Firecracker and its relatives (and `vhost-device-vsock`) connect to a unix
//! socket, whose path is one that they were given, an underscore and the port.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::channel::Plain;
use super::{StreamGuest, StreamHost};
use crate::link::socket::vsock;
use crate::shm::doorbell::poll;

/// The port that executors listen on, unless told otherwise.
pub const DEFAULT_PORT: u32 = 4780;

/// The host, from a guest's point of view.
pub const HOST: u32 = 2;

/// Anybody, for a listener.
pub const ANY: u32 = u32::MAX;

/// Connects to the executor at `port` of the machine `cid`.
pub fn connect(cid: u32, port: u32, timeout: Duration) -> io::Result<StreamGuest> {
    let socket = vsock::connect(cid, port, timeout)?;
    Ok(StreamGuest::new(Box::new(Plain(UnixStream::from(socket)))))
}

/// A socket at which guests arrive.
#[derive(Debug)]
pub enum Listener {
    /// Of the kernel's own vsock.
    Kernel(OwnedFd),
    /// Of a monitor that connects to unix sockets.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens at a port of this machine, for all its guests.
    pub fn kernel(port: u32) -> io::Result<Listener> {
        vsock::listen(port).map(Listener::Kernel)
    }

    /// Listens for the guests of one monitor, which was given the path `uds`.
    pub fn unix(listener: UnixListener, path: &Path) -> Listener {
        Listener::Unix(listener, path.into())
    }

    /// Waits up to `timeout` for a guest to arrive: its machine's number, where the kernel knows it.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<(UnixStream, Option<u32>)>> {
        match self {
            Listener::Kernel(socket) => accept_within(socket, timeout, || vsock::accept(socket))
                .map(|got| got.map(|(socket, cid)| (UnixStream::from(socket), Some(cid)))),
            Listener::Unix(listener, _) => {
                let got = accept_within(listener, timeout, || listener.accept())?;
                let Some((socket, _)) = got else {
                    return Ok(None);
                };
                socket.set_nonblocking(true)?;
                Ok(Some((socket, None)))
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The host's end of a stream that has been accepted.
pub fn host(socket: UnixStream) -> io::Result<StreamHost> {
    StreamHost::new(Box::new(Plain(socket)))
}

/// Waits for `socket` to have a guest, and takes it. `None` when none came, or it did not wait for us.
pub(super) fn accept_within<T>(
    socket: impl AsFd,
    timeout: Duration,
    accept: impl FnOnce() -> io::Result<T>,
) -> io::Result<Option<T>> {
    let mut fds = [PollFd::new(&socket, PollFlags::IN)];
    if poll(&mut fds, timeout)? == 0 {
        return Ok(None);
    }
    match accept() {
        Ok(accepted) => Ok(Some(accepted)),
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            _ => Err(error),
        },
    }
}
