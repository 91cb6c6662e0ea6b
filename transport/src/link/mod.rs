//! Links: the transport of messages between guest and host.
//!
//! A link is a pair of ends, [`GuestEnd`] and [`HostEnd`]. A link delivers messages with payloads
//! whole and in order, in both directions. Waiting is cheap and ends when the peer dies. A link
//! does not interpret messages; [`wire`](crate::wire) defines them.
//!
//! | link | module | medium |
//! |---|---|---|
//! | in-process | [`window`] | shared memory of one process |
//! | `unix` | [`unix`] | a memfd and eventfds, passed over a unix socket |
//! | `pci` | [`pci`] | a PCI BAR of a virtual machine |
//! | `vsock`, `tcp` | [`stream`] | a byte stream, with TLS off the loopback |
//!
//! [`socket_file`] binds the unix sockets of listeners.
//!
//! [`connect`] opens the guest's end of the link to an [`Endpoint`].

pub mod connect;
pub mod credentials;
mod end;
pub mod endpoint;
mod epoch;
mod fd_passing;
mod link_state;
mod packet;
pub mod pci;
pub mod scm_rights;
mod side;
mod slow_wait;
pub mod socket_file;
pub mod stream;
mod stream_state;
pub mod unix;
mod vsock;
pub mod window;
mod window_end;
mod window_state;

pub use crate::error::{LinkError, LinkViolation};
pub use end::{
    Counters, GuestEnd, HostEnd, Incoming, IsCancelled, LAST_MESSAGES, StagingRegion, chunk_len,
};
pub use endpoint::{Endpoint, EndpointError};
pub use link_state::{LinkState, LinkWatch};
