//! What is logged before the process ends.
//!
//! The reader of the log may have stopped reading, such as a full pipe's other end. A write to the
//! log then never returns. The end of a process whose engine hangs must not wait for it. The engine
//! may hang in the dynamic linker: neither does the end start a thread, nor does it use `tracing`
//! or a channel ([`log_queue`]).
#![forbid(unsafe_code)]

use tracing::Level;

use crate::{log_queue, service};

/// Ends the process with `status` when a last line is written, or after two seconds. Destructors
/// and exit handlers, which a hanging driver could block, do not run.
pub fn end_with_last_log(status: i32, level: Level, text: &str) -> ! {
    log_queue::write_line(level, text);
    log_queue::flush();
    service::end_at_once(status)
}
