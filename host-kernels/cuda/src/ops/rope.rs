//! ROPE and ROPE_BACK.

use vgpu_transport::ir::{Op, OpKind, Rule};

use crate::launch::builder::Builder;
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
    let threads = threads(&params.src);
    Some(b.for_each_row("vg_rope", params.src.rows(), threads, 0, &params))
}

/// The kernel parameters of a ROPE operator with these sources.
pub(crate) fn params(
    op: &Op,
    dst: VgView,
    [src, positions, factors]: [VgView; 3],
) -> Option<VgRopeParams> {
    let rotation = Rotation::of(op)?;
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
    })
}

/// Threads of a block, which processes one row.
pub(crate) fn threads(src: &VgView) -> u32 {
    let pairs = u32::try_from(src.ne[0] / 2).unwrap_or(u32::MAX / 2);
    pairs.next_multiple_of(32).clamp(32, 256)
}
