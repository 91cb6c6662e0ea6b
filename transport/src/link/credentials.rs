//! The credentials of the process at the other end of a unix socket.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::Errno;

use crate::error::LinkError;

/// A peer's credentials, as the kernel reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// The process id. 0 for a process in a PID namespace that is not visible from this one.
    pub pid: i32,
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
}

/// Reads the credentials of the process that connected to `socket`, or, of a socket that has
/// connected, of the process that listens (`SO_PEERCRED`).
///
/// `rustix` has this call too, but its process id cannot be 0.
///
/// # Errors
/// [`LinkError::System`] if the kernel does not say.
pub fn of(socket: impl AsFd) -> Result<PeerCredentials, LinkError> {
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
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        return Err(LinkError::io("reading the peer's credentials")(error));
    }
    Ok(PeerCredentials {
        pid: credentials.pid,
        uid: credentials.uid,
        gid: credentials.gid,
    })
}

/// The process that connected to `socket`, as a descriptor that becomes readable when the process
/// ends. `None` on Linux before 6.5 (`SO_PEERPIDFD`), or if the process has ended already: the
/// socket alone then shows the end.
pub(super) fn process(socket: &OwnedFd) -> Option<OwnedFd> {
    /// `SO_PEERPIDFD` of `asm-generic/socket.h`, which x86-64 and AArch64 use.
    const SO_PEERPIDFD: libc::c_int = 77;
    let (mut process, mut len): (RawFd, _) = (-1, size_of::<RawFd>() as libc::socklen_t);
    // SAFETY: the pointers refer to a local integer and to its length, and both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut process).cast(),
            &raw mut len,
        )
    };
    // SAFETY: the kernel has opened the descriptor for this call, close-on-exec, and nobody else
    // knows it.
    (result == 0 && process >= 0).then(|| unsafe { OwnedFd::from_raw_fd(process) })
}

/// A datagram, with the process that has sent it.
#[derive(Debug)]
pub struct Datagram {
    /// The number of bytes.
    pub bytes: usize,
    /// The first file that came with the bytes. Further files are closed.
    pub file: Option<OwnedFd>,
    /// The sender, as the kernel reports it. `None` without [`report_senders`].
    pub sender: Option<PeerCredentials>,
}

/// Makes the kernel report the sender of each datagram that arrives at `socket` from now on
/// (`SO_PASSCRED`).
///
/// # Errors
///
/// The errors of `setsockopt(2)`.
pub fn report_senders(socket: impl AsFd) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_passcred(socket, true)
}

/// Receives a datagram of a unix socket. Files that came with it are closed on exec.
///
/// `rustix` has this call too, but its process id cannot be 0.
///
/// # Errors
///
/// The errors of `recvmsg(2)`.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Datagram> {
    // Room for the sender and 16 files, in words, for the alignment of the headers.
    let mut control = [0u64; 32];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: `msghdr` is a C struct of integers and pointers, for which all zero bits are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: `message` points to one part, which is the caller's buffer with its length, and to
    // `control` with its length. All of them outlive the call.
    let got = unsafe {
        libc::recvmsg(
            socket.as_fd().as_raw_fd(),
            &raw mut message,
            libc::MSG_CMSG_CLOEXEC,
        )
    };
    let bytes = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    let (mut files, mut sender) = (Vec::new(), None);
    // SAFETY: the kernel has set the length of the control data in `message`, and the macros walk
    // the headers within that length. The data of a header follows it, as long as `cmsg_len` says;
    // it is read without alignment. Descriptors that have arrived belong to nobody else. Every bit
    // pattern is a valid ucred.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            let len = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for index in 0..len / size_of::<RawFd>() {
                        let file = data.cast::<RawFd>().add(index).read_unaligned();
                        files.push(OwnedFd::from_raw_fd(file));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len >= size_of::<libc::ucred>() => {
                    let libc::ucred { pid, uid, gid } = data.cast::<libc::ucred>().read_unaligned();
                    sender = Some(PeerCredentials { pid, uid, gid });
                }
                _ => {}
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok(Datagram {
        bytes,
        file: files.into_iter().next(),
        sender,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use rustix::net::SendFlags;

    use super::*;
    use crate::link::scm_rights;

    #[test]
    fn datagrams_come_with_their_sender_and_a_file() {
        let (here, there) = UnixDatagram::pair().unwrap();
        report_senders(&there).unwrap();
        let (one, two) = (
            rustix::io::dup(&here).unwrap(),
            rustix::io::dup(&here).unwrap(),
        );
        let files = [one.as_fd(), two.as_fd()];
        scm_rights::send(&here, b"files", &files, SendFlags::empty()).unwrap();
        scm_rights::send(&here, b"", &[], SendFlags::empty()).unwrap();
        let mut bytes = [0; 16];
        let got = receive(&there, &mut bytes).unwrap();
        assert_eq!(&bytes[..got.bytes], b"files");
        assert!(got.file.is_some());
        let sender = got.sender.expect("a sender");
        assert_eq!(sender.pid.cast_unsigned(), std::process::id());
        assert_eq!(sender.uid, rustix::process::getuid().as_raw());
        let got = receive(&there, &mut bytes).unwrap();
        assert!(got.bytes == 0 && got.file.is_none() && got.sender.is_some());
    }
}
