//! FLASH_ATTN_EXT.
//!
//! The kernels of `kernels/fattn.cuh` run on tensor cores: with F16 operands where keys and values
//! are F16 or convert to it without loss of range, with BF16 operands, and with f32 split into two
//! BF16 numbers for all other types. Heads wider than 576, and operands with unusual strides, use
//! `kernels/fattn_simt.cu`, which reads any type.

use vgpu_transport::ir::{Op, OpKind, Rule};

use super::fattn::Tiles;
use super::fattn_sm90::FattnSm90;
use crate::launch::builder::Builder;
use crate::megakernel::stages::MAX_TOKENS;
use crate::params::*;
use crate::types::READABLE;
use vgpu_engine::EngineError;
use vgpu_engine::types::F32;

/// Warps of a block of `vg_fattn_simt`, each with its own partial sums.
const WARPS: i64 = 4;

pub(crate) fn rules() -> Vec<Rule> {
    vec![Rule::new(
        OpKind::FlashAttnExt,
        F32,
        &[F32, READABLE, READABLE],
    )]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let &Op::FlashAttnExt {
        scale,
        max_bias,
        logit_softcap,
        ..
    } = op
    else {
        return None;
    };
    Some(b.staged(|b, dst| {
        let (q, k, v) = (b.src(0), b.src(1), b.src(2));
        let params = VgFattnSimtParams {
            dst,
            q,
            k,
            v,
            mask: b.optional(3),
            sinks: b.optional(4),
            codebooks: b.codebooks(),
            scale: if logit_softcap == 0.0 {
                scale
            } else {
                scale / logit_softcap
            },
            logit_softcap,
            max_bias,
            heads_log2: 1 << q.ne[2].ilog2(),
        };
        // A megakernel has attention with tiles of few rows only, for as many tokens as it takes.
        let is_few = b.uses_megakernel() && q.ne[1] <= MAX_TOKENS;
        match Tiles::of(&params, |kernel| b.max_dynamic_shared(kernel), is_few) {
            Some(tiles) => match FattnSm90::of(b, &params, tiles.gqa_ratio).filter(|_| !is_few) {
                Some(sm90) => sm90.fattn(b, &params),
                None => tiles.fattn(b, &params),
            },
            None => launch_simt(b, &params),
        }
    }))
}

/// Adds the launch of `vg_fattn_simt`.
///
/// # Errors
/// [`EngineError::Unsupported`] if the operands need more shared memory than a block has;
/// [`EngineError::Device`] if the device lacks a kernel.
fn launch_simt(b: &mut Builder<'_>, params: &VgFattnSimtParams) -> Result<(), EngineError> {
    b.kernel("vg_fattn_simt")?;
    let (q, [dk, dv]) = (&params.q, [params.k.ne[0], params.v.ne[0]]);
    let shared = 4 * (dk + WARPS * dv);
    let shared = u32::try_from(shared)
        .ok()
        .filter(|&bytes| bytes <= b.max_dynamic_shared("vg_fattn_simt"))
        .ok_or_else(|| {
            b.unsupported(format!(
                "heads of {dk} and {dv} elements do not fit into shared memory"
            ))
        })?;
    let grid = [q.ne[1], q.ne[2], q.ne[3]];
    b.launch_over("vg_fattn_simt", grid, 128, shared, params)
}
