//! The threads that report what lasts too long.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use tracing::{Level, warn};

use super::device::Found;
use super::shared::ServerState;
use crate::activity::{Notice, Watch};
use crate::dump_thread::write_into_log;
use crate::log_limit::LogLimit;
use crate::log_queue;
use crate::status::StatusSource as _;

/// Lines that wait for the log. Further ones are lost.
const MAX_LINES: usize = 64;

/// Lines in 10 s about requests that last long.
const REQUEST_LINES: u64 = 20;

/// Starts two threads, which end with the server. One watches, and counts the lines that guests may
/// not cause any more. The other one writes of both and of what is slow: a log that nobody reads
/// must not keep the first one from its work. That the engine hangs is written by the first one,
/// past `tracing`: the engine may hang in the dynamic linker ([`log_queue`]).
pub(super) fn start(
    shared: &Arc<ServerState>,
    on_stuck: impl Fn(&str) + Send + 'static,
) -> io::Result<()> {
    let (reports, queue) = mpsc::sync_channel(MAX_LINES);
    thread::Builder::new()
        .name("vgpu-watch-log".into())
        .spawn(move || queue.into_iter().for_each(|what: String| warn!("{what}")))?;
    let slow = shared.limits.slow;
    let mut watches: Vec<Watch> = { shared.devices.iter() }
        .map(|device| Watch::new(slow, device.limits.turn_time))
        .collect();
    let period = watches.iter().map(Watch::period).min().unwrap_or(slow);
    let requests = LogLimit::new(REQUEST_LINES);
    let weak = Arc::downgrade(shared);
    // A thread that never gets to run is late, too.
    shared.watchdog.beat();
    thread::Builder::new()
        .name("vgpu-watchdog".into())
        .spawn(move || {
            let mut last = Instant::now();
            loop {
                thread::sleep(period);
                let Some(shared) = weak.upgrade() else { return };
                let passed = last.elapsed();
                last = Instant::now();
                let mut notices = Vec::new();
                for ((at, device), watch) in shared.devices.iter().enumerate().zip(&mut watches) {
                    let mut sessions = shared.activities.snapshot();
                    sessions.retain(|session| session.device == at);
                    notices.extend(watch.look(&sessions, device.monitor.call(), passed));
                    device.set_found(Found {
                        hang: watch.hang().map(str::to_owned),
                        starved: watch.starved().map(str::to_owned),
                    });
                }
                shared.watchdog.beat();
                for left_out in shared.session_log.left_out(last) {
                    if reports.try_send(left_out.to_string()).is_err() {
                        shared.session_log.put_back(&left_out);
                    }
                }
                for notice in notices {
                    match notice {
                        Notice::Slow(what) => drop(reports.try_send(what)),
                        Notice::LongRequest(what) => match requests.allow(last) {
                            Some(0) => drop(reports.try_send(what)),
                            Some(others) => {
                                let left_out = format!("{what}; {others} such lines were left out");
                                drop(reports.try_send(left_out));
                            }
                            None => {}
                        },
                        Notice::Stuck(what) => {
                            let text = format!("{what}: the engine hangs");
                            log_queue::write_line(Level::ERROR, &text);
                            write_into_log(Level::ERROR, &shared.dump());
                            on_stuck(&what);
                        }
                    }
                }
            }
        })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vgpu_cpu::CpuEngine;

    use super::*;
    use crate::limits::Limits;

    #[test]
    fn watchdog_is_expected_to_run_from_its_start_on() {
        let engine = Arc::new(CpuEngine::new(1, Some(1 << 20)).unwrap());
        // The watchdog runs first after a second.
        let limits = Limits {
            slow: Duration::from_secs(10),
            ..Limits::default()
        };
        let shared = Arc::new(ServerState::new(vec![(engine, limits)], 1).unwrap());
        assert_eq!(shared.watchdog.age(), None, "nobody watches");
        start(&shared, |_| {}).unwrap();
        assert!(shared.watchdog.age().is_some());
    }
}
