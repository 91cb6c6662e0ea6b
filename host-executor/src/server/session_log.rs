//! The limits of the log lines about sessions, one for each guest.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::lock::{Rank, RankedMutex};
use crate::log_limit::{GUEST_LINES, INTERVAL, LogLimit, is_over};

/// Guests whose lines are counted. Further ones have one limit together, with an empty name.
const MAX_GUESTS: usize = 256;

/// The limits by the name of the guest. A limit outlives the sessions, so that a guest gets no new
/// one by connecting again.
#[derive(Debug)]
pub(super) struct SessionLog {
    guests: RankedMutex<BTreeMap<String, GuestLog>>,
}

impl Default for SessionLog {
    fn default() -> SessionLog {
        SessionLog {
            guests: RankedMutex::new(Rank::SessionLog, BTreeMap::new()),
        }
    }
}

#[derive(Debug)]
struct GuestLog {
    limit: Arc<LogLimit>,
    /// When [`SessionLog::left_out`] had a line about this guest last.
    said: Option<Instant>,
}

impl GuestLog {
    fn new() -> GuestLog {
        GuestLog {
            limit: Arc::new(LogLimit::new(GUEST_LINES)),
            said: None,
        }
    }

    fn is_needed(&self, now: Instant) -> bool {
        Arc::strong_count(&self.limit) > 1 || !self.limit.is_new(now)
    }
}

impl SessionLog {
    /// The limit of the guest with this name.
    pub(super) fn of(&self, guest: &str, now: Instant) -> Arc<LogLimit> {
        let mut guests = self.guests.lock();
        if guests.len() >= MAX_GUESTS && !guests.contains_key(guest) {
            guests.retain(|_, log| log.is_needed(now));
        }
        let guest = match guests.len() < MAX_GUESTS || guests.contains_key(guest) {
            true => guest,
            false => "",
        };
        let log = { guests.entry(guest.to_owned()) }.or_insert_with(GuestLog::new);
        Arc::clone(&log.limit)
    }

    /// A line for each guest about whose sessions lines were suppressed, at most one in 10 s.
    pub(super) fn left_out(&self, now: Instant) -> Vec<String> {
        let mut guests = self.guests.lock();
        let counts = guests.iter_mut().filter_map(|(guest, log)| {
            if !is_over(log.said, now) {
                return None;
            }
            let count = Some(log.limit.take_suppressed()).filter(|&count| count > 0)?;
            log.said = Some(now);
            let of = match guest.as_str() {
                "" => "further guests".to_owned(),
                guest => format!("guest {guest}"),
            };
            Some(format!(
                "{count} lines about sessions of {of} were left out: {GUEST_LINES} in \
                 {INTERVAL:?} are written"
            ))
        });
        counts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_comes_again_keeps_its_limit_and_others_have_their_own() {
        let (log, start) = (SessionLog::default(), Instant::now());
        let passed = |guest: &str, at| {
            let lines = (0..300).filter(|_| log.of(guest, at).passes(at));
            lines.count() as u64
        };
        assert_eq!(passed("a", start), GUEST_LINES);
        assert_eq!(passed("a", start), 0);
        assert_eq!(passed("b", start), GUEST_LINES);
        let left_out = log.left_out(start);
        assert_eq!(left_out.len(), 2, "{left_out:?}");
        assert!(left_out[0].starts_with("400 lines about sessions of guest a were left out"));
        assert!(left_out[1].starts_with("100 lines about sessions of guest b were left out"));
        // Not more often than once in the period, and nothing is lost.
        assert_eq!(passed("a", start + INTERVAL / 2), 0);
        assert!(log.left_out(start + INTERVAL / 2).is_empty());
        let left_out = log.left_out(start + INTERVAL);
        assert!(left_out[0].starts_with("300 lines"), "{left_out:?}");
        assert_eq!(passed("a", start + INTERVAL), GUEST_LINES);
    }

    #[test]
    fn the_number_of_limits_is_limited_and_those_in_use_stay() {
        let (log, start) = (SessionLog::default(), Instant::now());
        let of = |guest: usize, at| log.of(&guest.to_string(), at);
        for guest in 0..MAX_GUESTS {
            assert!(of(guest, start).passes(start));
        }
        let further = of(MAX_GUESTS, start);
        assert!(Arc::ptr_eq(&of(MAX_GUESTS + 1, start), &further));
        let later = start + INTERVAL;
        let first = of(0, later);
        assert!(!Arc::ptr_eq(&of(MAX_GUESTS, later), &further));
        assert!(Arc::ptr_eq(&of(0, later), &first));
        // The two, and that of the further guests.
        assert_eq!(log.guests.lock().len(), 3);
    }
}
