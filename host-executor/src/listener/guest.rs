//! What a listener does for a server and for a supervisor.
#![forbid(unsafe_code)]

use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use vgpu_transport::link::HostEnd;

use crate::peer::Peer;

/// A listener whose guests are served by this process.
pub trait GuestListener: Send + 'static {
    /// Waits up to `timeout` for a guest to connect. `None` if none did. A guest cannot delay this
    /// call: whatever waits for the guest belongs in [`IncomingGuest::open`].
    ///
    /// # Errors
    /// An error of the socket. The listener stays usable; the caller tries again later.
    fn accept(&mut self, timeout: Duration) -> io::Result<Option<IncomingGuest>>;
}

/// A listener whose sockets can be passed to another process, which then talks to the guest.
pub trait SocketListener: Send + 'static {
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
}

/// Completes a link's handshake. Called on the session's own thread, since it may wait for the
/// guest.
pub type OpenLink = Box<dyn FnOnce() -> Result<Box<dyn HostEnd>, Box<dyn Error>> + Send>;
