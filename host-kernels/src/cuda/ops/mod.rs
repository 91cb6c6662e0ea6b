//! The operators, one file for each family, as in the CPU engine. A family's file has `rules()`, the type
//! combinations it runs, and `compile()`, which turns a node into launches, if it is one of its own.

mod attention;
mod elementwise;
mod matmul;
mod movement;
mod norm;
mod reduce;
mod rope;

use vgpu_transport::ir::{Op, Rule, Type, TypeSet};

use super::plan::Builder;
use crate::engine::EngineError;
use crate::types::FLOATS;

/// The types that real numbers can be written to.
const WRITABLE: TypeSet = FLOATS.union(TypeSet::of(&[
    Type::Q4_0,
    Type::Q4_1,
    Type::Q5_0,
    Type::Q5_1,
    Type::Q8_0,
    Type::Iq4Nl,
]));

/// The types that can be read as real numbers.
const READABLE: TypeSet = WRITABLE.union(TypeSet::of(&[
    Type::Q8_1,
    Type::Q1_0,
    Type::Q2_0,
    Type::Mxfp4,
    Type::Nvfp4,
    Type::Q2K,
    Type::Q3K,
    Type::Q4K,
    Type::Q5K,
    Type::Q6K,
    Type::Q8K,
    Type::Iq1S,
    Type::Iq1M,
    Type::Iq2Xxs,
    Type::Iq2Xs,
    Type::Iq2S,
    Type::Iq3Xxs,
    Type::Iq3S,
    Type::Iq4Xs,
    Type::Tq1_0,
    Type::Tq2_0,
]));

/// Everything the engine runs.
pub(super) fn rules() -> Vec<Rule> {
    [
        attention::rules(),
        elementwise::rules(),
        matmul::rules(),
        movement::rules(),
        norm::rules(),
        reduce::rules(),
        rope::rules(),
    ]
    .concat()
}

/// Turns a node into launches, if it belongs to the family.
type Family = fn(&Op, &mut Builder<'_>) -> Option<Result<(), EngineError>>;

const FAMILIES: [Family; 7] = [
    attention::compile,
    elementwise::compile,
    matmul::compile,
    movement::compile,
    norm::compile,
    reduce::compile,
    rope::compile,
];

/// Turns a node into launches. Its destination is not empty.
pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Result<(), EngineError> {
    FAMILIES
        .iter()
        .find_map(|compile| compile(op, b))
        .unwrap_or_else(|| Err(b.unsupported("the engine has no kernel for it")))
}

/// `n / by`, rounded up; of extents, which are not negative.
fn div_ceil(n: i64, by: i64) -> i64 {
    (n as u64).div_ceil(by as u64) as i64
}
