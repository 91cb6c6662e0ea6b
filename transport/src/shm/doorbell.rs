//! How a sleeping end is woken, and how the death of a peer is noticed.
//!
//! A doorbell is seen from one end: [`ring`](Doorbell::ring) wakes the peer, [`wait`](Doorbell::wait) sleeps until the
//! peer rings. Rings are remembered, not counted: one that comes before `wait` ends it at once, several
//! are one. A wait may end for no reason.
#![forbid(unsafe_code)]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::link::LinkError;

/// Wakes the peer and is woken by it.
pub trait Doorbell: Send {
    /// Wakes the peer, now or when it next waits.
    fn ring(&self) -> Result<(), LinkError>;

    /// Forgets rings that have already come.
    fn clear(&self) -> Result<(), LinkError>;

    /// Sleeps until the peer rings, is gone, or `timeout` has passed. With no time it only looks.
    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError>;
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The peer rang, the time is over, or there was no reason.
    Look,
    /// The peer has died or has closed its side: there will be no ring.
    PeerGone,
}

/// Two eventfds, and a socket that hangs up when the peer dies.
#[derive(Debug)]
pub struct EventDoorbell {
    /// Rung by the peer.
    own: OwnedFd,
    /// Rung by us.
    peer: OwnedFd,
    /// Nothing is sent on it; open as long as the peer lives. Inside one process there is none.
    lifeline: Option<OwnedFd>,
}

impl EventDoorbell {
    /// A doorbell of two eventfds that do not block.
    pub fn new(own: OwnedFd, peer: OwnedFd, lifeline: Option<OwnedFd>) -> EventDoorbell {
        EventDoorbell {
            own,
            peer,
            lifeline,
        }
    }

    /// Both sides of a doorbell inside one process.
    pub fn pair() -> Result<(EventDoorbell, EventDoorbell), LinkError> {
        let (a, b) = (new_eventfd()?, new_eventfd()?);
        let duplicate = |fd: &OwnedFd| {
            fd.try_clone().map_err(|error| LinkError::System {
                what: "duplicating an eventfd",
                error: Errno::from_io_error(&error).unwrap_or(Errno::IO),
            })
        };
        let (a2, b2) = (duplicate(&a)?, duplicate(&b)?);
        Ok((
            EventDoorbell::new(a, b, None),
            EventDoorbell::new(b2, a2, None),
        ))
    }
}

impl Doorbell for EventDoorbell {
    fn ring(&self) -> Result<(), LinkError> {
        match rustix::io::write(&self.peer, &1u64.to_ne_bytes()) {
            // Full to the brim counts as rung.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(system("ringing the peer's eventfd")(error)),
        }
    }

    fn clear(&self) -> Result<(), LinkError> {
        match rustix::io::read(&self.own, &mut [0; 8]) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(system("reading an eventfd")(error)),
        }
    }

    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError> {
        let waiting = system("waiting for the peer");
        let rung = PollFd::new(&self.own, PollFlags::IN);
        let Some(lifeline) = &self.lifeline else {
            poll(&mut [rung], timeout).map_err(waiting)?;
            return Ok(Wake::Look);
        };
        let mut fds = [rung, PollFd::new(lifeline, PollFlags::RDHUP)];
        poll(&mut fds, timeout).map_err(waiting)?;
        // Hang-ups and errors are reported without being asked for.
        let is_gone = !fds[1].revents().is_empty();
        Ok(if is_gone { Wake::PeerGone } else { Wake::Look })
    }
}

/// An eventfd as doorbells need it: never blocking, not inherited by programs that are started.
pub fn new_eventfd() -> Result<OwnedFd, LinkError> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(system("making an eventfd"))
}

/// Whether a file descriptor that the peer sent is an eventfd that does not block: not one that would make
/// [`EventDoorbell`] wait for the peer.
pub fn is_eventfd(fd: BorrowedFd<'_>) -> bool {
    let is_nonblocking =
        rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
    // Eventfds are anonymous inodes: no file type at all.
    let is_anonymous = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_mode & 0o170_000 == 0);
    is_nonblocking && is_anonymous
}

/// `poll`, not ended early by a signal's handler more than a caller can bear: it reports no event then.
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

pub(crate) fn system(what: &'static str) -> impl FnOnce(Errno) -> LinkError {
    move |error| LinkError::System { what, error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn rings_are_kept_until_cleared() {
        let (a, b) = EventDoorbell::pair().unwrap();
        for _ in 0..3 {
            a.ring().unwrap();
        }
        assert_eq!(b.wait(LONG), Ok(Wake::Look));
        assert_eq!(b.wait(LONG), Ok(Wake::Look), "not cleared");
        b.clear().unwrap();
        b.clear().unwrap();
        b.ring().unwrap();
        assert_eq!(a.wait(LONG), Ok(Wake::Look));
    }

    #[test]
    fn a_peer_that_has_gone_ends_every_wait() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let doorbell = EventDoorbell::new(
            new_eventfd().unwrap(),
            new_eventfd().unwrap(),
            Some(ours.into()),
        );
        assert_eq!(doorbell.wait(Duration::ZERO), Ok(Wake::Look));
        drop(theirs);
        assert_eq!(doorbell.wait(Duration::ZERO), Ok(Wake::PeerGone));
        assert_eq!(doorbell.wait(LONG), Ok(Wake::PeerGone));
    }

    #[test]
    fn only_eventfds_are_eventfds() {
        assert!(is_eventfd(new_eventfd().unwrap().as_fd()));
        let blocking = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(!is_eventfd(blocking.as_fd()));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(!is_eventfd(file.as_fd()));
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        assert!(!is_eventfd(socket.as_fd()));
    }
}
