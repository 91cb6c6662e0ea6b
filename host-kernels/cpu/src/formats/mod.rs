//! Block formats: how ggml stores a row of numbers (`ggml-common.h`), and how to read and write it.
//!
//! Every quantised format belongs to one of two families:
//!
//! - [`Block32Format`]: scales per 32 elements (or 16), with activations in groups of 32
//!   ([`BlockQ8_0`], [`BlockQ8_1`]); `value = d * (q - OFFSET) + m`.
//! - [`SuperBlockFormat`]: super-blocks of 256 elements, with activations in super-blocks
//!   ([`BlockQ8K`]); `value = (d * scale[j]) * (q - OFFSET) - dmin * min[j]`, where `j` is the
//!   sub-block.
//!
//! The file of a format defines only how one block is converted to unsigned small integers and
//! scales, and back. Dequantisation, dot products and matrix tiles are implemented once per family.
//! To add a format: one file with the block and its trait, one line in [`Format::of`] and one in
//! [`crate::gemm`].
//!
//! Blocks are `repr(C, packed)`: a view of a tensor may begin at any block, so a block may have any
//! address.

mod block32;
mod codebook;
mod float;
pub mod grids;
mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod k_quants;
mod mxfp4;
mod nvfp4;
mod q1_0;
mod q2_0;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod q8_1;
mod q8_k;
mod search;
mod tq1_0;
mod tq2_0;

pub use crate::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use block32::{Block32Format, Quants32};
pub(crate) use codebook::prepare;
pub(crate) use grids::{FP4_VALUES, IQ4_VALUES};
pub use iq1_m::BlockIq1M;
pub use iq1_s::BlockIq1S;
pub use iq2_s::BlockIq2S;
pub use iq2_xs::BlockIq2Xs;
pub use iq2_xxs::BlockIq2Xxs;
pub use iq3_s::BlockIq3S;
pub use iq3_xxs::BlockIq3Xxs;
pub use iq4_nl::BlockIq4Nl;
pub use iq4_xs::BlockIq4Xs;
pub use k_quants::{Quants256, SuperBlockFormat};
pub use mxfp4::BlockMxfp4;
pub use nvfp4::BlockNvfp4;
pub(crate) use nvfp4::SCALES as NVFP4_SCALES;
pub use q1_0::BlockQ1_0;
pub use q2_0::BlockQ2_0;
pub use q2_k::BlockQ2K;
pub use q3_k::BlockQ3K;
pub use q4_0::BlockQ4_0;
pub use q4_1::BlockQ4_1;
pub use q4_k::BlockQ4K;
pub use q5_0::BlockQ5_0;
pub use q5_1::BlockQ5_1;
pub use q5_k::BlockQ5K;
pub use q6_k::BlockQ6K;
pub use q8_0::BlockQ8_0;
pub use q8_1::BlockQ8_1;
pub use q8_k::BlockQ8K;
pub use tq1_0::BlockTq1_0;
pub use tq2_0::BlockTq2_0;

pub use vgpu_transport::ir::Type;

/// Reads `n` elements of a format into `f32`.
///
/// # Safety
/// `n` is a multiple of the format's block size. `src` is readable for `n` elements of the format,
/// `dst` is aligned for floats and writable for `n` of them, and they do not overlap.
pub type DequantizeRow = unsafe fn(src: *const u8, dst: *mut f32, n: usize);

/// Writes `n` floats as elements of a format.
///
/// # Safety
/// `n` is a multiple of the format's block size. `src` is aligned for floats and
/// readable for `n` of them, `dst` is writable for `n` elements of the format, and they do not
/// overlap.
pub type QuantizeRow = unsafe fn(src: *const f32, dst: *mut u8, n: usize);

/// How to read and write rows of one type.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    /// The type.
    pub ty: Type,
    /// Elements in a block.
    pub block: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Reads a row.
    pub dequantize_row: DequantizeRow,
    /// Writes a row, with the bytes that `from_float` of ggml-cpu writes on x86. ggml-cpu does not
    /// write types with codebooks; for these the error is smaller than that of ggml's quantisation
    /// tool.
    pub quantize_row: QuantizeRow,
}

