//! The credentials of the process at the other end of a unix socket.

use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::error::LinkError;

/// A peer's credentials, as the kernel reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The process id. 0 for a process in a PID namespace that is not visible from this one.
    pub pid: i32,
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
}

/// Reads the credentials of the process that connected to `socket` (`SO_PEERCRED`).
///
/// `rustix` has this call too, but its process id cannot be 0.
pub(super) fn of(socket: &OwnedFd) -> Result<Peer, LinkError> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointers refer to a local ucred and to its length, and both outlive the call. The
    // kernel writes at most `len` bytes, and every bit pattern is a valid ucred.
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
        let error = std::io::Error::last_os_error();
        return Err(LinkError::io("reading the guest's credentials")(error));
    }
    Ok(Peer {
        pid: credentials.pid,
        uid: credentials.uid,
        gid: credentials.gid,
    })
}
