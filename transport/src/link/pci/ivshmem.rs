//! The protocol by which QEMU's `ivshmem-doorbell` gets its memory and its doorbells.
//!
//! A stream of little-endian `i64`, some with a file:
//!
//! ```text
//!  0                  version of the protocol
//!  1                  id of the virtual machine
//!  -1   + memfd       its shared memory
//!  0    + eventfd     peer 0, the host: what the virtual machine rings
//!  1    + eventfd     the virtual machine itself: what would ring it
//! ```
//!
//! QEMU says nothing, ever; that it closes the socket is all we learn of it. It wants exactly as many eventfds as it has
//! vectors, and one is the default, so there is one. It ends itself when the memory's size is no power of two.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;

use super::host::VmError;
use crate::link::{LinkError, scm_rights};
use crate::shm::doorbell::{new_eventfd, system};
use crate::shm::memory::sealed_file;

/// The number of the virtual machine; the host is peer 0, so that a doorbell is the number of its vector.
const VM_ID: i64 = 1;

/// What a virtual machine has been given, and is needed to serve it.
#[derive(Debug)]
pub struct Parts {
    /// The memory.
    pub memory: OwnedFd,
    /// What it rings.
    pub bell: OwnedFd,
    /// The socket to QEMU: hangs up when it ends.
    pub line: OwnedFd,
}

/// Gives QEMU, which has connected on `socket`, a memory of `size` bytes and its doorbells.
pub fn welcome(socket: OwnedFd, size: usize) -> Result<Parts, VmError> {
    let memory = sealed_file(size)?;
    let (bell, unheard) = (new_eventfd()?, new_eventfd()?);
    for (number, file) in [
        (0, None),
        (VM_ID, None),
        (-1, Some(memory.as_fd())),
        (0, Some(bell.as_fd())),
        (VM_ID, Some(unheard.as_fd())),
    ] {
        send(&socket, number, file)?;
    }
    Ok(Parts {
        memory,
        bell,
        line: socket,
    })
}

fn send(socket: &OwnedFd, number: i64, file: Option<BorrowedFd<'_>>) -> Result<(), LinkError> {
    let bytes = number.to_le_bytes();
    loop {
        match scm_rights::send(socket, &bytes, file.as_slice(), SendFlags::empty()) {
            // A fresh socket has room for these few words; one without is not QEMU's.
            Ok(8) => return Ok(()),
            Ok(_) | Err(Errno::AGAIN) => {
                return Err(LinkError::PeerMisbehaved(
                    "its socket takes no 8 bytes".into(),
                ));
            }
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(LinkError::Closed),
            Err(error) => return Err(system("sending to QEMU")(error)),
        }
    }
}
