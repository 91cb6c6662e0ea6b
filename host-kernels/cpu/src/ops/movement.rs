//! REPEAT, REPEAT_BACK, CONCAT, SET, ACC, DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO, PAD, PAD_REFLECT_1D,
//! ROLL, TRI, FILL, ARANGE.

use vgpu_transport::ir::{Op, OpKind, Rule, TriKind};

use super::copy_raw::{self, Element, copy_strided, each_row};
use super::elementwise::Add;
use super::f32_rows::{Access, STAGE, map};
use super::walk::{laid_out, window};
use crate::kernel::{Compiled, Estimate, Kernel};
use crate::operands::{Operands, parameters};
use crate::view::View;
use vgpu_engine::types::{ANY, F32, FLOATS, PLAIN};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::uniform(OpKind::Repeat, ANY, 1),
        Rule::uniform(OpKind::RepeatBack, FLOATS, 1),
        Rule::uniform(OpKind::Concat, ANY, 2),
        Rule::uniform(OpKind::Set, PLAIN, 2),
        Rule::uniform(OpKind::Acc, FLOATS, 2),
        Rule::uniform(OpKind::Diag, PLAIN, 1),
        Rule::uniform(OpKind::DiagMaskInf, FLOATS, 1),
        Rule::uniform(OpKind::DiagMaskZero, FLOATS, 1),
        Rule::uniform(OpKind::Pad, PLAIN, 1),
        Rule::uniform(OpKind::PadReflect1d, PLAIN, 1),
        Rule::uniform(OpKind::Roll, PLAIN, 1),
        Rule::uniform(OpKind::Tri, PLAIN, 1),
        Rule::new(OpKind::Fill, FLOATS, &[]),
        Rule::new(OpKind::Arange, F32, &[]),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    let kernels: Vec<Kernel> = match *o.op() {
        Op::Repeat {} => vec![copy_raw::copy(dst, o.src(0))],
        Op::RepeatBack {} => return Some(repeat_back(o)),
        Op::Concat { dim } => concat(dst, o.src(0), o.src(1), dim as usize),
        Op::Set {
            nb1,
            nb2,
            nb3,
            offset,
        } => {
            let part = placed(dst, o.src(1), [nb1, nb2, nb3], offset);
            let mut kernels = start_from(dst, o.src(0));
            kernels.push(copy_raw::copy(part, o.src(1)));
            kernels
        }
        Op::Acc {
            nb1,
            nb2,
            nb3,
            offset,
        } => {
            let part = placed(dst, o.src(1), [nb1, nb2, nb3], offset);
            let mut kernels = start_from(dst, o.src(0));
            kernels.extend(map(part, [part, o.src(1)], Add {}).kernels);
            kernels
        }
        Op::Diag {} => vec![diag(o)],
        Op::DiagMaskInf { n_past } => {
            let kept = move |i1| 0..(n_past as usize).saturating_add(i1 + 1);
            vec![keep(o, kept, Element::of(dst.ty, f32::NEG_INFINITY))]
        }
        Op::DiagMaskZero { n_past } => {
            let kept = move |i1| 0..(n_past as usize).saturating_add(i1 + 1);
            vec![keep(o, kept, Element::zero(dst.ty))]
        }
        Op::Pad { circular: true, .. } => vec![pad_circular(o)],
        Op::Pad { .. } => vec![pad(o)],
        Op::PadReflect1d { .. } => vec![pad_reflect(o)],
        Op::Roll { .. } => vec![roll(o)],
        Op::Tri { kind } => {
            let kept = move |i1| match kind {
                TriKind::UpperDiag => i1..usize::MAX,
                TriKind::Upper => i1 + 1..usize::MAX,
                TriKind::LowerDiag => 0..i1 + 1,
                TriKind::Lower => 0..i1,
            };
            vec![keep(o, kept, Element::zero(dst.ty))]
        }
        Op::Fill { value } => vec![copy_raw::fill(dst, Element::of(dst.ty, value))],
        Op::Arange { .. } => vec![arange(o)],
        _ => return None,
    };
    Some(Compiled {
        kernels,
        scratch_bytes: 0,
    })
}

