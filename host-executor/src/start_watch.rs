//! The start of an engine, which no session waits for yet and so no watchdog sees.
//!
//! A driver can hang while the dynamic linker loads it. The linker's lock is then never released,
//! and glibc takes that lock where a thread begins, and where a thread first uses a thread-local
//! variable with a destructor, as channels and `tracing` do. So the thread that watches begins
//! before the engine, and uses neither.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tracing::Level;

use crate::last_log::end_with_last_log;
use crate::log_queue;

use vgpu_transport::lock::{lock, wait_timeout};

/// A start that takes longer is reported.
const SLOW: Duration = Duration::from_secs(10);

/// While this exists, an engine starts.
#[derive(Debug)]
pub struct StartWatch {
    shared: Arc<WatchedStart>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct WatchedStart {
    state: Mutex<StartProgress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct StartProgress {
    /// The thread has begun.
    watches: bool,
    /// The engine has started, or has failed.
    is_over: bool,
}

impl WatchedStart {
    fn set(&self, change: impl FnOnce(&mut StartProgress)) {
        change(&mut lock(&self.state));
        self.changed.notify_all();
    }

    /// Waits for `until`, and for `limit` at most. Returns whether it is so.
    fn wait(&self, limit: Duration, until: impl Fn(&StartProgress) -> bool) -> bool {
        let end = Instant::now() + limit;
        let mut state = lock(&self.state);
        while !until(&state) {
            let Some(left) = end.checked_duration_since(Instant::now()) else {
                return false;
            };
            state = wait_timeout(&self.changed, state, left);
        }
        true
    }
}

impl StartWatch {
    /// Logs a line if the result is not dropped within ten seconds, and ends the process with
    /// status 1 if it is not dropped within `limit`. The driver may have hung.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn begin(limit: Option<Duration>) -> io::Result<StartWatch> {
        let on_slow = |slow, limit: Option<Duration>| {
            let end = limit.map_or(String::new(), |limit| format!(", and may take {limit:?}"));
            log_queue::write_line(
                Level::WARN,
                &format!(
                    "the engine has been starting for {slow:?}{end}: a call of its driver waits"
                ),
            );
        };
        StartWatch::with(SLOW, limit, on_slow, |limit| {
            end_with_last_log(
                1,
                Level::ERROR,
                &format!(
                    "the engine has not started within {limit:?}: its driver hangs; vgpu serve \
                     ends, and a supervisor can start it again"
                ),
            )
        })
    }

    fn with(
        slow: Duration,
        limit: Option<Duration>,
        on_slow: impl FnOnce(Duration, Option<Duration>) + Send + 'static,
        on_stuck: impl FnOnce(Duration) + Send + 'static,
    ) -> io::Result<StartWatch> {
        let shared = Arc::new(WatchedStart::default());
        let watched = Arc::clone(&shared);
        let watch = move || {
            watched.set(|state| state.watches = true);
            let ends_within = |time| watched.wait(time, |state| state.is_over);
            let first = limit.map_or(slow, |limit| slow.min(limit));
            if ends_within(first) {
                return;
            }
            if first == slow {
                on_slow(slow, limit);
            }
            if let Some(limit) = limit
                && !ends_within(limit - first)
            {
                on_stuck(limit);
            }
        };
        let thread = thread::Builder::new().name("vgpu-start".into());
        let thread = thread.spawn(watch)?;
        while !shared.wait(SLOW, |state| state.watches) {} // the thread exists
        Ok(StartWatch {
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for StartWatch {
    fn drop(&mut self) {
        self.shared.set(|state| state.is_over = true);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic, and waits for nothing any more.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn start_without_an_end_is_noticed_and_one_that_ends_is_not() {
        let (stuck, noticed) = mpsc::channel();
        let (soon, later) = (Duration::from_millis(20), Duration::from_secs(600));
        let watch = |slow, limit| {
            let stuck = stuck.clone();
            let on_stuck = move |limit| stuck.send(limit).unwrap();
            StartWatch::with(slow, limit, |_, _| {}, on_stuck).unwrap()
        };
        for slow in [Duration::from_millis(5), later] {
            let watch = watch(slow, Some(soon));
            assert_eq!(noticed.recv_timeout(later), Ok(soon));
            drop(watch);
        }
        // Ends at once, with its thread.
        drop(watch(later, Some(later)));
        drop(watch(soon, None));
        assert!(noticed.try_recv().is_err());
    }
}
