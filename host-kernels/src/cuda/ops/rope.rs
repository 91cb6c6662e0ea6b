//! ROPE and ROPE_BACK.

use vgpu_transport::ir::{Op, OpKind, RopeMode, Rule};

use super::FLOATS;
use crate::cuda::params::*;
use crate::cuda::plan::Builder;
use crate::engine::EngineError;

pub(super) fn rules() -> Vec<Rule> {
    vec![Rule::uniform(OpKind::Rope, FLOATS, 1)]
}

pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let Op::Rope {
        mode,
        backward,
        n_dims,
        n_offs,
        n_ctx_orig,
        freq_base,
        freq_scale,
        ext_factor,
        attn_factor,
        beta_fast,
        beta_slow,
        sections,
    } = *op
    else {
        return None;
    };
    // YaRN: the pairs between which angles pass from interpolated to as they were, and the magnitude.
    let pair_of = |rotations: f32| {
        let turns = n_ctx_orig as f32 / (rotations * 2.0 * std::f32::consts::PI);
        n_dims as f32 * turns.ln() / (2.0 * freq_base.ln())
    };
    let (first, last) = (pair_of(beta_fast).floor(), pair_of(beta_slow).ceil());
    let magnitude = if ext_factor == 0.0 {
        attn_factor
    } else {
        attn_factor * (1.0 + 0.1 * (1.0 / freq_scale).ln())
    };
    let params = VgRopeParams {
        dst: b.dst(),
        src: b.src(0),
        positions: b.src(1),
        factors: b.optional(2),
        sections,
        mode: mode as u32,
        start: n_offs,
        pairs: if mode == RopeMode::Vision {
            n_dims
        } else {
            n_dims / 2
        },
        step: freq_base.powf(-2.0 / n_dims as f32),
        sign: if backward { -1.0 } else { 1.0 },
        freq_scale,
        ext_factor,
        magnitude,
        ramp: [first.max(0.0), last.min(n_dims as f32 - 1.0)],
    };
    let threads = (params.src.ne[0] as u32 / 2)
        .next_multiple_of(32)
        .clamp(32, 256);
    Some(b.for_each_row("vg_rope", params.src.rows(), threads, 0, &params))
}
