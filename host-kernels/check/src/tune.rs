//! Autotuning: the fastest GEMM variant of a GPU for each weight type and length.

use vgpu_transport::ir::Type;

use super::rates;
use super::{CheckError, Options};
use vgpu_cuda::autotune::{GemmVariant, TuningTable};
use vgpu_engine::Engine;

/// The grid of measurements.
#[derive(Debug, Clone)]
pub struct TuneShapes {
    /// Types of weights.
    pub types: Vec<Type>,
    /// Rows of weights.
    pub rows: Vec<u64>,
    /// Columns of activations.
    pub columns: Vec<u64>,
}

/// Further types with several GEMM variants.
const OTHERS: [Type; 6] = [
    Type::Iq4Xs,
    Type::Q2K,
    Type::Q3K,
    Type::Q4_1,
    Type::Q5_0,
    Type::Q5_1,
];

impl Default for TuneShapes {
    /// All types with several GEMM variants, at lengths from half the smallest to twice the largest
    /// of common models.
    fn default() -> TuneShapes {
        TuneShapes {
            types: [&rates::POPULAR[..], &OTHERS].concat(),
            rows: vec![1024, 4096, 14336],
            columns: vec![128, 256, 1024, 4096],
        }
    }
}

/// A measurement of all variants.
#[derive(Debug, Clone)]
pub struct Tuned {
    /// The type of the weights.
    pub ty: Type,
    /// Rows of the result.
    pub rows: u64,
    /// Columns of the result.
    pub columns: u64,
    /// Floating-point operations per second of each variant, or why the measurement failed.
    pub rates: [(GemmVariant, Result<f64, CheckError>); 3],
}

impl Tuned {
    /// The fastest variant.
    pub fn best(&self) -> Option<GemmVariant> {
        let rate =
            |(_, rate): &&(GemmVariant, Result<f64, CheckError>)| rate.clone().unwrap_or(0.0);
        let best = { self.rates.iter() }.max_by(|a, b| rate(a).total_cmp(&rate(b)))?;
        best.1.is_ok().then_some(best.0)
    }
}

pub(super) fn run(
    engines: &[(GemmVariant, &dyn Engine); 3],
    options: &Options,
    lengths: &TuneShapes,
    mut seen: impl FnMut(&Tuned),
) -> TuningTable {
    let mut table = TuningTable::default();
    for &ty in &lengths.types {
        for &rows in &lengths.rows {
            for &columns in &lengths.columns {
                let rates = engines.map(|(variant, engine)| {
                    let rate = rates::operations(engine, options, ty, rows, columns);
                    (variant, rate)
                });
                let tuned = Tuned {
                    ty,
                    rows,
                    columns,
                    rates,
                };
                if let Some(best) = tuned.best() {
                    table.record(ty, rows, columns, best);
                }
                seen(&tuned);
            }
        }
    }
    table
}
