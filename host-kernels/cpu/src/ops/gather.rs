//! Rows of any type and stride, read as `f32`.

use vgpu_transport::ir::TypeSet;

use crate::formats::{Format, Type};
use crate::view::View;

/// Elements brought together at once when they are not adjacent.
const STAGE: usize = 256;

/// Types that hold real numbers: all of them can be read and written.
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

    /// The row at `row` as it lies in memory, if it is plain adjacent `f32`.
    pub(super) fn in_place(&self, row: *const u8) -> Option<*const f32> {
        (self.dense && self.format.ty == Type::F32).then_some(row.cast())
    }

    /// Writes the elements `start..start + n` of the row at `row` to `out`.
    ///
    /// # Safety
    /// The row lies in the tensor the reader was made for and has these elements; `start` and `n` are
    /// multiples of the type's block; `out` is writable for `n` floats, and not part of the tensor.
    pub(super) unsafe fn read(&self, row: *const u8, start: usize, n: usize, out: *mut f32) {
        let Format { block, bytes, .. } = *self.format;
        if self.dense {
            // SAFETY: the blocks from `start` on are adjacent, and the caller's.
            unsafe { (self.format.dequantize_row)(row.add(start / block * bytes), out, n) };
            return;
        }
        // Only plain types get here: the IR refuses quantised rows whose blocks are not adjacent.
        let mut stage = [0u8; STAGE * size_of::<f32>()];
        for first in (0..n).step_by(STAGE) {
            let count = STAGE.min(n - first);
            for i in 0..count {
                // SAFETY: element `start + first + i` is one of the caller's; the stage has room
                // for `STAGE` elements of any plain type there is a format for.
                unsafe {
                    let element = row.add((start + first + i) * self.stride);
                    element.copy_to_nonoverlapping(stage.as_mut_ptr().add(i * bytes), bytes);
                }
            }
            // SAFETY: `count` elements lie in the stage; `out` is the caller's.
            unsafe { (self.format.dequantize_row)(stage.as_ptr(), out.add(first), count) };
        }
    }
}
