//! What is logged before the process ends.
//!
//! The reader of the log may have stopped reading, such as a full pipe's other end. A write to the
//! log then never returns. The end of a process whose engine hangs must not wait for it.
#![forbid(unsafe_code)]

use std::sync::mpsc;
use std::thread;

use crate::log_queue::{self, LOG_PATIENCE};
use crate::service;

/// Calls `log` on a thread of its own. Waits until `log` has returned and its lines are written,
/// but no longer than [`LOG_PATIENCE`].
pub(crate) fn log_in_time(log: impl FnOnce() + Send + 'static) {
    let (done, logged) = mpsc::sync_channel::<()>(1);
    let work = move || {
        log();
        log_queue::flush();
        drop(done);
    };
    // Without a thread the closure is dropped, which ends the wait.
    let _ = thread::Builder::new()
        .name("vgpu-last-log".into())
        .spawn(work);
    let _ = logged.recv_timeout(LOG_PATIENCE);
}

/// Ends the process with `status` when `log` has returned and its lines are written, or after two
/// seconds. Destructors and exit handlers, which a hanging driver could block, do not run.
pub fn end_with_last_log(status: i32, log: impl FnOnce() + Send + 'static) -> ! {
    log_in_time(log);
    service::end_at_once(status)
}
