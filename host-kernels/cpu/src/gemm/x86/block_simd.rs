//! Unpacking blocks into the vectors of an instruction set.

use std::arch::x86_64::*;

use super::blocks::{Block32Kernel, SuperBlockKernel};
use super::int_simd::IntSimd;
use crate::simd::{Avx512, Ymm, register_fns};

/// How an instruction set unpacks blocks into vectors.
///
/// # Safety
/// Every function requires that the processor has the instructions of the type, as those of
/// [`IntSimd`] do. `row` is as [`Block32Kernel`] requires it, for the groups that a function is
/// asked for; `block` is as [`SuperBlockKernel`] requires it.
#[allow(clippy::missing_safety_doc)] // see above
pub(super) trait BlockSimd: IntSimd {
    /// [`BlockSimd::scales`] in the order of [`IntSimd::QUADS`].
    unsafe fn scales_for_quads<B: Block32Kernel>(
        row: *const u8,
        g: usize,
        n: usize,
    ) -> (__m256, __m256);

    /// The quants of the groups of a vector, from group `g` of a row on. Groups after `last` are
    /// not read; their quants are arbitrary.
    unsafe fn groups<B: Block32Kernel>(row: *const u8, g: usize, last: usize) -> Self::I;

    /// [`Block32Kernel::scales`], with the instructions of the level.
    unsafe fn scales<B: Block32Kernel>(row: *const u8, g: usize, n: usize) -> (__m256, __m256);

    /// The F16 at byte `at` of each of `LANES` rows.
    ///
    /// # Safety
    /// `rows` points to `LANES` pointers, each of which is readable for two bytes from `at` on.
    unsafe fn halves_of_rows(rows: *const *const u8, at: usize) -> Self::Vector;

    /// 32 signed quants of each of two rows as 16-bit integers: in each lane, one of both rows.
    /// For AVX-512 the order is not that of the quants ([`BlockSimd::in_order`]), and the last two
    /// vectors are zeros.
    unsafe fn pairs(a: __m256i, b: __m256i) -> [Self::I; 4];

    /// The lanes of [`BlockSimd::pairs`], in the order of the quants.
    unsafe fn in_order(lanes: [Self::Vector; 4]) -> [Self::Vector; 4];

    /// The quants of a super-block, in the order of [`BlockSimd::order`].
    unsafe fn quants<B: SuperBlockKernel>(block: *const u8) -> [Self::I; 8];

    /// The index of the 32 elements in half `i` of the vectors of [`BlockSimd::quants`].
    fn order<B: SuperBlockKernel>(i: usize) -> usize;

    /// The 16-bit scales of the elements of vector `v` of a super-block, each in all 16-bit lanes
    /// of its elements.
    unsafe fn spread_superblock<B: SuperBlockKernel>(scales: __m256i, v: usize) -> Self::I;
}

/// The 16 bits at byte `at` of each of eight rows.
///
/// # Safety
/// `rows` points to eight pointers, each of which is readable for two bytes from `at` on. The
/// processor has AVX2.
#[inline(always)]
unsafe fn eight_halves(rows: *const *const u8, at: usize) -> __m128i {
    // SAFETY: eight reads of two bytes, unaligned, which the caller guarantees. The vector is made
    // of numbers.
    unsafe {
        let half = |r: usize| (*rows.add(r)).add(at).cast::<i16>().read_unaligned();
        _mm_setr_epi16(
            half(0),
            half(1),
            half(2),
            half(3),
            half(4),
            half(5),
            half(6),
            half(7),
        )
    }
}

impl BlockSimd for Avx512 {
    #[inline(always)]
    unsafe fn scales_for_quads<B: Block32Kernel>(
        row: *const u8,
        g: usize,
        n: usize,
    ) -> (__m256, __m256) {
        // SAFETY: `Self::scales` reads the same `n <= 8` groups of `row` from `g` on and requires
        // the same instructions. The order of `QUADS` is that of the groups.
        unsafe { Self::scales::<B>(row, g, n) }
    }

    #[inline(always)]
    unsafe fn groups<B: Block32Kernel>(row: *const u8, g: usize, last: usize) -> __m512i {
        // SAFETY: groups `g` and `last` of `row` are readable and those between, so the one after
        // `g`, at most `last`, is. The caller guarantees the AVX-512 of `pair`.
        unsafe { B::pair(row, g, (g + 1).min(last)) }
    }

    #[inline(always)]
    unsafe fn scales<B: Block32Kernel>(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: `eight_scales` reads groups `g .. g + 8` of `row` and is called for `n = 8`;
        // `scales` reads groups `g .. g + n`. The caller guarantees them, and the AVX-512 of the
        // former.
        unsafe {
            match n {
                8 => B::eight_scales(row, g),
                _ => B::scales(row, g, n),
            }
        }
    }

    #[inline(always)]
    unsafe fn halves_of_rows(rows: *const *const u8, at: usize) -> __m512 {
        // SAFETY: `eight_halves` gets eight of the 16 pointers each time, all readable as it
        // requires. The conversion is on registers and needs AVX-512 F, which the caller
        // guarantees.
        unsafe {
            let (low, high) = (eight_halves(rows, at), eight_halves(rows.add(8), at));
            _mm512_cvtph_ps(_mm256_set_m128i(high, low))
        }
    }

    #[inline(always)]
    unsafe fn quants<B: SuperBlockKernel>(block: *const u8) -> [__m512i; 8] {
        // SAFETY: `quants_512` reads one block, which is readable at `block`. `quants_512` and the
        // zero vector need AVX-512, which the caller guarantees.
        unsafe {
            let [a, b, c, d] = B::quants_512(block);
            let zero = _mm512_setzero_si512();
            [a, b, c, d, zero, zero, zero, zero]
        }
    }

