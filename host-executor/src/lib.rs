//! The executor: it serves guests on an engine.
//!
//! - [`session`]: one guest, its buffers, its graphs. Invalid requests end here.
//! - [`engine`]: which engine executes graphs, and how it starts.
//! - [`weights`]: weights that several guests use, stored once.
//! - [`inproc`]: a session inside the guest's own process.
//! - `sched`: the graphs of several tenants take turns on the engine.
//! - `tenant`, `ledger`, [`tenant_registry`]: who the guests are, and how much memory each uses and
//!   may use.
//!
//! With the feature `server`:
//! - [`Server`]: a thread and a session for each guest that connects.
//! - [`listener`], [`vm`]: the sockets to which guests and virtual machines connect.
//! - [`isolate`]: guests in processes of their own.
//! - [`config`]: the settings of an executor.
//! - [`sandbox`]: the privileges and system calls that a process gives up before it serves guests.
//! - [`status`], [`metrics`], [`control`]: what an executor is doing.
//! - [`added_guests`]: guests that a client of the control socket adds and removes.
//! - [`log_queue`]: the log on its way to standard error.
//! - [`service`]: the service manager, and the files that it keeps across a restart.
//!
//! The `vgpu` command is the package in `cli/`.
#![cfg_attr(not(feature = "server"), allow(dead_code))] // a single session uses a part

mod activity;
#[cfg(feature = "server")]
pub mod added_guests;
#[cfg(feature = "server")]
pub mod config;
#[cfg(feature = "server")]
pub mod control;
#[cfg(feature = "server")]
mod drain;
#[cfg(feature = "server")]
mod dump_thread;
#[cfg(feature = "engines")]
pub mod engine;
mod engine_monitor;
#[cfg(feature = "server")]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // no other engine names its GPU
mod gpu_monitor;
#[cfg(feature = "server")]
mod guest_change;
#[cfg(feature = "server")]
mod handshakes;
#[cfg(feature = "server")]
mod hang_watch;
mod heap;
#[cfg(feature = "server")]
mod heartbeat;
mod histogram;
mod host_memory;
#[cfg(feature = "server")]
mod identity;
pub mod inproc;
#[cfg(feature = "server")]
pub mod isolate;
#[cfg(feature = "server")]
mod last_log;
mod ledger;
mod limits;
#[cfg(feature = "server")]
pub mod listener;
mod lock;
mod log_limit;
#[cfg(feature = "server")]
pub mod log_queue;
#[cfg(feature = "server")]
mod machine_watch;
#[cfg(feature = "server")]
pub mod metrics;
#[cfg(feature = "server")]
mod operator_request;
#[cfg(feature = "server")]
mod peer;
mod policy;
mod pool;
#[cfg(feature = "server")]
mod process_figures;
#[cfg(feature = "server")]
mod process_limits;
#[cfg(feature = "server")]
pub mod sandbox;
mod sched;
mod seqlock;
#[cfg(feature = "server")]
mod server;
#[cfg(feature = "server")]
pub mod service;
pub mod session;
#[cfg(feature = "server")]
mod session_log;
pub mod size;
#[cfg(feature = "server")]
mod start_watch;
mod stats;
#[cfg(feature = "server")]
pub mod status;
mod stop;
mod tenant;
#[cfg(feature = "server")]
pub mod tenant_registry;
mod version;
#[cfg(feature = "server")]
pub mod vm;
pub mod weights;

#[cfg(feature = "server")]
pub use dump_thread::DumpThread;
#[cfg(feature = "server")]
pub use guest_change::{ChangeError, GuestChange, ParseChangeError, Quota};
#[cfg(feature = "server")]
pub use hang_watch::{HangFinding, HangWatch};
#[cfg(feature = "server")]
pub use heap::limit_kept_memory;
#[cfg(feature = "server")]
pub use identity::{CertificateRule, Identity, ParseCertificateRuleError};
#[cfg(feature = "server")]
pub use last_log::end_with_last_log;
pub use limits::{HandshakeLimits, Limits};
#[cfg(feature = "server")]
pub use machine_watch::MachineWatch;
#[cfg(feature = "server")]
pub use operator_request::OperatorRequest;
#[cfg(feature = "server")]
pub use peer::{Peer, Process};
pub use policy::{LinkKind, ParseLinkKindError, Policy};
pub use pool::PoolError;
#[cfg(feature = "server")]
pub use process_limits::{ProcessLimitsError, raise_descriptors};
#[cfg(feature = "server")]
pub use server::{Health, Server, SessionInfo, Shutdown};
pub use session::{RejectReason, Session, SessionEnd, Violation};
#[cfg(feature = "server")]
pub use start_watch::StartWatch;
pub use stats::{Failures, Stats};
pub use stop::StopFlag;
#[cfg(feature = "server")]
pub use tenant_registry::{GuestRule, QuotaError, Rules, RulesError};
#[cfg(feature = "server")]
pub use version::set_version;
pub use weights::WeightStore;
