//! POOL_1D, POOL_2D, POOL_2D_BACK.

use vgpu_transport::ir::{Op, OpKind, PoolKind, PoolWindow, Rule};

use super::conv_axis::PoolAxis;
use super::copy_raw::{Element, each_part};
use super::f32_rows::Access;
use crate::kernel::{Compiled, Estimate, Kernel};
use crate::operands::{Operands, parameters};
use crate::view::View;
use vgpu_engine::types::{F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::Pool1d, F32, &[FLOATS]),
        Rule::new(OpKind::Pool2d, F32, &[FLOATS]),
        Rule::new(OpKind::Pool2dBack, F32, &[F32, FLOATS]),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let op = o.op();
    let kernel = match *op {
        Op::Pool1d { .. } => pool_1d(o, PoolAxis::all(&PoolWindow::<1>::of(op)?)),
        Op::Pool2d { .. } => pool_2d(o, PoolAxis::all(&PoolWindow::<2>::of(op)?)),
        Op::Pool2dBack { .. } => pool_2d_back(o, PoolAxis::all(&PoolWindow::<2>::of(op)?)),
        _ => return None,
    };
    Some(Compiled {
        kernels: vec![kernel],
        scratch_bytes: 0,
    })
}

/// The element of `row` at index `i`.
///
/// # Safety
/// The row has more than `i` elements.
unsafe fn element(access: Access, row: *const u8, i: usize) -> f32 {
    let mut value = 0.0;
    // SAFETY: the caller guarantees element `i`, which is loaded into one float.
    unsafe { access.load(access.at(row, i), 1, &mut value) };
    value
}

/// The result of a window without elements: the smallest number for a maximum, 0 for a sum.
fn start(kind: PoolKind) -> f32 {
    match kind {
        PoolKind::Max => f32::MIN,
        PoolKind::Average => 0.0,
    }
}

fn add(kind: PoolKind, result: f32, value: f32) -> f32 {
    match kind {
        PoolKind::Max => {
            if value < result {
                result
            } else {
                value
            }
        }
        PoolKind::Average => result + value,
    }
}

/// Elements of the source that a unit of work reads, about.
const UNIT_READS: usize = 1 << 18;

/// Results in a unit of work, for windows of these sizes over a source of these lengths.
fn grain<const N: usize>(windows: [PoolAxis; N], lengths: [usize; N]) -> usize {
    (UNIT_READS / reads(windows, lengths).max(1)).max(1)
}

/// The most elements of a source of these lengths that a window reads.
fn reads<const N: usize>(windows: [PoolAxis; N], lengths: [usize; N]) -> usize {
    let reads = windows.iter().zip(lengths).map(|(w, n)| w.size.min(n));
    reads.product()
}

/// An average is over the elements that the window covers.
fn pool_1d(o: &Operands<'_>, [window]: [PoolAxis; 1]) -> Kernel {
    parameters!(o, Op::Pool1d { kind, .. });
    let (dst, src) = (o.dst(), o.src(0));
    let (out, x) = (
        Access::new(dst.ty, dst.nb[0]),
        Access::new(src.ty, src.nb[0]),
    );
    let grain = grain([window], [src.ne[0]]);
    each_part(dst, grain, move |index, row, part| {
        let src_row = src.row_ptr(index);
        for i in part {
            let covered = window.covers(i, src.ne[0]);
            let count = covered.len();
            let mut result = start(kind);
            for j in covered {
                // SAFETY: `o` has passed the check of POOL_1D: the source has the rows of the
                // destination. `covers` returns indices below `src.ne[0]`, the length of the row.
                result = add(kind, result, unsafe { element(x, src_row, j) });
            }
            if kind == PoolKind::Average && count > 0 {
                result /= count as f32;
            }
            // SAFETY: `i < dst.ne[0]`, the length of the row.
            unsafe { out.store(&result, 1, out.at(row, i).cast_mut()) };
        }
    })
}

