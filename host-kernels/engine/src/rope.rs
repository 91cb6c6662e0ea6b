//! ROPE: what the frequencies of a rotation follow from, for every engine.

use vgpu_transport::ir::{Op, RopeMode};

/// How pairs of elements of a row are turned, but for the positions.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    /// Which pairs of elements are rotated.
    pub mode: RopeMode,
    /// The first element that is turned.
    pub start: u32,
    /// The number of pairs that are rotated.
    pub pairs: u32,
    /// What a pair's frequency is of the one before it.
    pub step: f32,
    /// How many pairs each of four axes has.
    pub sections: [i32; 4],
    /// -1 for the gradient, which turns back.
    pub sign: f32,
    /// The factor of interpolated angles.
    pub freq_scale: f32,
    /// The share of extrapolated angles, as in YaRN.
    pub ext_factor: f32,
    /// The length of the turned vectors, in units of theirs.
    pub magnitude: f32,
    /// The pairs between which YaRN goes from extrapolated to interpolated frequencies.
    pub ramp: [f32; 2],
}

impl Rotation {
    /// The rotation of a ROPE operator; `None` for any other.
    pub fn of(op: &Op) -> Option<Rotation> {
        let &Op::Rope {
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
        } = op
        else {
            return None;
        };
        // The pair that turns `rotations` times over the context the model was trained with.
        let pair_of = |rotations: f32| {
            let turns = n_ctx_orig as f32 / (rotations * 2.0 * std::f32::consts::PI);
            n_dims as f32 * turns.ln() / (2.0 * freq_base.ln())
        };
        let (first, last) = (pair_of(beta_fast).floor(), pair_of(beta_slow).ceil());
        let end = n_dims as f32 - 1.0;
        Some(Rotation {
            mode,
            start: n_offs,
            // Vision positions turn each element of the rotated half with one of the other half.
            pairs: if mode == RopeMode::Vision {
                n_dims
            } else {
                n_dims / 2
            },
            step: freq_base.powf(-2.0 / n_dims as f32),
            sections,
            sign: if backward { -1.0 } else { 1.0 },
            freq_scale,
            ext_factor,
            magnitude: if ext_factor == 0.0 {
                attn_factor
            } else {
                attn_factor * (1.0 + 0.1 * (1.0 / freq_scale).ln())
            },
            ramp: [greater(0.0, first), less(end, last)],
        })
    }
}

/// The greater; `b` if it is NaN.
pub fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The less; `b` if it is NaN.
pub fn less(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}
