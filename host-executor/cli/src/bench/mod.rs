//! `vgpu bench`: benchmarks of the engines.

mod plan;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures an engine.
#[derive(Parser)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    Plan(plan::Args),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.what {
        Benchmark::Plan(args) => plan::run(args),
    }
}
