//! What happens in a second: the difference of two looks at counters.

use std::collections::BTreeMap;

use vgpu_executor::status::{Status, Work};

/// What a guest does in a second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) graphs: f64,
    /// Part of the device's time, 0 to 1.
    pub(super) busy: f64,
    /// Graphs that wait, on average.
    pub(super) waiting: f64,
    pub(super) bytes_in: f64,
    pub(super) bytes_out: f64,
}

impl Rates {
    fn between(before: &Work, after: &Work, seconds: f64) -> Rates {
        // Counters only grow, except when another executor has taken the first one's place.
        let rate = |before: f64, after: f64| (after - before).max(0.0) / seconds;
        Rates {
            graphs: rate(before.graphs as f64, after.graphs as f64),
            busy: rate(before.busy, after.busy),
            waiting: rate(before.queued, after.queued),
            bytes_in: rate(before.bytes_in as f64, after.bytes_in as f64),
            bytes_out: rate(before.bytes_out as f64, after.bytes_out as f64),
        }
    }
}

/// The rates of each guest, by name. None between two executors, or when no time has passed.
pub(super) fn rates(before: &Status, after: &Status) -> BTreeMap<String, Rates> {
    let seconds = after.uptime - before.uptime;
    if seconds <= 0.0 {
        return BTreeMap::new();
    }
    let mut rates = BTreeMap::new();
    for guest in &after.guests {
        let earlier = before.guests.iter().find(|g| g.name == guest.name);
        let nothing = Work::default();
        let earlier = earlier.map_or(&nothing, |g| &g.work);
        rates.insert(
            guest.name.clone(),
            Rates::between(earlier, &guest.work, seconds),
        );
    }
    rates
}
