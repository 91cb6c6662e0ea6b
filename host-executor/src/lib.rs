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

#![cfg_attr(not(feature = "server"), allow(dead_code))] // sessions, tenants and statistics are used in part

#[cfg(feature = "server")]
pub mod config;
#[cfg(feature = "server")]
pub mod control;
#[cfg(feature = "server")]
mod doors;
#[cfg(feature = "engines")]
pub mod engine;
mod histogram;
#[cfg(feature = "server")]
mod identity;
pub mod inproc;
#[cfg(feature = "server")]
pub mod isolate;
mod limits;
#[cfg(feature = "server")]
pub mod metrics;
#[cfg(feature = "server")]
mod net;
#[cfg(feature = "server")]
mod roster;
#[cfg(feature = "server")]
pub mod sandbox;
mod sched;
#[cfg(feature = "server")]
mod server;
#[cfg(feature = "server")]
pub mod service;
pub mod session;
pub mod size;
mod stats;
#[cfg(feature = "server")]
pub mod status;
mod tenant;
#[cfg(feature = "server")]
mod unix;
#[cfg(feature = "server")]
pub mod vm;
pub mod weights;

#[cfg(feature = "server")]
pub use doors::DoorId;
#[cfg(feature = "server")]
pub use identity::{CertificateRule, Identity};
pub use limits::Limits;
#[cfg(feature = "server")]
pub use roster::{GuestRule, Rules, TooMuchPromised};
#[cfg(feature = "server")]
pub use server::{Door, Guest, Open, Peer, Process, Server, SessionInfo};
pub use session::{Ending, Session, Stop, Violation};
pub use stats::Stats;
pub use tenant::{LinkKind, Policy};
pub use weights::Weights;
