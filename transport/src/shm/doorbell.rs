//! Doorbells: waking the sleeping peer, and detecting the death of the peer.
//!
//! A doorbell belongs to one end of a link. [`ring`](Doorbell::ring) wakes the peer;
//! [`wait`](Doorbell::wait) sleeps until the peer rings. A doorbell has one pending bit and no
//! counter: a ring before `wait` ends that `wait` at once, and several rings count as one. A wait
//! may end spuriously.
#![forbid(unsafe_code)]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;

use crate::error::LinkError;
use crate::fork::OwnFd;
use crate::poll::poll;

/// The doorbell of one end.
pub trait Doorbell: Send {
    /// Wakes the peer from its current wait or its next one.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] when a system call fails.
    fn ring(&self) -> Result<(), LinkError>;

    /// Clears the pending bit of this end.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] when a system call fails.
    fn clear(&self) -> Result<(), LinkError>;

    /// Sleeps until the peer rings, the peer is gone, or `timeout` has passed. A `timeout` of zero
    /// returns the current state.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] when a system call fails.
    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError>;
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The peer rang, the timeout has passed, or the wake-up is spurious. The caller checks the
    /// shared memory.
    Look,
    /// The peer has died or has closed its end. The peer will not ring again.
    PeerGone,
    /// The peer's slot of a PCI device now belongs to another program.
    Evicted,
}

/// A doorbell of two eventfds, and a socket that the kernel closes when the peer dies.
#[derive(Debug)]
pub struct EventDoorbell {
    /// The peer writes this eventfd.
    own: OwnFd,
    /// This end writes this eventfd.
    peer: OwnFd,
    /// A socket without traffic; the peer's end is open while the peer lives. `None` inside one
    /// process.
    hangup_socket: Option<OwnFd>,
    /// A pidfd of the peer, which is readable after the peer's end.
    process: Option<OwnFd>,
}

impl EventDoorbell {
    /// A doorbell of two non-blocking eventfds: the one that the peer writes, and the one that this
    /// end writes.
    pub fn new(own: OwnedFd, peer: OwnedFd, hangup_socket: Option<OwnedFd>) -> EventDoorbell {
        EventDoorbell {
            own: OwnFd::new(own),
            peer: OwnFd::new(peer),
            hangup_socket: hangup_socket.map(OwnFd::new),
            process: None,
        }
    }

    /// The same doorbell, which also watches the process behind a pidfd: a forked child of the peer
    /// may hold the hangup_socket open after the peer's death.
    pub fn watching(self, process: Option<OwnedFd>) -> EventDoorbell {
        EventDoorbell {
            process: process.map(OwnFd::new),
            ..self
        }
    }

    /// The doorbells of both ends of a link inside one process.
    ///
    /// # Errors
    ///
    /// [`LinkError::System`] when the process has no file descriptor left.
    pub fn pair() -> Result<(EventDoorbell, EventDoorbell), LinkError> {
        let (a, b) = (new_eventfd()?, new_eventfd()?);
        let duplicate = |fd: &OwnedFd| {
            fd.try_clone()
                .map_err(LinkError::io("duplicating an eventfd"))
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
        match rustix::io::write(&*self.peer, &1u64.to_ne_bytes()) {
            // A saturated counter is pending already.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(LinkError::system("writing the peer's eventfd")(error)),
        }
    }

    fn clear(&self) -> Result<(), LinkError> {
        match rustix::io::read(&*self.own, &mut [0; 8]) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(LinkError::system("reading an eventfd")(error)),
        }
    }

    fn wait(&self, timeout: Duration) -> Result<Wake, LinkError> {
        let waiting = LinkError::system("waiting for the peer");
        let rung = PollFd::new(&*self.own, PollFlags::IN);
        let Some(hangup_socket) = &self.hangup_socket else {
            poll(&mut [rung], timeout).map_err(waiting)?;
            return Ok(Wake::Look);
        };
        let hang_up = PollFd::new(&**hangup_socket, PollFlags::RDHUP);
        // `poll` reports hang-ups and errors in addition to the requested events.
        let is_gone = match &self.process {
            Some(process) => {
                let mut fds = [rung, hang_up, PollFd::new(&**process, PollFlags::IN)];
                poll(&mut fds, timeout).map_err(waiting)?;
                fds[1..].iter().any(|fd| !fd.revents().is_empty())
            }
            None => {
                let mut fds = [rung, hang_up];
                poll(&mut fds, timeout).map_err(waiting)?;
                !fds[1].revents().is_empty()
            }
        };
        Ok(if is_gone { Wake::PeerGone } else { Wake::Look })
    }
}

/// A new eventfd for a doorbell: non-blocking and close-on-exec.
///
/// # Errors
///
/// [`LinkError::System`] when the process has no file descriptor left.
pub fn new_eventfd() -> Result<OwnedFd, LinkError> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(LinkError::system("creating an eventfd"))
}

/// Whether a file descriptor from the peer is a non-blocking eventfd. A blocking descriptor would
/// let the peer block [`EventDoorbell`].
pub fn is_eventfd(fd: BorrowedFd<'_>) -> bool {
    let is_nonblocking =
        rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
    // An eventfd is an anonymous inode, which has no file type.
    let is_anonymous = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_mode & 0o170_000 == 0);
    is_nonblocking && is_anonymous
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_ring_is_pending_until_cleared() {
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
    fn end_of_the_peer_process_ends_every_wait() {
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
    fn only_nonblocking_eventfds_are_accepted() {
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
