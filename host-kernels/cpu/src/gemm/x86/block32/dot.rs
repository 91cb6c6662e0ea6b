//! The integer dot product of 32 quants of weights and 32 quants of activations, and the offset of
//! the quants that the result contains.

use std::arch::x86_64::*;

use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::depth;
use crate::gemm::x86::blocks::Block32Kernel;
use crate::simd::register_fns;

/// The offset of the quants of `B` that [`dot`] at level `S` does not subtract.
pub(super) const fn offset<S: BlockSimd, B: Block32Kernel>() -> i32 {
    if B::WIDE && S::WIDE_IS_SIGNED {
        0
    } else {
        B::OFFSET
    }
}

/// Each lane of `acc` plus the dot product of four quants of weights with four of activations.
///
/// # Safety
/// The processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn dot<S: BlockSimd, B: Block32Kernel>(acc: S::I, quants: S::I, x: S::I) -> S::I {
    // SAFETY: both products take registers and need the instructions of `S`, which the caller
    // guarantees.
    unsafe {
        if B::WIDE {
            S::dot_wide(acc, quants, x)
        } else {
            S::dot(acc, quants, x)
        }
    }
}

/// The dot products of 16 quants of weights and 16 of activations: the first halves of the groups,
/// and the second halves.
///
/// # Safety
/// The processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn dot_halves<S: BlockSimd, B: Block32Kernel>(
    quants: [S::I; 2],
    x: [S::I; 2],
) -> S::I {
    // SAFETY: all products and sums take registers and need the instructions of `S`, which the
    // caller guarantees.
    unsafe {
        if const { depth::<S>(B::MAX_QUANT, 2) } == 2 {
            let first = S::multiply_pairs(quants[0], x[0]);
            let second = S::multiply_pairs(quants[1], x[1]);
            S::add_i16_pairs(S::zero_int(), S::add_i16(first, second))
        } else {
            let first = dot::<S, B>(S::zero_int(), quants[0], x[0]);
            dot::<S, B>(first, quants[1], x[1])
        }
    }
}

/// Whether the offset is subtracted as a minimum is: once per group, times the scale of the
/// weights. Otherwise it is subtracted from every integer dot product. A format with scales of half
/// groups has no scale for the whole group.
pub(super) const fn folds<S: BlockSimd, B: Block32Kernel>() -> bool {
    offset::<S, B>() != 0 && !B::HALF_SCALES
}

register_fns! {
    avx2;
    /// The sums of the first and the last 16 of 32 signed quants.
    ///
    /// # Safety
    /// The processor has AVX2.
    pub(super) unsafe fn half_sums(x: __m256i) -> [i32; 2] {
        // A byte plus 128 is unsigned. `sad` sums eight such bytes, and 16 * 128 is subtracted at
        // the end.
        let x = _mm256_xor_si256(x, _mm256_set1_epi8(-128));
        let eights = _mm256_sad_epu8(x, _mm256_setzero_si256());
        [
            _mm256_castsi256_si128(eights),
            _mm256_extracti128_si256(eights, 1),
        ]
        .map(|sums| _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128)
    }

    /// Signed bytes, -127 instead of -128. With -128, the signs of a product cannot be exchanged.
    /// No conversion makes a -128, but the activations of a guest may be any bytes.
    ///
    /// # Safety
    /// The processor has AVX2.
    pub(in crate::gemm::x86) unsafe fn above_minus_128(x: __m256i) -> __m256i {
        _mm256_max_epi8(x, _mm256_set1_epi8(-127))
    }
}
