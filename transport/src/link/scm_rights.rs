//! `SCM_RIGHTS`: open files sent over a unix socket together with bytes. This module encodes and
//! decodes all control messages of the project.
#![forbid(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix,
};

/// The maximum number of files in one message.
pub const MAX_FILES: usize = 16;

/// The result of one receive call.
#[derive(Debug)]
pub struct Received {
    /// The number of bytes; 0 when the other side has closed the socket.
    pub bytes: usize,
    /// The files, in the order in which they were sent.
    pub files: Vec<OwnedFd>,
    /// Whether the kernel has dropped bytes or files that exceeded the buffers.
    pub is_truncated: bool,
}

/// Sends `bytes` and at most [`MAX_FILES`] files. Returns the number of bytes sent. The files
/// travel with the first byte.
///
/// # Errors
///
/// `TOOBIG` for more than [`MAX_FILES`] files, and the errors of `sendmsg(2)`.
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    with_control(files, |control| {
        let parts = [IoSlice::new(bytes)];
        rustix::net::sendmsg(socket, &parts, control, flags | SendFlags::NOSIGNAL)
    })
}

/// The same as [`send`], to an address, on an unconnected socket.
///
/// # Errors
///
/// As [`send`].
pub fn send_to(
    socket: impl AsFd,
    address: &SocketAddrUnix,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    with_control(files, |control| {
        let parts = [IoSlice::new(bytes)];
        rustix::net::sendmsg_addr(socket, address, &parts, control, SendFlags::NOSIGNAL)
    })
}

fn with_control<T>(
    files: &[BorrowedFd<'_>],
    send: impl FnOnce(&mut SendAncillaryBuffer<'_, '_, '_>) -> Result<T, Errno>,
) -> Result<T, Errno> {
    if files.len() > MAX_FILES {
        return Err(Errno::TOOBIG);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::TOOBIG);
    }
    send(&mut control)
}

/// Receives bytes into `bytes`, and the files that came with them. [`RecvFlags::CMSG_CLOEXEC`] sets
/// the close-on-exec flag of the files.
///
/// # Errors
///
/// The errors of `recvmsg(2)`.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], flags: RecvFlags) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space[..]);
    let mut parts = [IoSliceMut::new(bytes)];
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?;
    // The iterator must run to its end: every received descriptor needs an owner that closes it.
    let files = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        })
        .flatten()
        .collect();
    Ok(Received {
        bytes: got.bytes,
        files,
        is_truncated: got
            .flags
            .intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, Write as _};
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn files_arrive_in_order_with_their_bytes() {
        let (here, there) = UnixDatagram::pair().unwrap();
        let mut files: Vec<std::fs::File> = (0..3u8)
            .map(|number| {
                let file =
                    rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                let mut file = std::fs::File::from(file);
                file.write_all(&[number]).unwrap();
                file
            })
            .collect();
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        assert_eq!(send(&here, b"three", &borrowed, SendFlags::empty()), Ok(5));
        assert_eq!(send(&here, b"none", &[], SendFlags::empty()), Ok(4));
        files.clear();
        let mut bytes = [0; 16];
        let got = receive(&there, &mut bytes, RecvFlags::CMSG_CLOEXEC).unwrap();
        assert_eq!(
            (&bytes[..got.bytes], got.is_truncated),
            (&b"three"[..], false)
        );
        for (number, file) in (0..).zip(got.files) {
            let (mut file, mut content) = (std::fs::File::from(file), Vec::new());
            file.rewind().unwrap();
            file.read_to_end(&mut content).unwrap();
            assert_eq!(content, [number]);
            files.push(file);
        }
        assert_eq!(files.len(), 3);
        let got = receive(&there, &mut bytes[..2], RecvFlags::CMSG_CLOEXEC).unwrap();
        assert!(got.is_truncated && got.files.is_empty());
    }

    #[test]
    fn too_many_files_are_refused() {
        let (here, _there) = UnixDatagram::pair().unwrap();
        let many = [here.as_fd(); MAX_FILES + 1];
        assert_eq!(
            send(&here, b"x", &many, SendFlags::empty()),
            Err(Errno::TOOBIG)
        );
    }
}
