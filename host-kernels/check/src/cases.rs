//! Cases of each family of operators, compared on two engines.

mod attention;
#[cfg(test)]
mod divided;
mod elementwise;
mod images;
mod list;
mod movement;
mod operation;
mod products;
mod recurrent;
mod rows;
mod training;

use std::collections::BTreeSet;

use self::list::List;
pub(super) use self::operation::Operation;
use super::CheckError;
use super::steps::{Selection, Step};
use vgpu_engine::Engine;

/// The outcome of a case.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The normalised mean square error and its limit.
    Compared {
        /// Mean square of the differences over that of the reference.
        error: f64,
        /// Upper bound of `error`.
        limit: f64,
    },
    /// Why the case did not run.
    Failed(CheckError),
}

/// A case that ran on both engines.
#[derive(Debug, Clone)]
pub struct Case {
    /// Operator and types of the sources.
    pub name: String,
    /// The outcome.
    pub outcome: Outcome,
    /// The kernels of the engine's plan, if they have names.
    pub kernels: Vec<&'static str>,
}

impl Case {
    /// Whether the engines agree.
    pub fn is_right(&self) -> bool {
        // Not `error > limit`: NaN is an error.
        matches!(self.outcome, Outcome::Compared { error, limit } if error <= limit)
    }
}

/// Compiles the cases for a GPU, and returns the kernels of all plans.
pub(super) fn planned_kernels(engine: &dyn Engine) -> Result<BTreeSet<&'static str>, CheckError> {
    let plans = { operations(true).into_iter() }.map(|operation| operation.kernels(engine));
    let plans = plans.collect::<Result<Vec<_>, _>>()?;
    Ok(plans.into_iter().flatten().collect())
}

/// Compiles the cases for any engine, and returns the name and the kernels of each.
pub(super) fn planned_cases(
    engine: &dyn Engine,
) -> Result<Vec<(String, Vec<&'static str>)>, CheckError> {
    let plan = |operation: Operation| Ok((operation.name.clone(), operation.kernels(engine)?));
    operations(false).into_iter().map(plan).collect()
}

pub(super) fn run(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    selection: &Selection<'_>,
    mut seen: impl FnMut(Step<'_, Case>),
) -> Vec<Case> {
    // The shim, which runs kernels as fibers, would need minutes for products that fill a GPU.
    let is_gpu = engine.name().starts_with("cuda:");
    let selected = { operations(is_gpu).into_iter().enumerate() }
        .filter(|(index, operation)| selection.has(*index, &operation.name));
    let outcomes = selected.map(|(index, operation)| {
        let mut kernels = Vec::new();
        seen(Step::Begins {
            index,
            name: &operation.name,
        });
        let compiled = |planned: &[&'static str]| {
            kernels = planned.to_vec();
            seen(Step::Runs { kernels: planned });
        };
        let case = Case {
            outcome: match difference(engine, oracle, &operation, compiled) {
                Ok(error) => Outcome::Compared {
                    error,
                    limit: operation.limit,
                },
                Err(reason) => Outcome::Failed(reason),
            },
            name: operation.name,
            kernels,
        };
        seen(Step::Ends(&case));
        case
    });
    outcomes.collect()
}

/// Runs of each graph: an engine may capture the second run and replay the third.
pub(super) const RUNS: usize = 3;

/// The largest normalised mean square error of all runs. Calls `compiled` with the kernels of the
/// engine's plan before the first run.
fn difference(
    engine: &dyn Engine,
    oracle: &dyn Engine,
    operation: &Operation,
    compiled: impl FnOnce(&[&'static str]),
) -> Result<f64, CheckError> {
    let expected = operation.results(oracle, 1, |_| ());
    let expected = expected.map_err(|error| CheckError::Reference(Box::new(error)))?;
    let got = operation.results(engine, RUNS, compiled)?;
    Ok(worst_error(&got, &expected[0]))
}

/// The largest error of some results. NaN is the largest of all.
pub(super) fn worst_error(results: &[Vec<f32>], expected: &[f32]) -> f64 {
    let errors = { results.iter() }.map(|got| normalized_mean_square_error(got, expected));
    errors.fold(0.0, |worst: f64, error| {
        match error > worst || error.is_nan() {
            true if !worst.is_nan() => error,
            _ => worst,
        }
    })
}

/// Mean square of the differences over that of the expected values.
fn normalized_mean_square_error(got: &[f32], expected: &[f32]) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (&got, &expected) in got.iter().zip(expected) {
        if got == expected || got.is_nan() && expected.is_nan() {
            size += if expected.is_finite() {
                f64::from(expected).powi(2)
            } else {
                0.0
            };
            continue;
        }
        off += (f64::from(got) - f64::from(expected)).powi(2);
        size += f64::from(expected).powi(2);
    }
    if off == 0.0 { 0.0 } else { off / size }
}

fn operations(is_gpu: bool) -> Vec<Operation> {
    let mut list = List::default();
    products::all(&mut list);
    if is_gpu {
        products::large(&mut list);
        attention::large(&mut list);
    }
    attention::all(&mut list);
    elementwise::all(&mut list);
    rows::all(&mut list);
    movement::all(&mut list);
    images::all(&mut list);
    recurrent::all(&mut list);
    training::all(&mut list);
    list.0
}

/// The operations of the self-check: some use each kernel that has a fallback, except those for
/// several nodes.
pub(super) fn self_check() -> Vec<Operation> {
    let mut list = List::default();
    products::all(&mut list);
    attention::all(&mut list);
    attention::every_size(&mut list);
    attention::large(&mut list);
    elementwise::all(&mut list);
    rows::all(&mut list);
    list.0
}
