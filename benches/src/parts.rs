//! The measurement of `host-executor/tests/longest_parts/main.rs`: how long the parts run that no
//! kernel of the CPU engine divides.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::common::{keep, show};
use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::workspace;

/// Options of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Seconds of each shape
    #[arg(long, default_value_t = 0.2)]
    seconds: f64,
    /// Only shapes whose name contains this text
    #[arg(long, default_value = "")]
    shapes: String,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("parts");
    let progress = Progress::new("the longest rows, windows and tiles of every operator");
    let mut cargo = workspace::cargo();
    cargo
        .args(["test", "--release", "--package", "vgpu-executor"])
        .args(["--test", "longest_parts", "--", "--nocapture"])
        .env("VGPU_PARTS", options.seconds.to_string())
        .env("VGPU_PARTS_OF", &options.shapes);
    let log = cache.log("parts");
    process::run(&mut cargo, &progress, &log)?;
    let text =
        std::fs::read_to_string(&log).with_context(|| format!("reading {}", log.display()))?;
    let lines = { text.lines() }
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).context("parsing a row"));
    let rows = lines
        .map(|line| row(&line?))
        .collect::<Result<Vec<Row>>>()?;
    ensure!(!rows.is_empty(), "{} has no figures", log.display());
    progress.done(&format!("{} shapes", rows.len()));
    show(&rows);
    let folder = workspace::root().join("target/bench");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let setting = json!({ "seconds": options.seconds, "shapes": options.shapes });
    keep(&folder, "parts", setting, &rows)
}

/// The figures of one shape.
fn row(line: &Value) -> Result<Row> {
    let figure = |name: &str| {
        let value = line[name].as_f64();
        value.with_context(|| format!("no {name} in {line}"))
    };
    let name = line["name"].as_str().context("no name")?;
    Ok(Row::new(name, "ms of processor time")
        .figure("longest", figure("longest_ms")?)
        .figure("second longest", figure("second_ms")?)
        .figure("median", figure("median_ms")?)
        .figure("length", figure("length")?)
        .figure("steps of a part", figure("part")?))
}
