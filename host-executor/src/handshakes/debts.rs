//! What connections of each origin have cost that ended without a session.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The part of a processor that connections without a session may use for each origin.
const RATE: f64 = 0.1;

/// The cost that an origin may cause at once without a consequence: ten worker processes.
const BURST: Duration = Duration::from_millis(500);

/// How long a connection waits at most. Programs that connect anew at each load wait 1 s for an
/// executor that did not answer before.
const MAX_WAIT: Duration = Duration::from_millis(800);

/// The largest debt of an origin. After any flood the origin is served again within
/// `(MAX_DEBT - BURST) / RATE`, 5 s.
const MAX_DEBT: Duration = Duration::from_secs(1);

/// Origins that are remembered. Beyond that, the one with the smallest debt is forgotten.
const MAX_ORIGINS: usize = 4096;

/// The processor time of each origin, which time pays at [`RATE`].
#[derive(Debug, Default)]
pub(super) struct Debts(BTreeMap<String, Debt>);

#[derive(Debug, Clone, Copy)]
struct Debt {
    /// At the time `at`.
    cost: Duration,
    at: Instant,
}

impl Debt {
    fn left(&self, now: Instant) -> Duration {
        let paid = now.saturating_duration_since(self.at).mul_f64(RATE);
        self.cost.saturating_sub(paid)
    }
}

impl Debts {
    /// How long a connection of this origin has to wait now. `None`: too long.
    pub(super) fn wait(&self, origin: &str, now: Instant) -> Option<Duration> {
        let left = self
            .0
            .get(origin)
            .map_or(Duration::ZERO, |debt| debt.left(now));
        let wait = left.saturating_sub(BURST).div_f64(RATE);
        (wait <= MAX_WAIT).then_some(wait)
    }

    /// A connection of this origin has ended without a session.
    pub(super) fn add(&mut self, origin: &str, cost: Duration, now: Instant) {
        if cost.is_zero() {
            return;
        }
        if let Some(debt) = self.0.get_mut(origin) {
            *debt = Debt {
                cost: (debt.left(now) + cost).min(MAX_DEBT),
                at: now,
            };
            return;
        }
        let cost = cost.min(MAX_DEBT);
        if self.0.len() >= MAX_ORIGINS {
            self.0.retain(|_, debt| !debt.left(now).is_zero());
        }
        if self.0.len() >= MAX_ORIGINS {
            let smallest = self.0.iter().min_by_key(|(_, debt)| debt.left(now));
            if let Some(origin) = smallest.map(|(origin, _)| origin.clone()) {
                self.0.remove(&origin);
            }
        }
        self.0.insert(origin.to_owned(), Debt { cost, at: now });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn an_origin_waits_for_what_it_has_cost_and_no_other_origin_does() {
        let (mut debts, start) = (Debts::default(), Instant::now());
        debts.add("a", 500 * MS, start);
        assert_eq!(debts.wait("a", start), Some(Duration::ZERO), "a burst");
        debts.add("a", 20 * MS, start);
        assert_eq!(debts.wait("a", start), Some(200 * MS));
        assert_eq!(debts.wait("b", start), Some(Duration::ZERO));
        // A tenth of the time that passes pays.
        let later = start + 150 * MS;
        assert_eq!(debts.wait("a", later), Some(50 * MS));
        debts.add("a", 75 * MS, later);
        assert_eq!(debts.wait("a", later), Some(800 * MS));
        debts.add("a", MS, later);
        assert_eq!(debts.wait("a", later), None);
        assert_eq!(debts.wait("a", later + 10 * MS), Some(800 * MS));
    }

    #[test]
    fn an_origin_is_served_again_some_seconds_after_any_flood() {
        let (mut debts, start) = (Debts::default(), Instant::now());
        for origin in ["once", "often", "often", "often"] {
            debts.add(origin, 3600 * 1000 * MS, start);
        }
        for origin in ["once", "often"] {
            assert_eq!(debts.wait(origin, start + 4100 * MS), None);
            assert_eq!(debts.wait(origin, start + 4200 * MS), Some(800 * MS));
            assert_eq!(debts.wait(origin, start + 5000 * MS), Some(Duration::ZERO));
        }
    }

    #[test]
    fn the_rate_of_any_number_of_connections_is_bounded() {
        let (mut debts, start) = (Debts::default(), Instant::now());
        // Each costs 2 ms, and the next one comes when the last one has ended.
        let (mut now, mut cost) = (start, Duration::ZERO);
        while now < start + Duration::from_secs(100) {
            now += debts.wait("a", now).expect("no longer than the limit") + 2 * MS;
            debts.add("a", 2 * MS, now);
            cost += 2 * MS;
        }
        let part = (cost - BURST).as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.095..0.105).contains(&part), "{part}");
    }

    #[test]
    fn the_number_of_origins_is_bounded_and_the_largest_debts_stay() {
        let (mut debts, now) = (Debts::default(), Instant::now());
        debts.add("large", 600 * MS, now);
        for i in 0..2 * MAX_ORIGINS {
            debts.add(&i.to_string(), MS, now);
        }
        assert_eq!(debts.0.len(), MAX_ORIGINS);
        assert_eq!(debts.wait("large", now), None);
        // Debts that have been paid go first.
        debts.add("new", MS, now + 100 * MS);
        assert_eq!(debts.0.len(), 2);
    }
}
