//! The host: it serves guests on an engine.
//!
//! - [`session`]: one guest, its memory, its graphs; where hostile requests end.
//! - [`Server`]: listeners, a thread for each session, shutdown.
//! - [`inproc`]: a session inside the guest's own process.
//! - [`sandbox`]: what the process gives up before it serves anybody.
//! - [`vm`]: doors of virtual machines; [`service`]: the service manager, which keeps their files across a restart.
//!
//! The `vgpu` command is a shell around these.

pub mod inproc;
mod limits;
mod net;
pub mod sandbox;
mod server;
pub mod service;
pub mod session;
pub mod size;
mod stats;
mod unix;
pub mod vm;
pub mod weights;

pub use limits::Limits;
pub use server::{Door, Guest, Open, Peer, Process, Server, SessionInfo};
pub use session::{Ending, Session, Stop, Violation};
pub use stats::Stats;
pub use weights::Weights;
