//! All faults, a few times each.
//!
//! In a default run as many random events happen as fit into a minute.

use std::time::Duration;

use anyhow::Context as _;

use crate::faults::{self, Chosen, Counts, FAULTS};
use xtask_common::progress::heading;

use crate::previous::previous;
use crate::test_run::TestRun;

/// The counts of each fault: enough for frequent errors. `cargo xtask faults` finds rare ones.
const FULL: Counts = Counts {
    kills: 6,
    others: 2,
    // The time ends the run.
    events: 1_000_000,
    chosen: Chosen::ALL,
    keeps_executor: false,
    shares_weights: true,
    time: Some(Duration::from_secs(60 * 60)),
    seed: 1,
};

/// Counts of a default run.
const DEFAULT: Counts = Counts {
    kills: 3,
    others: 1,
    events: 12,
    chosen: Chosen::ALL,
    keeps_executor: false,
    shares_weights: true,
    time: Some(Duration::from_secs(60)),
    seed: 1,
};

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("faults");
    let Some(dist) = tests.dist() else { return };
    let cache = tests.cache;
    let counts = Counts {
        seed: tests.options.seed(),
        ..if tests.options.full { FULL } else { DEFAULT }
    };
    let prepared = tests.prepare("the guest program", |_| {
        faults::Setup::new(cache, &dist, counts)
    });
    let Some(prepared) = prepared else { return };
    for (name, inject) in FAULTS {
        tests.check(name, |_, step| {
            inject(&prepared, step)
                .map(|row| format!("{} times: {}", row.times, row.found))
                .with_context(|| format!("with --seed {}", counts.seed))
        });
    }
    if !tests.options.full {
        return;
    }
    let made = tests.prepare("the previous release", |tests| previous(tests.cache));
    let Some(made) = made else { return };
    tests.check(faults::UPGRADE, |_, step| {
        faults::from_the_previous_release(&prepared, &made.dist, step)
    });
}
