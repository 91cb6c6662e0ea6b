//! Who is at the other end of a socket.

use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;

use super::LinkError;
use super::unix::Peer;

/// Asks the kernel who connected to `socket`.
///
/// (`rustix` has this call too, but its process id cannot be 0, which is what the kernel gives for a
/// process in a namespace that we cannot see into.)
pub(super) fn of(socket: &OwnedFd) -> Result<Peer, LinkError> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers are to a ucred and to its length, both ours and both living longer than the call; every bit
    // pattern is a ucred.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(LinkError::System {
            what: "asking who the guest is",
            error: Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO),
        });
    }
    Ok(Peer {
        pid: credentials.pid,
        uid: credentials.uid,
        gid: credentials.gid,
    })
}
