//! The window: memory that guest and host share, and everything that happens in it.
//!
//! One format for every link that has shared memory: a memfd over a unix socket, anonymous memory in one
//! process, a PCI BAR. What differs between them is only where the memory comes from and what a
//! [`Doorbell`](doorbell::Doorbell) is.
//!
//! - [`layout`]: what lies where, and who may write it.
//! - [`memory`]: the mapping, and the only way to touch it.
//! - [`ring`]: records in order from one side to the other.
//! - [`bulk`]: room for payloads too large for a ring, managed by the guest.
//! - [`notify`]: how an end waits without missing its peer and without burning a core.
//! - [`doorbell`]: how a sleeping end is woken, and how the death of a peer is noticed.
//! - [`liveness`]: how a host process that has stopped is told from one that is busy.

pub mod bulk;
pub mod doorbell;
pub mod layout;
pub mod liveness;
pub mod memory;
pub mod notify;
pub mod ring;
