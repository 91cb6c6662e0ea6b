//! Rates per second, from the difference of two snapshots.

use std::collections::BTreeMap;

use vgpu_executor::status::{Status, Usage};

/// The rates of a guest.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) graphs: f64,
    /// Share of the device's time, 0 to 1; with several devices, the sum.
    pub(super) busy: f64,
    /// Average number of waiting graphs.
    pub(super) waiting: f64,
    /// Turns on the engine per second, and the graphs that ran in them.
    pub(super) turns: f64,
    pub(super) batch_members: f64,
    pub(super) bytes_in: f64,
    pub(super) bytes_out: f64,
}

impl Rates {
    fn between(before: &Usage, after: &Usage, seconds: f64) -> Rates {
        // Counters only decrease when the executor has been restarted.
        let rate = |before: f64, after: f64| (after - before).max(0.0) / seconds;
        Rates {
            graphs: rate(before.graphs as f64, after.graphs as f64),
            busy: rate(before.busy, after.busy),
            waiting: rate(before.queued, after.queued),
            turns: rate(before.turns as f64, after.turns as f64),
            batch_members: rate(before.batch_members as f64, after.batch_members as f64),
            bytes_in: rate(before.bytes_in as f64, after.bytes_in as f64),
            bytes_out: rate(before.bytes_out as f64, after.bytes_out as f64),
        }
    }
}

/// The part of its time that each engine has executed graphs, by device. Zero if no time has
/// passed, or the executor has been restarted.
pub(super) fn busy(before: &Status, after: &Status) -> Vec<f64> {
    let seconds = after.uptime - before.uptime;
    let executed = |status: &Status| -> Vec<f64> {
        let devices = status.by_device();
        let sums = devices.map(|(_, guests)| guests.map(|(_, usage)| usage.busy).sum());
        sums.collect()
    };
    let before = executed(before);
    let after = executed(after).into_iter().enumerate();
    let parts = after.map(|(device, after)| {
        let before = before.get(device).copied().unwrap_or(0.0);
        match seconds > 0.0 {
            true => (after - before).max(0.0) / seconds,
            false => 0.0,
        }
    });
    parts.collect()
}

/// The part of the time of each engine's nodes that the CPU engine had, by device. `None` if the
/// engine does not count that, or nothing has run.
pub(super) fn on_cpu(before: &Status, after: &Status) -> Vec<Option<f64>> {
    let mut before = before.engines().map(|engine| engine.fallback);
    let parts = after.engines().map(|engine| {
        let before = before.next().flatten().unwrap_or_default();
        let now = engine.fallback?;
        // Counters only decrease when the executor has been restarted.
        let [device, cpu] = [
            now.device_seconds - before.device_seconds,
            now.cpu_seconds - before.cpu_seconds,
        ]
        .map(|seconds| seconds.max(0.0));
        (device + cpu > 0.0).then(|| cpu / (device + cpu))
    });
    parts.collect()
}

/// The rates of each guest, by name. Empty if no time has passed, or the executor has been
/// restarted.
pub(super) fn rates(before: &Status, after: &Status) -> BTreeMap<String, Rates> {
    let seconds = after.uptime - before.uptime;
    if seconds <= 0.0 {
        return BTreeMap::new();
    }
    let mut rates = BTreeMap::new();
    for guest in &after.guests {
        let earlier = before.guests.iter().find(|g| g.name == guest.name);
        let nothing = Usage::default();
        let earlier = earlier.map_or(&nothing, |g| &g.usage);
        rates.insert(
            guest.name.clone(),
            Rates::between(earlier, &guest.usage, seconds),
        );
    }
    rates
}
