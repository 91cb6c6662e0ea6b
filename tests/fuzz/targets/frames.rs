//! Frames on a stream, in parts of any size, read by the guest's end. The host's end uses the same
//! code.

use std::io;
use std::os::fd::OwnedFd;

use vgpu_transport::bytes::BytesMut;
use vgpu_transport::link::GuestEnd as _;
use vgpu_transport::link::LinkError;
use vgpu_transport::link::stream::{Channel, StreamGuest};
use vgpu_transport::wire::{MAX_MESSAGE, MAX_PAYLOAD};

/// A stream that returns the input in parts, and discards all writes.
struct Script {
    bytes: Vec<u8>,
    at: usize,
    piece: usize,
}

impl Channel for Script {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let rest = &self.bytes[self.at..];
        let count = rest.len().min(out.len()).min(self.piece);
        out[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(count)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn close(&mut self) {}

    fn socket(&self) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

pub(crate) fn run(data: &[u8]) {
    let Some((&piece, bytes)) = data.split_first() else {
        return;
    };
    let mut guest = StreamGuest::new(Box::new(Script {
        bytes: bytes.to_vec(),
        at: 0,
        piece: usize::from(piece) + 1,
    }));
    let mut retired = 0;
    let mut message = Vec::new();
    let mut room = vec![0; 256];
    // The loop ends, since the end of the input is the end of the stream.
    loop {
        message.clear();
        let now = guest.retired();
        assert!(now >= retired, "{now} after {retired}");
        retired = now;
        match guest.receive(&mut message, BytesMut::from(&mut room[..])) {
            Ok(len) => {
                assert!(len <= room.len() && message.len() <= MAX_MESSAGE && len <= MAX_PAYLOAD)
            }
            Err(LinkError::Closed | LinkError::PeerMisbehaved(_)) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(guest.is_closed());
}
