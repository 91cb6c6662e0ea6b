//! GET_ROWS, GET_ROWS_BACK, SET_ROWS: rows selected by indices in a tensor.

use std::mem::MaybeUninit;

use vgpu_transport::ir::{Op, OpKind, Rule, Type};

use super::copy_raw::{Element, copy_strided};
use super::elementwise::Add;
use super::f32_rows::{Access, STAGE, apply};
use super::gather::real_types;
use crate::kernel::{Compiled, Estimate, Fault, check_index};
use crate::operands::{Operands, parameters};
use crate::view::View;
use vgpu_engine::types::{F32, FLOATS, I32};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::GetRows, F32, &[real_types()]),
        Rule::new(OpKind::GetRows, I32, &[I32]),
        Rule::new(OpKind::GetRowsBack, F32, &[real_types().union(I32)]),
        Rule::new(OpKind::SetRows, real_types(), &[FLOATS]),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    Some(match o.op() {
        Op::GetRows {} => get_rows(o),
        Op::GetRowsBack {} => get_rows_back(o),
        Op::SetRows {} => set_rows(o),
        _ => return None,
    })
}

/// The index at `[i0, i1, i2]` of a tensor of indices, if it is less than `count`.
///
/// # Safety
/// `ids` is of i32 or i64, and each of `i0`, `i1` and `i2` is below its length.
pub(super) unsafe fn index(
    ids: &View,
    [i0, i1, i2]: [usize; 3],
    count: usize,
) -> Result<usize, Fault> {
    let id = ids
        .ptr()
        .wrapping_add(i0 * ids.nb[0] + i1 * ids.nb[1] + i2 * ids.nb[2]);
    // SAFETY: the caller guarantees the element. The volatile read happens once: the checked value
    // is the value that is used, even if the destination overlaps the ids.
    let id = unsafe {
        match ids.ty {
            Type::I64 => id.cast::<i64>().read_volatile(),
            _ => id.cast::<i32>().read_volatile().into(),
        }
    };
    check_index(id, count)
}

/// Copies a row, converted from the type of `reader` to that of `writer`.
///
/// # Safety
/// `reader` may read and `writer` may write `n` elements of the rows.
unsafe fn convert_row(
    (writer, to): (Access, *mut u8),
    (reader, from): (Access, *const u8),
    n: usize,
) {
    // SAFETY: the caller guarantees `n` elements of both rows, and `start + len <= n`. `STAGE` is a
    // multiple of every block. `load` writes the stage, and `store` reads it after that.
    unsafe {
        // Not initialised: rows can be short, and many.
        let mut stage = MaybeUninit::<[f32; STAGE]>::uninit();
        let stage = stage.as_mut_ptr().cast::<f32>();
        for start in (0..n).step_by(STAGE) {
            let len = STAGE.min(n - start);
            reader.load(reader.at(from, start), len, stage);
            writer.store(stage, len, writer.at(to, start).cast_mut());
        }
    }
}

/// `dst[:, i, j, k] = a[:, ids[i, j, k], j, k]`
fn get_rows(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::GetRows {});
    let (dst, [a, ids]) = (o.dst(), o.sources());
    Compiled::one(move |w| {
        for row in w.range_of(dst.rows()) {
            let [i, j, k] = dst.row_index(row);
            // SAFETY: `o` has passed the check of GET_ROWS: there is an i32 for each row of the
            // destination.
            let id = unsafe { index(&ids, [i, j, k], a.ne[1])? };
            let (from, to) = (a.row_ptr([id, j, k]), dst.row_ptr([i, j, k]));
            // SAFETY: `index` has checked the id, and the check of GET_ROWS requires `j` and `k` to
            // be below the lengths of `a`. So both rows exist, with `dst.ne[0]` elements each.
            unsafe {
                if a.ty == dst.ty {
                    let size = dst.ty.block_bytes() as usize;
                    copy_strided(to, dst.nb[0], from, a.nb[0], dst.ne[0], size);
                } else {
                    convert_row(
                        (Access::rows(&dst), to),
                        (Access::rows(&a), from),
                        dst.ne[0],
                    );
                }
            }
        }
        Ok(())
    })
}

/// `dst[:, ids[i]] += a[:, i]`, from zero.
fn get_rows_back(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::GetRowsBack {});
    let (dst, [a, ids]) = (o.dst(), o.sources());
    let (sums, grads) = (Access::rows(&dst), Access::rows(&a));
    // Threads divide the columns: rows with the same id are added in order by one thread.
    let block = (a.ty.block_elements() as usize).max(16);
    let n = dst.ne[0].div_ceil(o.workers()).next_multiple_of(block);
    let zero = Element::zero(dst.ty);
    let (zeros, steps) = (dst.ne[1], dst.ne[1] + ids.ne[0]);
    Compiled::one(move |w| {
        for unit in { w.range_of_groups(dst.ne[0].div_ceil(n), steps) }.each(Estimate::steps(n)) {
            let (step, start) = (unit % steps, unit / steps * n);
            let n = n.min(dst.ne[0] - start);
            // SAFETY: `o` has passed the check of GET_ROWS_BACK: `ids` is a vector of i32, and `a`
            // has at least as many rows. `start + n <= dst.ne[0]`, the elements of a row of `a` and
            // `dst`, and `start` is a multiple of the block. `index` has checked the ids. One
            // worker has these columns of all rows.
            unsafe {
                let Some(i) = step.checked_sub(zeros) else {
                    let row = sums.at(dst.row_ptr([step, 0, 0]), start);
                    zero.fill(row.cast_mut(), dst.nb[0], n);
                    continue;
                };
                let row = dst.row_ptr([index(&ids, [i, 0, 0], dst.ne[1])?, 0, 0]);
                let row = sums.at(row, start);
                let grad = grads.at(a.row_ptr([i, 0, 0]), start);
                apply(
                    Add {},
                    (sums, row.cast_mut()),
                    [(sums, row), (grads, grad)],
                    n,
                );
            }
        }
        Ok(())
    })
}

/// Elements of a row that SET_ROWS converts as a unit of work: a multiple of every block.
/// An element of a type with a codebook takes up to a microsecond.
const STRIP: usize = 1024;

/// `dst[:, ids[i, j, k], j, k] = a[:, i, j, k]`. The ids are broadcast over j and k.
fn set_rows(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::SetRows {});
    let (dst, [a, ids]) = (o.dst(), o.sources());
    let (writer, reader) = (Access::rows(&dst), Access::rows(&a));
    let strips = a.ne[0].div_ceil(STRIP);
    Compiled::one(move |w| {
        for unit in w.range_of(a.rows() * strips) {
            let (row, start) = (unit / strips, unit % strips * STRIP);
            let n = STRIP.min(a.ne[0] - start);
            let [i, j, k] = a.row_index(row);
            // SAFETY: `o` has passed the check of SET_ROWS: a row of the ids has an i32 or i64 for
            // each row of `a`.
            let id = unsafe { index(&ids, [i, j % ids.ne[1], k % ids.ne[2]], dst.ne[1])? };
            let (to, from) = (dst.row_ptr([id, j, k]), a.row_ptr([i, j, k]));
            // SAFETY: `index` has checked the id, and the check of SET_ROWS requires the same
            // lengths of `a` and `dst` but in dimension 1. So both rows exist, with `a.ne[0]`
            // elements each. `start + n <= a.ne[0]`, and `start` is a multiple of every block.
            unsafe {
                let to = writer.at(to, start).cast_mut();
                convert_row((writer, to), (reader, reader.at(from, start)), n);
            }
        }
        Ok(())
    })
}
