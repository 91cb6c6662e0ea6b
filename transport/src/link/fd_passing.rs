//! Passing of files from the host to the guest: memory of the engine that the guest may map.
//!
//! The host sends a file before the reply that announces the file, so the file has arrived when the
//! reply arrives. The guest never sends a file, and the host does not read from the socket.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::packet::{self, PacketError};
use crate::error::{LinkError, LinkViolation};
use crate::fork::OwnFd;
use crate::lock::lock;

/// The words of the packet that carries a file: magic, [`FILE`].
const WORDS: usize = 2;

/// The second word of the packet: `FILE`.
const FILE: u64 = u32::from_le_bytes(*b"FILE") as u64;

/// The time that a guest waits for a file that should have arrived already.
const TIMEOUT: Duration = Duration::from_secs(1);

/// One end of the channel for files.
#[derive(Debug)]
pub(super) enum Files {
    /// Between processes: the socket of the handshake.
    Socket(OwnFd),
    /// Inside one process.
    Queue(Arc<Mutex<VecDeque<OwnedFd>>>),
}

impl Files {
    /// The host's end of a socket. The kernel limits the number of files in flight per user, so the
    /// host shrinks the socket's buffer to a few packets per guest.
    pub(super) fn of_host(socket: OwnedFd) -> Files {
        // The kernel rounds the size up to its minimum. A failure only leaves more room in the
        // buffer.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, 1);
        Files::of_guest(socket)
    }

    /// The guest's end of a socket.
    pub(super) fn of_guest(socket: OwnedFd) -> Files {
        Files::Socket(OwnFd::new(socket))
    }

    /// Both ends inside one process.
    pub(super) fn pair() -> (Files, Files) {
        let queue = Arc::default();
        (Files::Queue(Arc::clone(&queue)), Files::Queue(queue))
    }

    /// Sends a file. The host calls this. `false` when the guest has not received the files before.
    pub(super) fn send(&self, file: BorrowedFd<'_>) -> bool {
        match self {
            // The deadline is now: the host does not wait for a guest that does not read its
            // socket.
            Files::Socket(socket) => {
                let words = [packet::MAGIC, FILE];
                packet::send(socket, &words, &[file], Instant::now()).is_ok()
            }
            Files::Queue(queue) => match file.try_clone_to_owned() {
                Ok(file) => {
                    let mut queue = lock(queue);
                    queue.push_back(file);
                    true
                }
                Err(_) => false,
            },
        }
    }

    /// Receives the next file. The guest calls this.
    pub(super) fn receive(&self) -> Result<OwnedFd, LinkError> {
        let none = || LinkError::from(LinkViolation::NoFile);
        match self {
            Files::Socket(socket) => {
                let deadline = Instant::now() + TIMEOUT;
                let (words, mut files) = match packet::receive(socket, WORDS, 1, deadline) {
                    Ok(packet) => packet,
                    Err(PacketError::Late) => return Err(none()),
                    Err(PacketError::Garbage(why)) => return Err(why.into()),
                    Err(PacketError::Link(error)) => return Err(error),
                };
                match files.pop() {
                    Some(file) if words[1] == FILE => Ok(file),
                    _ => Err(none()),
                }
            }
            Files::Queue(queue) => {
                let mut queue = lock(queue);
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
        (Files::of_host(a), Files::of_guest(b))
    }

    #[test]
    fn files_arrive_in_order_and_are_shared() {
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
    fn the_host_does_not_wait_for_a_guest_that_reads_nothing() {
        let (host, guest) = sockets();
        let file = sealed_file(4096).unwrap();
        let sent = (0..100_000).take_while(|_| host.send(file.as_fd())).count();
        assert!(sent > 0 && sent < 64, "{sent}");
        // The files in the buffer are still there.
        guest.receive().unwrap();
    }

    #[test]
    fn a_missing_file_is_an_error() {
        let (_host, guest) = Files::pair();
        guest.receive().unwrap_err();
        let (host, guest) = sockets();
        drop(host);
        guest.receive().unwrap_err();
    }
}
