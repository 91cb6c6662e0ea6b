//! A limit on log lines that connections can cause.
#![forbid(unsafe_code)]

use std::sync::Mutex;
use std::time::{Duration, Instant};

use vgpu_transport::lock::lock;

/// The period in which the lines are counted.
const INTERVAL: Duration = Duration::from_secs(10);

/// Lets a number of lines pass in 10 s, and counts the others.
#[derive(Debug)]
pub(crate) struct LogLimit {
    lines: u64,
    state: Mutex<LineCounts>,
}

#[derive(Debug, Default)]
struct LineCounts {
    began: Option<Instant>,
    lines: u64,
    suppressed: u64,
}

impl LogLimit {
    /// Lets `lines` pass in 10 s.
    pub(crate) fn new(lines: u64) -> LogLimit {
        LogLimit {
            lines,
            state: Mutex::default(),
        }
    }

    /// Whether a line may be logged at `now`. The number is that of the lines that were suppressed
    /// before it.
    pub(crate) fn allow(&self, now: Instant) -> Option<u64> {
        let mut state = lock(&self.state);
        if state
            .began
            .is_none_or(|began| now.duration_since(began) >= INTERVAL)
        {
            state.began = Some(now);
            state.lines = 0;
        }
        if state.lines >= self.lines {
            state.suppressed += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_and_the_next_period_says_how_many() {
        let (limit, start) = (LogLimit::new(10), Instant::now());
        let passed = (0..1000).filter(|_| limit.allow(start).is_some()).count();
        assert_eq!(passed, 10);
        assert_eq!(limit.allow(start + INTERVAL), Some(990));
        assert_eq!(limit.allow(start + INTERVAL), Some(0));
    }
}
