//! The start of an engine, which no session waits for yet and so no watchdog sees.
#![forbid(unsafe_code)]

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::{error, warn};

use crate::last_log::end_with_last_log;

/// A start that takes longer is reported.
const SLOW: Duration = Duration::from_secs(10);

/// While this exists, an engine starts.
#[derive(Debug)]
pub struct StartWatch {
    /// Dropped at the end of the start.
    is_over: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StartWatch {
    /// Logs a line if the result is not dropped within ten seconds, and ends the process with
    /// status 1 if it is not dropped within `limit`. The driver may have hung.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn begin(limit: Option<Duration>) -> io::Result<StartWatch> {
        StartWatch::with(SLOW, limit, |limit| {
            end_with_last_log(1, move || {
                error!(
                    "the engine has not started within {limit:?}: its driver hangs; vgpu serve \
                     ends, and a supervisor can start it again"
                );
            })
        })
    }

    fn with(
        slow: Duration,
        limit: Option<Duration>,
        on_stuck: impl FnOnce(Duration) + Send + 'static,
    ) -> io::Result<StartWatch> {
        let (is_over, waited) = mpsc::channel();
        let watch = move || {
            let is_running = |time| waited.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
            let first = limit.map_or(slow, |limit| slow.min(limit));
            if !is_running(first) {
                return;
            }
            if first == slow {
                let end = limit.map_or(String::new(), |limit| format!(", and may take {limit:?}"));
                warn!("the engine has been starting for {slow:?}{end}: a call of its driver waits");
            }
            if let Some(limit) = limit
                && is_running(limit - first)
            {
                on_stuck(limit);
            }
        };
        let thread = thread::Builder::new().name("vgpu-start".into());
        Ok(StartWatch {
            is_over: Some(is_over),
            thread: Some(thread.spawn(watch)?),
        })
    }
}

impl Drop for StartWatch {
    fn drop(&mut self) {
        drop(self.is_over.take());
        if let Some(thread) = self.thread.take() {
            // The thread does not panic, and waits for nothing any more.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_without_an_end_is_noticed_and_one_that_ends_is_not() {
        let (stuck, noticed) = mpsc::channel();
        let (soon, later) = (Duration::from_millis(20), Duration::from_secs(600));
        let watch = |slow, limit| {
            let stuck = stuck.clone();
            StartWatch::with(slow, limit, move |limit| stuck.send(limit).unwrap()).unwrap()
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
