//! Guests that come in through a unix socket.

use std::fs;
use std::io;
use std::time::Duration;

use vgpu_transport::link::unix::{Arrival, Listener};

use crate::server::{Door, Guest, Peer, Process};
use crate::tenant::LinkKind;

impl Door for Listener {
    fn knock(&mut self, timeout: Duration) -> io::Result<Option<Guest>> {
        let arrival = self.accept(timeout).map_err(io::Error::other)?;
        Ok(arrival.map(|arrival| {
            let peer = peer(self, &arrival);
            let open = Box::new(move || Ok(Box::new(arrival.handshake()?) as _));
            Guest { peer, open }
        }))
    }
}

/// Who a guest is that came in through `listener`.
pub(crate) fn peer(listener: &Listener, arrival: &Arrival) -> Peer {
    Peer {
        endpoint: format!("unix:{}", listener.path().display()),
        link: LinkKind::Unix,
        machine: None,
        process: Some(process(arrival)),
        certificate: None,
    }
}

fn process(arrival: &Arrival) -> Process {
    let peer = arrival.peer();
    // For logs only: by now the process may be another one, and any process can name itself.
    let program = fs::read_to_string(format!("/proc/{}/comm", peer.pid)).ok();
    Process {
        pid: peer.pid,
        uid: peer.uid,
        program: program.map(|name| name.chars().filter(|c| !c.is_control()).collect()),
    }
}
