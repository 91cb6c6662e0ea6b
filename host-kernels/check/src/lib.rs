//! Whether an engine is right and how fast it is: one case for each family of operators beside the CPU engine, and
//! rates of memory, products and attention beside what the device can do at most.
//!
//! Made for the first minutes on a new GPU (`vgpu gpu-check`): a few minutes, no model files, one table.

mod cases;
mod cublas;
mod graph;
mod greedy;
pub mod model;
mod published;
mod rates;
mod tune;

use std::time::Duration;

use vgpu_cuda::autotune::{GemmVariant, TuningTable};
use vgpu_engine::Engine;

pub use cases::{Case, Outcome};
pub use greedy::{MOST_TOKENS, Text};
pub use published::{PUBLISHED, Published};
pub use rates::{Ceilings, Rate, Work};
pub use tune::{Extents, Tuned};

/// How much is looked at.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Bytes of weights that products are measured with: several times a device's cache.
    pub weights: u64,
    /// Rows and columns of those weights.
    pub size: u64,
    /// For how long a rate is measured.
    pub time: Duration,
    /// For how long rates are measured at all, if there is a limit.
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

/// Compares `engine` with `oracle`, a case for each family of operators; `seen` is told of each at once.
pub fn compare(engine: &dyn Engine, oracle: &dyn Engine, seen: impl FnMut(&Case)) -> Vec<Case> {
    cases::run(engine, oracle, seen)
}

/// Has both write texts of so many tokens, [`MOST_TOKENS`] at most, with small models of several families; `seen` is told of
/// each at once.
pub fn texts(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    tokens: u64,
    seen: impl FnMut(&Text),
) -> Vec<Text> {
    greedy::run(engine, oracle, tokens, seen)
}

/// What the device's memory can do at most: copies.
pub fn ceilings(engine: &dyn Engine, options: &Options) -> Result<Ceilings, String> {
    rates::ceilings(engine, options)
}

/// What the engine reaches at most in a second: with copies and products of one column for memory, with products of many
/// columns for operations.
pub fn peaks(
    engine: &dyn Engine,
    options: &Options,
) -> Result<vgpu_engine::roofline::Rates, String> {
    rates::peaks(engine, options)
}

/// Measures products and attention, and cuBLASLt beside them where that is; `seen` is told of each rate at once. Also says how
/// many were left out because the time was up.
pub fn rates(
    engine: &dyn Engine,
    options: &Options,
    seen: impl FnMut(&Rate),
) -> (Vec<Rate>, usize) {
    rates::run(engine, options, seen)
}

/// Measures products of many columns on engines that do them in each way; `seen` is told of each at once. Returns the fastest.
pub fn tune(
    engines: &[(GemmVariant, &dyn Engine); 3],
    options: &Options,
    extents: &Extents,
    seen: impl FnMut(&Tuned),
) -> TuningTable {
    tune::run(engines, options, extents, seen)
}
