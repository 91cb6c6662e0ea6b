//! UPSCALE, TIMESTEP_EMBEDDING, WIN_PART, WIN_UNPART, GET_REL_POS, ADD_REL_POS: operators of image
//! models other than convolutions.

use vgpu_transport::ir::{Op, OpKind, Rule, ScaleMode, Type, TypeSet};

use super::copy_raw::{self, Element, copy_strided, each_part, each_row};
use super::elementwise::Add;
use super::f32_rows::map;
use super::walk::laid_out;
use crate::kernel::{Compiled, Kernel};
use crate::operands::{Operands, parameters};
use crate::view::View;
use vgpu_engine::types::{F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    let halves = TypeSet::of(&[Type::F16, Type::Bf16]);
    vec![
        Rule::new(OpKind::Upscale, F32, &[F32]),
        Rule::new(OpKind::TimestepEmbedding, F32, &[F32]),
        Rule::uniform(OpKind::WinPart, FLOATS, 1),
        Rule::uniform(OpKind::WinUnpart, FLOATS, 1),
        Rule::new(OpKind::GetRelPos, halves, &[halves]),
        Rule::uniform(OpKind::AddRelPos, F32, 3),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let kernels = match *o.op() {
        Op::Upscale {
            mode,
            align_corners,
            antialias,
        } => {
            let resampling = Resampling::new(o.dst(), o.src(0), align_corners);
            vec![match mode {
                ScaleMode::Nearest => nearest(o, resampling),
                ScaleMode::Bilinear if antialias => antialiased(o, resampling),
                ScaleMode::Bilinear => bilinear(o, resampling),
                ScaleMode::Bicubic => bicubic(o, resampling),
            }]
        }
        Op::TimestepEmbedding { .. } => vec![timestep_embedding(o)],
        Op::WinPart { .. } => vec![win_part(o)],
        Op::WinUnpart { .. } => vec![win_unpart(o)],
        Op::GetRelPos {} => vec![get_rel_pos(o)],
        Op::AddRelPos {} => add_rel_pos(o.dst(), o.sources()),
        _ => return None,
    };
    Some(Compiled {
        kernels,
        scratch_bytes: 0,
    })
}

/// How an image is resampled: the scale factor of each dimension, and the offset of the centre of a
/// pixel.
#[derive(Clone, Copy)]
struct Resampling {
    factor: [f32; 4],
    middle: f32,
}

impl Resampling {
    fn new(dst: View, src: View, align_corners: bool) -> Resampling {
        let factor = |d: usize| {
            if align_corners && d < 2 && dst.ne[d] > 1 && src.ne[d] > 1 {
                (dst.ne[d] - 1) as f32 / (src.ne[d] - 1) as f32
            } else {
                dst.ne[d] as f32 / src.ne[d] as f32
            }
        };
        Resampling {
            factor: std::array::from_fn(factor),
            middle: if align_corners { 0.0 } else { 0.5 },
        }
    }

    /// The element of `src` nearest to element `i` of the destination in dimension `d`.
    fn nearest(&self, src: &View, d: usize, i: usize) -> usize {
        ((i as f32 / self.factor[d]) as usize).min(src.ne[d] - 1)
    }

    /// The position of element `i` of the destination in the source, in dimension `d`.
    fn position(&self, d: usize, i: usize) -> f32 {
        (i as f32 + self.middle) / self.factor[d] - self.middle
    }
}

/// A plane of an image. Pixels outside the plane have the value of the nearest pixel of the border.
#[derive(Clone, Copy)]
struct Plane {
    src: View,
    i2: usize,
    i3: usize,
}

impl Plane {
    /// # Safety
    /// `src` is f32 and not empty, and has the plane.
    unsafe fn new(src: View, i2: usize, i3: usize) -> Plane {
        Plane { src, i2, i3 }
    }

    fn pixel(&self, x: i64, y: i64) -> f32 {
        let clamp = |i: i64, d: usize| i.clamp(0, self.src.ne[d] as i64 - 1) as usize;
        let row = self.src.row_ptr([clamp(y, 1), self.i2, self.i3]);
        // SAFETY: `clamp` keeps the coordinates inside the plane, whose elements are f32 by the
        // contract of `new`.
        unsafe {
            row.wrapping_add(clamp(x, 0) * self.src.nb[0])
                .cast::<f32>()
                .read()
        }
    }
}

/// Pixels of the source that a unit of work reads, about.
const UNIT_READS: usize = 1 << 14;

/// Computes every pixel of `dst` from its coordinates and the nearest plane of `src`, of which it
/// reads about `reads` pixels.
fn resample(
    o: &Operands<'_>,
    resampling: Resampling,
    reads: usize,
    pixel: impl Fn(&Plane, usize, usize) -> f32 + Send + Sync + 'static,
) -> Kernel {
    parameters!(o, Op::Upscale { .. });
    let (dst, src) = (o.dst(), o.src(0));
    each_part(
        dst,
        UNIT_READS / reads.max(1),
        move |[y, i2, i3], row, part| {
            let [i2, i3] = [(2, i2), (3, i3)].map(|(d, i)| resampling.nearest(&src, d, i));
            // SAFETY: `o` has passed the check of UPSCALE: the source is not empty, because the
            // destination has the row. Images are f32 by the rule. `nearest` returns indices below
            // the lengths of the source.
            let plane = unsafe { Plane::new(src, i2, i3) };
            for x in part {
                let value = pixel(&plane, x, y);
                // SAFETY: `x < dst.ne[0]`, the length of the row. The destination of UPSCALE is f32
                // by the rule.
                unsafe { row.wrapping_add(x * dst.nb[0]).cast::<f32>().write(value) };
            }
        },
    )
}

fn nearest(o: &Operands<'_>, resampling: Resampling) -> Kernel {
    let src = o.src(0);
    resample(o, resampling, 1, move |plane, x, y| {
        plane.pixel(
            resampling.nearest(&src, 0, x) as i64,
            resampling.nearest(&src, 1, y) as i64,
        )
    })
}

fn bilinear(o: &Operands<'_>, resampling: Resampling) -> Kernel {
    let src = o.src(0);
    resample(o, resampling, 4, move |plane, x, y| {
        // The distance is measured from the neighbour after clamping.
        let neighbour = |d: usize, i: usize| {
            let position = resampling.position(d, i);
            let low = (position.floor() as i64).clamp(0, src.ne[d] as i64 - 1);
            (
                low,
                (position.floor() as i64) + 1,
                (position - low as f32).clamp(0.0, 1.0),
            )
        };
        let ((x0, x1, dx), (y0, y1, dy)) = (neighbour(0, x), neighbour(1, y));
        let (a, b) = (plane.pixel(x0, y0), plane.pixel(x1, y0));
        let (c, d) = (plane.pixel(x0, y1), plane.pixel(x1, y1));
        a * (1.0 - dx) * (1.0 - dy) + b * dx * (1.0 - dy) + c * (1.0 - dx) * dy + d * dx * dy
    })
}

/// Bilinear with antialiasing: a triangle filter with the width of a pixel of the smaller image.
fn antialiased(o: &Operands<'_>, resampling: Resampling) -> Kernel {
    let src = o.src(0);
    let support = [0, 1].map(|d| (1.0 / resampling.factor[d]).max(1.0));
    let middle = resampling.middle;
    let triangle = |x: f32| (1.0 - x.abs()).max(0.0);
    let reads = { support.iter() }
        .map(|radius| 2 * radius.ceil() as usize + 1)
        .product();
    resample(o, resampling, reads, move |plane, x, y| {
        let center = |d: usize, i: usize| (i as f32 + middle) / resampling.factor[d];
        let range = |d: usize, center: f32| {
            let first = ((center - support[d] + middle) as i64).max(0);
            let last = ((center + support[d] + middle) as i64).min(src.ne[d] as i64);
            first..last
        };
        let (cx, cy) = (center(0, x), center(1, y));
        let (mut value, mut total) = (0.0, 0.0);
        for sy in range(1, cy) {
            let wy = triangle((sy as f32 - cy + middle) * (1.0 / support[1]));
            for sx in range(0, cx) {
                let weight = wy * triangle((sx as f32 - cx + middle) * (1.0 / support[0]));
                if weight > 0.0 {
                    value += plane.pixel(sx, sy) * weight;
                    total += weight;
                }
            }
        }
        if total > 0.0 { value / total } else { value }
    })
}

fn bicubic(o: &Operands<'_>, resampling: Resampling) -> Kernel {
    const A: f32 = -0.75;
    let near = |x: f32| ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0;
    let far = |x: f32| ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A;
    let weights = move |x: f32| [far(x + 1.0), near(x), near(1.0 - x), far(2.0 - x)];
    resample(o, resampling, 16, move |plane, x, y| {
        let (px, py) = (resampling.position(0, x), resampling.position(1, y));
        let (wx, wy) = (weights(px - px.floor()), weights(py - py.floor()));
        let (x0, y0) = (px.floor() as i64, py.floor() as i64);
        let row = |j: usize| -> f32 {
            let pixel = |i: usize| plane.pixel(x0 + i as i64 - 1, y0 + j as i64 - 1);
            (0..4).map(|i| pixel(i) * wx[i]).sum()
        };
        (0..4).map(|j| row(j) * wy[j]).sum()
    })
}

/// Cosines, then sines, of the step times decreasing frequencies.
fn timestep_embedding(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::TimestepEmbedding { dim, max_period });
    let (dst, steps) = (o.dst(), o.src(0));
    let (dim, max_period) = (dim as usize, max_period as f32);
    let half = dim / 2;
    each_row(dst, move |[i, ..], row| {
        // SAFETY: `o` has passed the check of TIMESTEP_EMBEDDING: `steps` has an element for each
        // row of the destination, which is f32 by the rule.
        let step = unsafe {
            steps
                .ptr()
                .wrapping_add(i * steps.nb[0])
                .cast::<f32>()
                .read()
        };
        let set = |j: usize, value: f32| {
            // SAFETY: `j < dim`, the length of a row of the destination by the check. The
            // destination is f32 by the rule.
            unsafe { row.wrapping_add(j * dst.nb[0]).cast::<f32>().write(value) };
        };
        for j in 0..half {
            let frequency = (-max_period.ln() * j as f32 / half as f32).exp();
            let angle = step * frequency;
            set(j, angle.cos());
            set(j + half, angle.sin());
        }
        if dim % 2 == 1 {
            set(2 * half, 0.0);
        }
    })
}

