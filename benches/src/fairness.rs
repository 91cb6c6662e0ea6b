//! The measurement of `host-executor/tests/fairness.rs`: what an attacker with each operator leaves
//! to another guest.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::common::{keep, show};
use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::workspace;

/// The least share of its rate alone that the other guest keeps.
const SHARE: f64 = 0.45;

/// The same once the attacker has been gone for a second: all, but for what the machine varies.
const SHARE_AFTER: f64 = 0.95;

/// Options of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Seconds of each measurement; each attacker has three, and the second after its end, in each
    /// of five rounds, of which the one with the median share counts
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Only these attackers, by the names that the figures have: operators, "no graph", "requests",
    /// "short graphs of 4" and "MUL_MAT, long parts"
    #[arg(long, value_delimiter = ';')]
    attackers: Vec<String>,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("fairness");
    let progress = Progress::new("a guest that decodes, beside attackers of every operator");
    let mut cargo = workspace::cargo();
    cargo
        .args(["test", "--release", "--package", "vgpu-executor"])
        .args(["--test", "fairness", "--", "--nocapture"])
        .env("VGPU_FAIRNESS", options.seconds.to_string());
    if !options.attackers.is_empty() {
        cargo.env("VGPU_FAIRNESS_OF", options.attackers.join(";"));
    }
    let log = cache.log("fairness");
    process::run(&mut cargo, &progress, &log)?;
    let text =
        std::fs::read_to_string(&log).with_context(|| format!("reading {}", log.display()))?;
    let rows = { text.lines() }
        .filter(|line| line.starts_with('{'))
        .map(|line| row(&serde_json::from_str(line).context("parsing a row")?))
        .collect::<Result<Vec<_>>>()?;
    ensure!(!rows.is_empty(), "{} has no figures", log.display());
    progress.done(&format!("{} attackers", rows.len()));
    show(&rows);
    let folder = workspace::root().join("target/bench");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let setting = json!({ "seconds": options.seconds });
    keep(&folder, "fairness", setting, &rows)
}

/// The figures of one attacker.
fn row(line: &Value) -> Result<Row> {
    let figure = |name: &str| {
        let value = line[name].as_f64();
        value.with_context(|| format!("no {name} in {line}"))
    };
    let attacker = line["attacker"].as_str().context("no attacker")?;
    let alone = figure("alone_tokens_per_second")?;
    let rates = [
        ("beside", "share"),
        ("slowest half second", "lowest_share"),
        ("second after", "share_in_the_second_after"),
        ("after a second", "share_after_a_second"),
    ];
    let row = Row::new(format!("decoding beside {attacker}"), "tok/s").figure("alone", alone);
    let row = rates.iter().try_fold(row, |row, (name, share)| {
        anyhow::Ok(row.figure(*name, alone * figure(share)?))
    })?;
    let target = |name| match name {
        "beside" => Some(SHARE),
        "after a second" => Some(SHARE_AFTER),
        _ => None,
    };
    let row = { rates.iter() }.fold(row, |row, &(name, _)| {
        row.ratio(name, "alone", true, target(name))
    });
    Ok(row
        .figure(
            "share of the engine's time",
            figure("share_of_engine_time")?,
        )
        .figure("longest wait, ms", figure("longest_wait_ms")?)
        .figure("longest wait alone, ms", figure("longest_wait_alone_ms")?))
}
