//! Guests that come in through a stream: TCP from other machines, vsock out of virtual machines.

use std::io;
use std::time::Duration;

use vgpu_transport::link::stream::{tcp, vsock};

use crate::server::{Door, Guest, Peer};
use crate::tenant::LinkKind;

/// How long a guest may take to bring encryption up.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);

impl Door for tcp::Listener {
    fn knock(&mut self, timeout: Duration) -> io::Result<Option<Guest>> {
        let arrival = self.accept(timeout)?;
        Ok(arrival.map(|arrival| Guest {
            peer: tcp_peer(&arrival),
            open: Box::new(move || Ok(Box::new(arrival.handshake(HANDSHAKE)?) as _)),
        }))
    }
}

impl Door for vsock::Listener {
    fn knock(&mut self, timeout: Duration) -> io::Result<Option<Guest>> {
        let Some((socket, cid)) = self.accept(timeout)? else {
            return Ok(None);
        };
        Ok(Some(Guest {
            peer: vsock_peer(self, cid),
            open: Box::new(move || Ok(Box::new(vsock::host(socket)?) as _)),
        }))
    }
}

/// Who a guest is that came in through TCP.
pub(crate) fn tcp_peer(arrival: &tcp::Arrival) -> Peer {
    Peer {
        endpoint: format!("tcp from {}", arrival.from()),
        link: LinkKind::Tcp,
        machine: None,
        process: None,
        certificate: None,
    }
}

/// Who a guest is that came in through `listener`.
pub(crate) fn vsock_peer(listener: &vsock::Listener, cid: Option<u32>) -> Peer {
    let endpoint = match (listener, cid) {
        (_, Some(cid)) => format!("vsock from machine {cid}"),
        (vsock::Listener::Unix(_, path), None) => format!("vsock at {}", path.display()),
        (vsock::Listener::Kernel(_), None) => "vsock".into(),
    };
    Peer {
        endpoint,
        link: LinkKind::Vsock,
        machine: cid,
        process: None,
        certificate: None,
    }
}
