//! GET_ROWS, GET_ROWS_BACK, SET_ROWS: rows selected by indices in a tensor.

use std::mem::MaybeUninit;

use vgpu_transport::ir::{Op, OpKind, Rule, Type};

use super::copy_raw::{Element, copy_line};
use super::elementwise::Add;
use super::f32_rows::{Access, STAGE, apply};
use super::gather::real_types;
use crate::kernel::{Compiled, Estimate, Fault, check_index};
use crate::operands::Operands;
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

pub(super) fn compile(op: &Op, o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    Some(match op {
        Op::GetRows {} => get_rows(dst, o.src(0), o.src(1)),
        Op::GetRowsBack {} => get_rows_back(dst, o.src(0), o.src(1), o.workers()),
        Op::SetRows {} => set_rows(dst, o.src(0), o.src(1)),
        _ => return None,
    })
}

/// The index at `[i0, i1, i2]` of a tensor of indices, if it is less than `count`.
pub(super) fn index(ids: &View, [i0, i1, i2]: [usize; 3], count: usize) -> Result<usize, Fault> {
    let id = ids
        .ptr()
        .wrapping_add(i0 * ids.nb[0] + i1 * ids.nb[1] + i2 * ids.nb[2]);
    // SAFETY: the callers pass indices below the lengths of `ids`. The volatile read happens once:
    // the checked value is the value that is used, even if the destination overlaps the ids.
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
fn get_rows(dst: View, a: View, ids: View) -> Compiled {
    Compiled::one(move |w| {
        for row in w.share(dst.rows()) {
            let [i, j, k] = dst.row_index(row);
            let from = a.row_ptr([index(&ids, [i, j, k], a.ne[1])?, j, k]);
            let to = dst.row_ptr([i, j, k]);
            // SAFETY: `index` has checked the id, so both rows exist, with `dst.ne[0]` elements
            // each.
            unsafe {
                if a.ty == dst.ty {
                    let size = dst.ty.block_bytes() as usize;
                    copy_line(to, dst.nb[0], from, a.nb[0], dst.ne[0], size);
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
fn get_rows_back(dst: View, a: View, ids: View, workers: usize) -> Compiled {
    let (sums, grads) = (Access::rows(&dst), Access::rows(&a));
    // Threads divide the columns: rows with the same id are added in order by one thread.
    let block = (a.ty.block_elements() as usize).max(16);
    let n = dst.ne[0].div_ceil(workers).next_multiple_of(block);
    let (zeros, steps) = (dst.ne[1], dst.ne[1] + ids.ne[0]);
    Compiled::one(move |w| {
        for unit in { w.share_groups(dst.ne[0].div_ceil(n), steps) }.each(Estimate::steps(n)) {
            let (step, start) = (unit % steps, unit / steps * n);
            let n = n.min(dst.ne[0] - start);
            // SAFETY: `start + n <= dst.ne[0]`, the elements of a row of `a` and `dst`, and `start`
            // is a multiple of the block. `index` has checked the ids. One worker has these columns
            // of all rows.
            unsafe {
                let Some(i) = step.checked_sub(zeros) else {
                    let row = sums.at(dst.row_ptr([step, 0, 0]), start);
                    Element::zero(dst.ty).fill(row.cast_mut(), dst.nb[0], n);
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
fn set_rows(dst: View, a: View, ids: View) -> Compiled {
    let (writer, reader) = (Access::rows(&dst), Access::rows(&a));
    let strips = a.ne[0].div_ceil(STRIP);
    Compiled::one(move |w| {
        for unit in w.share(a.rows() * strips) {
            let (row, start) = (unit / strips, unit % strips * STRIP);
            let n = STRIP.min(a.ne[0] - start);
            let [i, j, k] = a.row_index(row);
            let id = index(&ids, [i, j % ids.ne[1], k % ids.ne[2]], dst.ne[1])?;
            let (to, from) = (dst.row_ptr([id, j, k]), a.row_ptr([i, j, k]));
            // SAFETY: `index` has checked the id, so both rows exist, with `a.ne[0]` elements each.
            // `start + n <= a.ne[0]`, and `start` is a multiple of every block.
            unsafe {
                let to = writer.at(to, start).cast_mut();
                convert_row((writer, to), (reader, reader.at(from, start)), n);
            }
        }
        Ok(())
    })
}
