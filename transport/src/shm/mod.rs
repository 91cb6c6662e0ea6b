//! Shared memory between guest and host, and the protocols in it.
//!
//! The shared memory of a session is a *window*. All links with shared memory use one window
//! format: a memfd passed over a unix socket, memory inside one process, a PCI BAR. Links differ
//! only in the origin of the memory and in their [`Doorbell`](doorbell::Doorbell).
//!
//! - [`layout`]: the offsets of the parts of a window, and the side that may write each part.
//! - [`memory`]: the mapping, and all accesses to it.
//! - [`ring`]: a single-producer single-consumer queue of records.
//! - [`staging`]: allocation of payload memory outside the rings. The guest allocates.
//! - [`notify`]: waiting for the peer by spinning, then sleeping, without a lost wake-up.
//! - [`doorbell`]: waking the sleeping peer, and detecting the death of the peer.
//! - [`liveness`]: telling a stopped host process from a busy one.

pub mod doorbell;
pub mod layout;
pub mod liveness;
pub mod memory;
pub mod notify;
pub mod ring;
pub mod staging;
