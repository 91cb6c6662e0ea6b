//! `cargo xtask faults`: all faults, hundreds of times.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use xtask_common::cache::Cache;
use xtask_common::dist;
use xtask_common::print;
use xtask_common::progress::{Progress, heading, say};
use xtask_common::workspace;

use super::all::{self, FAULTS};
use super::event::Chosen;
use super::setup::{Counts, Setup};
use super::upgrade::{UPGRADE, from_the_previous_release};
use crate::previous::previous;

/// Options of the long run.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Executors to kill, and guests to kill
    #[arg(long, default_value_t = 200)]
    kills: usize,
    /// How often each other fault is injected
    #[arg(long, default_value_t = 20)]
    others: usize,
    /// Random events against six guests
    #[arg(long, default_value_t = 200)]
    events: usize,
    /// Seed of the moments at which faults are injected
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only faults whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Test libggml-vgpu.so and vgpu of this folder instead of a fresh release build
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
}

/// Options of the random events.
#[derive(Debug, clap::Args)]
pub(crate) struct SoakOptions {
    /// How many events happen
    #[arg(long, default_value_t = 1000)]
    events: usize,
    /// The time after which no further event happens, in minutes [default: no limit]
    #[arg(long)]
    minutes: Option<u64>,
    /// Only these kinds of events, by their names in the result with commas between them, or by the
    /// begin of a word of the name: `fork,load` are "guest forks" and "models loaded again"
    #[arg(long, value_name = "NAMES")]
    only: Option<Chosen>,
    /// Leave out the events that end the executor: one lives through all of them
    #[arg(long)]
    keep_executor: bool,
    /// The programs do not share weights
    #[arg(long)]
    without_sharing: bool,
    /// Seed of the events and their moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Test libggml-vgpu.so and vgpu of this folder instead of a fresh release build
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
}

/// Random events only.
pub(crate) fn soak(cache: &Cache, options: &SoakOptions) -> Result<()> {
    let counts = Counts {
        kills: 0,
        others: 0,
        events: options.events,
        chosen: options.only.unwrap_or(Chosen::ALL),
        keeps_executor: options.keep_executor,
        shares_weights: !options.without_sharing,
        time: options
            .minutes
            .map(|minutes| Duration::from_secs(60 * minutes)),
        seed: options.seed,
    };
    inject(
        cache,
        options.dist.as_deref(),
        counts,
        Some(all::RANDOM_EVENTS),
    )
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    let counts = Counts {
        kills: options.kills,
        others: options.others,
        events: options.events,
        chosen: Chosen::ALL,
        keeps_executor: false,
        shares_weights: true,
        time: None,
        seed: options.seed,
    };
    inject(
        cache,
        options.dist.as_deref(),
        counts,
        options.only.as_deref(),
    )
}

/// Injects the faults whose names contain `only`, the upgrade among them.
fn inject(cache: &Cache, dist: Option<&Path>, counts: Counts, only: Option<&str>) -> Result<()> {
    heading("faults");
    say(&format!("  --seed {}", counts.seed));
    let dist = match dist {
        Some(folder) => dist::at(folder),
        None => dist::build(cache)?,
    };
    let setup = Setup::new(cache, &dist, counts)?;
    let (mut rows, mut failed) = (Vec::new(), 0);
    for (name, inject) in FAULTS {
        if only.is_some_and(|text| !name.contains(text)) {
            continue;
        }
        let progress = Progress::new(name);
        match inject(&setup, &progress) {
            Ok(row) => {
                progress.done(&format!("{} times", row.times));
                rows.push(row);
            }
            Err(error) => {
                progress.failed(&format!("{error:#}"));
                failed += 1;
            }
        }
    }
    if only.is_none_or(|text| UPGRADE.contains(text)) {
        let progress = Progress::new(UPGRADE);
        let upgraded = previous(cache)
            .and_then(|made| from_the_previous_release(&setup, &made.dist, &progress));
        match upgraded {
            Ok(found) => progress.done(&found),
            Err(error) => {
                progress.failed(&format!("{error:#}"));
                failed += 1;
            }
        }
    }
    let table = all::table(&rows);
    print!("{table}");
    let reports = workspace::reports();
    std::fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
    let file = reports.join("faults.txt");
    std::fs::write(&file, table).with_context(|| format!("writing {}", file.display()))?;
    match failed {
        0 => Ok(()),
        failed => bail!("{failed} kinds of faults had an effect beyond the process concerned"),
    }
}
