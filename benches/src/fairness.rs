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

/// Options of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Seconds of each measurement; each operator has four
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("fairness");
    let progress = Progress::new("a guest that decodes, beside attackers of every operator");
    let mut cargo = workspace::cargo();
    cargo
        .args(["test", "--release", "--package", "vgpu-executor"])
        .args(["--test", "fairness", "--", "--nocapture"])
        .env("VGPU_FAIRNESS", options.seconds.to_string());
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
    let operator = line["operator"].as_str().context("no operator")?;
    let long = if line["long_parts"] == true {
        ", long parts"
    } else {
        ""
    };
    let alone = figure("alone_tokens_per_second")?;
    let row = Row::new(format!("decoding beside {operator}{long}"), "tok/s")
        .figure("alone", alone)
        .figure("beside", alone * figure("share")?)
        .figure(
            "second after",
            alone * figure("share_in_the_first_second_after")?,
        )
        .ratio("beside", "alone", true, Some(SHARE))
        .ratio("second after", "alone", true, None);
    Ok(row
        .figure(
            "share of the engine's time",
            figure("share_of_engine_time")?,
        )
        .figure("longest wait, ms", figure("longest_wait_ms")?))
}
