//! Matrix products with weights in any block format.
//!
//! Activations are first converted to the format that ggml pairs with the weights (its
//! `vec_dot_type`). So the integer part of every dot product is the same integer that ggml
//! computes, and only the order of the floating-point sums differs.
//!
//! A [`MatmulKernel`] is chosen once per weight type by the instruction set ([`Level`]). Kernels
//! are single-threaded and access only their arguments and a thread-local scratch buffer. The
//! engine cuts rows into pieces, one call per piece.
//!
//! **What a result depends on.** `dst[c][r]` is a function of weight row `r`, activation column
//! `c`, `k`, the level, and whether the call has one column, several, or at least
//! [`MatmulKernel::panel_cols`]. It does not depend on the other rows or columns, on how rows are
//! cut, or on addresses. So an engine that cuts rows gets the same bits for every number of
//! threads.

mod kernel;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use crate::isa::Level;
pub use kernel::{Activation, Gemm, GemmArgs, MatmulKernel, ROUNDED_COLUMNS};

use crate::formats::Type;

impl Activation {
    /// Bytes of a column of `k` activations.
    pub fn column_bytes(self, k: usize) -> usize {
        match self {
            Activation::Typed(_) => self.format().row_bytes(k),
            #[cfg(target_arch = "x86_64")]
            Activation::I16 => x86::i16_column_bytes(k),
            #[cfg(not(target_arch = "x86_64"))]
            Activation::I16 => unreachable!("only kernels of x86-64 take 14-bit integers"),
        }
    }
}

impl MatmulKernel {
    /// The kernel for `weight` on this machine; `None` for types that are no weights (integers,
    /// `F64`, the activation-only Q8_1 and Q8_K).
    pub fn of(weight: Type) -> Option<MatmulKernel> {
        MatmulKernel::at(weight, Level::best())
    }

    /// The kernel for `weight` at a given level, for tests and comparisons.
    ///
    /// # Panics
    /// If this machine does not support `level`: that is a mistake of the caller, and the kernel would
    /// die of an illegal instruction.
    pub fn at(weight: Type, level: Level) -> Option<MatmulKernel> {
        assert!(
            level.is_supported(),
            "this processor does not support {level:?}"
        );
        #[cfg(target_arch = "x86_64")]
        return x86::kernel(weight, level);
        #[cfg(not(target_arch = "x86_64"))]
        scalar::kernel(weight)
    }

    /// A kernel for products of that many columns of `k` elements that is up to twice as fast
    /// because it rounds weights *and* activations further than [`MatmulKernel::of`], if there is
    /// one.
    ///
    /// **With the dot product of bfloat16**, F16 from [`ROUNDED_COLUMNS`] columns on is rounded to
    /// it: both have 8 bits, an operand is off by at most 2^-8 of itself, its root mean square is
    /// 2^-9.3. The errors have either sign, so a sum of products is off by about 5 parts in a
    /// million of its variance, of which `test-backend-ops` allows 500. That is what ggml computes
    /// with for the same model published as BF16, a tenth of the deviation of a Q8_0 model, and
    /// most F16 models were made from BF16 weights, which are not rounded at all. Splitting each
    /// weight in two bfloat16 would make it exact, but cost what single precision costs.
    ///
    /// **Without it**, F16 and BF16 are rounded to integers of 14 bits that share a scale with the
    /// 31 next to them, once there are columns enough to pay for that, and elements enough for
    /// errors to cancel: an operand is off by at most 2^-14 of the largest of its group. Where
    /// values are of the same order that is less than the 2^-12 of itself by which ggml rounds the
    /// activations of F16 weights; where one is a thousand times as large as the others of its
    /// group, those keep 4 bits, far more than the 8-bit activations of quantised weights leave of
    /// them.
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
        assert!(
            level.is_supported(),
            "this processor does not support {level:?}"
        );
        #[cfg(target_arch = "x86_64")]
        return x86::rounded(weight, k, columns, level);
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (weight, k, columns);
            None
        }
    }
}

#[cfg(test)]
mod tests;
