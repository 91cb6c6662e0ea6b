//! What a listener does for a server and for a supervisor.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use vgpu_transport::link::pci::VmError;
use vgpu_transport::link::stream::tcp::TcpError;
use vgpu_transport::link::unix::HandshakeError;
use vgpu_transport::link::{HostEnd, LinkError};

use crate::machine_watch::MachineWatch;
use crate::peer::Peer;

/// A listener, as the thread waits for it that accepts its guests.
pub trait ListeningSocket: Send + 'static {
    /// The socket that is readable when a guest has connected, if the listener waits for nothing
    /// else. `None`: the thread asks the listener every 100 ms.
    fn listening_socket(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A listener whose guests are served by this process.
pub trait GuestListener: ListeningSocket {
    /// Waits up to `timeout` for a guest to connect. `None` if none did. A guest cannot delay this
    /// call: whatever waits for the guest belongs in [`IncomingGuest::open`].
    ///
    /// # Errors
    /// An error of the socket. The listener stays usable; the caller tries again later.
    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>>;

    /// The virtual machine of the listener, if the listener has one.
    fn machine(&self) -> Option<&Arc<MachineWatch>> {
        None
    }
}

/// A listener whose sockets can be passed to another process, which then talks to the guest.
pub trait SocketListener: ListeningSocket {
    /// Waits up to `timeout` for a guest to connect. Returns the guest's socket, on which nothing
    /// has been read or written.
    ///
    /// # Errors
    /// As [`GuestListener::accept`].
    fn accept_socket(&mut self, timeout: Duration) -> io::Result<Option<(OwnedFd, Peer)>>;
}

/// A guest that has connected and has no session yet.
pub struct IncomingGuest {
    /// What the host knows about the guest without asking it.
    pub peer: Peer,
    /// Completes the link's handshake.
    pub open: OpenLink,
    /// A duplicate of the guest's socket. Shutting it down cuts the handshake short. `None` if the
    /// link has no socket.
    pub socket: Option<OwnedFd>,
}

/// Completes a link's handshake, within a time limit of its own. Called on a thread of the
/// connection, since it may wait for the guest.
pub type OpenLink = Box<dyn FnOnce() -> Result<Box<dyn HostEnd>, OpenError> + Send>;

/// Why a link's handshake was not completed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The handshake on a unix socket failed.
    #[error(transparent)]
    Unix(#[from] HandshakeError),
    /// The handshake over TCP failed.
    #[error(transparent)]
    Tcp(#[from] TcpError),
    /// The handshake with a program in a virtual machine failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The guest's process is unknown: its socket failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A system call of this process failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The supervisor handed over a guest that has no socket: the supervisor's fault.
    #[error("the link of a virtual machine cannot be handed to a worker")]
    NoSocket,
}
