//! SOLVE_TRI: forward substitution with a lower triangular matrix.

use std::ops::Range;

use vgpu_transport::ir::Op;

use crate::kernel::{Compiled, Estimate};
use crate::operands::{Operands, parameters};
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};
use crate::view::View;

/// Adjacent columns of one system of equations.
///
/// Contract: the rows of the views are dense, matrix `matrix` is inside them, `b` and `x` have the
/// columns `first .. first + columns`, and no other thread writes these columns of `x`.
struct Solve {
    a: View,
    b: View,
    x: View,
    /// Indices of the matrix.
    matrix: [usize; 2],
    first: usize,
    columns: usize,
    /// The rows to solve. All rows before them are solved.
    rows: Range<usize>,
}

impl PtrTask for Solve {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Solve {
            a,
            b,
            x,
            matrix: [i2, i3],
            first,
            columns,
            rows,
        } = self;
        // SAFETY: the contract of `Solve` guarantees dense rows and the columns from `first` on.
        // `j + len <= columns`, and `t <= i` is below the number of rows of each view.
        unsafe {
            chunks::<S>(columns, |j, len| {
                let row = |view: &View, i: usize| {
                    view.row_ptr([i, i2, i3])
                        .cast::<f32>()
                        .wrapping_add(first + j)
                };
                for i in rows.clone() {
                    let factors = a.row_ptr([i, i2, i3]).cast::<f32>();
                    let mut sum = simd.load_ptr(row(&b, i), len);
                    for t in 0..i {
                        let known = simd.load_ptr(row(&x, t), len);
                        sum = known.mul_add(simd.splat(-factors.add(t).read()), sum);
                    }
                    (sum / factors.add(i).read()).store_ptr(row(&x, i), len);
                }
            });
        }
    }
}

/// Columns that a thread solves at once: two or more vectors of each instruction set.
const SOLVE_COLUMNS: usize = 32;

/// Products in a unit of work, about.
const UNIT_PRODUCTS: usize = 1 << 22;

/// Solves `a * dst = b` for a lower triangular `a`. Columns are independent.
pub(super) fn solve_tri(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::SolveTri {});
    let (dst, [a, b]) = (o.dst(), o.sources());
    let columns = b.ne[0];
    let strips = columns.div_ceil(SOLVE_COLUMNS);
    let n = a.ne[1];
    let grain = (UNIT_PRODUCTS / SOLVE_COLUMNS / n.max(1)).max(1);
    let steps = n.div_ceil(grain);
    let most = Estimate::products(grain.saturating_mul(SOLVE_COLUMNS).saturating_mul(n));
    Compiled::one(move |w| {
        for unit in w
            .range_of_groups(strips * b.ne[2] * b.ne[3], steps)
            .each(most)
        {
            let (start, unit) = (unit % steps * grain, unit / steps);
            let (strip, matrix) = (unit % strips, unit / strips);
            let first = strip * SOLVE_COLUMNS;
            // SAFETY: `o` has passed the check of SOLVE_TRI, which requires square matrices `a`
            // with as many rows as those of `b`, as many matrices of both, and a destination with
            // the lengths of `b`; all rows are dense floats. A unit is run by one thread and writes
            // only its columns of one matrix of the destination.
            unsafe {
                dispatch_ptr(Solve {
                    a,
                    b,
                    x: dst,
                    matrix: [matrix % b.ne[2], matrix / b.ne[2]],
                    first,
                    columns: SOLVE_COLUMNS.min(columns - first),
                    rows: start..n.min(start + grain),
                })
            };
        }
        Ok(())
    })
}
