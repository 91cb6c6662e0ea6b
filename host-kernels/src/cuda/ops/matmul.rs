//! MUL_MAT, MUL_MAT_ID, OUT_PROD.

use vgpu_transport::ir::{Op, OpKind, Rule};

use super::{READABLE, div_ceil};
use crate::cuda::params::*;
use crate::cuda::plan::Builder;
use crate::engine::EngineError;
use crate::types::{F32, FLOATS};

/// Up to this many columns a row of weights is multiplied with each as it is read.
const FEW_COLUMNS: i64 = 8;

/// The tile of results that a block of `vg_mul_mat` and `vg_out_prod` computes.
const TILE: [i64; 2] = [64, 32];

/// Rows of weights that a block of `vg_mul_vec` and `vg_mul_mat_id` multiplies.
const VECTOR_ROWS: i64 = 4;

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::MulMat, F32, &[READABLE, READABLE]),
        Rule::new(OpKind::MulMatId, F32, &[READABLE, READABLE]),
        Rule::new(OpKind::OutProd, F32, &[READABLE, FLOATS]),
    ]
}

pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    match op {
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::OutProd {} => {}
        _ => return None,
    }
    Some(b.staged(|b, dst| {
        let params = VgMulMatParams {
            dst,
            w: b.src(0),
            x: b.src(1),
            ids: b.optional(2),
            codebooks: b.codebooks(),
            place: b.place(),
        };
        let [m, n, ..] = dst.ne;
        let batches = dst.ne[2] * dst.ne[3];
        match op {
            Op::MulMatId { .. } => {
                let grid = [div_ceil(m, VECTOR_ROWS), n, dst.ne[2]];
                b.launch_over("vg_mul_mat_id", grid, 128, 0, &params)
            }
            Op::MulMat { .. } if n <= FEW_COLUMNS => {
                let grid = [div_ceil(m, VECTOR_ROWS), 1, batches];
                b.launch_over("vg_mul_vec", grid, 128, 0, &params)
            }
            _ => {
                let kernel = match op {
                    Op::MulMat { .. } => "vg_mul_mat",
                    _ => "vg_out_prod",
                };
                let grid = [div_ceil(m, TILE[0]), div_ceil(n, TILE[1]), batches];
                b.launch_over(kernel, grid, 256, 0, &params)
            }
        }
    }))
}
