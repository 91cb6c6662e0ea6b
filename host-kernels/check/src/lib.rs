//! The self-test of an engine: results of each family of operators compared with the CPU engine,
//! and rates of copies, matrix products and attention.
//!
//! `vgpu gpu-check` runs the self-test on a new GPU, in a few minutes and without model files.

mod cases;
pub mod child_process;
mod cublas;
mod decode_check;
mod error;
mod graph;
pub mod model;
mod random;
mod rates;
pub mod self_check;
mod steps;
mod synthetic_gguf;
mod tune;

use std::collections::BTreeSet;
use std::time::Duration;

use vgpu_cuda::autotune::{GemmVariant, TuningTable};
use vgpu_engine::Engine;

pub use cases::{Case, Outcome};
pub use decode_check::{Decoding, MAX_TOKENS};
pub use error::CheckError;
pub use random::Random;
pub use rates::{Ceilings, KvCaches, Rate, Work};
pub use steps::{Selection, Step};
pub use synthetic_gguf::{SHAPES, SyntheticModel};
pub use tune::{TuneShapes, Tuned};

/// Extent of the measurements.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Bytes of weights of a measurement: several times the device's cache.
    pub weights: u64,
    /// Rows and columns of those weights.
    pub size: u64,
    /// Time of one measurement.
    pub time: Duration,
    /// Time limit of all measurements.
    pub budget: Option<Duration>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            weights: 512 << 20,
            size: 4096,
            time: Duration::from_millis(200),
            budget: None,
        }
    }
}

/// Compares `engine` with the reference `oracle`, several cases for each family of operators. Calls
/// `seen` at each step of a case.
pub fn compare(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    selection: &Selection<'_>,
    seen: impl FnMut(Step<'_, Case>),
) -> Vec<Case> {
    cases::run(engine, oracle, selection, seen)
}

/// The kernels that [`compare`] runs on a GPU: its cases are compiled on `engine`, and not run.
///
/// # Errors
///
/// If the engine refuses a case.
pub fn planned_kernels(engine: &dyn Engine) -> Result<BTreeSet<&'static str>, CheckError> {
    cases::planned_kernels(engine)
}

/// The name and the kernels of each case that [`compare`] runs on any engine, compiled on `engine`.
///
/// # Errors
///
/// If the engine refuses a case.
pub fn planned_cases(engine: &dyn Engine) -> Result<Vec<(String, Vec<&'static str>)>, CheckError> {
    cases::planned_cases(engine)
}

/// The families of kernels (`Engine::kernel_families`) of which none is among `kernels`.
pub fn untested_families<'f, 'k>(
    families: impl IntoIterator<Item = &'f str>,
    kernels: impl IntoIterator<Item = &'k str>,
) -> Vec<&'f str> {
    let kernels: Vec<_> = kernels.into_iter().collect();
    let is_untested = |family: &&str| !kernels.iter().any(|kernel| kernel.starts_with(*family));
    families.into_iter().filter(is_untested).collect()
}

/// Decodes `tokens` tokens, [`MAX_TOKENS`] at most, greedily on both engines with small models of
/// several families. Calls `seen` at each step of a model.
pub fn compare_decoding(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    tokens: u64,
    selection: &Selection<'_>,
    seen: impl FnMut(Step<'_, Decoding>),
) -> Vec<Decoding> {
    decode_check::run(engine, oracle, tokens, selection, seen)
}

/// Measures copies within the device, to it and from it.
///
/// # Errors
///
/// If the engine refuses the memory or a copy fails.
pub fn ceilings(engine: &dyn Engine, options: &Options) -> Result<Ceilings, CheckError> {
    rates::ceilings(engine, options)
}

/// The peak rates of the engine: bytes per second of copies and matrix-vector products, operations
/// per second of matrix products with many columns.
///
/// # Errors
///
/// If the engine refuses a measurement.
pub fn peaks(
    engine: &dyn Engine,
    options: &Options,
) -> Result<vgpu_engine::roofline::Rates, CheckError> {
    rates::peaks(engine, options)
}

/// Measures matrix products and attention, and cuBLASLt for comparison if it is installed. Calls
/// `seen` at each step of a rate. Also returns how many rates the time limit left out.
pub fn rates(
    engine: &dyn Engine,
    options: &Options,
    selection: &Selection<'_>,
    seen: impl FnMut(Step<'_, Rate>),
) -> (Vec<Rate>, usize) {
    rates::run(engine, options, selection, seen)
}

/// Measures the attention of one token: bytes per second of keys and values.
///
/// # Errors
///
/// If the engine refuses the graph or the memory, or a run fails.
pub fn decode_attention(
    engine: &dyn Engine,
    options: &Options,
    caches: KvCaches,
) -> Result<f64, CheckError> {
    rates::decode_attention(engine, options, caches)
}

/// Measures GEMMs on engines that are forced to each variant, and returns a table of the fastest.
/// Calls `seen` after each measurement.
pub fn tune(
    engines: &[(GemmVariant, &dyn Engine); 3],
    options: &Options,
    lengths: &TuneShapes,
    seen: impl FnMut(&Tuned),
) -> TuningTable {
    tune::run(engines, options, lengths, seen)
}
