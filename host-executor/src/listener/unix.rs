//! Guests that connect to a unix socket.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use vgpu_transport::link::unix::{Arrival, Listener};

use super::guest::{GuestListener, IncomingGuest, ListeningSocket, SocketListener};
use crate::peer::{Peer, Process};
use crate::policy::LinkKind;

impl ListeningSocket for Listener {
    fn listening_socket(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

impl GuestListener for Listener {
    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>> {
        let arrival = Listener::accept(self, timeout).map_err(io::Error::other)?;
        Ok(arrival.map(|arrival| {
            let peer = peer(self, &arrival);
            let socket = arrival.as_fd().try_clone_to_owned().ok();
            let open = Box::new(move || Ok(Box::new(arrival.handshake()?) as _));
            IncomingGuest { peer, open, socket }
        }))
    }
}

impl SocketListener for Listener {
    fn accept_socket(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>> {
        let arrival = Listener::accept(self, timeout).map_err(io::Error::other)?;
        Ok(arrival.map(|arrival| {
            let peer = peer(self, &arrival);
            (arrival.into_socket(), peer)
        }))
    }
}

fn peer(listener: &Listener, arrival: &Arrival) -> Peer {
    let endpoint = format!("unix:{}", listener.path().display());
    Peer {
        process: Some(process(arrival)),
        ..Peer::new(endpoint, LinkKind::Unix)
    }
}

fn process(arrival: &Arrival) -> Process {
    let peer = arrival.peer();
    // Only for logs: the pid may belong to another process by now, and a process chooses its own
    // name.
    let program = fs::read_to_string(format!("/proc/{}/comm", peer.pid)).ok();
    Process {
        pid: peer.pid,
        uid: peer.uid,
        program: program.map(|name| name.chars().filter(|c| !c.is_control()).collect()),
    }
}
