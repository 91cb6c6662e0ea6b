//! [`crate::faults`] in short.

use crate::faults::{self, Counts, FAULTS};
use xtask_common::progress::heading;

use crate::test_run::TestRun;

/// Enough to find what goes wrong often; `cargo xtask faults` finds the rest.
const COUNTS: Counts = Counts {
    kills: 6,
    others: 2,
    seed: 1,
};

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("faults");
    let Some(dist) = tests.dist() else { return };
    let cache = tests.cache;
    let prepared = tests.prepare("the guest program", |_| {
        faults::Setup::new(cache, &dist, COUNTS)
    });
    let Some(prepared) = prepared else { return };
    for (name, inject) in FAULTS {
        tests.check(name, |_, step| {
            inject(&prepared, step).map(|row| format!("{} times: {}", row.times, row.found))
        });
    }
}
