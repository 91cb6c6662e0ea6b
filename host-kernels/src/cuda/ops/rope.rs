//! ROPE and ROPE_BACK.

use vgpu_transport::ir::{Op, OpKind, Rule};

use crate::cuda::params::*;
use crate::cuda::plan::Builder;
use crate::engine::EngineError;
use crate::rope::Rotation;
use crate::types::FLOATS;

pub(super) fn rules() -> Vec<Rule> {
    vec![Rule::uniform(OpKind::Rope, FLOATS, 1)]
}

pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let rotation = Rotation::of(op)?;
    let params = VgRopeParams {
        dst: b.dst(),
        src: b.src(0),
        positions: b.src(1),
        factors: b.optional(2),
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
    };
    let threads = (params.src.ne[0] as u32 / 2)
        .next_multiple_of(32)
        .clamp(32, 256);
    Some(b.for_each_row("vg_rope", params.src.rows(), threads, 0, &params))
}