fn win_part(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::WinPart { npx, w, .. });
    let (dst, src) = (o.dst(), o.src(0));
    let (npx, w) = (npx as usize, w as usize);
    let size = dst.ty.block_bytes() as usize;
    let zero = Element::zero(dst.ty);
    each_row(dst, move |[i1, i2, window], row| {
        let (x, y) = (window % npx * w + i1, window / npx * w + i2);
        // SAFETY: `o` has passed the check of WIN_PART, and its rule: source and destination have
        // the same type and rows of `ne[0]` elements, and the source has no dimension 3.
        unsafe {
            if x < src.ne[1] && y < src.ne[2] {
                copy_strided(
                    row,
                    dst.nb[0],
                    src.row_ptr([x, y, 0]),
                    src.nb[0],
                    dst.ne[0],
                    size,
                );
            } else {
                zero.fill(row, dst.nb[0], dst.ne[0]);
            }
        }
    })
}

fn win_unpart(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::WinUnpart { w });
    let (dst, src) = (o.dst(), o.src(0));
    let w = w as usize;
    let size = dst.ty.block_bytes() as usize;
    let npx = dst.ne[1].div_ceil(w);
    each_row(dst, move |[x, y, _], row| {
        let from = src.row_ptr([x % w, y % w, y / w * npx + x / w]);
        // SAFETY: `o` has passed the check of WIN_UNPART, and its rule: source and destination have
        // the same type and rows of `ne[0]` elements, and the source has windows of `w` by `w` rows
        // that cover the destination. One worker writes this row of `dst`.
        unsafe { copy_strided(row, dst.nb[0], from, src.nb[0], dst.ne[0], size) };
    })
}

