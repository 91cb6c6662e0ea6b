//! The operators, one module for each family.
//!
//! - `attention`: FLASH_ATTN_EXT
//! - `conv`: CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D
//! - `copy`: COPY (DUP, CPY, CONT)
//! - `deepseek`: DSV4_HC_COMB, DSV4_HC_PRE, DSV4_HC_POST, LIGHTNING_INDEXER
//! - `elementwise`: ADD, SUB, MUL, DIV, ADD1, ADD_ID, SCALE, CLAMP
//! - `glu`: GLU
//! - `im2col`: IM2COL, IM2COL_BACK, IM2COL_3D, COL2IM_1D
//! - `image`: UPSCALE, TIMESTEP_EMBEDDING, WIN_PART, WIN_UNPART, GET_REL_POS, ADD_REL_POS
//! - `matmul`: MUL_MAT, MUL_MAT_ID, OUT_PROD
//! - `movement`: REPEAT, REPEAT_BACK, CONCAT, SET, ACC, DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO, PAD,
//!   PAD_REFLECT_1D, ROLL, TRI, FILL, ARANGE
//! - `norm`: NORM, RMS_NORM, RMS_NORM_BACK, L2_NORM, GROUP_NORM, SOFT_MAX_BACK
//! - `pool`: POOL_1D, POOL_2D, POOL_2D_BACK
//! - `recurrent`: SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET,
//!   SOLVE_TRI
//! - `reduce`: SUM, SUM_ROWS, MEAN, CUMSUM, ARGMAX, COUNT_EQUAL, ARGSORT, TOP_K
//! - `rope`: ROPE
//! - `rows`: GET_ROWS, GET_ROWS_BACK, SET_ROWS
//! - `softmax`: SOFT_MAX
//! - `training`: CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK, OPT_STEP_ADAMW, OPT_STEP_SGD
//! - `unary`: UNARY, SQR, SQRT, LOG, SIN, COS, LEAKY_RELU, XIELU, SILU_BACK
//!
//! `fused` has the kernels of several nodes. The families share a few modules: `walk` and
//! `sequence` loop over elements, `f32_rows` computes with runs of elements as `f32`, `copy_raw`
//! copies them without conversion, `gather` reads rows, `scratch` divides scratch memory,
//! `conv_axis` and `patches` say which elements a convolution kernel covers.
//!
//! The module of a family has `rules()`, the type combinations that it runs, and `compile()`, which
//! compiles a node if it belongs to the family. The `check` module of the IR defines which shapes a
//! validated node can have. A function that computes addresses from these shapes takes
//! [`Operands`], the proof that the node is validated, and says with [`parameters!`] which
//! operator's check its arguments refer to.
//!
//! [`parameters!`]: crate::operands::parameters

mod attention;
mod conv;
mod conv_axis;
mod copy;
mod copy_raw;
mod deepseek;
mod elementwise;
mod f32_rows;
mod fused;
mod gather;
mod glu;
mod im2col;
mod image;
mod matmul;
mod movement;
mod norm;
mod patches;
mod pool;
mod recurrent;
mod reduce;
mod rope;
mod rows;
mod scratch;
mod sequence;
mod softmax;
mod training;
mod unary;
mod walk;

use vgpu_transport::ir::{Op, Rule};

use crate::kernel::Compiled;
use crate::operands::Operands;
use vgpu_engine::EngineError;

pub(super) use fused::compile_group;

/// All rules of the engine.
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

/// Compiles a node, if it belongs to the family.
type Family = fn(&Operands<'_>) -> Option<Compiled>;

const FAMILIES: [Family; 15] = [
    conv::compile,
    copy::compile,
    deepseek::compile,
    elementwise::compile,
    glu::compile,
    im2col::compile,
    image::compile,
    movement::compile,
    norm::compile,
    pool::compile,
    recurrent::compile,
    reduce::compile,
    rows::compile,
    training::compile,
    unary::compile,
];

/// Compiles a node.
///
/// # Errors
/// [`EngineError::Unsupported`] if no family has a kernel for it.
pub(super) fn compile(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    // An empty result has no kernels. So kernels need not handle large lengths together with a
    // length of 0.
    if operands.dst().elements() == 0 {
        return Ok(Compiled {
            kernels: Vec::new(),
            scratch_bytes: 0,
        });
    }
    let compiled = compile_any(operands)?;
    // Here, and not in a turn of the engine.
    crate::formats::prepare(operands.dst().ty);
    Ok(compiled)
}

fn compile_any(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    match operands.op() {
        Op::MulMat { .. } => matmul::mul_mat(operands),
        Op::MulMatId { .. } => matmul::mul_mat_id(operands),
        Op::OutProd {} => matmul::out_prod(operands),
        Op::Rope { .. } => rope::rope(operands),
        Op::SoftMax { .. } => softmax::soft_max(operands),
        Op::FlashAttnExt { .. } => attention::flash_attn_ext(operands),
        _ => FAMILIES
            .iter()
            .find_map(|compile| compile(operands))
            .ok_or_else(|| EngineError::Unsupported {
                op: operands.op().kind().ggml_name(),
                why: "the engine has no kernel for it".into(),
            }),
    }
}
