//! A limit on log lines that guests can cause.
#![forbid(unsafe_code)]

use std::sync::Mutex;
use std::time::{Duration, Instant};

use vgpu_transport::lock::lock;

/// The period in which the lines are counted.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Lets a number of lines pass in 10 s, and counts the others.
#[derive(Debug)]
pub struct LogLimit {
    lines: u64,
    state: Mutex<LineCounts>,
}

#[derive(Debug)]
struct LineCounts {
    began: Option<Instant>,
    lines: u64,
    suppressed: u64,
}

impl LineCounts {
    /// Whether one more line is within the limit at `now`. Counts the line.
    fn passes(&mut self, limit: u64, now: Instant) -> bool {
        if is_over(self.began, now) {
            self.began = Some(now);
            self.lines = 0;
        }
        let passes = self.lines < limit;
        match passes {
            true => self.lines += 1,
            false => self.suppressed += 1,
        }
        passes
    }
}

/// Whether a period that began then is over, or none has begun.
pub fn is_over(began: Option<Instant>, now: Instant) -> bool {
    began.is_none_or(|began| now.saturating_duration_since(began) >= INTERVAL)
}

impl LogLimit {
    /// Lets `lines` pass in 10 s.
    pub const fn new(lines: u64) -> LogLimit {
        LogLimit {
            lines,
            state: Mutex::new(LineCounts {
                began: None,
                lines: 0,
                suppressed: 0,
            }),
        }
    }

    /// Whether a line may be logged at `now`. The number is that of the lines that were suppressed
    /// before it.
    pub fn allow(&self, now: Instant) -> Option<u64> {
        let mut state = lock(&self.state);
        let passes = state.passes(self.lines, now);
        passes.then(|| std::mem::take(&mut state.suppressed))
    }

    /// Whether a line may be logged at `now`, of a limit whose owner says by itself how many lines
    /// were suppressed.
    pub fn passes(&self, now: Instant) -> bool {
        lock(&self.state).passes(self.lines, now)
    }

    /// Counts lines that are suppressed for another reason than this limit.
    pub fn add_suppressed(&self, lines: u64) {
        let mut state = lock(&self.state);
        state.suppressed = state.suppressed.saturating_add(lines);
    }

    /// The number of lines that were suppressed since the last call.
    pub fn take_suppressed(&self) -> u64 {
        std::mem::take(&mut lock(&self.state).suppressed)
    }

    /// Whether a new limit in place of this one would let as many lines pass at `now`, and no
    /// suppressed line would be forgotten.
    pub fn is_new(&self, now: Instant) -> bool {
        let state = lock(&self.state);
        state.suppressed == 0 && is_over(state.began, now)
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
