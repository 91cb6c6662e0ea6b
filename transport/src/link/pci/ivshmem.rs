//! The server's side of the protocol of QEMU's `ivshmem-doorbell` (QEMU,
//! `docs/specs/ivshmem-spec.rst`).
//!
//! The server sends little-endian `i64` words, some with a file:
//!
//! ```text
//!  0                  version of the protocol
//!  1                  id of the virtual machine
//!  -1   + memfd       its shared memory
//!  0    + eventfd     peer 0, the host: the virtual machine rings this eventfd
//!  1    + eventfd     the virtual machine: nobody rings this eventfd
//! ```
//!
//! QEMU sends nothing, and closes the socket when the virtual machine ends. QEMU expects one
//! eventfd per vector, and its default is one vector. QEMU exits when the size of the memory is not
//! a power of two.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;

use super::host::VmError;
use crate::error::{LinkError, LinkViolation};
use crate::link::scm_rights;
use crate::shm::doorbell::new_eventfd;
use crate::shm::memory::sealed_file;

/// The id of the virtual machine. The host is peer 0, so a doorbell's value is its vector alone.
const VM_ID: i64 = 1;

/// The resources of a connected virtual machine.
#[derive(Debug)]
pub struct Parts {
    /// The shared memory.
    pub memory: OwnedFd,
    /// The eventfd that the virtual machine rings.
    pub bell: OwnedFd,
    /// The socket to QEMU, which QEMU closes when it ends.
    pub hangup_socket: OwnedFd,
}

/// Sends a memory of `size` bytes and the doorbells to QEMU, which has connected to `socket`.
///
/// # Errors
///
/// [`VmError::Map`] when the host cannot create the memory, and [`VmError::Link`] when QEMU has
/// closed the socket or the peer is not QEMU.
pub fn welcome(socket: OwnedFd, size: usize) -> Result<Parts, VmError> {
    let memory = sealed_file(size)?;
    let (bell, unused) = (new_eventfd()?, new_eventfd()?);
    for (number, file) in [
        (0, None),
        (VM_ID, None),
        (-1, Some(memory.as_fd())),
        (0, Some(bell.as_fd())),
        (VM_ID, Some(unused.as_fd())),
    ] {
        send(&socket, number, file)?;
    }
    Ok(Parts {
        memory,
        bell,
        hangup_socket: socket,
    })
}

fn send(socket: &OwnedFd, number: i64, file: Option<BorrowedFd<'_>>) -> Result<(), LinkError> {
    let bytes = number.to_le_bytes();
    loop {
        match scm_rights::send(socket, &bytes, file.as_slice(), SendFlags::empty()) {
            // A new socket has room for five words. A socket without room is not QEMU's.
            Ok(8) => return Ok(()),
            Ok(_) | Err(Errno::AGAIN) => {
                return Err(LinkViolation::MachineSocket.into());
            }
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(LinkError::Closed),
            Err(error) => return Err(LinkError::system("sending to QEMU")(error)),
        }
    }
}
