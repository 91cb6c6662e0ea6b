//! DSV4_HC_COMB, DSV4_HC_PRE, DSV4_HC_POST, LIGHTNING_INDEXER.

use vgpu_transport::ir::{Op, OpKind, Rule};

use crate::launch::builder::Builder;
use crate::launch::grid::div_ceil;
use crate::params::*;
use crate::types::READABLE;
use vgpu_engine::EngineError;
use vgpu_engine::types::{F32, FLOATS};

/// Warps of a block of the indexer, one for each key.
const WARPS: i64 = 4;

pub(crate) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::Dsv4HcComb, F32, &[F32; 3]),
        Rule::new(OpKind::Dsv4HcPre, F32, &[F32; 2]),
        Rule::new(OpKind::Dsv4HcPost, F32, &[F32; 4]),
        Rule::new(OpKind::LightningIndexer, F32, &[F32, READABLE, F32, FLOATS]),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let dst = b.dst();
    Some(match *op {
        Op::Dsv4HcComb { eps, n_iter } => {
            let params = VgHcCombParams {
                dst,
                mixes: b.src(0),
                scale: b.src(1),
                base: b.src(2),
                eps,
                iterations: n_iter,
            };
            b.for_each_row("vg_hc_comb", div_ceil(dst.ne[2], 128), 128, 0, &params)
        }
        Op::Dsv4HcPre { scale, gated } => {
            let params = VgHcPreParams {
                dst,
                x: b.src(0),
                w: b.src(1),
                scale,
                gated: gated.into(),
            };
            b.for_each("vg_hc_pre", dst.elements(), &params)
        }
        Op::Dsv4HcPost {} => {
            let params = VgHcPostParams {
                dst,
                x: b.src(0),
                residual: b.src(1),
                post: b.src(2),
                comb: b.optional(3),
            };
            b.for_each("vg_hc_post", dst.elements(), &params)
        }
        Op::LightningIndexer {} => {
            let params = VgIndexerParams {
                dst,
                q: b.src(0),
                k: b.src(1),
                w: b.src(2),
                mask: b.src(3),
                codebooks: b.codebooks(),
            };
            if let Err(error) = b.kernel("vg_indexer") {
                return Some(Err(error));
            }
            let n = params.q.ne[0];
            let shared = u32::try_from(4 * WARPS * n)
                .ok()
                .filter(|&bytes| bytes <= b.max_dynamic_shared("vg_indexer"));
            let Some(shared) = shared else {
                return Some(Err(b.unsupported(format!(
                    "keys of {n} elements do not fit into shared memory"
                ))));
            };
            let units = params.k.ne[2] * params.q.ne[3];
            let threads = WARPS as u32 * 32;
            b.for_each_row(
                "vg_indexer",
                div_ceil(units, WARPS),
                threads,
                shared,
                &params,
            )
        }
        _ => return None,
    })
}
