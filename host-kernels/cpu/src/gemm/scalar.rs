//! The reference implementation: every format, without SIMD.
//!
//! Each block of weights is decoded once and multiplied with all columns. Sums run over the blocks
//! in order, in `dst` itself.

use super::kernel::{Activation, GemmArgs, MatmulKernel, PANEL_COLUMNS};
use crate::formats::{
    self, Block32Format, BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S,
    BlockIq3Xxs, BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ2K,
    BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
    BlockQ8_1, BlockQ8K, BlockTq1_0, BlockTq2_0, Format, SuperBlockFormat, Type, bf16_to_f32,
    f16_to_f32,
};

/// The scalar kernel for `weight`.
pub(super) fn kernel(weight: Type) -> Option<MatmulKernel> {
    let (activation, gemm): (Type, super::kernel::Gemm) = match weight {
        Type::F32 => (Type::F32, floats::<F32>),
        Type::F16 => (Type::F16, floats::<F16>),
        Type::Bf16 => (Type::Bf16, floats::<Bf16>),
        Type::Q4_0 => (Type::Q8_0, block32::<BlockQ4_0>),
        Type::Q4_1 => (Type::Q8_1, block32_with_min::<BlockQ4_1>),
        Type::Q5_0 => (Type::Q8_0, block32::<BlockQ5_0>),
        Type::Q5_1 => (Type::Q8_1, block32_with_min::<BlockQ5_1>),
        Type::Q8_0 => (Type::Q8_0, block32::<BlockQ8_0>),
        Type::Q1_0 => (Type::Q8_0, block32::<BlockQ1_0>),
        Type::Q2_0 => (Type::Q8_0, block32::<BlockQ2_0>),
        Type::Iq4Nl => (Type::Q8_0, block32::<BlockIq4Nl>),
        Type::Mxfp4 => (Type::Q8_0, block32::<BlockMxfp4>),
        Type::Nvfp4 => (Type::Q8_0, block32::<BlockNvfp4>),
        Type::Q2K => (Type::Q8K, k_quants::<BlockQ2K>),
        Type::Q3K => (Type::Q8K, k_quants::<BlockQ3K>),
        Type::Q4K => (Type::Q8K, k_quants::<BlockQ4K>),
        Type::Q5K => (Type::Q8K, k_quants::<BlockQ5K>),
        Type::Q6K => (Type::Q8K, k_quants::<BlockQ6K>),
        Type::Iq1S => (Type::Q8K, k_quants::<BlockIq1S>),
        Type::Iq1M => (Type::Q8K, k_quants::<BlockIq1M>),
        Type::Iq2Xxs => (Type::Q8K, k_quants::<BlockIq2Xxs>),
        Type::Iq2Xs => (Type::Q8K, k_quants::<BlockIq2Xs>),
        Type::Iq2S => (Type::Q8K, k_quants::<BlockIq2S>),
        Type::Iq3Xxs => (Type::Q8K, k_quants::<BlockIq3Xxs>),
        Type::Iq3S => (Type::Q8K, k_quants::<BlockIq3S>),
        Type::Iq4Xs => (Type::Q8K, k_quants::<BlockIq4Xs>),
        Type::Tq1_0 => (Type::Q8K, k_quants::<BlockTq1_0>),
        Type::Tq2_0 => (Type::Q8K, k_quants::<BlockTq2_0>),
        _ => return None,
    };
    let quantize_activation: formats::QuantizeRow = Format::of(activation)?.quantize_row;
    Some(MatmulKernel {
        weight,
        activation: Activation::Typed(activation),
        quantize_activation,
        gemm,
        panel_cols: 1,
        row_tile: 1,
        most_columns: PANEL_COLUMNS,
        takes_tables: false,
        one_order: true,
    })
}

