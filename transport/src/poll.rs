//! `poll(2)` with a relative timeout.

use std::time::{Duration, Instant};

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

/// Polls `fds` until one has an event or `deadline` has passed, whatever signals arrive meanwhile.
/// Returns the number of descriptors with events.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Instant) -> Result<usize, Errno> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = poll(fds, left)?;
        if ready > 0 || left.is_zero() {
            return Ok(ready);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals;
    use rustix::event::PollFlags;

    /// A program's profiler or timer interrupts every system call of the plugin.
    #[test]
    fn signals_do_not_end_a_wait_early() {
        let (socket, _open) = std::os::unix::net::UnixStream::pair().unwrap();
        signals::interrupting(|| {
            let began = Instant::now();
            let deadline = began + Duration::from_millis(100);
            let ready = poll_until(&mut [PollFd::new(&socket, PollFlags::IN)], deadline);
            assert_eq!(ready, Ok(0));
            assert!(Instant::now() >= deadline, "after {:?}", began.elapsed());
        });
    }
}
