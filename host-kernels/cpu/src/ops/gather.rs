//! Rows of any type and stride, read as `f32`.

use vgpu_transport::ir::TypeSet;

use crate::formats::{Format, Type};
use crate::view::View;

/// Elements that are gathered at once if they are not adjacent.
const STAGE: usize = 256;

/// The types of real numbers, all of which can be read and written.
pub(super) fn real_types() -> TypeSet {
    let types: Vec<Type> = Type::ALL
        .iter()
        .copied()
        .filter(|&ty| Format::of(ty).is_some())
        .collect();
    TypeSet::of(&types)
}

/// Reads rows of one tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowReader {
    format: &'static Format,
    /// Bytes from one element (of quantised types: block) to the next.
    stride: usize,
    dense: bool,
}

impl RowReader {
    /// A reader for the rows of `view`, which is of one of the [`real_types`].
    pub(super) fn new(view: &View) -> RowReader {
        let format = Format::of(view.ty).expect("the rules claim no other types");
        RowReader {
            format,
            stride: view.nb[0],
            dense: view.dense_rows(),
        }
    }

    /// The row at `row` in its memory, if its elements are adjacent `f32`.
    pub(super) fn in_place(&self, row: *const u8) -> Option<*const f32> {
        (self.dense && self.format.ty == Type::F32).then_some(row.cast())
    }

    /// Writes the elements `start..start + n` of the row at `row` to `out`.
    ///
    /// # Safety
    /// `row` is a row of the tensor of this reader and has these elements. `start` and `n` are
    /// multiples of the block of the type. `out` is writable for `n` floats and does not overlap
    /// the tensor.
    pub(super) unsafe fn read(&self, row: *const u8, start: usize, n: usize, out: *mut f32) {
        let Format { block, bytes, .. } = *self.format;
        if self.dense {
            // SAFETY: the blocks of the row are adjacent. The caller guarantees `n` elements from
            // `start` on, and `n` floats at `out`.
            unsafe { (self.format.dequantize_row)(row.add(start / block * bytes), out, n) };
            return;
        }
        // The type is plain: the IR refuses quantised rows whose blocks are not adjacent.
        let mut stage = [0u8; STAGE * size_of::<f32>()];
        for first in (0..n).step_by(STAGE) {
            let count = STAGE.min(n - first);
            for i in 0..count {
                // SAFETY: `first + i < n`: the caller guarantees the element. `i < STAGE`, and an
                // element of a plain type has at most four bytes, so it fits the stage.
                unsafe {
                    let element = row.add((start + first + i) * self.stride);
                    element.copy_to_nonoverlapping(stage.as_mut_ptr().add(i * bytes), bytes);
                }
            }
            // SAFETY: the stage has `count` elements, and `out` has `n >= first + count` floats.
            unsafe { (self.format.dequantize_row)(stage.as_ptr(), out.add(first), count) };
        }
    }
}
