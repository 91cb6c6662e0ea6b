//! What each origin has cost: connections that ended without a session, and processes that ended
//! soon after their start.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What an origin may cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    /// The part of a processor.
    part: f64,
    /// The cost that has no consequence if it comes at once.
    burst: Duration,
    /// The largest debt. After any flood the origin is served again within the time that pays what
    /// is beyond `burst`.
    max_debt: Duration,
}

/// Of connections that end without a session: ten worker processes at once, and served again after
/// 5 s.
pub(super) const OF_CONNECTIONS: Rate = Rate {
    part: 0.1,
    burst: Duration::from_millis(500),
    max_debt: Duration::from_secs(1),
};

/// Of worker processes whose programs have had sessions, but have ended soon: a hundred processes
/// at once, five a second, and served again after 2 s. A script that starts one short program after
/// the other is no flood.
pub(super) const OF_WORKERS: Rate = Rate {
    part: 0.25,
    burst: Duration::from_secs(5),
    max_debt: Duration::from_millis(5500),
};

/// How long a connection waits at most. Programs that connect anew at each load wait 1 s for an
/// executor that did not answer before.
const MAX_WAIT: Duration = Duration::from_millis(800);

/// Origins that are remembered. Beyond that, the one with the smallest debt is forgotten.
const MAX_ORIGINS: usize = 4096;

/// The processor time of each origin, which time pays at a rate.
#[derive(Debug)]
pub(super) struct Debts {
    rate: Rate,
    by_origin: BTreeMap<String, Debt>,
}

#[derive(Debug, Clone, Copy)]
struct Debt {
    /// At the time `at`.
    cost: Duration,
    at: Instant,
}

impl Debt {
    fn left(&self, rate: Rate, now: Instant) -> Duration {
        let paid = now.saturating_duration_since(self.at).mul_f64(rate.part);
        self.cost.saturating_sub(paid)
    }
}

impl Debts {
    pub(super) fn new(rate: Rate) -> Debts {
        Debts {
            rate,
            by_origin: BTreeMap::new(),
        }
    }

    /// How long a connection of this origin has to wait now. `None`: too long.
    pub(super) fn wait(&self, origin: &str, now: Instant) -> Option<Duration> {
        let left = self.of(origin, now);
        let wait = left.saturating_sub(self.rate.burst).div_f64(self.rate.part);
        (wait <= MAX_WAIT).then_some(wait)
    }

    /// What this origin has cost and time has not paid.
    pub(super) fn of(&self, origin: &str, now: Instant) -> Duration {
        let debt = self.by_origin.get(origin);
        debt.map_or(Duration::ZERO, |debt| debt.left(self.rate, now))
    }

    /// This origin has cost so much more.
    pub(super) fn add(&mut self, origin: &str, cost: Duration, now: Instant) {
        if cost.is_zero() {
            return;
        }
        let Debts { rate, by_origin } = self;
        if let Some(debt) = by_origin.get_mut(origin) {
            *debt = Debt {
                cost: (debt.left(*rate, now) + cost).min(rate.max_debt),
                at: now,
            };
            return;
        }
        let cost = cost.min(rate.max_debt);
        if by_origin.len() >= MAX_ORIGINS {
            by_origin.retain(|_, debt| !debt.left(*rate, now).is_zero());
        }
        if by_origin.len() >= MAX_ORIGINS {
            let smallest = { by_origin.iter() }.min_by_key(|(_, debt)| debt.left(*rate, now));
            if let Some(origin) = smallest.map(|(origin, _)| origin.clone()) {
                by_origin.remove(&origin);
            }
        }
        by_origin.insert(origin.to_owned(), Debt { cost, at: now });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn an_origin_waits_for_what_it_has_cost_and_no_other_origin_does() {
        let (mut debts, start) = (Debts::new(OF_CONNECTIONS), Instant::now());
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
        let (mut debts, start) = (Debts::new(OF_CONNECTIONS), Instant::now());
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
        let (mut debts, start) = (Debts::new(OF_CONNECTIONS), Instant::now());
        // Each costs 2 ms, and the next one comes when the last one has ended.
        let (mut now, mut cost) = (start, Duration::ZERO);
        while now < start + Duration::from_secs(100) {
            now += debts.wait("a", now).expect("no longer than the limit") + 2 * MS;
            debts.add("a", 2 * MS, now);
            cost += 2 * MS;
        }
        let part = (cost - OF_CONNECTIONS.burst).as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.095..0.105).contains(&part), "{part}");
    }

    #[test]
    fn short_programs_in_a_row_wait_for_nothing_and_a_flood_of_them_is_bounded() {
        let start = Instant::now();
        // Four scripts, each with a program after the other that lives for 1 s.
        let mut debts = Debts::new(OF_WORKERS);
        for second in 0..600 {
            let now = start + second * 1000 * MS;
            assert_eq!(debts.wait("a", now), Some(Duration::ZERO));
            (0..4).for_each(|_| debts.add("a", 40 * MS, now));
        }
        // As many as come, which end at once.
        let mut debts = Debts::new(OF_WORKERS);
        let (mut now, mut count) = (start, 0);
        while now < start + 60 * 1000 * MS {
            match debts.wait("a", now) {
                Some(Duration::ZERO) => {
                    debts.add("a", 50 * MS, now);
                    count += 1;
                }
                _ => now += 10 * MS,
            }
        }
        assert!((395..=405).contains(&count), "{count}: 100, and 5 a second");
    }

    #[test]
    fn the_number_of_origins_is_bounded_and_the_largest_debts_stay() {
        let (mut debts, now) = (Debts::new(OF_CONNECTIONS), Instant::now());
        debts.add("large", 600 * MS, now);
        for i in 0..2 * MAX_ORIGINS {
            debts.add(&i.to_string(), MS, now);
        }
        assert_eq!(debts.by_origin.len(), MAX_ORIGINS);
        assert_eq!(debts.wait("large", now), None);
        // Debts that have been paid go first.
        debts.add("new", MS, now + 100 * MS);
        assert_eq!(debts.by_origin.len(), 2);
    }
}
