//! The link over vsock: out of a virtual machine without a window, to its host.
//!
//! A guest always opens a socket of the family `AF_VSOCK`. The host's socket depends on the
//! hypervisor. With the kernel's vhost-vsock the host has an `AF_VSOCK` socket too. Firecracker,
//! Cloud Hypervisor and `vhost-device-vsock` connect to a unix socket on the host. The path of the
//! socket is the one that the hypervisor was given, an underscore and the port.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use super::accept::accept_within;
use super::channel::Plain;
use super::guest::StreamGuest;
use super::host::StreamHost;
use crate::link::socket_file::{self, SocketFile, SocketFileError};
use crate::link::vsock;

/// The default port of an executor.
pub const DEFAULT_PORT: u32 = 4780;

/// The context id of the host (`VMADDR_CID_HOST`).
pub const HOST: u32 = 2;

/// The context id of a listener for every machine (`VMADDR_CID_ANY`).
pub const ANY: u32 = u32::MAX;

/// Connects to the executor at `port` of the machine `cid`. `timeout` limits the wait.
///
/// # Errors
///
/// `TimedOut`, or the error of the system call. `ENODEV` and `EAFNOSUPPORT` mean that this machine
/// has no vsock device.
pub fn connect(cid: u32, port: u32, timeout: Duration) -> io::Result<StreamGuest> {
    vsock::connect(cid, port, timeout).and_then(guest)
}

/// The guest's end of a link over a connected socket.
fn guest(socket: OwnedFd) -> io::Result<StreamGuest> {
    StreamGuest::new(Box::new(Plain::new(socket))).with_heartbeat()
}

/// A listening socket for guests.
#[derive(Debug)]
pub enum Listener {
    /// An `AF_VSOCK` socket.
    Kernel(OwnedFd),
    /// A unix socket that a hypervisor connects to, and its file.
    Unix(UnixListener, SocketFile),
}

impl Listener {
    /// Listens at `port` of this machine for guests of every virtual machine.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn kernel(port: u32) -> io::Result<Listener> {
        vsock::listen(port).map(Listener::Kernel)
    }

    /// Listens for the guests of one hypervisor at the unix socket `path`. `mode` holds the
    /// permissions of the socket file. Dropping the listener removes the file.
    ///
    /// # Errors
    ///
    /// [`SocketFileError`] says why the socket cannot be bound.
    pub fn unix(path: &Path, mode: u32) -> Result<Listener, SocketFileError> {
        let (listener, file) = socket_file::bind_stream(path, mode)?;
        Ok(Listener::Unix(listener, file))
    }

    /// Waits up to `timeout` for a guest to connect. Returns the non-blocking socket, and the
    /// context id of the guest's machine where the kernel knows it.
    ///
    /// # Errors
    ///
    /// The error of a system call.
    pub fn accept(&self, timeout: Duration) -> io::Result<Option<(OwnedFd, Option<u32>)>> {
        match self {
            Listener::Kernel(socket) => {
                let accepted = accept_within(socket, timeout, || vsock::accept(socket))?;
                Ok(accepted.map(|(socket, cid)| (socket, Some(cid))))
            }
            Listener::Unix(listener, _) => {
                let accepted = accept_within(listener, timeout, || listener.accept())?;
                let Some((socket, _)) = accepted else {
                    return Ok(None);
                };
                socket.set_nonblocking(true)?;
                Ok(Some((socket.into(), None)))
            }
        }
    }
}

impl AsFd for Listener {
    /// The descriptor is readable when a guest has connected.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Kernel(socket) => socket.as_fd(),
            Listener::Unix(listener, _) => listener.as_fd(),
        }
    }
}

/// The host's end of a link over an accepted, non-blocking socket.
///
/// # Errors
///
/// When the process cannot start the heartbeat thread.
pub fn host(socket: OwnedFd) -> io::Result<StreamHost> {
    StreamHost::new(Box::new(Plain::new(socket)))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::link::stream::framing::FrameKind;
    use crate::shm::liveness::PERIOD;

    /// With the heartbeat the host ends the session of a machine that falls silent
    /// (`super::super::host`).
    #[test]
    fn guest_that_asks_for_nothing_has_a_heartbeat() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_read_timeout(Some(20 * PERIOD)).unwrap();
        let _guest = guest(near.into()).unwrap();
        // The first one is there before the first period.
        for _ in 0..3 {
            let mut frame = [0; 24];
            far.read_exact(&mut frame).unwrap();
            assert_eq!(frame[0], FrameKind::Heartbeat as u8);
        }
    }
}
