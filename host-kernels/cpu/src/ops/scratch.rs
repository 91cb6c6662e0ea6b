//! How an operator divides its scratch memory, and when its results are staged there.

use vgpu_transport::ir::Type;

use crate::kernel::{Estimate, Kernel};
use crate::view::View;

/// The parts of the scratch memory of an operator, one after the other, each aligned to 64 bytes.
#[derive(Debug, Default)]
pub(super) struct ScratchLayout {
    bytes: usize,
}

impl ScratchLayout {
    /// Reserves `count` items of `size` bytes. Returns the offset of the first. A layout whose size
    /// does not fit a `usize` has `usize::MAX` bytes, which no run can allocate.
    pub(super) fn room(&mut self, count: usize, size: usize) -> usize {
        let offset = self.bytes;
        self.bytes = count
            .checked_mul(size)
            .and_then(|bytes| bytes.checked_next_multiple_of(64))
            .and_then(|bytes| bytes.checked_add(offset))
            .unwrap_or(usize::MAX);
        offset
    }

    /// The bytes of all parts.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Where rows of `f32` results are written: to the destination, or first to the scratch memory.
///
/// A kernel of several threads reads its sources while it writes. If the destination overlaps a
/// source (only in a hostile or wrong graph), one thread copies the results to the destination
/// after all have been computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Output {
    dst: View,
    /// The offset of the results in the scratch memory, where they are contiguous. `None` if they
    /// are written to `dst`.
    staged: Option<usize>,
}

impl Output {
    /// The output of an operator that reads `sources` and writes dense rows of `f32` to `dst`.
    ///
    /// # Panics
    /// If the destination has other rows.
    pub(super) fn new(dst: View, sources: &[View], scratch: &mut ScratchLayout) -> Output {
        assert!(dst.ty == Type::F32 && dst.dense_rows());
        let safe = dst.distinct_rows() && !sources.iter().any(|s| s.overlaps(&dst));
        Output {
            dst,
            staged: (!safe).then(|| scratch.room(dst.elements(), size_of::<f32>())),
        }
    }

    /// The address that the first row is written to.
    pub(super) fn base(&self, scratch: *mut u8) -> *mut u8 {
        match self.staged {
            None => self.dst.ptr(),
            Some(offset) => scratch.wrapping_add(offset),
        }
    }

    /// Whether the results are written to the scratch memory first.
    pub(super) fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Strides of dimensions 1 to 3, in bytes.
    pub(super) fn strides(&self) -> [usize; 3] {
        let View { ne, nb, .. } = self.dst;
        match self.staged {
            None => [nb[1], nb[2], nb[3]],
            Some(_) => {
                let row = ne[0] * size_of::<f32>();
                [row, row * ne[1], row * ne[1] * ne[2]]
            }
        }
    }

    /// Adds the kernel that copies staged results to the destination.
    pub(super) fn finish(self, kernels: &mut Vec<Kernel>) {
        if self.staged.is_none() {
            return;
        }
        kernels.push(Box::new(move |w| {
            let row_bytes = self.dst.ne[0] * size_of::<f32>();
            for row in w
                .alone(self.dst.rows())
                .each(Estimate::steps(self.dst.ne[0]))
            {
                let from = self.base(w.scratch()).wrapping_add(row * row_bytes);
                let to = self.dst.row_ptr(self.dst.row_index(row));
                // SAFETY: `new` has reserved `rows` rows of `row_bytes` bytes in the scratch
                // memory, and rows of the destination are dense. The results were written before
                // the barrier before this kernel, and only this thread copies them.
                unsafe { from.copy_to_nonoverlapping(to, row_bytes) };
            }
            Ok(())
        }));
    }
}
