//! Kernels for x86-64.
//!
//! - [`simd`]: the vector operations, once for AVX2, once more with AVX-VNNI, and once for AVX-512.
//! - [`blocks`]: blocks of each format as vectors of quants.
//! - [`groups`], [`supers`], [`floats`]: the products of the three families, for few columns by rows,
//!   for many through panels.
//! - [`pairs`]: the products of bfloat16 by pairs, where there is an instruction for them.
//! - [`shorts`]: products through integers of 16 bits, where those are multiplied faster: of floats that are rounded to
//!   14 bits, and of quants of eight bits ([`wide`]).
//! - [`panel`]: the loops around a panel.
//! - [`plain`]: the rare formats, decoded first.
//! - [`activations`]: f32 to the activation formats.

// Tiles index several arrays by the same row and column.
#![allow(clippy::needless_range_loop)]

mod activations;
mod blocks;
mod floats;
mod groups;
mod pairs;
mod panel;
mod plain;
mod scratch;
mod shorts;
mod simd;
mod supers;
mod wide;

pub(super) use shorts::column_bytes as short_column_bytes;

use super::{Activation, Level, MatmulKernel, ROUNDED_COLUMNS};
use crate::formats::{
    BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs, BlockIq4Nl,
    BlockIq4Xs, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ2K, BlockQ3K, BlockQ4_0,
    BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, BlockTq1_0,
    BlockTq2_0, Type,
};
use pairs::Pairs;

/// Transposes 8 rows of 8 words, strides in bytes apart.
///
/// # Safety
/// The rows are readable and writable, and the processor has AVX2.
#[inline(always)]
pub(crate) unsafe fn transpose_8(src: *const u8, from: usize, dst: *mut u8, to: usize) {
    // SAFETY: the caller's promise.
    unsafe { <simd::Avx2 as simd::Simd>::transpose(src, from, dst, to) }
}

/// Transposes 16 rows of 16 words, strides in bytes apart.
///
/// # Safety
/// The rows are readable and writable, and the processor has AVX-512.
#[inline(always)]
pub(crate) unsafe fn transpose_16(src: *const u8, from: usize, dst: *mut u8, to: usize) {
    // SAFETY: the caller's promise.
    unsafe { <simd::Avx512 as simd::Simd>::transpose(src, from, dst, to) }
}

/// The arguments of a [`super::Gemm`].
#[derive(Clone, Copy)]
struct Call {
    k: usize,
    w: *const u8,
    w_stride: usize,
    rows: usize,
    x: *const u8,
    x_stride: usize,
    cols: usize,
    dst: *mut f32,
    dst_stride: usize,
}

impl Call {
    /// Where row `r` of the weights begins; behind the last row, that one.
    #[inline(always)]
    fn row(&self, r: usize) -> *const u8 {
        self.w.wrapping_add(r.min(self.rows - 1) * self.w_stride)
    }
}

/// A function of the type [`super::Gemm`] around one that takes a [`Call`].
macro_rules! gemm {
    ($(#[$attribute:meta])* $name:ident $(<$format:ident: $bound:ident>)?, $body:expr) => {
        /// # Safety
        /// As [`crate::gemm::Gemm`].
        $(#[$attribute])*
        #[allow(clippy::too_many_arguments)]
        pub(super) unsafe fn $name $(<$format: $bound>)? (
            k: usize,
            w: *const u8,
            w_stride: usize,
            rows: usize,
            x: *const u8,
            x_stride: usize,
            cols: usize,
            dst: *mut f32,
            dst_stride: usize,
        ) {
            let call = Call { k, w, w_stride, rows, x, x_stride, cols, dst, dst_stride };
            // SAFETY: the caller's promise; the function has the instructions of the level.
            unsafe { $body(&call) }
        }
    };
}

/// Defines the entry points of a level: what they call is inlined into them and so compiled for its
/// instructions.
macro_rules! entry_points {
    ($module:ident, $simd:ty, $features:literal) => {
        mod $module {
            use super::blocks::{Groups, Supers};
            use super::floats::{self as float_kernels, Float};
            use super::{Call, groups as group_kernels, plain, shorts, supers as super_kernels};
            use crate::formats::SuperBlock;

            gemm!(
                #[target_feature(enable = $features)]
                groups<B: Groups>,
                group_kernels::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                supers<B: Supers>,
                super_kernels::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                floats<B: Float>,
                float_kernels::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                rounded<B: Float>,
                shorts::gemm::<$simd, B>
            );
            gemm!(
                #[target_feature(enable = $features)]
                rare<B: SuperBlock>,
                |call| plain::gemm::<B>(call, multiply_plain)
            );

            /// # Safety
            /// As [`shorts::round_column`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn round_column(from: *const f32, to: *mut u8, k: usize) {
                // SAFETY: the caller's promise; the function has the instructions of the level.
                unsafe { shorts::round_column::<$simd>(from, to, k) }
            }

            /// # Safety
            /// As [`plain::multiply`].
            #[target_feature(enable = $features)]
            unsafe fn multiply_plain(call: &Call) {
                // SAFETY: the caller's promise; the function has the instructions of the level.
                unsafe { plain::multiply::<$simd>(call) }
            }
        }
    };
}

entry_points!(avx2, super::simd::Avx2, "avx2,fma,f16c");
entry_points!(avx2_vnni, super::simd::Avx2Vnni, "avx2,fma,f16c,avxvnni");
entry_points!(
    avx512,
    super::simd::Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);
gemm!(
    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16"
    )]
    bf16_pairs<W: Pairs>,
    pairs::gemm::<W>
);

