//! [`crate::faults`] in short.

use crate::faults::{self, Counts, FAULTS};
use crate::progress::heading;

use super::Bench;

/// Enough to find what goes wrong often; `cargo xtask bench faults` finds the rest.
const COUNTS: Counts = Counts {
    kills: 6,
    others: 2,
    seed: 1,
};

pub(super) fn run(bench: &mut Bench<'_>) {
    heading("faults");
    let Some(dist) = bench.dist() else { return };
    let cache = bench.cache;
    let prepared = bench.prepare("the guest program", |_| {
        faults::Bench::new(cache, &dist, COUNTS)
    });
    let Some(prepared) = prepared else { return };
    for (name, inject) in FAULTS {
        bench.check(name, |_, step| {
            inject(&prepared, step).map(|row| format!("{} times: {}", row.times, row.found))
        });
    }
}
