//! A server: guests connect to its listeners, and each gets a thread and a session.
//!
//! - `core`: the server, its listeners, its shutdown.
//! - `guest_thread`: the thread of a connection, from its handshake to its end.
//! - `seat`: the places in the table of sessions.
//! - `shared`, `status`: what the threads share, and snapshots of it.

mod core;
mod guest_thread;
mod seat;
mod shared;
mod status;

pub use core::{Server, SessionInfo};