    register_fns! {
        avx512;
        unsafe fn pairs(a: __m256i, b: __m256i) -> [__m512i; 4] {
            let low = _mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b));
            let high = _mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b));
            [low, high, _mm512_setzero_si512(), _mm512_setzero_si512()]
        }

        unsafe fn in_order(lanes: [__m512; 4]) -> [__m512; 4] {
            // Quants 0 to 7 and 16 to 23, and the others.
            let [a, b, c, d] = lanes;
            let first = _mm512_shuffle_f32x4(a, b, 0b01_00_01_00);
            [first, _mm512_shuffle_f32x4(a, b, 0b11_10_11_10), c, d]
        }
    }

    #[inline(always)]
    fn order<B: SuperBlockKernel>(i: usize) -> usize {
        B::ORDER_512[i]
    }

    #[inline(always)]
    unsafe fn spread_superblock<B: SuperBlockKernel>(scales: __m256i, v: usize) -> __m512i {
        // SAFETY: the load reads `SPREAD_512[v]`, 64 bytes of a constant, whose index is checked.
        // The permutation of words needs AVX-512 BW, which the caller guarantees.
        unsafe {
            let lanes = _mm512_loadu_si512(B::SPREAD_512[v].as_ptr().cast());
            _mm512_permutexvar_epi16(lanes, _mm512_castsi256_si512(scales))
        }
    }
}

impl<const VNNI: bool> BlockSimd for Ymm<VNNI> {
    #[inline(always)]
    unsafe fn scales_for_quads<B: Block32Kernel>(
        row: *const u8,
        g: usize,
        n: usize,
    ) -> (__m256, __m256) {
        // SAFETY: groups `g .. g + n` of `row` are readable. For `n = 8`, `QUADS` is the
        // permutation of 0 to 7 that `scales_in_order` requires; otherwise `scales` reads the `n`
        // groups. Both need AVX2 and F16C, which the caller guarantees.
        unsafe {
            if n == 8 {
                return B::scales_in_order(row, g, Self::QUADS);
            }
            let (d, m) = B::scales(row, g, n);
            let lanes = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
            (
                _mm256_permutevar8x32_ps(d, lanes),
                _mm256_permutevar8x32_ps(m, lanes),
            )
        }
    }

    #[inline(always)]
    unsafe fn groups<B: Block32Kernel>(row: *const u8, g: usize, _: usize) -> __m256i {
        // SAFETY: `single` reads group `g` of `row`, which is readable. `single` needs AVX2, which
        // the caller guarantees.
        unsafe { B::single(row, g) }
    }

    #[inline(always)]
    unsafe fn scales<B: Block32Kernel>(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: `B::scales` has the contract of this function: groups `g .. g + n` of `row` are
        // readable, `n <= 8`, and the processor has AVX2 and F16C.
        unsafe { B::scales(row, g, n) }
    }

    #[inline(always)]
    unsafe fn halves_of_rows(rows: *const *const u8, at: usize) -> __m256 {
        // SAFETY: the eight pointers are readable as `eight_halves` requires. The conversion is on
        // registers and needs F16C, which the caller guarantees.
        unsafe { _mm256_cvtph_ps(eight_halves(rows, at)) }
    }

    #[inline(always)]
    unsafe fn quants<B: SuperBlockKernel>(block: *const u8) -> [__m256i; 8] {
        // SAFETY: `quants_256` reads one block, which is readable at `block`. `quants_256` needs
        // AVX2, which the caller guarantees.
        unsafe { B::quants_256(block) }
    }

    #[inline(always)]
    fn order<B: SuperBlockKernel>(i: usize) -> usize {
        i
    }

    #[inline(always)]
    unsafe fn in_order(lanes: [__m256; 4]) -> [__m256; 4] {
        lanes
    }

    register_fns! {
        avx2;
        unsafe fn pairs(a: __m256i, b: __m256i) -> [__m256i; 4] {
            let (low, high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
            [
                _mm256_cvtepi8_epi16(_mm256_castsi256_si128(low)),
                _mm256_cvtepi8_epi16(_mm256_castsi256_si128(high)),
                _mm256_cvtepi8_epi16(_mm256_extracti128_si256(low, 1)),
                _mm256_cvtepi8_epi16(_mm256_extracti128_si256(high, 1)),
            ]
        }

        unsafe fn spread_superblock<B: SuperBlockKernel>(scales: __m256i, v: usize) -> __m256i {
            // Vector `v` is sub-block `v` of 32 elements, or sub-blocks `2 v` and `2 v + 1` of 16.
            if B::SUB == 32 {
                let both = _mm256_permute4x64_epi64(scales, 0b01_00_01_00);
                let lane = _mm256_set1_epi16((2 * v + 256 * (2 * v + 1)) as i16);
                _mm256_shuffle_epi8(both, lane)
            } else {
                let both = if v < 4 {
                    _mm256_permute4x64_epi64(scales, 0b01_00_01_00)
                } else {
                    _mm256_permute4x64_epi64(scales, 0b11_10_11_10)
                };
                let first = 4 * (v % 4);
                let low = _mm_set1_epi16((first + 256 * (first + 1)) as i16);
                let high = _mm_set1_epi16((first + 2 + 256 * (first + 3)) as i16);
                _mm256_shuffle_epi8(both, _mm256_set_m128i(high, low))
            }
        }
    }
}
