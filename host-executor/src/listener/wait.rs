//! Waiting for a connection.
#![forbid(unsafe_code)]

use std::io;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Waits up to `timeout` for a listener to have a connection. Returns whether it has one.
///
/// # Errors
/// The system call failed.
pub(crate) fn wait_readable(listener: &UnixListener, timeout: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match rustix::event::poll(&mut fds, Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
