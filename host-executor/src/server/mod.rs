//! A server: guests connect to its listeners, and each gets a thread and a session.
//!
//! - `core`: the server, its listeners, its shutdown.
//! - `guest_thread`: the thread of a connection, from its handshake to its end.
//! - `registration`: the entries in the table of sessions.
//! - `watchdog`: the thread that reports what lasts too long.
//! - `device`: an engine, its scheduler and its weights.
//! - `shared`, `status`: what the threads share, and snapshots of it.

mod core;
mod device;
mod guest_thread;
mod registration;
mod shared;
mod silent_guests;
mod status;
mod watchdog;

pub use core::{Health, Server, SessionInfo, Shutdown};
