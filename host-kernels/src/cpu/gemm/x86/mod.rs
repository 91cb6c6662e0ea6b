//! Kernels for x86-64.
//!
//! - [`simd`]: the vector operations, once for AVX2 and once for AVX-512.
//! - [`blocks`]: blocks of each format as vectors of quants.
//! - [`groups`], [`supers`], [`floats`]: the products of the three families, for few columns by rows,
//!   for many through panels.
//! - [`panel`]: the loops around a panel.
//! - [`activations`]: f32 to the activation formats.

mod activations;
mod blocks;
mod floats;
mod groups;
mod panel;
mod scratch;
mod simd;
mod supers;

use super::{Level, MatmulKernel};
use crate::cpu::formats::{
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, Type,
};

/// The arguments of a [`super::Gemm`].
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

/// Defines entry points with the instructions of a level: everything below is inlined into them.
macro_rules! entry_points {
    ($module:ident, $simd:ty, $features:literal) => {
        mod $module {
            use super::blocks::{Groups, Supers};
            use super::floats::Float;
            use super::{Call, floats, groups, supers};

            entry_points!(@entry groups, Groups, $simd, $features);
            entry_points!(@entry supers, Supers, $simd, $features);
            entry_points!(@entry floats, Float, $simd, $features);
        }
    };
    (@entry $family:ident, $format:ident, $simd:ty, $features:literal) => {
        /// # Safety
        /// As [`crate::cpu::gemm::Gemm`].
        #[target_feature(enable = $features)]
        #[allow(clippy::too_many_arguments)]
        pub(super) unsafe fn $family<B: $format>(
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
            // SAFETY: the caller's promise; this function has the instructions of the level.
            unsafe { $family::gemm::<$simd, B>(&call) }
        }
    };
}

entry_points!(avx2, super::simd::Avx2, "avx2,fma,f16c");
entry_points!(
    avx512,
    super::simd::Avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
);

/// # Safety
/// As [`super::Gemm`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")]
#[allow(clippy::too_many_arguments)]
unsafe fn bf16_pairs(
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
    let call = Call {
        k,
        w,
        w_stride,
        rows,
        x,
        x_stride,
        cols,
        dst,
        dst_stride,
    };
    // SAFETY: the caller's promise; this function has the instructions.
    unsafe { floats::bf16_pairs::gemm(&call) }
}

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
                Type::Q4K => $module::supers::<BlockQ4K>,
                Type::Q5K => $module::supers::<BlockQ5K>,
                Type::Q6K => $module::supers::<BlockQ6K>,
                _ => return Some(portable),
            }
        };
    }
    let gemm: super::Gemm = match (level, weight) {
        (Level::Scalar, _) => return Some(portable),
        (Level::Avx512Bf16, Type::Bf16) => bf16_pairs,
        (Level::Avx2, _) => at_level!(avx2),
        (Level::Avx512 | Level::Avx512Bf16, _) => at_level!(avx512),
    };
    let panel_cols = match portable.activation {
        Type::F32 | Type::F16 | Type::Bf16 => floats::PANEL_COLS,
        Type::Q8K => supers::PANEL_COLS,
        _ => groups::PANEL_COLS,
    };
    let wide = level != Level::Avx2;
    Some(MatmulKernel {
        gemm,
        quantize_activation: activations::quantizer(portable.activation, wide)
            .unwrap_or(portable.quantize_activation),
        panel_cols,
        row_tile: if wide { 32 } else { 16 },
        ..portable
    })
}
