//! Open files, sent over a unix socket with the bytes they belong to: the one place where control messages are put
//! together and taken apart.
#![forbid(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix,
};

/// The most files that go, or are taken, with one message.
pub const MOST: usize = 16;

/// What came in one call.
#[derive(Debug)]
pub struct Received {
    /// Bytes; 0 when the other side has hung up.
    pub bytes: usize,
    /// Files, in the order they were sent.
    pub files: Vec<OwnedFd>,
    /// There were more files than [`MOST`], or more bytes than there was room for. They are lost.
    pub is_cut: bool,
}

/// Sends `bytes` and `files`, at most [`MOST`]. Returns how many bytes went; the files went with the first of them.
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

/// The same to an address, on a socket that is not connected.
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
    if files.len() > MOST {
        return Err(Errno::TOOBIG);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(Errno::TOOBIG);
    }
    send(&mut control)
}

/// Receives bytes into `bytes`, and the files that come with them. With [`RecvFlags::CMSG_CLOEXEC`] programs that this one
/// starts do not have them.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], flags: RecvFlags) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space[..]);
    let mut parts = [IoSliceMut::new(bytes)];
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?;
    // Taken out in any case, so that they are closed if nobody wants them.
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
        is_cut: got
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
        assert_eq!((&bytes[..got.bytes], got.is_cut), (&b"three"[..], false));
        for (number, file) in (0..).zip(got.files) {
            let (mut file, mut content) = (std::fs::File::from(file), Vec::new());
            file.rewind().unwrap();
            file.read_to_end(&mut content).unwrap();
            assert_eq!(content, [number]);
            files.push(file);
        }
        assert_eq!(files.len(), 3);
        let got = receive(&there, &mut bytes[..2], RecvFlags::CMSG_CLOEXEC).unwrap();
        assert!(got.is_cut && got.files.is_empty());
    }

    #[test]
    fn more_files_than_fit_are_refused() {
        let (here, _there) = UnixDatagram::pair().unwrap();
        let many = [here.as_fd(); MOST + 1];
        assert_eq!(
            send(&here, b"x", &many, SendFlags::empty()),
            Err(Errno::TOOBIG)
        );
    }
}
