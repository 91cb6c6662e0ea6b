//! The soak test of `host-executor/tests/soak.rs` with the full number of commands.

use anyhow::Result;

use xtask_common::cache::Cache;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::workspace;

/// Options of the soak.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Commands of all guests together
    #[arg(long, default_value_t = 1_000_000)]
    commands: u64,
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("soak");
    let commands = options.commands;
    let progress = Progress::new(&format!("{commands} random commands of four guests"));
    let mut cargo = workspace::cargo();
    cargo
        .args(["test", "--release", "--package", "vgpu-executor"])
        .args(["--test", "soak", "--", "--nocapture"])
        .env("VGPU_SOAK", commands.to_string());
    let log = cache.log("soak");
    process::run(&mut cargo, &progress, &log)?;
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let found = text.lines().find(|line| line.contains("commands; before"));
    progress.done(found.unwrap_or_default());
    Ok(())
}
