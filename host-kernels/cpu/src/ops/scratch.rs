//! How an operator divides its scratch memory, and when its results must pass through it.

use crate::kernel::Kernel;
use crate::view::View;

/// The parts of an operator's scratch memory, one after the other, each at a multiple of 64 bytes.
#[derive(Debug, Default)]
pub(super) struct ScratchLayout {
    bytes: usize,
}

impl ScratchLayout {
    /// Room for `count` things of `size` bytes; the offset it begins at.
    pub(super) fn room(&mut self, count: usize, size: usize) -> usize {
        let offset = self.bytes;
        self.bytes = count
            .checked_mul(size)
            .and_then(|bytes| bytes.checked_next_multiple_of(64))
            .and_then(|bytes| bytes.checked_add(offset))
            .expect("working memory is a small multiple of operands that were validated");
        offset
    }

    /// All of it.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Where rows of `f32` results are written: to their destination, or to scratch first where that is
/// not safe.
///
/// A kernel of several threads reads its sources while it writes. If a graph lets them overlap (no
/// sane one does) the results are brought to the destination after all have been computed, by one
/// thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Output {
    dst: View,
    /// Where the results lie in scratch, contiguous; `None` if they are written to `dst`.
    staged: Option<usize>,
}

impl Output {
    /// The output of an operator that reads `sources` and writes dense rows of `f32` to `dst`.
    pub(super) fn new(dst: View, sources: &[View], scratch: &mut ScratchLayout) -> Output {
        let safe = dst.distinct_rows() && !sources.iter().any(|s| s.overlaps(&dst));
        Output {
            dst,
            staged: (!safe).then(|| scratch.room(dst.elements(), size_of::<f32>())),
        }
    }

    /// Where the first row is written.
    pub(super) fn base(&self, scratch: *mut u8) -> *mut u8 {
        match self.staged {
            None => self.dst.ptr(),
            Some(offset) => scratch.wrapping_add(offset),
        }
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

    /// Adds the kernel that brings staged results to the destination.
    pub(super) fn finish(self, kernels: &mut Vec<Kernel>) {
        if self.staged.is_none() {
            return;
        }
        kernels.push(Box::new(move |w| {
            let row_bytes = self.dst.ne[0] * size_of::<f32>();
            let rows = if w.index() == 0 { self.dst.rows() } else { 0 };
            for row in 0..rows {
                let from = self.base(w.scratch()).wrapping_add(row * row_bytes);
                let to = self.dst.row_ptr(self.dst.row_index(row));
                // SAFETY: the row lies in scratch and in the destination, whose rows are dense; all
                // threads have finished writing results, and only this one copies them.
                unsafe { from.copy_to_nonoverlapping(to, row_bytes) };
            }
            Ok(())
        }));
    }
}