/// The kernels that copy `src` to `dst`: none if both are the same memory.
fn start_from(dst: View, src: View) -> Vec<Kernel> {
    if dst.ptr() == src.ptr() {
        Vec::new()
    } else {
        vec![copy_raw::copy(dst, src)]
    }
}

/// The view of `dst` that SET and ACC change: it has the lengths of `part` and its own strides.
fn placed(dst: View, part: View, nb: [u64; 3], offset: u64) -> View {
    let [nb1, nb2, nb3] = nb.map(|n| n as usize);
    laid_out(
        dst,
        offset as usize,
        part.ne,
        [dst.ty.block_bytes() as usize, nb1, nb2, nb3],
    )
}

/// Repetitions along a row in a unit of work.
const REPETITIONS: usize = 1024;

/// The gradient of REPEAT: the sum over all repetitions.
fn repeat_back(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::RepeatBack {});
    let (dst, src, workers) = (o.dst(), o.src(0), o.workers());
    let (out, values) = (Access::rows(&dst), Access::rows(&src));
    let mut times: [usize; 4] = std::array::from_fn(|d| src.ne[d] / dst.ne[d]);
    if times.contains(&0) {
        times = [0; 4]; // empty sums
    }
    // The repetitions in dimensions 1 to 3, and a few of those in dimension 0 at a time.
    let (parts, copies) = (dst.ne[0].div_ceil(STAGE), times[1] * times[2] * times[3]);
    let along = times[0].div_ceil(REPETITIONS);
    // The last step writes the sums.
    let steps = copies * along + 1;
    let most = Estimate::steps(STAGE.min(dst.ne[0]) * REPETITIONS.min(times[0]).max(1));
    let kernel: Kernel = Box::new(move |w| {
        let mut stage = [0.0; STAGE];
        for unit in w.range_of_groups(dst.rows() * parts, steps).each(most) {
            let (step, unit) = (unit % steps, unit / steps);
            let (start, index) = (unit % parts * STAGE, dst.row_index(unit / parts));
            let n = STAGE.min(dst.ne[0] - start);
            // SAFETY: the scratch memory has `STAGE` floats for each worker. The floats are set
            // here in the first step of a unit, and one worker does all its steps.
            let sums = unsafe {
                let sums = w.scratch().cast::<f32>().add(w.index() * STAGE);
                if step == 0 {
                    sums.write_bytes(0, STAGE);
                }
                std::slice::from_raw_parts_mut(sums, STAGE)
            };
            if step == steps - 1 {
                let row = dst.row_ptr(index);
                // SAFETY: `sums` has `STAGE >= n` floats. `start + n <= dst.ne[0]`, the elements of
                // the row, and one worker has this part of the row.
                unsafe { out.store(sums.as_ptr(), n, out.at(row, start).cast_mut()) };
                continue;
            }
            let (copy, first) = (step / along, step % along * REPETITIONS);
            let (c1, c2, c3) = (
                copy % times[1],
                copy / times[1] % times[2],
                copy / (times[1] * times[2]),
            );
            let src_row = src.row_ptr([
                index[0] + c1 * dst.ne[1],
                index[1] + c2 * dst.ne[2],
                index[2] + c3 * dst.ne[3],
            ]);
            for c0 in first..times[0].min(first + REPETITIONS) {
                // SAFETY: `o` has passed the check of REPEAT_BACK: `src` has `times` the lengths of
                // `dst`. So the row exists, and its `src.ne[0]` elements are at least
                // `c0 * dst.ne[0] + start + n`. `stage` has `STAGE >= n` floats.
                unsafe {
                    let part = values.at(src_row, c0 * dst.ne[0] + start);
                    values.load(part, n, stage.as_mut_ptr());
                }
                sums.iter_mut()
                    .zip(&stage[..n])
                    .for_each(|(sum, x)| *sum += x);
            }
        }
        Ok(())
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: workers * STAGE * size_of::<f32>(),
    }
}

