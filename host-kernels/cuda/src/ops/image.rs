//! POOL_1D, POOL_2D, POOL_2D_BACK, UPSCALE, TIMESTEP_EMBEDDING, WIN_PART, WIN_UNPART, GET_REL_POS,
//! ADD_REL_POS.

use vgpu_transport::ir::{Op, OpKind, PoolKind, Rule, ScaleMode, Type, TypeSet};

use crate::launch::builder::Builder;
use crate::launch::grid::div_ceil;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::{F32, FLOATS};

pub(crate) fn rules() -> Vec<Rule> {
    let f16s = TypeSet::of(&[Type::F16, Type::Bf16]);
    vec![
        Rule::new(OpKind::Pool1d, F32, &[FLOATS]),
        Rule::new(OpKind::Pool2d, F32, &[FLOATS]),
        Rule::new(OpKind::Pool2dBack, F32, &[F32, FLOATS]),
        Rule::new(OpKind::Upscale, F32, &[F32]),
        Rule::new(OpKind::TimestepEmbedding, F32, &[F32]),
        Rule::uniform(OpKind::WinPart, FLOATS, 1),
        Rule::uniform(OpKind::WinUnpart, FLOATS, 1),
        Rule::new(OpKind::GetRelPos, f16s, &[f16s]),
        Rule::uniform(OpKind::AddRelPos, F32, 3),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let (dst, src) = (b.dst(), b.optional(0));
    Some(match *op {
        // In one dimension an average is over the elements inside the image; in two it is over the
        // whole window, padding included.
        Op::Pool1d { kind, k0, s0, p0 } => {
            let mut params = pool(dst, src, kind, [(k0, s0, p0), (1, 1, 0)]);
            params.covered = 1;
            b.for_each("vg_pool", dst.elements(), &params)
        }
        Op::Pool2d {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        } => {
            let params = pool(dst, src, kind, [(k0, s0, p0), (k1, s1, p1)]);
            b.for_each("vg_pool", dst.elements(), &params)
        }
        Op::Pool2dBack {
            kind,
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
        } => {
            let mut params = pool(dst, src, kind, [(k0, s0, p0), (k1, s1, p1)]);
            params.forward = b.src(1);
            let windows = src.elements();
            if kind == PoolKind::Max && windows > 0 {
                params.argmax = b.scratch(windows as u64 * 8);
                if let Err(error) = b.for_each("vg_pool_argmax", windows, &params) {
                    return Some(Err(error));
                }
            }
            b.for_each("vg_pool_back", dst.elements(), &params)
        }
        Op::Upscale {
            mode,
            align_corners,
            antialias,
        } => {
            let factor = |d: usize| {
                let (to, from) = (dst.ne[d], src.ne[d]);
                if align_corners && d < 2 && to > 1 && from > 1 {
                    (to - 1) as f32 / (from - 1) as f32
                } else {
                    to as f32 / from as f32
                }
            };
            let params = VgUpscaleParams {
                dst,
                src,
                factor: std::array::from_fn(factor),
                middle: if align_corners { 0.0 } else { 0.5 },
                op: match mode {
                    ScaleMode::Nearest => VG_UPSCALE_NEAREST,
                    ScaleMode::Bilinear if antialias => VG_UPSCALE_ANTIALIASED,
                    ScaleMode::Bilinear => VG_UPSCALE_BILINEAR,
                    ScaleMode::Bicubic => VG_UPSCALE_BICUBIC,
                },
            };
            b.for_each("vg_upscale", dst.elements(), &params)
        }
        Op::TimestepEmbedding { dim, max_period } => {
            let params = VgTimestepParams {
                dst,
                steps: src,
                half: i64::from(dim) / 2,
                log_period: (max_period as f32).ln(),
                reserved: 0,
            };
            b.for_each("vg_timestep_embedding", dst.elements(), &params)
        }
        Op::WinPart { npx, w, .. } => window(b, VG_WINDOW_PART, w.into(), npx.into()),
        Op::WinUnpart { w } => {
            let across = div_ceil(dst.ne[1], w.into());
            window(b, VG_WINDOW_UNPART, w.into(), across)
        }
        Op::GetRelPos {} => window(b, VG_WINDOW_REL_POS, 1, 1),
        Op::AddRelPos {} => {
            let params = VgRelPosParams {
                dst,
                a: src,
                w: b.src(1),
                h: b.src(2),
            };
            b.for_each("vg_add_rel_pos", dst.elements(), &params)
        }
        _ => return None,
    })
}

fn pool(dst: VgView, src: VgView, kind: PoolKind, windows: [(i32, i32, i32); 2]) -> VgPoolParams {
    VgPoolParams {
        dst,
        src,
        size: windows.map(|(size, ..)| size.into()),
        stride: windows.map(|(_, stride, _)| stride.into()),
        padding: windows.map(|(.., padding)| padding.into()),
        average: u32::from(kind == PoolKind::Average),
        ..VgPoolParams::default()
    }
}

/// Adds the launch of a window operator.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn window(b: &mut Builder<'_>, op: VgWindow, size: i64, across: i64) -> Result<(), EngineError> {
    let params = VgWindowParams {
        dst: b.dst(),
        src: b.src(0),
        size,
        across,
        op,
        bytes: b.dst_shape().ty.block_bytes() as u32,
    };
    b.for_each("vg_window", params.dst.elements(), &params)
}
