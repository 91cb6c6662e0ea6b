//! A stream of bytes that never blocks.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use crate::link::LinkError;
use crate::shm::doorbell::{poll, system};

/// A stream of bytes that never blocks: what would have to wait is `WouldBlock`.
pub trait Channel: Send {
    /// Takes bytes that have come. 0 is the end.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize>;

    /// Gives bytes out.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Pushes out what the channel itself still holds. `true` when that is nothing any more.
    fn flush(&mut self) -> io::Result<bool>;

    /// Says goodbye.
    fn close(&mut self);

    /// The socket, to wait for: a copy.
    fn socket(&self) -> io::Result<OwnedFd>;
}

/// A socket as it is.
#[derive(Debug)]
pub struct Plain<S>(pub S);

impl<S: Read + Write + AsFd + Send> Channel for Plain<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn close(&mut self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }

    fn socket(&self) -> io::Result<OwnedFd> {
        self.0.as_fd().try_clone_to_owned()
    }
}

/// A wait for a socket, which needs nothing of the channel.
pub(super) struct Wait<'a> {
    pub(super) socket: &'a OwnedFd,
    pub(super) events: PollFlags,
}

impl Wait<'_> {
    pub(super) fn wait(&self, timeout: Duration) -> Result<(), LinkError> {
        let mut fds = [PollFd::new(self.socket, self.events)];
        poll(&mut fds, timeout)
            .map(drop)
            .map_err(system("waiting for the peer"))
    }
}