/// An average is over the whole window, padding included.
fn pool_2d(o: &Operands<'_>, [wx, wy]: [PoolAxis; 2]) -> Kernel {
    parameters!(o, Op::Pool2d { kind, .. });
    let (dst, src) = (o.dst(), o.src(0));
    let (out, x) = (
        Access::new(dst.ty, dst.nb[0]),
        Access::new(src.ty, src.nb[0]),
    );
    let area = (wx.size * wy.size) as f32;
    let grain = grain([wx, wy], [src.ne[0], src.ne[1]]);
    each_part(dst, grain, move |[y, i2, i3], row, part| {
        for i in part {
            let mut result = start(kind);
            for sy in wy.covers(y, src.ne[1]) {
                let src_row = src.row_ptr([sy, i2, i3]);
                for sx in wx.covers(i, src.ne[0]) {
                    // SAFETY: `o` has passed the check of POOL_2D: the source has the planes of the
                    // destination. `covers` returns indices below the lengths of a plane.
                    result = add(kind, result, unsafe { element(x, src_row, sx) });
                }
            }
            if kind == PoolKind::Average {
                result /= area;
            }
            // SAFETY: `i < dst.ne[0]`, the length of the row.
            unsafe { out.store(&result, 1, out.at(row, i).cast_mut()) };
        }
    })
}

/// The gradient of POOL_2D with input `forward`, for the gradient `grad` of its output. For the
/// maximum, the first largest element of the window gets the whole gradient of the window.
fn pool_2d_back(o: &Operands<'_>, [wx, wy]: [PoolAxis; 2]) -> Kernel {
    parameters!(o, Op::Pool2dBack { kind, .. });
    let (dst, [grad, forward]) = (o.dst(), o.sources());
    let zero = Element::zero(dst.ty);
    let access = |view: &View| Access::new(view.ty, view.nb[0]);
    let (out, gradients, x) = (access(&dst), access(&grad), access(&forward));
    let area = (wx.size * wy.size) as f32;
    let outputs = grad.ne[0] * grad.ne[1];
    let grain = grain([wx, wy], [dst.ne[0], dst.ne[1]]);
    // The zero rows of a plane, then its windows.
    let (rows, parts) = (dst.ne[1], outputs.div_ceil(grain));
    let window = reads([wx, wy], [dst.ne[0], dst.ne[1]]);
    let most = Estimate::steps(dst.ne[0].max(window.saturating_mul(grain.min(outputs))));
    Box::new(move |w| {
        // Windows overlap, so one thread computes a whole plane.
        for unit in w
            .range_of_groups(dst.ne[2] * dst.ne[3], rows + parts)
            .each(most)
        {
            let (plane, step) = (unit / (rows + parts), unit % (rows + parts));
            let (i2, i3) = (plane % dst.ne[2], plane / dst.ne[2]);
            if step < rows {
                // SAFETY: a row of the destination has `dst.ne[0]` elements, `dst.nb[0]` bytes
                // apart, and one worker has this plane.
                unsafe { zero.fill(dst.row_ptr([step, i2, i3]), dst.nb[0], dst.ne[0]) };
            } else {
                let first = (step - rows) * grain;
                for output in first..outputs.min(first + grain) {
                    let (ox, oy) = (output % grad.ne[0], output / grad.ne[0]);
                    // SAFETY: `o` has passed the check of POOL_2D_BACK: the gradient has the planes
                    // of the destination. `ox` and `oy` are below the lengths of a plane.
                    let g = unsafe { element(gradients, grad.row_ptr([oy, i2, i3]), ox) };
                    let covered = || {
                        let ys = wy.covers(oy, dst.ne[1]);
                        ys.flat_map(|y| wx.covers(ox, dst.ne[0]).map(move |x| (y, x)))
                    };
                    let accumulate = |(y, x): (usize, usize), g: f32| {
                        let row = dst.row_ptr([y, i2, i3]);
                        // SAFETY: `covers` returns indices below the lengths of `dst`.
                        unsafe {
                            let sum = element(out, row, x) + g;
                            out.store(&sum, 1, out.at(row, x).cast_mut());
                        }
                    };
                    match kind {
                        PoolKind::Average => covered().for_each(|at| accumulate(at, g / area)),
                        PoolKind::Max => {
                            let (mut largest, mut position) = (f32::MIN, None);
                            for at in covered() {
                                let src_row = forward.row_ptr([at.0, i2, i3]);
                                // SAFETY: `covers` returns indices below the lengths of `dst`,
                                // which are those of `forward` by the check of POOL_2D_BACK.
                                let value = unsafe { element(x, src_row, at.1) };
                                if value > largest {
                                    (largest, position) = (value, Some(at));
                                }
                            }
                            if let Some(at) = position {
                                accumulate(at, g);
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    })
}
