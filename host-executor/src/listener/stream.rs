//! Guests that connect over TCP or vsock.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use vgpu_transport::link::stream::{tcp, vsock};

use super::guest::{GuestListener, IncomingGuest, ListeningSocket, SocketListener};
use crate::peer::Peer;
use crate::policy::LinkKind;

/// How long a guest may take for its TLS handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

impl ListeningSocket for tcp::Listener {
    fn listening_socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

impl GuestListener for tcp::Listener {
    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        let arrival = tcp::Listener::accept(self, timeout)?;
        Ok(arrival.map(|arrival| IncomingGuest {
            peer: tcp_peer(&arrival),
            socket: arrival.as_fd().try_clone_to_owned().ok(),
            open: Box::new(move || Ok(Box::new(arrival.handshake(HANDSHAKE_TIMEOUT)?) as _)),
        }))
    }
}

impl SocketListener for tcp::Listener {
    fn accept_socket(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrival = tcp::Listener::accept(self, timeout)?;
        Ok(arrival.map(|arrival| {
            let peer = tcp_peer(&arrival);
            (arrival.into_socket(), peer)
        }))
    }
}

impl ListeningSocket for vsock::Listener {
    fn listening_socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

impl GuestListener for vsock::Listener {
    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        let Some((socket, cid)) = vsock::Listener::accept(self, timeout)? else {
            return Ok(None);
        };
        Ok(Some(IncomingGuest {
            peer: vsock_peer(self, cid),
            socket: socket.try_clone().ok(),
            open: Box::new(move || Ok(Box::new(vsock::host(socket)?) as _)),
        }))
    }
}

impl SocketListener for vsock::Listener {
    fn accept_socket(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let accepted = vsock::Listener::accept(self, timeout)?;
        Ok(accepted.map(|(socket, cid)| {
            let peer = vsock_peer(self, cid);
            (socket, peer)
        }))
    }
}

fn tcp_peer(arrival: &tcp::Arrival) -> Peer {
    Peer {
        address: Some(arrival.from()),
        ..Peer::new(format!("tcp from {}", arrival.from()), LinkKind::Tcp)
    }
}

fn vsock_peer(listener: &vsock::Listener, cid: Option<u32>) -> Peer {
    let endpoint = match (listener, cid) {
        (_, Some(cid)) => format!("vsock from machine {cid}"),
        (vsock::Listener::Unix(_, file), None) => format!("vsock at {}", file.path().display()),
        (vsock::Listener::Kernel(_), None) => "vsock".into(),
    };
    Peer {
        machine: cid,
        ..Peer::new(endpoint, LinkKind::Vsock)
    }
}
