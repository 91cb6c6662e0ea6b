//! Lines in the log of a guest that waits long for its executor.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A guest that has waited longer for its executor says so in the log.
const SLOW: Duration = Duration::from_secs(10);

/// The shortest time between two such lines of an end.
const PAUSE: Duration = Duration::from_secs(60);

/// The lines of one end of a link.
#[derive(Debug, Default)]
pub(super) struct SlowWait {
    last_line: Option<Instant>,
}

impl SlowWait {
    /// Says that the guest has waited for `waited`, if that is long. `state`: what is known of the
    /// link.
    pub(super) fn check(&mut self, waited: Duration, state: impl FnOnce() -> String) {
        if is_worth_a_line(waited, self.last_line.map(|last| last.elapsed())) {
            self.last_line = Some(Instant::now());
            let state = state();
            tracing::warn!(
                "the executor is alive and has not answered for {waited:.1?}; its log and `vgpu \
                 dump` say what it does; {state}"
            );
        }
    }
}

/// Whether a wait is worth a line. `last_line`: time since the last line.
fn is_worth_a_line(waited: Duration, last_line: Option<Duration>) -> bool {
    waited >= SLOW && last_line.is_none_or(|passed| passed >= PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_have_a_line_a_minute() {
        let seconds = Duration::from_secs;
        assert!(!is_worth_a_line(seconds(9), None));
        assert!(is_worth_a_line(seconds(10), None));
        assert!(!is_worth_a_line(seconds(30), Some(seconds(20))));
        assert!(!is_worth_a_line(seconds(9), Some(seconds(3600))));
        assert!(is_worth_a_line(seconds(70), Some(seconds(60))));
    }

    #[test]
    fn a_wait_is_described_once() {
        let mut wait = SlowWait::default();
        let mut described = 0;
        for seconds in [1, 9, 10, 20, 30] {
            wait.check(Duration::from_secs(seconds), || {
                described += 1;
                String::new()
            });
        }
        assert_eq!(described, 1);
    }
}
