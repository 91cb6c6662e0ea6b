//! Matrix products with weights in any block format.
//!
//! Activations are first converted to the format that ggml pairs with the weights (its
//! `vec_dot_type`). So the integer part of every dot product is the same integer that ggml
//! computes, and only the order of the floating-point sums differs. With many columns, a product
//! may be [rounded](MatmulKernel::rounded) instead.
//!
//! A [`MatmulKernel`] is chosen by weight type, instruction set ([`Level`]) and, if it is rounded,
//! the columns of the whole product and `k`. Kernels
//! are single-threaded and access only their arguments and a thread-local scratch buffer. The
//! engine cuts rows into parts, one call per part.
//!
//! **What a result depends on.** `dst[c][r]` is a function of weight row `r`, activation column
//! `c`, `k`, the level, and, unless the kernel has [one order](MatmulKernel::one_order) of sums,
//! whether the call has at least [`MatmulKernel::panel_cols`] columns and no table. For the dot
//! product of bfloat16 pairs, it also depends on whether the call has one column, or more. A result
//! does not depend on the other rows or columns, on how rows are cut, or on addresses. So an engine
//! that cuts rows gets the same bits for every number of threads, and a column gets the same bits
//! alone and beside the columns of other guests.

mod kernel;
mod limits;
mod scalar;
mod thread_memory;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use crate::isa::Level;
pub use kernel::{Activation, Column, ColumnTable, Gemm, GemmArgs, MatmulKernel, ROUNDED_COLUMNS};
pub(crate) use kernel::{MAX_WEIGHTED_ROWS, WeightedRows, WeightedRowsArgs};
pub(crate) use limits::{MAX_KEPT, MAX_PREPARED, MIN_COLUMNS, prepared_bytes};
pub(crate) use thread_memory::KeptThreadMemory;

use half::bf16;

use crate::formats::Type;

impl Activation {
    /// Bytes of a column of `k` activations: those from one column to the next.
    pub fn column_bytes(self, k: usize) -> usize {
        match self {
            Activation::Typed(_) => self.format().row_bytes(k),
            #[cfg(target_arch = "x86_64")]
            Activation::I16 => x86::i16_column_bytes(k),
            #[cfg(target_arch = "x86_64")]
            Activation::Prepared => x86::prepared_column_bytes(k),
            #[cfg(target_arch = "x86_64")]
            Activation::Tiles => x86::tiles_column_bytes(k),
            #[cfg(not(target_arch = "x86_64"))]
            Activation::I16 | Activation::Prepared | Activation::Tiles => {
                unreachable!("only kernels of x86-64 take them")
            }
        }
    }

    /// The offset of element `start`, a multiple of every block and chunk, in a column.
    pub(crate) fn offset(self, start: usize) -> usize {
        match self {
            Activation::Tiles => start * size_of::<bf16>(),
            _ => self.column_bytes(start),
        }
    }
}

/// The weighted sum of rows of `ty` that are not decoded first, if there is one at `level`.
///
/// # Panics
/// As [`MatmulKernel::at`].
pub(crate) fn weighted_rows(ty: Type, level: Level) -> Option<WeightedRows> {
    level.expect_supported();
    #[cfg(target_arch = "x86_64")]
    return x86::weighted_rows(ty, level);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = ty;
        None
    }
}

impl MatmulKernel {
    /// Whether there is a kernel for `weight`, at every level. Unlike [`MatmulKernel::of`], a
    /// program that only asks contains no kernels of instruction sets.
    pub(crate) fn exists(weight: Type) -> bool {
        scalar::kernel(weight).is_some()
    }

    /// The kernel for `weight` on this machine; `None` for types that are no weights (integers,
    /// `F64`, the activation-only Q8_1 and Q8_K).
    pub fn of(weight: Type) -> Option<MatmulKernel> {
        MatmulKernel::at(weight, Level::best())
    }

    /// The kernel for `weight` at a given level, for tests and comparisons.
    ///
    /// # Panics
    /// If `level` is not supported: the kernel would execute an illegal instruction.
    pub fn at(weight: Type, level: Level) -> Option<MatmulKernel> {
        level.expect_supported();
        #[cfg(target_arch = "x86_64")]
        return x86::kernel(weight, level);
        #[cfg(not(target_arch = "x86_64"))]
        scalar::kernel(weight)
    }

    /// A kernel for short rows of `weight` and few columns, if there is one: for the keys of
    /// attention. A column is prepared once, when it is converted, for any number of calls.
    pub fn of_short_rows(weight: Type) -> Option<MatmulKernel> {
        MatmulKernel::of_short_rows_at(weight, Level::best())
    }

    /// [`MatmulKernel::of_short_rows`] at a given level.
    ///
    /// # Panics
    /// As [`MatmulKernel::at`].
    pub fn of_short_rows_at(weight: Type, level: Level) -> Option<MatmulKernel> {
        level.expect_supported();
        #[cfg(target_arch = "x86_64")]
        return x86::short_rows(weight, level);
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = weight;
            None
        }
    }

    /// A kernel for products with `columns` columns of `k` elements that rounds weights *and*
    /// activations further than [`MatmulKernel::of`] and is faster, if there is one.
    ///
    /// **With the BF16 dot product**, F16 is rounded to BF16 from [`ROUNDED_COLUMNS`] columns on.
    /// An operand of 8 significant bits has a relative error of at most 2^-8, with a root mean
    /// square of 2^-9.3. Errors have either sign, so the error of a sum of products is about 5e-6
    /// of its variance; `test-backend-ops` allows 5e-4. ggml has the same error for a model
    /// published as BF16, and ten times as much for Q8_0. Most F16 models were made from BF16
    /// weights, which are not rounded at all. Splitting each weight into two BF16 would be exact,
    /// but as slow as single precision.
    ///
    /// **With AMX**, weights of every type but F32 are rounded to BF16 too, after they are decoded,
    /// from 32 (F16, BF16) or 64 columns on, if `k` is a multiple of 32. For quantised weights, the
    /// error is a tenth of that of activations of 8 bits.
    ///
    /// **Otherwise**, F16 and BF16 are rounded to integers of 14 bits with one scale per 32
    /// elements, if there are enough columns to pay for the conversion and enough elements for
    /// errors to cancel. The error of an operand is at most 2^-14 of the largest of its group. For
    /// values of similar magnitude this is less than the 2^-12 by which ggml rounds the activations
    /// of F16 weights. In a group with one value a thousand times as large as the others, the
    /// others keep 4 bits, more than in the 8-bit activations of quantised weights.
    pub fn rounded(weight: Type, k: usize, columns: usize) -> Option<MatmulKernel> {
        MatmulKernel::rounded_at(weight, k, columns, Level::best())
    }

    /// [`MatmulKernel::rounded`] at a given level.
    ///
    /// # Panics
    /// As [`MatmulKernel::at`].
    pub fn rounded_at(
        weight: Type,
        k: usize,
        columns: usize,
        level: Level,
    ) -> Option<MatmulKernel> {
        level.expect_supported();
        #[cfg(target_arch = "x86_64")]
        return x86::rounded(weight, k, columns, level);
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (weight, k, columns);
            None
        }
    }
}
