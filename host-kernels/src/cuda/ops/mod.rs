//! The operators, one file for each family, as in the CPU engine. A family's file has `rules()`, the type
//! combinations it runs, and `compile()`, which turns a node into launches, if it is one of its own.

mod elementwise;

use vgpu_transport::ir::{Op, Rule, Type, TypeSet};

use super::plan::Builder;
use crate::engine::EngineError;

/// Types that kernels compute with element by element.
const FLOATS: TypeSet = TypeSet::of(&[Type::F32, Type::F16, Type::Bf16]);
const F32: TypeSet = TypeSet::of(&[Type::F32]);

/// Everything the engine runs.
pub(super) fn rules() -> Vec<Rule> {
    [elementwise::rules()].concat()
}

/// Turns a node into launches, if it belongs to the family.
type Family = fn(&Op, &mut Builder<'_>) -> Option<Result<(), EngineError>>;

const FAMILIES: [Family; 1] = [elementwise::compile];

/// Turns a node into launches. Its destination is not empty.
pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Result<(), EngineError> {
    FAMILIES
        .iter()
        .find_map(|compile| compile(op, b))
        .unwrap_or_else(|| Err(b.unsupported("the engine has no kernel for it")))
}
