//! The host: it serves guests on an engine.
//!
//! - [`session`]: one guest, its memory, its graphs; where hostile requests end.
//! - [`Server`]: listeners, a thread for each session, shutdown.
//! - [`config`]: what the executor is told; who the guests are and what each may use.
//! - `sched`: graphs of several guests take turns on the engine.
//! - [`engine`]: what computes.
//! - [`status`], [`metrics`], [`control`]: what it is doing, for people and for Prometheus.
//! - [`inproc`]: a session inside the guest's own process.
//! - [`isolate`]: guests in processes of their own.
//! - [`sandbox`]: what the process gives up before it serves anybody.
//! - [`vm`]: doors of virtual machines; [`service`]: the service manager, which keeps their files across a restart.
//!
//! The `vgpu` command is a shell around these.

pub mod config;
pub mod control;
mod doors;
pub mod engine;
mod histogram;
mod identity;
pub mod inproc;
pub mod isolate;
mod limits;
pub mod metrics;
mod net;
mod roster;
pub mod sandbox;
mod sched;
mod server;
pub mod service;
pub mod session;
pub mod size;
mod stats;
pub mod status;
mod tenant;
mod unix;
pub mod vm;
pub mod weights;

pub use doors::DoorId;
pub use identity::{CertificateRule, Identity};
pub use limits::Limits;
pub use roster::{GuestRule, Rules, TooMuchPromised};
pub use server::{Door, Guest, Open, Peer, Process, Server, SessionInfo};
pub use session::{Ending, Session, Stop, Violation};
pub use stats::Stats;
pub use tenant::{LinkKind, Policy};
pub use weights::Weights;
