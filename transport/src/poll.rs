//! `poll(2)` with a relative timeout.

use std::time::Duration;

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;

/// Polls `fds` for at most `timeout` and returns the number of descriptors with events.
///
/// A signal handler may end the call early. The call then reports no event, and the caller polls
/// again if it has time left.
pub(crate) fn poll(fds: &mut [PollFd<'_>], timeout: Duration) -> Result<usize, Errno> {
    let timeout = Timespec::try_from(timeout).map_err(|_| Errno::INVAL)?;
    match rustix::event::poll(fds, Some(&timeout)) {
        Err(Errno::INTR) => {
            for fd in fds {
                fd.clear_revents();
            }
            Ok(0)
        }
        other => other,
    }
}
