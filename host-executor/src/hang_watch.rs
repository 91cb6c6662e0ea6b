//! Whether another process, which says again and again that it runs, has fallen silent.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A silence of this length is worth a line in the log.
const NOTICE: Duration = Duration::from_secs(30);

/// The most time that counts between two looks. A process that could not look itself, because it or
/// the machine was stopped, blames nobody for that time.
const MAX_LOOK: Duration = Duration::from_secs(2);

/// How often to look at least.
pub(crate) const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// Counts how long a process has been silent.
#[derive(Debug)]
pub struct HangWatch {
    notice: Duration,
    /// `None`: a silence of any length is allowed.
    limit: Option<Duration>,
    looked: Instant,
    silent: Duration,
    is_noticed: bool,
}

/// What a look has found, with the length of the silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HangFinding {
    /// The silence has become worth a line. Found once for each silence.
    Notice(Duration),
    /// The silence has reached the limit.
    Hangs(Duration),
}

impl HangWatch {
    /// A watch of a process that has just reported. The process hangs after a silence of `limit`.
    pub fn new(limit: Option<Duration>) -> HangWatch {
        HangWatch {
            // Before the limit in any case.
            notice: limit.map_or(NOTICE, |limit| NOTICE.min(limit / 2)),
            limit,
            looked: Instant::now(),
            silent: Duration::ZERO,
            is_noticed: false,
        }
    }

    /// The process has said something.
    pub fn reported(&mut self) {
        (self.silent, self.is_noticed) = (Duration::ZERO, false);
        self.looked = Instant::now();
    }

    /// Looks at the silence. To be called each second at least.
    pub fn look(&mut self) -> Option<HangFinding> {
        self.look_at(Instant::now())
    }

    fn look_at(&mut self, now: Instant) -> Option<HangFinding> {
        self.silent += now.saturating_duration_since(self.looked).min(MAX_LOOK);
        self.looked = now;
        if self.limit.is_some_and(|limit| self.silent >= limit) {
            return Some(HangFinding::Hangs(self.silent));
        }
        let is_worth = self.silent >= self.notice && !self.is_noticed;
        self.is_noticed |= is_worth;
        is_worth.then_some(HangFinding::Notice(self.silent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_noticed_once_and_hangs_at_the_limit() {
        let mut watch = HangWatch::new(Some(Duration::from_secs(300)));
        let start = watch.looked;
        let mut findings = Vec::new();
        for second in 1..=300 {
            let found = watch.look_at(start + Duration::from_secs(second));
            findings.extend(found.map(|found| (second, found)));
        }
        let after = Duration::from_secs;
        assert_eq!(
            findings,
            [
                (30, HangFinding::Notice(after(30))),
                (300, HangFinding::Hangs(after(300)))
            ]
        );
        watch.reported();
        let now = watch.looked;
        assert_eq!(watch.look_at(now + after(1)), None);
        // A machine that was paused for an hour.
        assert_eq!(watch.look_at(now + after(3601)), None);
        let mut endless = HangWatch::new(None);
        let start = endless.looked;
        let seconds = (1..=1000).map(|second| start + after(second));
        let found: Vec<_> = seconds.filter_map(|now| endless.look_at(now)).collect();
        assert_eq!(found, [HangFinding::Notice(after(30))]);
    }
}
