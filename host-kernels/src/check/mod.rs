//! Whether an engine is right and how fast it is: one case for each family of operators beside the CPU engine, and
//! rates of memory, products and attention beside what the device can do at most.
//!
//! Made for the first minutes on a new GPU (`vgpu gpu-check`): a few minutes, no model files, one table.

mod cases;
mod graph;
pub mod model;
mod rates;

use std::time::Duration;

use crate::engine::Engine;

pub use cases::{Case, Outcome};
pub use rates::{Ceilings, Rate, Work};

/// How much is looked at.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Bytes of weights that products are measured with: several times a device's cache.
    pub weights: u64,
    /// Rows and columns of those weights.
    pub size: u64,
    /// For how long a rate is measured.
    pub time: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            weights: 512 << 20,
            size: 4096,
            time: Duration::from_millis(200),
        }
    }
}

/// Compares `engine` with `oracle`, a case for each family of operators; `seen` is told of each at once.
pub fn compare(engine: &dyn Engine, oracle: &dyn Engine, seen: impl FnMut(&Case)) -> Vec<Case> {
    cases::run(engine, oracle, seen)
}

/// What the device's memory can do at most: copies.
pub fn ceilings(engine: &dyn Engine, options: &Options) -> Result<Ceilings, String> {
    rates::ceilings(engine, options)
}

/// What the engine reaches at most in a second: with copies and products of one column for memory, with products of many
/// columns for operations.
pub fn peaks(engine: &dyn Engine, options: &Options) -> Result<crate::cost::Rates, String> {
    rates::peaks(engine, options)
}

/// Measures products and attention; `seen` is told of each rate at once.
pub fn rates(engine: &dyn Engine, options: &Options, seen: impl FnMut(&Rate)) -> Vec<Rate> {
    rates::run(engine, options, seen)
}
