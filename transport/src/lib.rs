//! The boundary between guest and host: the messages of a session, and the links that carry them.
//!
//! The modules form layers. A module imports only modules of the layers below its own:
//!
//! - 4: [`link`], the ends of a link over shared memory, PCI, vsock and TCP
//! - 3: [`wire`], the requests and replies of a session
//! - 2: [`ir`], the graph IR; [`shm`], shared memory, rings, doorbells. Independent of each other
//! - 1: [`bytes`], payloads that the peer may change; [`error`]; [`fork`], which uses [`lock`];
//!   [`limits`]; [`lock`]; [`memfd`], memory files; `poll`; [`random`];
//!   [`size`], sizes as text
//!
//! [`link`] does not import [`wire`]: a link carries bytes and does not know their meaning.
//!
//! # Users
//!
//! The guest plugin and the executor use every layer. Engines (`host-kernels`) compute graphs and
//! know nothing of messages, links or shared windows: an engine imports [`ir`], [`bytes`],
//! [`lock`], [`memfd`] and [`size`], and no other module of this crate. What an engine pins for DMA
//! (`Engine::pin`) is [`bytes::Mapped`] memory. CPU memory that guests map is a memory file.

pub mod bytes;
pub mod error;
pub mod fork;
pub mod ir;
pub mod limits;
pub mod link;
pub mod lock;
pub mod memfd;
mod poll;
pub mod random;
pub mod shm;
#[cfg(test)]
mod signals;
pub mod size;
pub mod wire;
