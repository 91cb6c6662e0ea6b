//! MUL_MAT, MUL_MAT_ID, OUT_PROD.

use vgpu_transport::ir::{Op, OpKind, Rule};

use super::{F32, FLOATS, READABLE};
use crate::cuda::params::*;
use crate::cuda::plan::Builder;
use crate::engine::EngineError;

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
                let grid = [m.div_ceil_by(VECTOR_ROWS), n, dst.ne[2]];
                b.launch_over("vg_mul_mat_id", grid, 128, 0, &params)
            }
            Op::MulMat { .. } if n <= FEW_COLUMNS => {
                let grid = [m.div_ceil_by(VECTOR_ROWS), 1, batches];
                b.launch_over("vg_mul_vec", grid, 128, 0, &params)
            }
            _ => {
                let kernel = match op {
                    Op::MulMat { .. } => "vg_mul_mat",
                    _ => "vg_out_prod",
                };
                let grid = [m.div_ceil_by(TILE[0]), n.div_ceil_by(TILE[1]), batches];
                b.launch_over(kernel, grid, 256, 0, &params)
            }
        }
    }))
}

/// Division that rounds up, of numbers that are not negative.
trait DivCeil {
    fn div_ceil_by(self, by: Self) -> Self;
}

impl DivCeil for i64 {
    fn div_ceil_by(self, by: i64) -> i64 {
        (self as u64).div_ceil(by as u64) as i64
    }
}
