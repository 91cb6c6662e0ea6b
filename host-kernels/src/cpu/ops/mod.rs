//! The operators, one file for each family.
//!
//! A family's file has `rules()`, the type combinations it runs, and `compile()`, which turns a node
//! into kernels. What shapes a node can have by then is written in the IR's `check` module.

mod attention;
mod conv;
mod copy;
mod deepseek;
mod elements;
mod elementwise;
mod gather;
mod glu;
mod im2col;
mod image;
mod lines;
mod matmul;
mod movement;
mod norm;
mod pool;
mod recurrent;
mod reduce;
mod rope;
mod rows;
mod sequence;
mod softmax;
mod staging;
mod training;
mod unary;
mod walk;

use vgpu_transport::ir::{Op, Rule};

use super::plan::{Compiled, Operands};
use crate::engine::EngineError;

/// Everything the engine runs.
pub(super) fn rules() -> Vec<Rule> {
    [
        attention::rules(),
        conv::rules(),
        copy::rules(),
        deepseek::rules(),
        elementwise::rules(),
        glu::rules(),
        im2col::rules(),
        image::rules(),
        matmul::rules(),
        movement::rules(),
        norm::rules(),
        pool::rules(),
        recurrent::rules(),
        reduce::rules(),
        rope::rules(),
        rows::rules(),
        softmax::rules(),
        training::rules(),
        unary::rules(),
    ]
    .concat()
}

/// Turns a node into kernels.
pub(super) fn compile(op: &Op, operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    match op {
        Op::MulMat { .. } => matmul::mul_mat(operands),
        Op::MulMatId { .. } => matmul::mul_mat_id(operands),
        Op::OutProd {} => matmul::out_prod(operands),
        Op::Rope { .. } => rope::rope(operands),
        Op::SoftMax { .. } => softmax::soft_max(operands),
        Op::FlashAttnExt { .. } => attention::flash_attn_ext(operands),
        _ => elementwise::compile(op, operands)
            .or_else(|| unary::compile(op, operands))
            .or_else(|| glu::compile(op, operands))
            .or_else(|| copy::compile(op, operands))
            .or_else(|| rows::compile(op, operands))
            .or_else(|| movement::compile(op, operands))
            .or_else(|| reduce::compile(op, operands))
            .or_else(|| norm::compile(op, operands))
            .or_else(|| im2col::compile(op, operands))
            .or_else(|| conv::compile(op, operands))
            .or_else(|| pool::compile(op, operands))
            .or_else(|| image::compile(op, operands))
            .or_else(|| recurrent::compile(op, operands))
            .or_else(|| deepseek::compile(op, operands))
            .or_else(|| training::compile(op, operands))
            .ok_or_else(|| EngineError::Unsupported {
                op: op.kind().ggml_name(),
                why: "the engine has no kernel for it".into(),
            }),
    }
}
