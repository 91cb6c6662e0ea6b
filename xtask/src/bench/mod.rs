//! `cargo xtask bench`: what things cost, each figure beside that of a peer in the same run.

mod boundary;
mod common;
mod cpu;
mod driver;
mod faults;
mod soak;
mod table;
mod tenants;
mod weights;

use anyhow::Result;

use crate::cache::Cache;

/// What to measure.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Options {
    /// What crossing from guest to host costs, beside ggml-rpc and ggml's own CPU backend
    Boundary(boundary::Options),
    /// The CPU engine beside ggml's own CPU backend: kernels, prefill and decoding, type by type
    Cpu(cpu::Options),
    /// A million random commands of four guests at once, and what they leave behind
    Soak(soak::Options),
    /// Several guests on one executor: shares by weight, decoding beside a prefill, eight at once
    Tenants(tenants::Options),
    /// Executors and guests killed, stopped and starved, hundreds of times, and what they leave behind
    Faults(faults::Options),
    /// The same model in several guests: what the next load costs, what the host holds
    Weights(weights::Options),
}

pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    match options {
        Options::Boundary(options) => boundary::run(cache, options),
        Options::Cpu(options) => cpu::run(cache, options),
        Options::Soak(options) => soak::run(cache, options),
        Options::Tenants(options) => tenants::run(cache, options),
        Options::Faults(options) => faults::run(cache, options),
        Options::Weights(options) => weights::run(cache, options),
    }
}

/// The median of figures, 0 of none.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(0.0)
}