fn concat(dst: View, a: View, b: View, dim: usize) -> Vec<Kernel> {
    let mut start = [0; 4];
    start[dim] = a.ne[dim];
    vec![
        copy_raw::copy(window(dst, [0; 4], a.ne), a),
        copy_raw::copy(window(dst, start, b.ne), b),
    ]
}

/// Copies the columns `kept(i1)` of each row of `src`, and sets the other columns to `other`.
fn keep(
    o: &Operands<'_>,
    kept: impl Fn(usize) -> std::ops::Range<usize> + Send + Sync + 'static,
    other: Element,
) -> Kernel {
    parameters!(
        o,
        (Op::DiagMaskInf { .. } | Op::DiagMaskZero { .. } | Op::Tri { .. })
    );
    let (dst, src) = (o.dst(), o.src(0));
    let size = dst.ty.block_bytes() as usize;
    let (n, to_step, from_step) = (dst.ne[0], dst.nb[0], src.nb[0]);
    each_row(dst, move |index, row| {
        let kept = kept(index[0]);
        let (start, end) = (kept.start.min(n), kept.end.min(n));
        let from = src.row_ptr(index).wrapping_add(start * from_step);
        let at = |i: usize| row.wrapping_add(i * to_step);
        // SAFETY: `o` has passed the check of DIAG_MASK_INF, DIAG_MASK_ZERO or TRI, and its rule:
        // source and destination have the same lengths and type. `start <= end <= n`, the length of
        // both rows. `other` has the type of the destination.
        unsafe {
            copy_strided(at(start), to_step, from, from_step, end - start, size);
            other.fill(row, to_step, start);
            other.fill(at(end), to_step, n - end);
        }
    })
}

/// `dst[i, i] = src[i]`
fn diag(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Diag {});
    let (dst, src) = (o.dst(), o.src(0));
    let size = dst.ty.block_bytes() as usize;
    let zero = Element::zero(dst.ty);
    each_row(dst, move |[i1, i2, i3], row| {
        let value = src.row_ptr([0, i2, i3]).wrapping_add(i1 * src.nb[0]);
        // SAFETY: `o` has passed the check of DIAG, and its rule: a row of the destination has
        // `ne[0]` elements, `dst.ne[0] == dst.ne[1]`, and a row of the source has as many, of the
        // same type. So `i1` is below the length of both.
        unsafe {
            zero.fill(row, dst.nb[0], dst.ne[0]);
            copy_strided(row.wrapping_add(i1 * dst.nb[0]), 0, value, 0, 1, size);
        }
    })
}

fn pad(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Pad { left, .. });
    let (dst, src, left) = (o.dst(), o.src(0), left.map(|n| n as usize));
    let size = dst.ty.block_bytes() as usize;
    let zero = Element::zero(dst.ty);
    let (n, inner, step) = (dst.ne[0], src.ne[0], dst.nb[0]);
    each_row(dst, move |index, row| {
        let from: [usize; 3] = std::array::from_fn(|d| index[d].wrapping_sub(left[d + 1]));
        let inside = (0..3).all(|d| from[d] < src.ne[d + 1]);
        let at = |i: usize| row.wrapping_add(i * step);
        // SAFETY: `o` has passed the check of PAD, and its rule: `left[0] + inner <= n`, the length
        // of a row of the destination. If `inside`, `from` is a row of the source, which has
        // `inner` elements of the same type.
        unsafe {
            if inside {
                zero.fill(row, step, left[0]);
                copy_strided(at(left[0]), step, src.row_ptr(from), src.nb[0], inner, size);
                zero.fill(at(left[0] + inner), step, n - left[0] - inner);
            } else {
                zero.fill(row, step, n);
            }
        }
    })
}

/// The source index of index `i` of a padded dimension, if the padding is circular.
fn wrap(i: usize, left: usize, length: usize) -> usize {
    (i + length - left % length) % length
}

