//! The threads that report what lasts too long.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::Instant;

use tracing::{error, info, warn};

use super::shared::Shared;
use crate::activity::{Notice, Watch};
use crate::log_queue::LOG_PATIENCE;
use crate::status::{StatusHandle, StatusSource as _};

/// Lines that wait for the log. Further ones are lost.
const MAX_LINES: usize = 64;

/// What the thread that writes the log gets.
enum Report {
    Slow(String),
    Stuck {
        what: String,
        dump: String,
        /// Dropped when the report is in the log.
        _pending: SyncSender<()>,
    },
}

/// Starts two threads, which end with the server. One watches. The other one writes into the log: a
/// log that nobody reads must not keep the first one from its work.
pub(super) fn start(
    shared: &Arc<Shared>,
    on_stuck: impl Fn(&str) + Send + 'static,
) -> io::Result<()> {
    let (reports, queue) = mpsc::sync_channel(MAX_LINES);
    thread::Builder::new()
        .name("vgpu-watch-log".into())
        .spawn(move || queue.into_iter().for_each(log))?;
    let mut watch = Watch::new(shared.limits.slow, shared.limits.turn_time);
    let weak = Arc::downgrade(shared);
    thread::Builder::new()
        .name("vgpu-watchdog".into())
        .spawn(move || {
            let mut last = Instant::now();
            loop {
                thread::sleep(watch.period());
                let Some(shared) = weak.upgrade() else { return };
                let passed = last.elapsed();
                last = Instant::now();
                let sessions = shared.activities.snapshot();
                let notices = watch.look(&sessions, shared.monitor.call(), passed);
                shared.set_hang(watch.hang());
                for notice in notices {
                    match notice {
                        Notice::Slow(what) => drop(reports.try_send(Report::Slow(what))),
                        Notice::Stuck(what) => {
                            let (_pending, logged) = mpsc::sync_channel(1);
                            let (text, dump) = (what.clone(), shared.dump());
                            let report = Report::Stuck {
                                what: text,
                                dump,
                                _pending,
                            };
                            drop(reports.try_send(report));
                            let _ = logged.recv_timeout(LOG_PATIENCE);
                            on_stuck(&what);
                        }
                    }
                }
            }
        })?;
    Ok(())
}

fn log(report: Report) {
    match report {
        Report::Slow(what) => warn!("{what}"),
        Report::Stuck { what, dump, .. } => {
            error!("{what}: the engine hangs");
            log_error_lines(&dump);
        }
    }
}

/// Writes each line of a dump into the log, as a part of an error.
pub(super) fn log_error_lines(dump: &str) {
    for line in dump.lines() {
        error!("dump: {line}");
    }
}

/// The target of the log lines of [`log_dump`], which are at level info. Somebody has asked for
/// them, so that the log should show them with any filter.
pub const DUMP_TARGET: &str = "vgpu_dump";

/// Writes the dump of an executor into the log.
pub fn log_dump(status: &StatusHandle) {
    for line in status.dump().lines() {
        info!(target: DUMP_TARGET, "dump: {line}");
    }
}