/// Row (k, q) is the row for the distance between k and q. The bits are copied, because ggml
/// declares the result as F16 for every source type.
fn get_rel_pos(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::GetRelPos {});
    let (dst, src) = (o.dst(), o.src(0));
    let size = dst.ty.block_bytes() as usize;
    each_row(dst, move |[k, q, _], row| {
        let from = src.row_ptr([dst.ne[1] - k - 1 + q, 0, 0]);
        // SAFETY: `o` has passed the check of GET_REL_POS: `q` and `k` are below `n = dst.ne[1]`,
        // and the source has `2 * n - 1` rows, of as many elements as those of the destination. The
        // elements of both have two bytes by the rule.
        unsafe { copy_strided(row, dst.nb[0], from, src.nb[0], dst.ne[0], size) };
    })
}

/// Each row of `a` is a matrix. `pw[i] + ph[j]` of the same row is added to element (i, j).
fn add_rel_pos(dst: View, [a, pw, ph]: [View; 3]) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    if dst.ptr() != a.ptr() {
        kernels.push(copy_raw::copy(dst, a));
    }
    let n = pw.ne[0];
    let rows = pw.ne[1] * pw.ne[2] * pw.ne[3];
    let size = size_of::<f32>();
    // Everything is contiguous: the same memory, with the matrix as two dimensions.
    let square = laid_out(dst, 0, [n, n, rows, 1], [size, n * size, n * n * size, 0]);
    let along_w = laid_out(pw, 0, [n, 1, rows, 1], [size, 0, n * size, 0]);
    let along_h = laid_out(ph, 0, [1, n, rows, 1], [size, size, n * size, 0]);
    for position in [along_w, along_h] {
        kernels.extend(map(square, [square, position], Add {}).kernels);
    }
    kernels
}
