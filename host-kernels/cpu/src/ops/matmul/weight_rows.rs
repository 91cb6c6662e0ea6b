//! Rows of weights in the type that a kernel multiplies.

use super::super::gather::RowReader;
use super::super::scratch::ScratchLayout;
use crate::formats::Type;
use crate::gemm::{GemmArgs, MatmulKernel};
use crate::kernel::Worker;
use crate::operands::Operands;

/// Rows that a thread converts at once: a multiple of every `row_tile`.
const ROWS: usize = 32;

/// How a kernel gets rows of weights.
#[derive(Clone, Copy)]
pub(super) enum WeightRows {
    /// In place: they have the type of the kernel.
    InPlace,
    /// As F32, [`ROWS`] at a time, in memory of each thread.
    Converted {
        reader: RowReader,
        /// The offset of this memory in the scratch memory.
        own: usize,
        /// Bytes of this memory for each thread.
        each: usize,
    },
}

impl WeightRows {
    /// For the weights of a product that `kernel` multiplies.
    pub(super) fn new(
        operands: &Operands<'_>,
        kernel: &MatmulKernel,
        scratch: &mut ScratchLayout,
    ) -> WeightRows {
        let weight = operands.src(0);
        if kernel.weight == weight.ty {
            return WeightRows::InPlace;
        }
        debug_assert_eq!(kernel.weight, Type::F32);
        let floats = ROWS.saturating_mul(weight.ne[0]);
        let each = floats.saturating_mul(size_of::<f32>()).next_multiple_of(64);
        WeightRows::Converted {
            reader: RowReader::new(&weight),
            own: scratch.room(operands.workers(), each),
            each,
        }
    }

    /// Multiplies: `args` has the rows as they are in the weights.
    ///
    /// # Safety
    /// As [`crate::gemm::Gemm`], but for the type of the weights, which is that of [`new`], as the
    /// kernel is. The scratch memory of `w` has the layout of [`new`].
    ///
    /// [`new`]: WeightRows::new
    pub(super) unsafe fn multiply(&self, w: &Worker<'_>, kernel: &MatmulKernel, args: &GemmArgs) {
        let WeightRows::Converted { reader, own, each } = *self else {
            // SAFETY: the weights have the type of the kernel (`new`). The caller guarantees the
            // rest of the contract of `Gemm` for `args`, which is passed on as it is.
            unsafe { (kernel.gemm)(args) };
            return;
        };
        let k = args.k;
        let own = own + w.index() * each;
        let rows = w.scratch().wrapping_add(own).cast::<f32>();
        for first in (0..args.rows).step_by(ROWS) {
            let count = ROWS.min(args.rows - first);
            // SAFETY: the caller guarantees `args.rows` rows of `k` weights, and results for them.
            // `rows` has `ROWS >= count` rows of `k` floats, which only this thread accesses.
            unsafe {
                for row in 0..count {
                    let from = args.w.add((first + row) * args.w_stride);
                    reader.read(from, 0, k, rows.add(row * k));
                }
                let w_stride = k * size_of::<f32>();
                (kernel.gemm)(&args.with_rows(first, count, rows.cast(), w_stride));
            }
        }
    }
}
