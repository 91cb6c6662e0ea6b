//! Sockets of the handshake, and their files.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// A new non-blocking `SOCK_SEQPACKET` socket.
pub(super) fn new() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Connects to the socket at `path`.
pub(super) fn connect(socket: &OwnedFd, path: &Path) -> Result<(), Errno> {
    rustix::net::connect(socket, &SocketAddrUnix::new(path)?)
}

/// Whether a file is a socket.
pub(super) fn is_socket(file: &std::fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_socket(&file.file_type())
}
