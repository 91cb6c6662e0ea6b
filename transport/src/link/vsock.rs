//! Sockets of the family `AF_VSOCK`.
//!
//! The crate `vsock` does not serve here: its `connect` blocks without a time limit, while the
//! plugin's search for an executor has a deadline, and its sockets are blocking until a second
//! system call. This module adds the address family to `rustix`, whose sockets are non-blocking
//! from the start, and costs the plugin no further crates.

use std::io;
use std::mem::size_of;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SocketAddrAny, SocketFlags, SocketType};

use crate::poll::poll_until;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A vsock address: the context id of a machine, and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VsockAddr {
    cid: u32,
    port: u32,
}

// SAFETY: `with_sockaddr` passes a pointer to a complete `sockaddr_vm` and its length, and the
// address lives until the closure returns.
unsafe impl SocketAddrArg for VsockAddr {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        // SAFETY: `sockaddr_vm` consists of integers, for which zero is a valid value.
        let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
        address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        address.svm_cid = self.cid;
        address.svm_port = self.port;
        f(
            (&raw const address).cast(),
            size_of::<libc::sockaddr_vm>() as SocketAddrLen,
        )
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::VSOCK, SocketType::STREAM, FLAGS, None)
}

/// Connects to `port` of the machine `cid`. `timeout` limits the wait.
pub(super) fn connect(cid: u32, port: u32, timeout: Duration) -> io::Result<OwnedFd> {
    connect_socket(socket()?, &VsockAddr { cid, port }, timeout)
}

/// Connects a socket that is non-blocking. `timeout` limits the wait, whatever signals arrive
/// meanwhile.
fn connect_socket(
    socket: OwnedFd,
    address: &impl SocketAddrArg,
    timeout: Duration,
) -> io::Result<OwnedFd> {
    match rustix::net::connect(&socket, address) {
        Ok(()) => return Ok(socket),
        Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
    if poll_until(&mut fds, Instant::now() + timeout)? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    rustix::net::sockopt::socket_error(&socket)??;
    Ok(socket)
}

/// Listens at `port` for guests of every machine.
pub(super) fn listen(port: u32) -> io::Result<OwnedFd> {
    let socket = socket()?;
    let cid = libc::VMADDR_CID_ANY;
    rustix::net::bind(&socket, &VsockAddr { cid, port })?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}

/// Accepts a connection. Returns the socket, and the context id of the peer's machine.
pub(super) fn accept(listener: &OwnedFd) -> io::Result<(OwnedFd, u32)> {
    let (socket, address) = rustix::net::acceptfrom_with(listener, FLAGS)?;
    let cid = address.as_ref().and_then(cid_of);
    let cid = cid.ok_or(io::ErrorKind::InvalidData)?;
    Ok((socket, cid))
}

/// The context id of a vsock address. `None` for an address of another family.
fn cid_of(address: &SocketAddrAny) -> Option<u32> {
    let is_vsock = address.address_family() == AddressFamily::VSOCK
        && address.addr_len() as usize >= size_of::<libc::sockaddr_vm>();
    is_vsock.then(|| {
        let address = address.as_ptr().cast::<libc::sockaddr_vm>();
        // SAFETY: `as_ptr` points to `addr_len` initialised bytes of the kernel's answer. The
        // condition has checked that these bytes are a whole `sockaddr_vm`, and `read_unaligned`
        // does not depend on its alignment.
        unsafe { address.read_unaligned() }.svm_cid
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals;

    /// A program's profiler interrupts the wait for a connection, which is neither an error nor a
    /// time-out. There need not be a vsock here: the wait is the same for every family.
    #[test]
    fn signals_do_not_end_a_connection_attempt() {
        // The kernel drops connections to a listener with a full backlog, as a machine that is
        // paused answers none.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&silent, 0).unwrap();
        let address = silent.local_addr().unwrap();
        let short = Duration::from_millis(200);
        let mut backlog = Vec::new();
        while let Ok(socket) = std::net::TcpStream::connect_timeout(&address, short) {
            backlog.push(socket);
        }
        let tcp = || rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, FLAGS, None);
        signals::interrupting(|| {
            let began = Instant::now();
            let outcome = connect_socket(tcp().unwrap(), &address, short);
            let took = began.elapsed();
            let error = outcome.expect_err("nobody answers");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
            assert!(took >= short, "after {took:?}");
        });
    }

    #[test]
    fn an_address_survives_the_kernel_format() {
        let address = VsockAddr {
            cid: 0x0102_0304,
            port: 0x0506_0708,
        };
        assert_eq!(cid_of(&address.as_any()), Some(address.cid));
        let other = SocketAddrAny::from(std::net::SocketAddr::from(([127, 0, 0, 1], 80)));
        assert_eq!(cid_of(&other), None);
    }
}
