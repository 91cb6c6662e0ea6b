//! The doors of a supervisor.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use vgpu_transport::link::stream::{tcp, vsock};
use vgpu_transport::link::unix::Listener;

use crate::server::Peer;

/// Where guests come in, whose sockets can be handed on.
pub trait Entrance: Send + 'static {
    /// Waits up to `timeout` for a guest: its socket, and who it is.
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>>;
}

impl Entrance for Listener {
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrival = self.accept(timeout).map_err(io::Error::other)?;
        Ok(arrival.map(|arrival| {
            let peer = crate::unix::peer(self, &arrival);
            (arrival.into_socket(), peer)
        }))
    }
}

impl Entrance for tcp::Listener {
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrival = self.accept(timeout)?;
        Ok(arrival.map(|arrival| {
            let peer = crate::net::tcp_peer(&arrival);
            (arrival.into_socket(), peer)
        }))
    }
}

impl Entrance for vsock::Listener {
    fn next(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrived = self.accept(timeout)?;
        Ok(arrived.map(|(socket, cid)| {
            let peer = crate::net::vsock_peer(self, cid);
            (socket.into(), peer)
        }))
    }
}
