//! ROPE and ROPE_BACK.

use vgpu_transport::ir::{Op, OpKind, Rule};

use crate::launch::builder::Builder;
use crate::launch::grid::div_ceil;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::rope::Rotation;
use vgpu_engine::types::FLOATS;

pub(crate) fn rules() -> Vec<Rule> {
    vec![Rule::uniform(OpKind::Rope, FLOATS, 1)]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    Rotation::of(op)?;
    let params = params(op, b.dst(), [b.src(0), b.src(1), b.optional(2)])?;
    Some(b.for_each_row("vg_rope", blocks(&params), THREADS, 0, &params))
}

/// The kernel parameters of a ROPE operator with these sources.
pub(crate) fn params(
    op: &Op,
    dst: VgView,
    [src, positions, factors]: [VgView; 3],
) -> Option<VgRopeParams> {
    let rotation = Rotation::of(op)?;
    // Kernels count heads with 32 bits.
    if src.rows() > i64::from(i32::MAX) {
        return None;
    }
    Some(VgRopeParams {
        dst,
        src,
        positions,
        factors,
        sections: rotation.sections,
        mode: rotation.mode as u32,
        start: rotation.start,
        pairs: rotation.pairs,
        step: rotation.step,
        sign: rotation.sign,
        freq_scale: rotation.freq_scale,
        ext_factor: rotation.ext_factor,
        magnitude: rotation.magnitude,
        ramp: rotation.ramp,
        heads: heads_of_block(&src),
        reserved: 0,
    })
}

/// Threads of a block.
pub(crate) const THREADS: u32 = 256;

/// The tokens from which on a block rotates all heads of a token: blocks are many enough, and each
/// angle is computed once.
const MANY_TOKENS: i64 = 64;

/// The heads of a token that a block rotates.
fn heads_of_block(src: &VgView) -> u32 {
    let heads = match src.ne[2] * src.ne[3] >= MANY_TOKENS {
        true => src.ne[1],
        // One for each thread, so that the time is short.
        false => i64::from(THREADS) / (src.ne[0] / 2).clamp(1, THREADS.into()),
    };
    heads.clamp(1, 1 << 16) as u32
}

/// The blocks of a launch.
pub(crate) fn blocks(params: &VgRopeParams) -> i64 {
    let src = &params.src;
    div_ceil(src.ne[1], params.heads.into()) * src.ne[2] * src.ne[3]
}