/// A float type in memory.
trait Float {
    /// Bytes of an element.
    const BYTES: usize;
    /// # Safety
    /// `p` is readable for `BYTES`.
    unsafe fn read(p: *const u8) -> f32;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn read(p: *const u8) -> f32 {
        // SAFETY: the caller guarantees four bytes at `p`. The read is unaligned.
        unsafe { p.cast::<f32>().read_unaligned() }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn read(p: *const u8) -> f32 {
        // SAFETY: the caller guarantees two bytes at `p`. The read is unaligned.
        f16_to_f32(unsafe { p.cast::<u16>().read_unaligned() })
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn read(p: *const u8) -> f32 {
        // SAFETY: the caller guarantees two bytes at `p`. The read is unaligned.
        bf16_to_f32(unsafe { p.cast::<u16>().read_unaligned() })
    }
}

/// # Safety
/// As [`super::kernel::Gemm`].
unsafe fn floats<T: Float>(args: &GemmArgs) {
    let &GemmArgs {
        k,
        w,
        w_stride,
        rows,
        x,
        x_stride,
        cols,
        dst,
        dst_stride,
        ..
    } = args;
    for r in 0..rows {
        for c in 0..cols {
            // SAFETY: row `r`, column `c` and element `i` lie inside the operands, by the contract
            // of `Gemm`.
            unsafe {
                let (w, x) = (w.add(r * w_stride), x.add(c * x_stride));
                let mut sum = 0.0f32;
                for i in 0..k {
                    sum += T::read(w.add(i * T::BYTES)) * T::read(x.add(i * T::BYTES));
                }
                *dst.add(c * dst_stride + r) = sum;
            }
        }
    }
}

/// A format with scales per 32 elements times Q8_0: `sum of (d_w * d_x) * integer dot`.
///
/// # Safety
/// As [`super::kernel::Gemm`].
unsafe fn block32<B: Block32Format>(args: &GemmArgs) {
    // SAFETY: `args` is the argument of this function, whose caller guarantees the contract of
    // `Gemm`. The activations of this kernel are blocks of Q8_0.
    unsafe {
        block32_with::<B, BlockQ8_0>(|x| (f16_to_f32(x.d), 0.0, &x.qs), args);
    }
}

/// A format with scales per 32 elements with a minimum times Q8_1: as [`block32`], plus `m_w *
/// s_x`.
///
/// # Safety
/// As [`super::kernel::Gemm`].
unsafe fn block32_with_min<B: Block32Format>(args: &GemmArgs) {
    // SAFETY: `args` is the argument of this function, whose caller guarantees the contract of
    // `Gemm`. The activations of this kernel are blocks of Q8_1.
    unsafe {
        block32_with::<B, BlockQ8_1>(|x| (f16_to_f32(x.d), f16_to_f32(x.s), &x.qs), args);
    }
}

/// # Safety
/// As [`super::kernel::Gemm`], the activations being blocks `X` of 32.
#[inline(always)]
unsafe fn block32_with<B: Block32Format, X>(
    parts: impl Fn(&X) -> (f32, f32, &[i8; 32]),
    args: &GemmArgs,
) {
    let &GemmArgs {
        k,
        w,
        w_stride,
        rows,
        x,
        x_stride,
        cols,
        dst,
        dst_stride,
        ..
    } = args;
    let groups = B::ELEMENTS / 32;
    for r in 0..rows {
        for c in 0..cols {
            // SAFETY: row `r` and column `c` lie inside the operands, by the contract of `Gemm`.
            unsafe { *dst.add(c * dst_stride + r) = 0.0 };
        }
        for g in 0..k / 32 {
            // SAFETY: group `g` is in row `r`, by the contract of `Gemm`. `B` is packed and
            // consists of integers, so any bytes are valid.
            let group =
                unsafe { (*w.add(r * w_stride).cast::<B>().add(g / groups)).group(g % groups) };
            for c in 0..cols {
                // SAFETY: block `g` is in column `c`, by the contract of `Gemm`. `X` is packed and
                // consists of integers, so any bytes are valid. `dst` is the float of row `r` and
                // column `c`.
                let (x, dst) = unsafe {
                    (
                        &*x.add(c * x_stride).cast::<X>().add(g),
                        &mut *dst.add(c * dst_stride + r),
                    )
                };
                let (d, s, qs) = parts(x);
                let span = if B::HALF_SCALES { 16 } else { 32 };
                let scaled = group
                    .q
                    .chunks_exact(span)
                    .zip(qs.chunks_exact(span))
                    .zip(group.d);
                for ((q, x), scale) in scaled {
                    let mut sum = 0;
                    for (&q, &x) in q.iter().zip(x) {
                        sum += (i32::from(q) - B::OFFSET) * i32::from(x);
                    }
                    *dst += scale * d * sum as f32;
                }
                if B::HAS_MIN {
                    *dst += group.m * s;
                }
            }
        }
    }
}

/// A super-block format times Q8_K.
///
/// # Safety
/// As [`super::kernel::Gemm`].
unsafe fn k_quants<B: SuperBlockFormat>(args: &GemmArgs) {
    let &GemmArgs {
        k,
        w,
        w_stride,
        rows,
        x,
        x_stride,
        cols,
        dst,
        dst_stride,
        ..
    } = args;
    for r in 0..rows {
        for c in 0..cols {
            // SAFETY: row `r` and column `c` lie inside the operands, by the contract of `Gemm`.
            unsafe { *dst.add(c * dst_stride + r) = 0.0 };
        }
        for b in 0..k / 256 {
            // SAFETY: block `b` is in row `r`, by the contract of `Gemm`. `B` is packed and has
            // integers and floats, so any bytes are valid.
            let block = unsafe { (*w.add(r * w_stride).cast::<B>().add(b)).decode() };
            for c in 0..cols {
                // SAFETY: block `b` is in column `c`, by the contract of `Gemm`. The block is
                // packed and has integers and a float, so any bytes are valid. `dst` is the float
                // of row `r` and column `c`.
                let (x, dst) = unsafe {
                    (
                        &*x.add(c * x_stride).cast::<BlockQ8K>().add(b),
                        &mut *dst.add(c * dst_stride + r),
                    )
                };
                let (mut sum, mut min_sum) = (0, 0);
                for (j, (q, x)) in block
                    .q
                    .chunks_exact(B::SUB)
                    .zip(x.qs.chunks_exact(B::SUB))
                    .enumerate()
                {
                    let mut dot = 0;
                    for (&q, &x) in q.iter().zip(x) {
                        dot += (i32::from(q) - B::OFFSET) * i32::from(x);
                    }
                    sum += i32::from(block.scales[j]) * dot;
                }
                *dst += block.d * x.d * sum as f32;
                if B::HAS_MIN {
                    for (i, bsum) in { x.bsums }.into_iter().enumerate() {
                        min_sum += i32::from(block.mins[i * 16 / B::SUB]) * i32::from(bsum);
                    }
                    *dst -= block.dmin * x.d * min_sum as f32;
                }
            }
        }
    }
}
