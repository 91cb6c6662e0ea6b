//! Matrix multiplication with weights in any block format.
//!
//! The activations are first converted to the format ggml pairs with the weights' (its
//! `vec_dot_type`), so that the integer part of every dot product is the same integer ggml computes and
//! only the order of the floating-point sums differs.
//!
//! A [`MatmulKernel`] is chosen once per weight type by what the processor can do ([`Level`]). Kernels
//! are single-threaded and touch nothing but their arguments and a thread-local scratch buffer: the
//! engine cuts rows into pieces, one call per piece.
//!
//! **What a result depends on.** `dst[c][r]` is a function of weight row `r`, activation column `c`, `k`,
//! the level, and whether the call has one column, more, or at least [`MatmulKernel::panel_cols`]; never
//! of the other rows or columns, of the piece the row came in, or of addresses. So an engine that cuts by rows
//! gets the same bits for every number of threads.

mod level;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use level::Level;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{transpose_8, transpose_16};

use super::formats::{self, Format, Type};

/// Multiplies rows of weights with columns of activations.
///
/// `dst[c * dst_col_stride + r] = dot(row r of w, column c of x)` for `r` in `0..rows`, `c` in
/// `0..cols`. Strides of `w` and `x` are in bytes, that of `dst` in floats.
///
/// # Safety
/// - `k` is a multiple of the blocks of the weight and the activation type, if that has any;
/// - `w` is readable for `rows` rows of `k` weights, `w_row_stride` bytes apart;
/// - `x` is readable for `cols` columns of `k` activations, `x_col_stride` bytes apart;
/// - `dst` is writable for `cols` columns of `rows` floats, `dst_col_stride` floats apart, no two of
///   which overlap, and overlaps neither `w` nor `x`;
/// - the processor supports the level the kernel was made for.
pub type Gemm = unsafe fn(
    k: usize,
    w: *const u8,
    w_row_stride: usize,
    rows: usize,
    x: *const u8,
    x_col_stride: usize,
    cols: usize,
    dst: *mut f32,
    dst_col_stride: usize,
);

/// From this many columns on, products may be [`MatmulKernel::rounded`]. Fewer wait for the weights, not for the
/// processor.
pub const ROUNDED_COLUMNS: usize = 8;

/// What columns of activations are converted to before they are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Elements of a type of ggml's. All kernels that are not [`MatmulKernel::rounded`] take one.
    Typed(Type),
    /// Integers of 14 bits with a scale for 32: chunks of 256 elements, the last one with as much room as the others.
    Shorts,
}

impl Activation {
    /// Bytes of a column of `k` activations.
    pub fn column_bytes(self, k: usize) -> usize {
        match self {
            Activation::Typed(_) => self.format().row_bytes(k),
            #[cfg(target_arch = "x86_64")]
            Activation::Shorts => x86::short_column_bytes(k),
            #[cfg(not(target_arch = "x86_64"))]
            Activation::Shorts => unreachable!("no kernel here takes them"),
        }
    }

    /// The format of a type of ggml's.
    ///
    /// # Panics
    /// For [`Activation::Shorts`].
    pub fn format(self) -> &'static Format {
        match self {
            Activation::Typed(ty) => Format::of(ty).expect("every activation is a format"),
            Activation::Shorts => panic!("these integers are no type of ggml's"),
        }
    }
}

/// How to multiply with one type of weights.
#[derive(Debug, Clone, Copy)]
pub struct MatmulKernel {
    /// The type of the weights.
    pub weight: Type,
    /// What the activations are converted to.
    pub activation: Activation,
    /// Converts a column of `k` activations.
    pub quantize_activation: formats::QuantizeRow,
    /// Multiplies.
    pub gemm: Gemm,
    /// From this many columns on, `gemm` unpacks weights into panels and is fastest per column.
    pub panel_cols: usize,
    /// Rows are best cut into multiples of this.
    pub row_tile: usize,
}

impl MatmulKernel {
    /// The kernel for `weight` on this machine; `None` for types that are no weights (integers, `F64`,
    /// the activation-only Q8_1 and Q8_K).
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

    /// A kernel for products of that many columns of `k` elements that is up to twice as fast because it rounds weights *and* activations
    /// further than [`MatmulKernel::of`], if there is one.
    ///
    /// **With the dot product of bfloat16**, F16 from [`ROUNDED_COLUMNS`] columns on is rounded to it: both have 8 bits,
    /// an operand is off by at most 2^-8 of itself, its root mean square is 2^-9.3. The errors have either sign, so a sum
    /// of products is off by about 5 parts in a million of its variance, of which `test-backend-ops` allows 500. That is
    /// what ggml computes with for the same model published as BF16, a tenth of the deviation of a Q8_0 model, and most
    /// F16 models were made from BF16 weights, which are not rounded at all. Splitting each weight in two bfloat16 would
    /// make it exact, but cost what single precision costs.
    ///
    /// **Without it**, F16 and BF16 are rounded to integers of 14 bits that share a scale with the 31 next to them, once
    /// there are columns enough to pay for that, and elements enough for errors to cancel: an operand is off by at most 2^-14 of the largest of its group. Where
    /// values are of the same order that is less than the 2^-12 of itself by which ggml rounds the activations of F16
    /// weights; where one is a thousand times as large as the others of its group, those keep 4 bits, far more than the
    /// 8-bit activations of quantised weights leave of them.
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