/// The kernel for `weight` at `level`, above [`Level::Scalar`].
pub(super) fn kernel(weight: Type, level: Level) -> Option<MatmulKernel> {
    let portable = super::scalar::kernel(weight)?;
    macro_rules! at_level {
        ($module:ident) => {
            match weight {
                Type::F32 => $module::floats::<floats::F32>,
                Type::F16 => $module::floats::<floats::F16>,
                Type::Bf16 => $module::floats::<floats::Bf16>,
                Type::Q4_0 => $module::groups::<BlockQ4_0>,
                Type::Q4_1 => $module::groups::<BlockQ4_1>,
                Type::Q5_0 => $module::groups::<BlockQ5_0>,
                Type::Q5_1 => $module::groups::<BlockQ5_1>,
                Type::Q8_0 => $module::groups::<BlockQ8_0>,
                Type::Q1_0 => $module::groups::<BlockQ1_0>,
                Type::Q2_0 => $module::groups::<BlockQ2_0>,
                Type::Iq4Nl => $module::groups::<BlockIq4Nl>,
                Type::Mxfp4 => $module::groups::<BlockMxfp4>,
                Type::Nvfp4 => $module::groups::<BlockNvfp4>,
                Type::Q2K => $module::supers::<BlockQ2K>,
                Type::Q3K => $module::supers::<BlockQ3K>,
                Type::Q4K => $module::supers::<BlockQ4K>,
                Type::Q5K => $module::supers::<BlockQ5K>,
                Type::Q6K => $module::supers::<BlockQ6K>,
                Type::Iq1S => $module::rare::<BlockIq1S>,
                Type::Iq1M => $module::rare::<BlockIq1M>,
                Type::Iq2Xxs => $module::rare::<BlockIq2Xxs>,
                Type::Iq2Xs => $module::rare::<BlockIq2Xs>,
                Type::Iq2S => $module::rare::<BlockIq2S>,
                Type::Iq3Xxs => $module::rare::<BlockIq3Xxs>,
                Type::Iq3S => $module::rare::<BlockIq3S>,
                Type::Iq4Xs => $module::supers::<BlockIq4Xs>,
                Type::Tq1_0 => $module::rare::<BlockTq1_0>,
                Type::Tq2_0 => $module::supers::<BlockTq2_0>,
                _ => return Some(portable),
            }
        };
    }
    let gemm: super::Gemm = match (level, weight) {
        (Level::Scalar, _) => return Some(portable),
        (Level::Avx512Bf16, Type::Bf16) => bf16_pairs::<pairs::Bf16>,
        (Level::Avx2, _) => at_level!(avx2),
        (Level::Avx2Vnni, _) => at_level!(avx2_vnni),
        (Level::Avx512 | Level::Avx512Bf16, _) => at_level!(avx512),
    };
    let activation = portable.activation.format().ty;
    let panel_cols = match activation {
        Type::F32 | Type::F16 | Type::Bf16 => floats::PANEL_COLS,
        Type::Q8K => supers::PANEL_COLS,
        _ => groups::PANEL_COLS,
    };
    let wide = level >= Level::Avx512;
    Some(MatmulKernel {
        gemm,
        quantize_activation: activations::quantizer(activation, wide)
            .unwrap_or(portable.quantize_activation),
        panel_cols,
        row_tile: if wide { 32 } else { 16 },
        ..portable
    })
}

/// [`MatmulKernel::rounded`] at `level`.
pub(super) fn rounded(
    weight: Type,
    k: usize,
    columns: usize,
    level: Level,
) -> Option<MatmulKernel> {
    if columns < ROUNDED_COLUMNS {
        return None;
    }
    let pays = columns >= shorts::COLUMNS && k >= shorts::ELEMENTS;
    macro_rules! shorts {
        ($module:ident) => {{
            let gemm: super::Gemm = match weight {
                Type::F16 => $module::rounded::<floats::F16>,
                Type::Bf16 => $module::rounded::<floats::Bf16>,
                _ => return None,
            };
            Some(MatmulKernel {
                gemm,
                activation: Activation::Shorts,
                quantize_activation: $module::round_column,
                panel_cols: shorts::COLUMNS,
                ..kernel(weight, level)?
            })
        }};
    }
    match (level, weight) {
        (Level::Avx512Bf16, Type::F16) => Some(MatmulKernel {
            weight,
            gemm: bf16_pairs::<pairs::F16>,
            ..kernel(Type::Bf16, level)?
        }),
        (Level::Avx2, _) if pays => shorts!(avx2),
        (Level::Avx2Vnni, _) if pays => shorts!(avx2_vnni),
        (Level::Avx512, _) if pays => shorts!(avx512),
        _ => None,
    }
}
