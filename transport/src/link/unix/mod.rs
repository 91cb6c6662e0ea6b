//! The link between processes of one machine: a unix socket for the handshake, a
//! [window](crate::shm) for the messages.
//!
//! ```text
//!  guest                                        host
//!  connect            ------------------------> accept, credentials from the kernel
//!  hello: layouts, wanted window size --------> choose
//!                     <------------------------ welcome: size; memfd, two eventfds
//!  check seals and size, map
//!  opened: epoch      ------------------------> the session begins
//! ```
//!
//! The socket is a `SOCK_SEQPACKET` socket, so each packet is one whole message, and `connect`
//! fails with an error of its own at the socket of another program. After the handshake the socket
//! carries the files that the host [shares](crate::link::HostEnd::share). The socket stays open as
//! the hang-up signal: the kernel closes it when either process dies.
//!
//! The permissions of the socket file decide who may use the executor. Beyond that the host trusts
//! a guest with nothing. Each step of the handshake has a time limit. [`Listener::accept`] does not
//! wait for the guest's packets, so a silent guest delays nobody else.

mod arrival;
mod guest;
mod handshake;
mod listener;

pub use super::credentials::PeerCredentials;
pub use super::socket_file::SocketFileError;
pub use arrival::{Arrival, HandshakeError, ListenOptions};
pub use guest::{SocketMismatch, UnixConnectError, connect};
pub use listener::{ListenError, Listener};
