//! FLASH_ATTN_EXT.

use vgpu_transport::ir::{Op, OpKind, Rule};

use super::READABLE;
use crate::cuda::params::*;
use crate::cuda::plan::Builder;
use crate::engine::EngineError;
use crate::types::F32;

/// Warps of a block, each with sums of its own.
const WARPS: i64 = 4;

pub(super) fn rules() -> Vec<Rule> {
    vec![Rule::new(
        OpKind::FlashAttnExt,
        F32,
        &[F32, READABLE, READABLE],
    )]
}

pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let &Op::FlashAttnExt {
        scale,
        max_bias,
        logit_softcap: cap,
        ..
    } = op
    else {
        return None;
    };
    Some(b.staged(|b, dst| {
        let (q, k, v) = (b.src(0), b.src(1), b.src(2));
        let params = VgAttentionParams {
            dst,
            q,
            k,
            v,
            mask: b.optional(3),
            sinks: b.optional(4),
            codebooks: b.codebooks(),
            scale: if cap == 0.0 { scale } else { scale / cap },
            cap,
            max_bias,
            heads_log2: 1 << q.ne[2].ilog2(),
        };
        let shared = 4 * (k.ne[0] + WARPS * v.ne[0]);
        let shared = u32::try_from(shared)
            .ok()
            .filter(|&bytes| bytes <= b.most_shared())
            .ok_or_else(|| b.unsupported(format!("heads of {} and {}", k.ne[0], v.ne[0])))?;
        b.launch_over(
            "vg_attention",
            [q.ne[1], q.ne[2], q.ne[3]],
            128,
            shared,
            &params,
        )
    }))
}
