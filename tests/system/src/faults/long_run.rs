//! `cargo xtask faults`: all faults, hundreds of times.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use xtask_common::cache::Cache;
use xtask_common::dist;
use xtask_common::progress::{Progress, heading};
use xtask_common::workspace;

use super::all::{self, FAULTS};
use super::setup::{Counts, Setup};

/// Options of the long run.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Executors to kill, and guests to kill
    #[arg(long, default_value_t = 200)]
    kills: usize,
    /// How often each other fault is injected
    #[arg(long, default_value_t = 20)]
    others: usize,
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

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("faults");
    let dist = match &options.dist {
        Some(folder) => dist::at(folder),
        None => dist::build(cache)?,
    };
    let counts = Counts {
        kills: options.kills,
        others: options.others,
        seed: options.seed,
    };
    let setup = Setup::new(cache, &dist, counts)?;
    let (mut rows, mut failed) = (Vec::new(), 0);
    for (name, inject) in FAULTS {
        if options
            .only
            .as_ref()
            .is_some_and(|text| !name.contains(text))
        {
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
