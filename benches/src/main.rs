//! `cargo xtask bench`: benchmarks, each compared with a peer in the same run.

mod batch;
mod boundary;
mod common;
mod cpu;
mod driver;
mod fairness;
mod parts;
mod plot;
mod soak;
mod table;
mod tenants;
mod weights;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use xtask_common::cache::Cache;
use xtask_common::progress;

/// Runs the benchmarks, each compared with a peer in the same run.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
enum Arguments {
    /// Measure programs that decode with the same model at once, with and without batches
    Batch(batch::Options),
    /// Measure round trips, transfers, model loads and decoding, beside ggml-rpc and ggml's CPU
    /// backend
    Boundary(boundary::Options),
    /// Measure kernels, prefill and decoding of the CPU engine, beside ggml's CPU backend
    Cpu(cpu::Options),
    /// Measure what guests with endless graphs of each operator leave to a guest that decodes
    Fairness(fairness::Options),
    /// Measure the longest parts of nodes that the CPU engine does not divide, for every operator
    Parts(parts::Options),
    /// Draw what benchmarks have measured, from their JSON, as SVG
    Plot(plot::Options),
    /// Run a million random commands of four concurrent guests, and look for leaks
    Soak(soak::Options),
    /// Measure several guests of one executor: shares by weight, decoding beside a prefill, eight
    /// guests
    Tenants(tenants::Options),
    /// Measure several guests with the same model: time and traffic of the next load, memory of
    /// the host
    Weights(weights::Options),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::say(&format!("\nerror: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let cache = &Cache::open()?;
    match arguments {
        Arguments::Boundary(options) => boundary::run(cache, options),
        Arguments::Cpu(options) => cpu::run(cache, options),
        Arguments::Fairness(options) => fairness::run(cache, options),
        Arguments::Parts(options) => parts::run(cache, options),
        Arguments::Plot(options) => plot::run(options),
        Arguments::Soak(options) => soak::run(cache, options),
        Arguments::Tenants(options) => tenants::run(cache, options),
        Arguments::Batch(options) => batch::run(cache, options),
        Arguments::Weights(options) => weights::run(cache, options),
    }
}