impl Format {
    /// The format of `ty`; `None` for integers and `F64`.
    pub const fn of(ty: Type) -> Option<&'static Format> {
        macro_rules! format {
            ($dequantize:expr, $quantize:expr) => {
                Some(
                    const {
                        &Format {
                            ty: TY,
                            block: TY.block_elements() as usize,
                            bytes: TY.block_bytes() as usize,
                            dequantize_row: $dequantize,
                            quantize_row: $quantize,
                        }
                    },
                )
            };
        }
        macro_rules! formats {
            ($($ty:ident: $dequantize:expr, $quantize:expr;)*) => {
                match ty {
                    $(Type::$ty => {
                        const TY: Type = Type::$ty;
                        format!($dequantize, $quantize)
                    })*
                    _ => None,
                }
            };
        }
        formats! {
            F32: float::copy_f32, float::write_f32;
            F16: float::read_f16, float::write_f16;
            Bf16: float::read_bf16, float::write_bf16;
            Q4_0: block32::dequantize::<BlockQ4_0>, block32::quantize::<32, BlockQ4_0>;
            Q4_1: block32::dequantize::<BlockQ4_1>, block32::quantize::<32, BlockQ4_1>;
            Q5_0: block32::dequantize::<BlockQ5_0>, block32::quantize::<32, BlockQ5_0>;
            Q5_1: block32::dequantize::<BlockQ5_1>, block32::quantize::<32, BlockQ5_1>;
            Q8_0: block32::dequantize::<BlockQ8_0>, block32::quantize::<32, BlockQ8_0>;
            Q8_1: block32::dequantize::<BlockQ8_1>, block32::quantize::<32, BlockQ8_1>;
            Q1_0: block32::dequantize::<BlockQ1_0>, block32::quantize::<128, BlockQ1_0>;
            Q2_0: block32::dequantize::<BlockQ2_0>, block32::quantize::<64, BlockQ2_0>;
            Iq4Nl: block32::dequantize::<BlockIq4Nl>, block32::quantize::<32, BlockIq4Nl>;
            Mxfp4: block32::dequantize::<BlockMxfp4>, block32::quantize::<32, BlockMxfp4>;
            Nvfp4: block32::dequantize::<BlockNvfp4>, block32::quantize::<64, BlockNvfp4>;
            Q2K: k_quants::dequantize::<BlockQ2K>, k_quants::quantize::<BlockQ2K>;
            Q3K: k_quants::dequantize::<BlockQ3K>, k_quants::quantize::<BlockQ3K>;
            Q4K: k_quants::dequantize::<BlockQ4K>, k_quants::quantize::<BlockQ4K>;
            Q5K: k_quants::dequantize::<BlockQ5K>, k_quants::quantize::<BlockQ5K>;
            Q6K: k_quants::dequantize::<BlockQ6K>, k_quants::quantize::<BlockQ6K>;
            Q8K: k_quants::dequantize::<BlockQ8K>, k_quants::quantize::<BlockQ8K>;
            Iq1S: k_quants::dequantize::<BlockIq1S>, k_quants::quantize::<BlockIq1S>;
            Iq1M: k_quants::dequantize::<BlockIq1M>, k_quants::quantize::<BlockIq1M>;
            Iq2Xxs: k_quants::dequantize::<BlockIq2Xxs>, k_quants::quantize::<BlockIq2Xxs>;
            Iq2Xs: k_quants::dequantize::<BlockIq2Xs>, k_quants::quantize::<BlockIq2Xs>;
            Iq2S: k_quants::dequantize::<BlockIq2S>, k_quants::quantize::<BlockIq2S>;
            Iq3Xxs: k_quants::dequantize::<BlockIq3Xxs>, k_quants::quantize::<BlockIq3Xxs>;
            Iq3S: k_quants::dequantize::<BlockIq3S>, k_quants::quantize::<BlockIq3S>;
            Iq4Xs: k_quants::dequantize::<BlockIq4Xs>, k_quants::quantize::<BlockIq4Xs>;
            Tq1_0: k_quants::dequantize::<BlockTq1_0>, k_quants::quantize::<BlockTq1_0>;
            Tq2_0: k_quants::dequantize::<BlockTq2_0>, k_quants::quantize::<BlockTq2_0>;
        }
    }

    /// Bytes of `n` consecutive elements; `n` is a multiple of the block size.
    pub const fn row_bytes(&self, n: usize) -> usize {
        debug_assert!(n.is_multiple_of(self.block));
        n / self.block * self.bytes
    }
}

#[cfg(test)]
mod tests;
