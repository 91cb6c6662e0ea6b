//! SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET, SOLVE_TRI.

use vgpu_transport::ir::{Op, OpKind, Rule};

use crate::launch::builder::Builder;
use crate::launch::grid::div_ceil;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::{F32, FLOATS};

/// Warps of a block, one for each row of a state.
const WARPS: i64 = 4;

pub(crate) fn rules() -> Vec<Rule> {
    let all = |op, sources| Rule::new(op, F32, &vec![F32; sources]);
    vec![
        Rule::new(OpKind::SsmConv, F32, &[FLOATS, FLOATS]),
        all(OpKind::SsmScan, 6),
        all(OpKind::RwkvWkv6, 6),
        all(OpKind::RwkvWkv7, 7),
        all(OpKind::GatedLinearAttn, 5),
        all(OpKind::GatedDeltaNet, 6),
        all(OpKind::SolveTri, 2),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let dst = b.dst();
    Some(match *op {
        Op::SsmConv {} => {
            let params = VgSsmConvParams {
                dst,
                x: b.src(0),
                kernel: b.src(1),
            };
            b.for_each("vg_ssm_conv", dst.elements(), &params)
        }
        Op::SsmScan { snapshots } => {
            let params = VgSsmScanParams {
                dst,
                s: b.src(0),
                x: b.src(1),
                dt: b.src(2),
                a: b.src(3),
                b: b.src(4),
                c: b.src(5),
                ids: b.src(6),
                site: b.fault_site(),
                snapshots: snapshots.into(),
                tokens: share(b, b.src(1).ne[2]),
            };
            let rows = params.x.ne[0] * params.x.ne[1] * params.x.ne[3];
            for_rows_of_states(b, "vg_ssm_scan", rows, params.tokens, &params)
        }
        Op::RwkvWkv6 {} => {
            let params = VgLinearAttentionParams {
                dst,
                k: b.src(0),
                v: b.src(1),
                r: b.src(2),
                bonus: b.src(3),
                decay: b.src(4),
                state: b.src(5),
                tokens: share_of_sequences(b, 5),
                scale: 1.0,
                reserved: 0,
            };
            linear_attention(b, &params)
        }
        Op::GatedLinearAttn { scale } => {
            let params = VgLinearAttentionParams {
                dst,
                k: b.src(0),
                v: b.src(1),
                r: b.src(2),
                bonus: VgView::default(),
                decay: b.src(3),
                state: b.src(4),
                tokens: share_of_sequences(b, 4),
                scale,
                reserved: 0,
            };
            linear_attention(b, &params)
        }
        Op::RwkvWkv7 {} => {
            let params = VgWkv7Params {
                dst,
                r: b.src(0),
                w: b.src(1),
                k: b.src(2),
                v: b.src(3),
                a: b.src(4),
                b: b.src(5),
                state: b.src(6),
                tokens: share_of_sequences(b, 6),
            };
            let rows = params.r.ne[0] * params.r.ne[1] * params.state.ne[1];
            for_rows_of_states(b, "vg_wkv7", rows, params.tokens, &params)
        }
        Op::GatedDeltaNet { snapshots } => {
            let params = VgDeltaNetParams {
                dst,
                q: b.src(0),
                k: b.src(1),
                v: b.src(2),
                gate: b.src(3),
                beta: b.src(4),
                state: b.src(5),
                snapshots: snapshots.into(),
                tokens: share(b, b.src(2).ne[2]),
            };
            let rows = params.v.ne[0] * params.v.ne[1] * params.v.ne[3];
            for_rows_of_states(b, "vg_delta_net", rows, params.tokens, &params)
        }
        Op::SolveTri {} => {
            let rows = b.share_of_sums(dst.ne[1]);
            let params = VgSolveTriParams {
                dst,
                a: b.src(0),
                b: b.src(1),
                rows: VgRange {
                    begin: rows.start,
                    end: rows.end,
                },
            };
            if params.rows.is_left_out(b) {
                return Some(Ok(()));
            }
            let columns = dst.ne[0] * dst.ne[2] * dst.ne[3];
            b.for_each("vg_solve_tri", columns, &params)
        }
        _ => return None,
    })
}

/// The share of `n` tokens of each sequence that the launches compute.
fn share(b: &Builder<'_>, n: i64) -> VgRange {
    let share = b.share_of(n);
    VgRange {
        begin: share.start,
        end: share.end,
    }
}

/// The same of the tokens of linear attention, whose sequences follow each other in dimension 2 of
/// the sources. Source `state` has the states.
fn share_of_sequences(b: &Builder<'_>, state: usize) -> VgRange {
    let sequences = b.src(state).ne[1].max(1);
    share(b, b.src(0).ne[2] / sequences)
}

impl VgRange {
    /// Whether the share is empty and not the first one, which copies the states also without
    /// tokens.
    fn is_left_out(self, b: &Builder<'_>) -> bool {
        self.begin == self.end && !b.is_first_share()
    }
}

/// Adds a launch with one warp for each of `rows`, unless there are no `tokens` for it.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn for_rows_of_states(
    b: &mut Builder<'_>,
    kernel: &'static str,
    rows: i64,
    tokens: VgRange,
    params: &impl Params,
) -> Result<(), EngineError> {
    if tokens.is_left_out(b) {
        return Ok(());
    }
    let threads = WARPS as u32 * 32;
    b.for_each_row(kernel, div_ceil(rows, WARPS), threads, 0, params)
}

/// Adds the launch of RWKV_WKV6 or GATED_LINEAR_ATTN.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn linear_attention(
    b: &mut Builder<'_>,
    params: &VgLinearAttentionParams,
) -> Result<(), EngineError> {
    if params.tokens.is_left_out(b) {
        return Ok(());
    }
    let columns = params.k.ne[0] * params.k.ne[1] * params.state.ne[1];
    b.for_each_row(
        "vg_linear_attention",
        div_ceil(columns, 128),
        128,
        0,
        params,
    )
}
