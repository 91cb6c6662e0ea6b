//! Waiting for a connection.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Waits up to `timeout` for a listener to have a connection. Returns whether it has one.
///
/// # Errors
/// The system call failed.
pub(crate) fn wait_readable(listener: &UnixListener, timeout: Duration) -> io::Result<bool> {
    wait(&mut [PollFd::new(listener, PollFlags::IN)], timeout)
}

/// Waits up to `timeout` for one of two descriptors to be readable.
///
/// # Errors
/// The system call failed.
pub(super) fn wait_for_either(
    a: BorrowedFd<'_>,
    b: BorrowedFd<'_>,
    timeout: Duration,
) -> io::Result<()> {
    let mut fds = [a, b].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    wait(&mut fds, timeout).map(|_| ())
}

/// Whether a descriptor is ready before `timeout` has passed. A signal ends the wait.
fn wait(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match rustix::event::poll(fds, Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
