//! Listeners: the sockets that guests connect to, and the threads that accept on them.
//!
//! - `guest`: the contracts, [`ListeningSocket`], [`GuestListener`] and [`SocketListener`].
//! - `unix`, `stream`: the contracts for unix sockets, TCP and vsock.
//! - `threads`: one accepting thread per listener.
//! - `socket_watch`: socket files that somebody removes.
//! - `wait`: waiting for a connection.

mod guest;
mod socket_watch;
mod stream;
pub(crate) mod threads;
mod unix;
mod wait;

pub use guest::{
    GuestListener, IncomingGuest, ListeningSocket, OpenError, OpenLink, SocketListener,
};
pub use socket_watch::{LOOK_INTERVAL, SocketOwner, SocketWatch, Watched};
pub(crate) use stream::HANDSHAKE_TIMEOUT;
pub use threads::ListenerId;
pub(crate) use wait::wait_readable;
