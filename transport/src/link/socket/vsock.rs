//! `AF_VSOCK`, by the kernel's own calls.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use crate::shm::doorbell::poll;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the call takes numbers only.
    let fd = check(unsafe { libc::socket(libc::AF_VSOCK, kind, 0) })?;
    // SAFETY: the kernel has just opened it for us, and nobody else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: all-zero bytes are a sockaddr_vm: it is made of integers.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = cid;
    address.svm_port = port;
    address
}

const LENGTH: libc::socklen_t = size_of::<libc::sockaddr_vm>() as libc::socklen_t;

/// Connects without waiting longer than `timeout`.
pub(crate) fn connect(cid: u32, port: u32, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let address = address(cid, port);
    // SAFETY: the pointer is to an address of that length, ours and living longer than the call.
    let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) };
    match check(result) {
        Ok(_) => return Ok(socket),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
    if poll(&mut fds, timeout)? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    rustix::net::sockopt::socket_error(&socket)??;
    Ok(socket)
}

/// Listens at a port, for every machine.
pub(crate) fn listen(port: u32) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let address = address(libc::VMADDR_CID_ANY, port);
    // SAFETY: the pointer is to an address of that length, ours and living longer than the call.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), LENGTH) })?;
    // SAFETY: the call takes numbers only.
    check(unsafe { libc::listen(socket.as_raw_fd(), 64) })?;
    Ok(socket)
}

/// Accepts who has come: the socket, and the number of its machine.
pub(crate) fn accept(socket: &OwnedFd) -> io::Result<(OwnedFd, u32)> {
    let mut from = address(0, 0);
    let mut length = LENGTH;
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the pointers are to an address and its length, ours and living longer than the call.
    let fd = check(unsafe {
        libc::accept4(
            socket.as_raw_fd(),
            (&raw mut from).cast(),
            &raw mut length,
            flags,
        )
    })?;
    // SAFETY: the kernel has just opened it for us, and nobody else knows its number.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, from.svm_cid))
}
