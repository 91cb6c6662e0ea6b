//! The thread that reports what lasts too long.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use tracing::{Level, error, info, warn};

use super::shared::Shared;
use crate::activity::{Notice, Watch};
use crate::status::{StatusHandle, StatusSource as _};

/// Starts the thread, which ends with the server.
pub(super) fn start(
    shared: &Arc<Shared>,
    on_stuck: impl Fn(&str) + Send + 'static,
) -> io::Result<()> {
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
                for notice in watch.look(&sessions, shared.monitor.call(), passed) {
                    match notice {
                        Notice::Slow(what) => warn!("{what}"),
                        Notice::Stuck(what) => {
                            error!("{what}: the engine hangs");
                            log_lines(Level::ERROR, &shared.dump());
                            on_stuck(&what);
                        }
                    }
                }
            }
        })?;
    Ok(())
}

/// Writes the dump of an executor into the log.
pub fn log_dump(status: &StatusHandle) {
    log_lines(Level::INFO, &status.dump());
}

/// Writes each line into the log.
pub(super) fn log_lines(level: Level, text: &str) {
    for line in text.lines() {
        match level {
            Level::ERROR => error!("dump: {line}"),
            _ => info!("dump: {line}"),
        }
    }
}
