//! The limits of the log lines about sessions, one for each guest.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::lock::{Rank, RankedMutex};
use crate::log_limit::{GUEST_LINES, INTERVAL, LogLimit, SESSION_EVENTS, is_over};

/// Guests whose lines are counted. Further ones have one limit together, with an empty name.
const MAX_GUESTS: usize = 256;

/// The limits by the name of the guest. A limit outlives the sessions, so that a guest gets no new
/// one by connecting again.
#[derive(Debug)]
pub(crate) struct SessionLog {
    guests: RankedMutex<BTreeMap<String, GuestLog>>,
}

/// Lines about the sessions of a guest that were suppressed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// The name of the guest; empty for those that have one limit together.
    guest: String,
    count: u64,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} lines about sessions of ", self.count)?;
        match self.guest.as_str() {
            "" => f.write_str("further guests")?,
            guest => write!(f, "guest {guest}")?,
        }
        write!(
            f,
            " were left out: {GUEST_LINES} in {INTERVAL:?} are written, and {SESSION_EVENTS} \
             events of a session"
        )
    }
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
    pub(crate) fn of(&self, guest: &str, now: Instant) -> Arc<LogLimit> {
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

    /// What to say of each guest about whose sessions lines were suppressed, at most once in 10 s.
    pub(crate) fn left_out(&self, now: Instant) -> Vec<LeftOut> {
        self.take(|log| {
            let is_due = is_over(log.said, now);
            let count = if is_due {
                log.limit.take_suppressed()
            } else {
                0
            };
            if count > 0 {
                log.said = Some(now);
            }
            count
        })
    }

    /// What has not been said, when no further line will be.
    pub(crate) fn rest(&self) -> Vec<LeftOut> {
        self.take(|log| log.limit.take_suppressed())
    }

    /// The lines were not written: the next call of [`left_out`](SessionLog::left_out) says them.
    pub(crate) fn put_back(&self, left_out: &LeftOut) {
        if let Some(log) = self.guests.lock().get_mut(&left_out.guest) {
            log.limit.add_suppressed(left_out.count);
            log.said = None;
        }
    }

    fn take(&self, mut count: impl FnMut(&mut GuestLog) -> u64) -> Vec<LeftOut> {
        let mut guests = self.guests.lock();
        let counts = guests.iter_mut().map(|(guest, log)| LeftOut {
            count: count(log),
            guest: guest.clone(),
        });
        counts.filter(|left_out| left_out.count > 0).collect()
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
        let said = |left_out: Vec<LeftOut>| {
            let lines = left_out.iter().map(LeftOut::to_string);
            lines.collect::<Vec<String>>()
        };
        let left_out = said(log.left_out(start));
        assert_eq!(left_out.len(), 2, "{left_out:?}");
        assert!(left_out[0].starts_with("400 lines about sessions of guest a were left out"));
        assert!(left_out[1].starts_with("100 lines about sessions of guest b were left out"));
        // Not more often than once in the period, and nothing is lost.
        assert_eq!(passed("a", start + INTERVAL / 2), 0);
        assert!(log.left_out(start + INTERVAL / 2).is_empty());
        let left_out = log.left_out(start + INTERVAL);
        // The log has no room for the line.
        assert_eq!(left_out.len(), 1);
        log.put_back(&left_out[0]);
        let left_out = said(log.left_out(start + INTERVAL));
        assert!(left_out[0].starts_with("300 lines"), "{left_out:?}");
        assert_eq!(passed("a", start + INTERVAL), GUEST_LINES);
        // At the end of the executor, whenever that is.
        assert!(log.left_out(start + INTERVAL).is_empty());
        assert!(said(log.rest())[0].starts_with("100 lines"));
        assert!(log.rest().is_empty());
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
