//! How fast a supervisor receives reports.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// Reports of a worker that are received at once, and the interval of further ones.
const REPORT_BURST: u32 = 64;
const REPORT_INTERVAL: Duration = Duration::from_millis(20);

/// How fast the reports of a worker are received. A worker whose reports are not received loses
/// reports.
#[derive(Debug, Default)]
pub(super) struct ReportRateLimit {
    /// When the reports so far would have been received, one in each interval.
    due: Option<Instant>,
}

impl ReportRateLimit {
    /// How long to wait after a report.
    pub(super) fn delay(&mut self, now: Instant) -> Duration {
        let due = self.due.map_or(now, |due| due.max(now)) + REPORT_INTERVAL;
        self.due = Some(due);
        let early = due.saturating_duration_since(now);
        early.saturating_sub(REPORT_INTERVAL * REPORT_BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_without_end_are_received_at_a_limited_pace() {
        let mut rate_limit = ReportRateLimit::default();
        let mut now = Instant::now();
        let start = now;
        for _ in 0..REPORT_BURST {
            assert_eq!(rate_limit.delay(now), Duration::ZERO);
        }
        for _ in 0..100 {
            now += rate_limit.delay(now);
        }
        assert_eq!(now - start, REPORT_INTERVAL * 100);
        // A worker that reports now and then never waits.
        for _ in 0..1000 {
            now += Duration::from_millis(500);
            assert_eq!(rate_limit.delay(now), Duration::ZERO);
        }
    }
}
