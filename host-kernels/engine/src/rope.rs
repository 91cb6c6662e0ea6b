//! The parameters of ROPE (rotary position embedding, Su et al., arXiv:2104.09864) with YaRN
//! scaling (Peng et al., arXiv:2309.00071), computed as ggml computes them.

use vgpu_transport::ir::{Op, RopeMode};

/// The rotation of a row's pairs of elements, except for the positions.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    /// Which elements form a pair.
    pub mode: RopeMode,
    /// The first rotated element.
    pub start: u32,
    /// The number of rotated pairs.
    pub pairs: u32,
    /// The ratio of a pair's frequency to that of the pair before: `freq_base^(-2 / n_dims)`.
    pub step: f32,
    /// The number of pairs of each of the four position axes (M-RoPE).
    pub sections: [i32; 4],
    /// 1, or -1 for the gradient, which is the inverse rotation.
    pub sign: f32,
    /// The factor of interpolated angles (position interpolation).
    pub freq_scale: f32,
    /// The weight of extrapolated angles in the YaRN mix; 0 without YaRN.
    pub ext_factor: f32,
    /// The factor of the rotated elements.
    pub magnitude: f32,
    /// The pairs between which YaRN changes from extrapolated to interpolated frequencies.
    pub ramp: [f32; 2],
}

impl Rotation {
    /// The rotation of a ROPE operator; `None` for any other operator.
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
        // The pair that makes `rotations` full turns over the training context.
        let pair_of = |rotations: f32| {
            let turns = n_ctx_orig as f32 / (rotations * 2.0 * std::f32::consts::PI);
            n_dims as f32 * turns.ln() / (2.0 * freq_base.ln())
        };
        let (first, last) = (pair_of(beta_fast).floor(), pair_of(beta_slow).ceil());
        let end = n_dims as f32 - 1.0;
        Some(Rotation {
            mode,
            start: n_offs,
            // In vision mode, each element of the rotated half pairs with one of the other half.
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

/// The greater of both; `b` if either is NaN.
pub fn greater(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The smaller of both; `b` if either is NaN.
pub fn less(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}
