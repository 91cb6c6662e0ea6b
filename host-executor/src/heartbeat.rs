//! When a thread that looks after others has run last.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The last time that a thread has said that it runs. Takes no lock.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    start: Instant,
    /// Nanoseconds after `start` plus 1. 0: never.
    last: AtomicU64,
}

impl Heartbeat {
    pub(crate) fn new() -> Heartbeat {
        Heartbeat {
            start: Instant::now(),
            last: AtomicU64::new(0),
        }
    }

    /// The thread runs.
    pub(crate) fn beat(&self) {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX - 1);
        self.last.store(now + 1, Ordering::Relaxed);
    }

    /// The time since the last beat. `None`: there was none, so nobody expects one.
    pub(crate) fn age(&self) -> Option<Duration> {
        let last = self.last.load(Ordering::Relaxed).checked_sub(1)?;
        Some(
            self.start
                .elapsed()
                .saturating_sub(Duration::from_nanos(last)),
        )
    }

    /// Why `what` does not run, if its last beat is older than `limit`.
    pub(crate) fn late(&self, what: &str, limit: Duration) -> Option<String> {
        let age = self.age().filter(|age| *age > limit)?;
        Some(format!("{what} has not run for {age:.0?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_late_only_if_it_has_run() {
        let heartbeat = Heartbeat::new();
        assert_eq!(
            (heartbeat.age(), heartbeat.late("it", Duration::ZERO)),
            (None, None)
        );
        heartbeat.beat();
        assert_eq!(heartbeat.late("it", Duration::from_secs(600)), None);
        std::thread::sleep(Duration::from_millis(2));
        let late = heartbeat.late("the thread", Duration::from_millis(1));
        assert!(late.is_some_and(|why| why.starts_with("the thread has not run for ")));
    }
}
