//! POOL_1D, POOL_2D, POOL_2D_BACK, UPSCALE, TIMESTEP_EMBEDDING, WIN_PART, WIN_UNPART, GET_REL_POS,
//! ADD_REL_POS.

use std::ops::Range;

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
            pooled(b, params, 1)
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
            pooled(b, params, 2)
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
            pool_back(b, params)
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
            let results = b.share_of(dst.elements());
            if results.is_empty() {
                return Some(Ok(()));
            }
            let params = VgUpscaleParams {
                dst,
                src,
                results: VgRange {
                    begin: results.start,
                    end: results.end,
                },
                factor: std::array::from_fn(factor),
                middle: if align_corners { 0.0 } else { 0.5 },
                op: match mode {
                    ScaleMode::Nearest => VG_UPSCALE_NEAREST,
                    ScaleMode::Bilinear if antialias => VG_UPSCALE_ANTIALIASED,
                    ScaleMode::Bilinear => VG_UPSCALE_BILINEAR,
                    ScaleMode::Bicubic => VG_UPSCALE_BICUBIC,
                },
            };
            b.for_each("vg_upscale", results.end - results.start, &params)
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

/// Adds the launch of POOL_1D or POOL_2D, whose windows slide along the first `dims` dimensions. A
/// share has a range of the results along the longest of them. In its padding lie the windows
/// before them.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn pooled(b: &mut Builder<'_>, mut params: VgPoolParams, dims: usize) -> Result<(), EngineError> {
    let ne = params.dst.ne;
    let dim = (0..dims).max_by_key(|&dim| ne[dim]).unwrap_or(0);
    let share = b.share_of(ne[dim]);
    if share.is_empty() {
        return Ok(());
    }
    params.dst.data += (share.start * params.dst.nb[dim]) as u64;
    params.dst.ne[dim] = share.end - share.start;
    params.padding[dim] -= share.start * params.stride[dim];
    b.for_each("vg_pool", params.dst.elements(), &params)
}

/// Adds the launches of POOL_2D_BACK. A share has a range of the windows of each plane, row by row,
/// and adds their gradients to the sums that the shares before it have left in the destination.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn pool_back(b: &mut Builder<'_>, params: VgPoolParams) -> Result<(), EngineError> {
    let [columns, rows, ..] = params.src.ne;
    let mut blocks = rectangles(b.share_of(columns * rows), columns);
    // The first launch writes elements in no window, too.
    let mut is_first = b.is_first_share();
    if is_first && blocks.is_empty() {
        blocks.push([0..0, 0..0]);
    }
    for block in blocks {
        let mut params = params;
        take_windows(&mut params, block);
        if !is_first {
            params.adds = 1;
            take_covered(&mut params);
        }
        is_first = false;
        if params.dst.elements() == 0 {
            continue;
        }
        let windows = params.src.elements();
        if params.average == 0 && windows > 0 {
            params.argmax = b.scratch(windows as u64 * 8);
            b.for_each("vg_pool_argmax", windows, &params)?;
        }
        b.for_each("vg_pool_back", params.dst.elements(), &params)?;
    }
    Ok(())
}

/// The fewest rectangles of windows, as columns and rows, that a range of windows is in row by row:
/// at most the rest of a row, whole rows and the beginning of a row.
fn rectangles(windows: Range<i64>, columns: i64) -> Vec<[Range<i64>; 2]> {
    let mut rectangles = Vec::new();
    let mut at = windows.start;
    while at < windows.end {
        let (row, column, left) = (at / columns, at % columns, windows.end - at);
        let (width, height) = match column == 0 && left >= columns {
            true => (columns, left / columns),
            false => (left.min(columns - column), 1),
        };
        rectangles.push([column..column + width, row..row + height]);
        at += width * height;
    }
    rectangles
}

/// Limits POOL_2D_BACK to these windows. In the padding lie those before them.
fn take_windows(params: &mut VgPoolParams, windows: [Range<i64>; 2]) {
    for (d, range) in windows.into_iter().enumerate() {
        params.src.data += (range.start * params.src.nb[d]) as u64;
        params.src.ne[d] = range.end - range.start;
        params.padding[d] -= range.start * params.stride[d];
    }
}

/// Limits POOL_2D_BACK to the elements of the image between the first and the last window.
fn take_covered(params: &mut VgPoolParams) {
    for d in 0..2 {
        let (ne, padding) = (params.dst.ne[d], params.padding[d]);
        let last = (params.src.ne[d] - 1) * params.stride[d] - padding;
        let begin = (-padding).clamp(0, ne);
        let end = (last + params.size[d]).clamp(begin, ne);
        for image in [&mut params.dst, &mut params.forward] {
            image.data += (begin * image.nb[d]) as u64;
            image.ne[d] = end - begin;
        }
        params.padding[d] += begin;
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
