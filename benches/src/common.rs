//! Shared code of the benchmarks: their prerequisites, runs of `llama-bench`, and the output of
//! figures.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::table::Row;
use xtask_common::cache::Cache;
use xtask_common::dist::{self, Dist};
use xtask_common::llama;
use xtask_common::model::{self, FileType};
use xtask_common::println;
use xtask_common::process;
use xtask_common::workspace;

/// The prerequisites of a benchmark.
pub(crate) struct Needs {
    /// The sources of llama.cpp.
    pub(crate) source: PathBuf,
    /// The folder of its programs.
    pub(crate) bin: PathBuf,
    pub(crate) dist: Dist,
    /// The folder for figures and logs.
    pub(crate) folder: PathBuf,
}

/// Which build a benchmark measures.
#[derive(Debug, clap::Args)]
pub(crate) struct Build {
    /// Measure libggml-vgpu.so and vgpu of this folder instead of a fresh release build
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
}

impl Needs {
    /// What the benchmarks need; fetches and builds what the cache does not have.
    pub(crate) fn prepare(cache: &Cache, build: &Build) -> Result<Needs> {
        let source = llama::source(cache)?;
        let bin = llama::build(cache, llama::Stage::Tools)?;
        let dist = match &build.dist {
            Some(folder) => dist::at(folder),
            None => dist::build(cache)?,
        };
        let folder = workspace::root().join("target/bench");
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("creating {}", folder.display()))?;
        Ok(Needs {
            source,
            bin,
            dist,
            folder,
        })
    }

    /// The model of benchmarks that measure one.
    pub(crate) fn model(&self, cache: &Cache) -> Result<PathBuf> {
        model::ensure(cache, &model::BENCH, FileType::Q4KM)
    }
}

/// Prints the rows.
pub(crate) fn show(rows: &[Row]) {
    println!();
    rows.iter().for_each(|row| println!("{}", row.lines()));
}

/// Writes the rows to `name`.json in `folder`, with the settings of the measurement (a JSON
/// object), and prints the path.
pub(crate) fn keep(folder: &Path, name: &str, mut setting: Value, rows: &[Row]) -> Result<()> {
    let path = folder.join(format!("{name}.json"));
    setting["rows"] = json!(rows.iter().map(Row::json).collect::<Vec<_>>());
    std::fs::write(&path, format!("{setting:#}\n"))
        .with_context(|| format!("writing {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

/// Runs `llama-bench -o json` for one measurement: tokens per second on a backend whose name holds
/// `backend`.
pub(crate) fn tokens_per_second(command: &mut Command, way: &str, backend: &str) -> Result<f64> {
    let text = process::output(command).with_context(|| format!("llama-bench, {way}"))?;
    let results: Value = serde_json::from_str(&text).context("parsing llama-bench's figures")?;
    let result = &results[0];
    let speed = result["avg_ts"].as_f64().context("no tokens per second")?;
    // A figure of another device would be misleading.
    let backends = result["backends"].as_str().unwrap_or_default();
    ensure!(
        backends.contains(backend),
        "llama-bench used {backends:?} for {way}"
    );
    Ok(speed)
}

/// The sum of two times in a process's `stat`, in hundredths of a second: field `first` of proc(5)
/// and the one behind it.
pub(crate) fn ticks(stat: &str, first: usize) -> Result<u64> {
    let text = std::fs::read_to_string(stat).with_context(|| format!("looking at {stat}"))?;
    // The second field is a name, which can hold anything.
    let (_, rest) = text.rsplit_once(") ").context("a line without a name")?;
    let ticks = rest
        .split(' ')
        .skip(first - 3)
        .take(2)
        .map(str::parse::<u64>);
    Ok(ticks.sum::<Result<u64, _>>()?)
}
