//! NORM, RMS_NORM, RMS_NORM_BACK, L2_NORM, GROUP_NORM, SOFT_MAX, SOFT_MAX_BACK.

use vgpu_transport::ir::{Op, OpKind, Rule, Type, TypeSet};

use crate::launch::builder::Builder;
use crate::launch::grid::{div_ceil, threads_for};
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::{F32, FLOATS};

pub(crate) fn rules() -> Vec<Rule> {
    let masks = TypeSet::of(&[Type::F32, Type::F16]);
    vec![
        Rule::new(OpKind::Norm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::RmsNorm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::RmsNormBack, FLOATS, &[FLOATS, FLOATS]),
        Rule::new(OpKind::L2Norm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::GroupNorm, FLOATS, &[FLOATS]),
        Rule::new(OpKind::SoftMax, F32, &[F32, masks, F32]),
        Rule::new(OpKind::SoftMaxBack, FLOATS, &[FLOATS, FLOATS]),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    Some(match *op {
        Op::Norm { eps } => norm(b, VG_NORM_STANDARD, eps),
        Op::RmsNorm { eps } => norm(b, VG_NORM_RMS, eps),
        Op::L2Norm { eps } => norm(b, VG_NORM_L2, eps),
        Op::RmsNormBack { eps } => norm(b, VG_NORM_RMS_BACK, eps),
        // ALiBi adds constants to the logits, so it does not change the gradient.
        Op::SoftMaxBack { scale, .. } => norm(b, VG_NORM_SOFT_MAX_BACK, scale),
        Op::GroupNorm { n_groups, eps } => {
            let (dst, src) = (b.dst(), b.src(0));
            let channels = div_ceil(src.ne[2], n_groups.into());
            let groups = div_ceil(src.ne[2], channels) * src.ne[3];
            let params = VgGroupNormParams {
                dst,
                src,
                channels,
                eps,
                reserved: 0,
            };
            b.for_each_row(
                "vg_group_norm",
                groups,
                threads_for(src.ne[0] * src.ne[1] * channels),
                0,
                &params,
            )
        }
        Op::SoftMax { scale, max_bias } => {
            let src = b.src(0);
            let params = VgSoftMaxParams {
                dst: b.dst(),
                src,
                mask: b.optional(1),
                sinks: b.optional(2),
                scale,
                max_bias,
                heads_log2: 1 << src.ne[2].ilog2(),
                reserved: 0,
            };
            b.for_each_row(
                "vg_soft_max",
                src.rows(),
                threads_for(src.ne[0]),
                0,
                &params,
            )
        }
        _ => return None,
    })
}

/// Adds the launch of a norm, a block for each row.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn norm(b: &mut Builder<'_>, op: VgNorm, eps: f32) -> Result<(), EngineError> {
    let params = VgNormParams {
        dst: b.dst(),
        a: b.src(0),
        b: b.optional(1),
        eps,
        op,
    };
    b.for_each_row(
        "vg_norm",
        params.dst.rows(),
        threads_for(params.dst.ne[0]),
        0,
        &params,
    )
}
