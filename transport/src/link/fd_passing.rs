//! Files that the host sends beside the messages: memory of its engine that the guest may map.
//!
//! A file goes before the reply that speaks of it, so that it is there when the reply is. The guest never sends
//! any, and what it writes to the socket all the same is not read.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::LinkError;
use super::unix::{StepError, receive_packet, send_packet};

/// Words of the packet that carries a file: magic, [`FILE`].
const WORDS: usize = 2;

/// Second word of the packet: `FILE`.
const FILE: u64 = u32::from_le_bytes(*b"FILE") as u64;

/// How long a guest looks for a file that must have come already.
const PATIENCE: Duration = Duration::from_secs(1);

/// The way of the files, from either end.
#[derive(Debug)]
pub(super) enum Files {
    /// Between processes: the socket of the handshake.
    Socket(OwnedFd),
    /// Inside this process.
    Queue(Arc<Mutex<VecDeque<OwnedFd>>>),
}

impl Files {
    /// The host's end of a socket. Files that a guest does not take count against what this user may have on the way to
    /// anybody, so there is room for a few only.
    pub(super) fn of_host(socket: OwnedFd) -> Files {
        // The kernel makes the least it allows of this. If it refuses, the guest gets its files all the same.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 1);
        Files::Socket(socket)
    }

    /// Both ends inside this process.
    pub(super) fn pair() -> (Files, Files) {
        let queue = Arc::default();
        (Files::Queue(Arc::clone(&queue)), Files::Queue(queue))
    }

    /// The host's part. Whether the file is on its way; it is not when the guest does not take what was sent before.
    pub(super) fn send(&self, file: BorrowedFd<'_>) -> bool {
        match self {
            // The deadline has passed at once: a host does not wait for a guest that does not look.
            Files::Socket(socket) => {
                let words = [super::unix::MAGIC, FILE];
                send_packet(socket, &words, &[file], Instant::now()).is_ok()
            }
            Files::Queue(queue) => match file.try_clone_to_owned() {
                Ok(file) => {
                    let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
                    queue.push_back(file);
                    true
                }
                Err(_) => false,
            },
        }
    }

    /// The guest's part: the next file.
    pub(super) fn receive(&self) -> Result<OwnedFd, LinkError> {
        let none = || LinkError::PeerMisbehaved("it announced a file and sent none".into());
        match self {
            Files::Socket(socket) => {
                let deadline = Instant::now() + PATIENCE;
                let (words, mut files) = match receive_packet(socket, WORDS, 1, deadline) {
                    Ok(packet) => packet,
                    Err(StepError::Late) => return Err(none()),
                    Err(StepError::Garbage(why)) => return Err(LinkError::PeerMisbehaved(why)),
                    Err(StepError::Link(error)) => return Err(error),
                };
                match files.pop() {
                    Some(file) if words[1] == FILE => Ok(file),
                    _ => Err(none()),
                }
            }
            Files::Queue(queue) => {
                let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
                queue.pop_front().ok_or_else(none)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::memory::{Window, sealed_file};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    fn sockets() -> (Files, Files) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Files::of_host(a), Files::Socket(b))
    }

    #[test]
    fn both_ends_see_the_same_bytes_of_each_file_in_order() {
        for (host, guest) in [sockets(), Files::pair()] {
            let files = [4096, 8192].map(|size| sealed_file(size).unwrap());
            for file in &files {
                assert!(host.send(file.as_fd()));
            }
            for (file, size) in files.iter().zip([4096, 8192]) {
                let ours = Window::map(file.as_fd(), size).unwrap();
                let received = guest.receive().unwrap();
                let theirs = Window::map_foreign(received.as_fd(), size as u64).unwrap();
                ours.bytes_mut(5..8).copy_from((&b"abc"[..]).into());
                let mut seen = [0; 3];
                theirs.bytes(5..8).copy_to(&mut seen);
                assert_eq!(&seen, b"abc");
            }
        }
    }

    #[test]
    fn a_guest_that_takes_nothing_is_not_waited_for() {
        let (host, guest) = sockets();
        let file = sealed_file(4096).unwrap();
        let sent = (0..100_000).take_while(|_| host.send(file.as_fd())).count();
        assert!(sent > 0 && sent < 64, "{sent}");
        // What was sent is still there.
        guest.receive().unwrap();
    }

    #[test]
    fn a_file_that_was_only_announced_is_an_error() {
        let (_host, guest) = Files::pair();
        guest.receive().unwrap_err();
        let (host, guest) = sockets();
        drop(host);
        guest.receive().unwrap_err();
    }
}
