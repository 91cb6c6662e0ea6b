//! Non-blocking byte streams.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use crate::error::LinkError;
use crate::fork::OwnFd;
use crate::poll::poll;

/// A non-blocking byte stream. A call that would block returns `WouldBlock`.
pub trait Channel: Send {
    /// Reads bytes that have arrived. 0 is the end of the stream.
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or the failure of the stream.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize>;

    /// Writes bytes and returns the number of bytes accepted.
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or the failure of the stream.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Writes the bytes that the channel itself has buffered. `true` when none are left.
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or the failure of the stream.
    fn flush(&mut self) -> io::Result<bool>;

    /// Closes the stream in both directions.
    fn close(&mut self);

    /// A duplicate of the socket, to poll.
    ///
    /// # Errors
    ///
    /// When the process has no file descriptor left.
    fn socket(&self) -> io::Result<OwnedFd>;
}

/// A connected, non-blocking stream socket of any address family, without encryption.
#[derive(Debug)]
pub struct Plain(OwnFd);

impl Plain {
    /// The channel of a connected, non-blocking stream socket.
    pub fn new(socket: impl Into<OwnedFd>) -> Plain {
        Plain(OwnFd::new(socket))
    }
}

impl Channel for Plain {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (count, _) = rustix::net::recv(&*self.0, bytes, RecvFlags::empty())?;
        Ok(count)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The plugin's host program may not ignore SIGPIPE.
        Ok(rustix::net::send(&*self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn close(&mut self) {
        let _ = rustix::net::shutdown(&*self.0, Shutdown::Both);
    }

    fn socket(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }
}

/// Waits up to `timeout` for events of a socket.
pub(super) fn wait(
    socket: impl AsFd,
    events: PollFlags,
    timeout: Duration,
) -> Result<(), LinkError> {
    let mut fds = [PollFd::new(&socket, events)];
    poll(&mut fds, timeout)
        .map(drop)
        .map_err(LinkError::system("waiting for the peer's socket"))
}
