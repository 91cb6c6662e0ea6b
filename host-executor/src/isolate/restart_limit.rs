//! How often processes of one guest are started again.
//!
//! A guest that has taken over its process can end it, or get it killed, as often as it likes. Each
//! start costs the time of an engine's start, for which the guest does not pay.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Pause before a process is started again that has ended early: at first, and at most. Doubled
/// while processes end early.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A process that has lived shorter than this has ended early.
const EARLY: Duration = Duration::from_secs(10);

/// Starts of the process of a virtual machine that may follow each other, whatever the machine
/// does. Then there is one in each [`PERIOD`].
const RESTARTS: u32 = 10;

/// Workers of a guest that may be killed one after the other, before a further one waits. Then
/// there is one in each [`PERIOD`].
const KILLS: u32 = 3;

/// The time that pays for one start.
const PERIOD: Duration = Duration::from_secs(30);

/// Counts events for which time pays: so many at once, and then one in each [`PERIOD`].
#[derive(Debug)]
struct EventRate {
    at_once: u32,
    /// When time has paid for all events.
    paid_at: Option<Instant>,
}

impl EventRate {
    fn new(at_once: u32) -> EventRate {
        EventRate {
            at_once,
            paid_at: None,
        }
    }

    fn add(&mut self, now: Instant) {
        let paid_at = self.paid_at.map_or(now, |paid_at| paid_at.max(now));
        self.paid_at = Some(paid_at + PERIOD);
    }

    /// How long the next event has to wait.
    fn wait(&self, now: Instant) -> Duration {
        let unpaid = self.paid_at.unwrap_or(now).saturating_duration_since(now);
        // One period less than the events that may come at once, so that the last of them is free.
        unpaid.saturating_sub(PERIOD * (self.at_once - 1))
    }

    fn is_paid(&self, now: Instant) -> bool {
        self.paid_at.is_none_or(|paid_at| paid_at <= now)
    }
}

/// The pauses between processes of which each replaces the one before.
#[derive(Debug)]
pub struct RestartPause {
    early: Duration,
    /// `None`: the number of starts has no limit.
    rate: Option<EventRate>,
}

impl RestartPause {
    /// Between the processes that serve all guests.
    pub fn of_all_guests() -> RestartPause {
        RestartPause {
            early: MIN_PAUSE,
            rate: None,
        }
    }

    /// Between the processes of one virtual machine, whose starts are limited.
    pub fn of_one_guest() -> RestartPause {
        RestartPause {
            early: MIN_PAUSE,
            rate: Some(EventRate::new(RESTARTS)),
        }
    }

    /// The pause before the next process: the last one has ended now, and has `lived` so long.
    pub fn after(&mut self, lived: Duration, now: Instant) -> Duration {
        self.early = match lived > EARLY {
            true => MIN_PAUSE,
            false => self.doubled(),
        };
        let Some(rate) = &mut self.rate else {
            return self.early;
        };
        rate.add(now);
        self.early.max(rate.wait(now))
    }

    /// The pause before the next attempt, after no process could be started.
    pub fn after_failed_start(&mut self) -> Duration {
        self.early = self.doubled();
        self.early
    }

    fn doubled(&self) -> Duration {
        (self.early * 2).min(MAX_PAUSE)
    }
}

/// A guest by its name, or an unnamed one by its origin.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GuestKey {
    Named(String),
    Origin(String),
}

/// The guests of workers that were killed because of what they did. Time forgets each of them.
#[derive(Debug, Default)]
pub(super) struct KilledGuests(BTreeMap<GuestKey, EventRate>);

impl KilledGuests {
    /// A worker of this guest is killed.
    pub(super) fn add(&mut self, guest: GuestKey, now: Instant) {
        self.0.retain(|_, rate| !rate.is_paid(now));
        let rate = self.0.entry(guest);
        rate.or_insert_with(|| EventRate::new(KILLS)).add(now);
    }

    /// How long the guest has to wait for a further worker.
    pub(super) fn wait(&self, guest: &GuestKey, now: Instant) -> Duration {
        let rate = self.0.get(guest);
        rate.map_or(Duration::ZERO, |rate| rate.wait(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Starts in an hour of a process that lives for `lived` each time.
    fn starts_in_an_hour(mut pause: RestartPause, lived: Duration) -> u32 {
        let start = Instant::now();
        let (mut now, mut starts) = (start, 0);
        while now < start + 3600 * SECOND {
            starts += 1;
            now += lived;
            now += pause.after(lived, now);
        }
        starts
    }

    #[test]
    fn processes_that_end_again_and_again_are_started_rarely() {
        // Ten, and then two a minute, however long they live.
        for lived in [Duration::ZERO, SECOND, 5 * SECOND, 11 * SECOND, 29 * SECOND] {
            let starts = starts_in_an_hour(RestartPause::of_one_guest(), lived);
            assert!((100..=131).contains(&starts), "{lived:?}: {starts}");
        }
        // A process that ends once in a minute is started at once.
        let of_one = RestartPause::of_one_guest();
        assert_eq!(starts_in_an_hour(of_one, 60 * SECOND), 60);
        // So is one that serves all guests.
        let of_all = RestartPause::of_all_guests();
        let starts = starts_in_an_hour(of_all, 11 * SECOND);
        assert!((320..=328).contains(&starts), "{starts}");
    }

    #[test]
    fn pauses_grow_while_processes_end_early() {
        let (now, mut pause) = (Instant::now(), RestartPause::of_one_guest());
        let early: Vec<_> = (0..6).map(|_| pause.after(SECOND, now)).collect();
        let expected = [200, 400, 800, 1600, 3200, 5000].map(Duration::from_millis);
        assert_eq!(early, expected);
        assert_eq!(pause.after(EARLY + SECOND, now), MIN_PAUSE);
        assert_eq!(pause.after_failed_start(), 2 * MIN_PAUSE);
        let more: Vec<_> = (0..4).map(|_| pause.after(60 * SECOND, now)).collect();
        assert_eq!(more, [MIN_PAUSE, MIN_PAUSE, PERIOD, 2 * PERIOD]);
        // Failed starts are not counted.
        for _ in 0..100 {
            assert!(pause.after_failed_start() <= MAX_PAUSE);
        }
        let later = now + 600 * SECOND;
        assert_eq!(pause.after(60 * SECOND, later), MIN_PAUSE);
    }

    #[test]
    fn a_guest_whose_workers_are_killed_waits_and_no_other_does() {
        let (now, mut killed) = (Instant::now(), KilledGuests::default());
        let guest = GuestKey::Named("a".into());
        for wait in [Duration::ZERO, Duration::ZERO, PERIOD, 2 * PERIOD] {
            killed.add(guest.clone(), now);
            assert_eq!(killed.wait(&guest, now), wait);
        }
        let other = GuestKey::Origin("a".into());
        assert_eq!(killed.wait(&other, now), Duration::ZERO);
        assert_eq!(killed.wait(&guest, now + 2 * PERIOD), Duration::ZERO);
        // Who has waited is forgotten.
        killed.add(other, now + 5 * PERIOD);
        assert_eq!(killed.0.len(), 1);
    }
}
