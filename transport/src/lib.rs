//! The boundary between guest and host: what is said, and how it crosses.
//!
//! - [`ir`]: graphs, operators, capabilities; what both sides agree a graph means.
//! - [`wire`]: the messages of a session.
//! - [`link`]: the ends that carry messages, and what an implementation promises.
//! - [`shm`]: shared memory, the rings in it, sleeping and waking.
//! - [`bytes`]: payloads that the peer may be changing.

pub mod bytes;
pub mod ir;
pub mod link;
pub mod shm;
pub mod wire;
