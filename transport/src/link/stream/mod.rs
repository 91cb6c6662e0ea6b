//! The link over a byte stream: TCP with TLS to another machine, vsock out of a virtual machine
//! without a window.
//!
//! The link carries the same messages as every link. Each message travels in a frame:
//!
//! ```text
//!  0 kind | 4 message bytes | 8 payload bytes | 12 zero | 16 number | 24 message, payload
//! ```
//!
//! | kind | sender | number |
//! |---|---|---|
//! | request | guest | of the request |
//! | reply | host | of the last retired request |
//! | retired | host | of the last retired request; no message |
//! | heartbeat | host | 0; no message: the process runs, whatever it computes |
//!
//! The host sends `retired` only when it would otherwise be idle, so a sequence of requests does
//! not cause a sequence of notifications. A guest that waits and receives nothing for
//! [`STALL`](crate::shm::liveness::STALL) closes the link.

mod accept;
#[cfg(test)]
mod blackhole;
mod channel;
mod framing;
mod guest;
mod heartbeat;
mod host;
pub mod tcp;
pub mod tls;
pub mod vsock;
pub mod x509;

pub use channel::{Channel, Plain};
pub use guest::StreamGuest;
pub use host::StreamHost;

pub use super::stream_state::{StreamFigures, StreamState};
