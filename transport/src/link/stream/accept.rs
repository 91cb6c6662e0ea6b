//! Accepting a connection within a time limit.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::poll::poll;

/// Waits up to `timeout` for a connection at `listener` and calls `accept`. `None` when no guest
/// has connected, or the guest has closed its socket already.
pub(super) fn accept_within<T>(
    listener: impl AsFd,
    timeout: Duration,
    accept: impl FnOnce() -> io::Result<T>,
) -> io::Result<Option<T>> {
    let mut fds = [PollFd::new(&listener, PollFlags::IN)];
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
