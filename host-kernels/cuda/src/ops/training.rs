//! CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK, OPT_STEP_ADAMW, OPT_STEP_SGD.

use vgpu_transport::ir::{Op, OpKind, Rule};

use crate::launch::builder::Builder;
use crate::launch::grid::threads_for;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::F32;

/// The most blocks that sum a loss.
const PARTS: i64 = 512;

pub(crate) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::CrossEntropyLoss, F32, &[F32; 2]),
        Rule::new(OpKind::CrossEntropyLossBack, F32, &[F32; 3]),
        Rule::new(OpKind::OptStepAdamw, F32, &[F32; 4]),
        Rule::new(OpKind::OptStepSgd, F32, &[F32; 2]),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    Some(match op {
        Op::CrossEntropyLoss {} => loss(b),
        Op::CrossEntropyLossBack {} => {
            let mut params = VgCrossEntropyParams {
                dst: b.dst(),
                gradient: b.src(0),
                a: b.src(1),
                b: b.src(2),
                ..VgCrossEntropyParams::default()
            };
            // A share has some of the rows. The kernel counts all of them in `a`.
            let dim = (1..4).max_by_key(|&dim| params.dst.ne[dim]).unwrap_or(1);
            let rows = b.share_of(params.dst.ne[dim]);
            if rows.is_empty() {
                return Some(Ok(()));
            }
            for view in [&mut params.dst, &mut params.a, &mut params.b] {
                view.data += (rows.start * view.nb[dim]) as u64;
            }
            params.dst.ne[dim] = rows.end - rows.start;
            let threads = threads_for(params.dst.ne[0]);
            b.for_each_row(
                "vg_cross_entropy_back",
                params.dst.rows(),
                threads,
                0,
                &params,
            )
        }
        Op::OptStepAdamw {} => {
            let params = VgOptimizerParams {
                dst: b.dst(),
                w: b.src(0),
                gradient: b.src(1),
                m: b.src(2),
                v: b.src(3),
                settings: b.src(4),
            };
            b.for_each("vg_adamw", params.dst.elements(), &params)
        }
        Op::OptStepSgd {} => {
            let params = VgOptimizerParams {
                dst: b.dst(),
                w: b.src(0),
                gradient: b.src(1),
                settings: b.src(2),
                ..VgOptimizerParams::default()
            };
            b.for_each("vg_sgd", params.dst.elements(), &params)
        }
        _ => return None,
    })
}

/// Adds the launches of CROSS_ENTROPY_LOSS.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn loss(b: &mut Builder<'_>) -> Result<(), EngineError> {
    let a = b.src(0);
    let parts = a.rows().clamp(1, PARTS) as u32;
    let mut params = VgCrossEntropyParams {
        dst: b.dst(),
        a,
        b: b.src(1),
        scratch: b.scratch(u64::from(parts) * 8),
        parts,
        ..VgCrossEntropyParams::default()
    };
    b.launch(
        "vg_cross_entropy",
        [parts, 1, 1],
        threads_for(a.ne[0]),
        0,
        &params,
    )?;
    params.finish = 1;
    b.launch("vg_cross_entropy", [1, 1, 1], 256, 0, &params)
}
