//! A server: guests connect to its listeners, and each gets a thread and a session.

mod core;
mod guest_thread;
mod shared;
mod status;

pub use core::{Server, SessionInfo};
