//! Packets of the unix link: little-endian 64-bit words with files, on a `SOCK_SEQPACKET` socket.
#![forbid(unsafe_code)]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::scm_rights;
use crate::error::{LinkError, LinkViolation};
use crate::poll::poll;

/// The first word of every packet: `VGPULINK`.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"VGPULINK");

/// Why a packet cannot be sent or received.
pub(super) enum PacketError {
    /// The deadline has passed.
    Late,
    /// The peer has sent something that is not the expected packet.
    Garbage(LinkViolation),
    /// The socket has failed.
    Link(LinkError),
}

impl From<LinkError> for PacketError {
    fn from(error: LinkError) -> PacketError {
        PacketError::Link(error)
    }
}

/// Sends one packet of words and the files `fds`. Waits for room until `deadline`.
pub(super) fn send(
    socket: &OwnedFd,
    words: &[u64],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(), PacketError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    loop {
        match scm_rights::send(socket, &bytes, fds, SendFlags::empty()) {
            Ok(_) => return Ok(()),
            Err(Errno::AGAIN) => wait_for(socket, PollFlags::OUT, deadline)?,
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(LinkError::Closed.into()),
            Err(error) => {
                return Err(LinkError::system("sending to the peer's socket")(error).into());
            }
        }
    }
}

/// Receives one packet of exactly `count` words and at most `max_fds` files. The first word is
/// [`MAGIC`].
pub(super) fn receive(
    socket: &OwnedFd,
    count: usize,
    max_fds: usize,
    deadline: Instant,
) -> Result<(Vec<u64>, Vec<OwnedFd>), PacketError> {
    loop {
        // One byte more than expected, to detect a packet that is too long.
        let mut bytes = vec![0; count * 8 + 1];
        let got = match scm_rights::receive(socket, &mut bytes, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got,
            Err(Errno::AGAIN) => {
                wait_for(socket, PollFlags::IN, deadline)?;
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Err(LinkError::Closed.into()),
            Err(error) => {
                return Err(LinkError::system("receiving from the peer's socket")(error).into());
            }
        };
        let fds = got.files;
        if got.bytes == 0 {
            return Err(LinkError::Closed.into());
        }
        if got.bytes != count * 8 || fds.len() > max_fds || got.is_truncated {
            return Err(PacketError::Garbage(LinkViolation::Packet {
                bytes: got.bytes,
                files: fds.len(),
                expected: count * 8,
                max_files: max_fds,
            }));
        }
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| {
                word.iter()
                    .rev()
                    .fold(0, |value, byte| value << 8 | u64::from(*byte))
            })
            .collect();
        if words[0] != MAGIC {
            return Err(PacketError::Garbage(LinkViolation::PacketMagic {
                found: words[0],
            }));
        }
        return Ok((words, fds));
    }
}

/// Waits until the socket is ready, until `deadline` at most.
fn wait_for(socket: &OwnedFd, ready: PollFlags, deadline: Instant) -> Result<(), PacketError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(PacketError::Late);
    }
    let mut fds = [PollFd::new(socket, ready)];
    poll(&mut fds, left).map_err(LinkError::system("waiting for the peer's socket"))?;
    Ok(())
}
