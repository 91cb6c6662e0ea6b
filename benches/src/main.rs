//! `cargo xtask bench`: what things cost, each figure beside that of a peer in the same run.

mod boundary;
mod common;
mod cpu;
mod driver;
mod plot;
mod soak;
mod table;
mod tenants;
mod weights;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use xtask_common::cache::Cache;

/// Measures what things cost, each figure beside that of a peer in the same run.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
enum Arguments {
    /// What crossing from guest to host costs, beside ggml-rpc and ggml's own CPU backend
    Boundary(boundary::Options),
    /// The CPU engine beside ggml's own CPU backend: kernels, prefill and decoding, type by type
    Cpu(cpu::Options),
    /// Draw what benchmarks have measured, from their JSON, as SVG
    Plot(plot::Options),
    /// A million random commands of four guests at once, and what they leave behind
    Soak(soak::Options),
    /// Several guests on one executor: shares by weight, decoding beside a prefill, eight at once
    Tenants(tenants::Options),
    /// The same model in several guests: what the next load costs, what the host holds
    Weights(weights::Options),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let cache = &Cache::open()?;
    match arguments {
        Arguments::Boundary(options) => boundary::run(cache, options),
        Arguments::Cpu(options) => cpu::run(cache, options),
        Arguments::Plot(options) => plot::run(options),
        Arguments::Soak(options) => soak::run(cache, options),
        Arguments::Tenants(options) => tenants::run(cache, options),
        Arguments::Weights(options) => weights::run(cache, options),
    }
}