fn pad_circular(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Pad { left, .. });
    let (dst, src, left) = (o.dst(), o.src(0), left.map(|n| n as usize));
    let size = dst.ty.block_bytes() as usize;
    each_row(dst, move |index, row| {
        let from = src.row_ptr(std::array::from_fn(|d| {
            wrap(index[d], left[d + 1], src.ne[d + 1])
        }));
        let mut i = 0;
        while i < dst.ne[0] {
            let start = wrap(i, left[0], src.ne[0]);
            let n = (src.ne[0] - start).min(dst.ne[0] - i);
            let (to, from) = (
                row.wrapping_add(i * dst.nb[0]),
                from.wrapping_add(start * src.nb[0]),
            );
            // SAFETY: `wrap` returns indices below the lengths of the source, so its row exists.
            // `start + n <= src.ne[0]` and `i + n <= dst.ne[0]`, the lengths of the rows, which
            // have the same type by the rule of PAD.
            unsafe { copy_strided(to, dst.nb[0], from, src.nb[0], n, size) };
            i += n;
        }
    })
}

fn pad_reflect(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::PadReflect1d { p0, .. });
    let (dst, src, left) = (o.dst(), o.src(0), p0 as usize);
    let size = dst.ty.block_bytes() as usize;
    each_row(dst, move |index, row| {
        let from = src.row_ptr(index);
        let last = src.ne[0] - 1;
        for i in (0..left).chain(left + src.ne[0]..dst.ne[0]) {
            let mirrored = if i < left {
                left - i
            } else {
                2 * last + left - i
            };
            let element = from.wrapping_add(mirrored * src.nb[0]);
            // SAFETY: `o` has passed the check of PAD_REFLECT_1D, and its rule: the source has the
            // rows and the type of the destination, and each padding is smaller than a row of the
            // source, so `mirrored < src.ne[0]`. `i < dst.ne[0]`.
            unsafe { copy_strided(row.wrapping_add(i * dst.nb[0]), 0, element, 0, 1, size) };
        }
        let middle = row.wrapping_add(left * dst.nb[0]);
        // SAFETY: `left + src.ne[0] <= dst.ne[0]` by the check of PAD_REFLECT_1D.
        unsafe { copy_strided(middle, dst.nb[0], from, src.nb[0], src.ne[0], size) };
    })
}

/// `dst[i] = src[(i - shift) mod ne]`
fn roll(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Roll { shift });
    let (dst, src) = (o.dst(), o.src(0));
    let size = dst.ty.block_bytes() as usize;
    each_row(dst, move |index, row| {
        let wrap = |i: usize, d: usize| {
            (i as i64 - i64::from(shift[d])).rem_euclid(dst.ne[d] as i64) as usize
        };
        let from = src.row_ptr(std::array::from_fn(|d| wrap(index[d], d + 1)));
        let (n, start) = (dst.ne[0], wrap(0, 0));
        let split = row.wrapping_add((n - start) * dst.nb[0]);
        // SAFETY: `o` has passed the check of ROLL, and its rule: source and destination have the
        // same lengths, below which `wrap` returns indices, and type. `start < n`, the length of
        // both rows, which are copied as `n - start` and `start` elements.
        unsafe {
            let tail = from.wrapping_add(start * src.nb[0]);
            copy_strided(row, dst.nb[0], tail, src.nb[0], n - start, size);
            copy_strided(split, dst.nb[0], from, src.nb[0], start, size);
        }
    })
}

fn arange(o: &Operands<'_>) -> Kernel {
    parameters!(o, Op::Arange { start, step, .. });
    let dst = o.dst();
    Box::new(move |w| {
        for i in w.range_of(dst.ne[0]) {
            let element = dst.ptr().wrapping_add(i * dst.nb[0]);
            // SAFETY: `i < dst.ne[0]`, and the elements are f32 by the rule of ARANGE.
            unsafe { element.cast::<f32>().write(start + step * i as f32) };
        }
        Ok(())
    })
}
