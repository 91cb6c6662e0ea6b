//! Listeners: the sockets that guests connect to, and the threads that accept on them.
//!
//! - `guest`: the contracts, [`GuestListener`] and [`SocketListener`].
//! - `unix`, `stream`: the contracts for unix sockets, TCP and vsock.
//! - `socket_file`: a stream socket at a path, removed when its listener is dropped.
//! - `threads`: one accepting thread per listener.

mod guest;
mod socket_file;
mod stream;
pub(crate) mod threads;
mod unix;

pub use guest::{GuestListener, IncomingGuest, OpenLink, SocketListener};
pub(crate) use socket_file::wait_readable;
pub use socket_file::{DEFAULT_MODE, SocketFile, SocketFileError, bind_stream};
pub(crate) use stream::HANDSHAKE_TIMEOUT;
pub use threads::ListenerId;
