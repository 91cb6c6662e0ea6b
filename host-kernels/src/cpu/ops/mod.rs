//! The operators, one file for each family.
//!
//! A family's file has `rules()`, the type combinations it runs, and `compile()`, which turns a node
//! into kernels. What shapes a node can have by then is written in the IR's `check` module.

use vgpu_transport::ir::{Op, Rule};

use super::plan::{Compiled, Operands};
use crate::engine::EngineError;

/// Everything the engine runs.
pub(super) fn rules() -> Vec<Rule> {
    Vec::new()
}

/// Turns a node into kernels.
pub(super) fn compile(op: &Op, _operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    Err(EngineError::Unsupported {
        op: op.kind().ggml_name(),
        why: "the engine has no kernel for it".into(),
    })
}
