//! Limits on log lines that connections and sessions can cause.
#![forbid(unsafe_code)]

pub(crate) use vgpu_engine::log_limit::{INTERVAL, LogLimit, is_over};

/// Lines in 10 s about the sessions of one guest. As many programs as a guest may have can begin,
/// load a model and end at once.
pub(crate) const GUEST_LINES: u64 = 200;

/// Events of one session that are logged at the info or warn level: failed requests, large buffers,
/// weights.
pub(crate) const SESSION_EVENTS: u32 = 100;
