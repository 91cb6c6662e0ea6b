//! Integer operations on vectors, for the matrix products: for AVX2 with and without AVX-VNNI, and
//! for AVX-512 with VNNI.
//!
//! The kernels are generic over [`IntSimd`] and `#[inline(always)]`. Only the entry points carry
//! `#[target_feature]`; everything is inlined into them and so compiled for the right instructions.
//! The table of kernels returns an entry point only where its level is supported
//! ([`Level::is_supported`](crate::isa::Level::is_supported)).

use std::arch::x86_64::*;

use crate::simd::{Avx2, Avx512, Simd, Ymm, register_fns};

/// Distance of the software prefetch of weights in bytes: one page, because the hardware prefetcher
/// stops at the end of a page.
const PREFETCH_DISTANCE: usize = 4096;

/// Prefetches the cache line of `p`, which may be any address. `HINT` is `_MM_HINT_T0` for all
/// levels of the cache, `_MM_HINT_T1` for the L2 cache.
#[inline(always)]
pub(super) fn prefetch_line<const HINT: i32>(p: *const u8) {
    // SAFETY: a prefetch is a hint: it neither reads nor writes memory, and an address that is not
    // mapped has no effect. SSE, which has the instruction, is part of x86-64.
    unsafe { _mm_prefetch::<HINT>(p.cast()) }
}

/// Integer operations of an instruction set, beside the operations on `f32` of [`Simd`].
///
/// # Safety
/// Every function requires that the processor has the instructions of the type: those of the levels
/// `Avx2` or `Avx2Vnni` for [`Ymm`], those of `Avx512` for [`Avx512`]
/// ([`Level`](crate::isa::Level)). Functions with a pointer document what else they require. No
/// alignment is needed.
#[allow(clippy::missing_safety_doc)] // see above
pub(super) trait IntSimd: Simd {
    /// Groups of 32 bytes in a vector.
    const GROUPS: usize = Self::LANES / 8;
    /// Vectors of bytes in a super-block of 256.
    const SUPER: usize = 64 / Self::LANES;
    /// Vectors of rows in a panel of integers. The sums of a tile of [`IntSimd::COLS`] columns fit
    /// the registers.
    const PANEL: usize;
    /// Columns of a tile of integers: enough independent sums to hide the latency of a dot product.
    const COLS: usize;
    /// Whether [`IntSimd::dot_wide`] subtracts the offset of 128 from the quants.
    const WIDE_IS_SIGNED: bool;

    /// Whether formats may have one order of sums for any number of columns: that of a panel, where
    /// one float of each row and column takes the groups or super-blocks one after the other. Few
    /// columns are then multiplied with eight rows at a time. Otherwise row by row: a product has
    /// one sum for each lane, and tables are not multiplied with panels.
    const ONE_ORDER: bool;

    /// Whether [`IntSimd::dot`] takes several instructions. Products of small quants are then first
    /// summed in 16 bits ([`IntSimd::multiply_pairs`]), which is faster.
    const SUMS_I16: bool;

    /// Integers.
    type I: Copy;
    /// Prefetches `bytes` bytes, [`PREFETCH_DISTANCE`] bytes after `p`.
    #[inline(always)]
    unsafe fn prefetch(p: *const u8, bytes: usize) {
        for i in (0..bytes).step_by(64) {
            prefetch_line::<_MM_HINT_T1>(p.wrapping_add(PREFETCH_DISTANCE + i));
        }
    }

    unsafe fn zero_int() -> Self::I;
    /// The vector at `p`.
    ///
    /// # Safety
    /// `p` is readable for a vector: `4 * LANES` bytes.
    unsafe fn load_int(p: *const u8) -> Self::I;
    /// Writes a vector to `p`.
    ///
    /// # Safety
    /// `p` is writable for a vector: `4 * LANES` bytes.
    unsafe fn store_int(p: *mut u8, v: Self::I);
    /// Every lane the same 32 bits.
    unsafe fn splat_int(bits: u32) -> Self::I;
    unsafe fn sub_int(a: Self::I, b: Self::I) -> Self::I;
    /// Each lane of `acc` plus the product of 32-bit lanes.
    unsafe fn multiply_add_int(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// In each lane of 16 bytes, with four integers of `a` and of `b`: `a0 + a2`, `b0 + b2`,
    /// `a1 + a3` and `b1 + b3`.
    unsafe fn sum_alternate(a: Self::I, b: Self::I) -> Self::I;
    /// In each lane of 16 bytes: `a0 + a2`, `a1 + a3`, `b0 + b2` and `b1 + b3`.
    unsafe fn sum_pairs(a: Self::I, b: Self::I) -> Self::I;
    /// For each group of 32 bytes, the sums of the two lanes of 16 bytes of `a`, then of `b`.
    unsafe fn sum_lanes(a: Self::I, b: Self::I) -> Self::I;
    /// The lanes of 16 bytes of `a` and `b` in turn.
    unsafe fn zip_lanes(a: Self::I, b: Self::I) -> [Self::I; 2];
    /// Each lane of `acc` plus the dot product of four quants below 128 with four signed bytes.
    unsafe fn dot(acc: Self::I, quants: Self::I, x: Self::I) -> Self::I;
    /// As `dot`, for quants up to 255. If `WIDE_IS_SIGNED`, 128 is subtracted from each quant.
    unsafe fn dot_wide(acc: Self::I, quants: Self::I, x: Self::I) -> Self::I;
    /// As `dot`, for signed quants. In each product, the quant or `x` is above -128.
    unsafe fn dot_signed(acc: Self::I, quants: Self::I, x: Self::I) -> Self::I;
    /// As `dot`, for signed quants above -128. `magnitudes` are the magnitudes of `x`, whose signs
    /// are applied to the quants.
    unsafe fn dot_with_magnitudes(
        acc: Self::I,
        quants: Self::I,
        x: Self::I,
        magnitudes: Self::I,
    ) -> Self::I;
    /// The magnitudes of signed bytes.
    unsafe fn magnitudes(x: Self::I) -> Self::I;
    /// The four signed bytes of each lane as 16-bit integers: the first and the third, and the
    /// second and the fourth.
    unsafe fn widen_pairs(v: Self::I) -> [Self::I; 2];
    /// For each 16-bit lane, the sum of two products of quants below 128 with signed bytes.
    unsafe fn multiply_pairs(quants: Self::I, x: Self::I) -> Self::I;
    /// The sums of 16-bit lanes.
    unsafe fn add_i16(a: Self::I, b: Self::I) -> Self::I;
    /// Each lane of `acc` plus two 16-bit lanes.
    unsafe fn add_i16_pairs(acc: Self::I, pairs: Self::I) -> Self::I;
    /// Each lane of `acc` plus the dot product of two signed 16-bit pairs.
    unsafe fn dot_pairs(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Each lane of `acc` plus the dot product of four quants below 128 with four signed bytes. The
    /// first two products are multiplied with the first 16-bit scale of the lane, the others with
    /// the second.
    unsafe fn dot_scaled(acc: Self::I, quants: Self::I, x: Self::I, scales: Self::I) -> Self::I;
    /// As `dot_scaled`, for quants up to 255, from which 128 is subtracted.
    unsafe fn dot_scaled_wide(
        acc: Self::I,
        quants: Self::I,
        x: Self::I,
        scales: Self::I,
    ) -> Self::I;

    /// The low 256 bits from `v`, the rest 0.
    unsafe fn widen(v: __m256i) -> Self::I;

    /// The groups of 32 bytes. The second is 0 if a vector has one group.
    unsafe fn halves(v: Self::I) -> [__m256i; 2];

    unsafe fn to_floats(v: Self::I) -> Self::Vector;
    /// For each lane, the larger of `acc` and the bits of the magnitude of `v`, as integers. The
    /// bits of infinity and NaN are larger than those of every finite number.
    unsafe fn larger_magnitudes(acc: Self::I, v: Self::Vector) -> Self::I;
    /// The largest lane.
    unsafe fn largest(v: Self::I) -> u32;
    /// The nearest integers of both in 16 bits, in an order that keeps adjacent pairs together.
    unsafe fn to_i16(a: Self::Vector, b: Self::Vector) -> Self::I;
    /// The sum of the lanes of both.
    unsafe fn sum_both(v: Self::Vector, more: __m256) -> f32;

    /// The scales of the groups of vector `v`, of the scales of eight groups, each in all lanes of
    /// its group.
    unsafe fn spread_groups(scales: __m256, v: usize) -> Self::Vector;
    /// The scales of the `LANES / 4` groups from group `v * LANES / 4` on, of the scales of eight
    /// groups in the order of [`IntSimd::QUADS`], each in four lanes.
    unsafe fn spread_quads(scales: __m256, v: usize) -> Self::Vector;
    /// `first`, with the second half of the lanes of each group from `second`.
    unsafe fn second_halves(first: Self::Vector, second: Self::Vector) -> Self::Vector;

    /// The low four bits of each byte.
    unsafe fn low_nibbles(v: Self::I) -> Self::I;
    /// The high four bits of each byte.
    unsafe fn high_nibbles(v: Self::I) -> Self::I;
    /// The entries of a table at indices below 16.
    unsafe fn look_up(table: [u8; 16], v: Self::I) -> Self::I;
    /// Every byte plus 128.
    unsafe fn add_128(v: Self::I) -> Self::I;
    /// The four words at byte `offset` of each of `LANES` rows. Vector `j` has word `j` of each
    /// row.
    ///
    /// # Safety
    /// `rows` points to `LANES` pointers, each of which is readable for 16 bytes from `offset` on.
    unsafe fn transpose_words(rows: *const *const u8, offset: usize) -> [Self::I; 4];

    /// The order of the scales of eight groups for which [`IntSimd::spread_quads`] is one
    /// instruction.
    const QUADS: [usize; 8];
    /// A vector of lanes of 16 bytes, `stride` bytes apart from `p` on. Lanes after lane `last`
    /// repeat lane `last`.
    ///
    /// # Safety
    /// `p` is readable for 16 bytes at each of the lanes 0 to `last` of the vector.
    unsafe fn load_quads(p: *const u8, stride: usize, last: usize) -> Self::I;
}

impl IntSimd for Avx512 {
    const PANEL: usize = 2;
    const COLS: usize = 4;
    const WIDE_IS_SIGNED: bool = false;
    const SUMS_I16: bool = false;
    const ONE_ORDER: bool = true;

    type I = __m512i;

    register_fns! {
        avx512;
        unsafe fn zero_int() -> __m512i {
            _mm512_setzero_si512()
        }

        unsafe fn splat_int(bits: u32) -> __m512i {
            _mm512_set1_epi32(bits as i32)
        }

        unsafe fn sub_int(a: __m512i, b: __m512i) -> __m512i {
            _mm512_sub_epi32(a, b)
        }

        unsafe fn multiply_add_int(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
            _mm512_add_epi32(acc, _mm512_mullo_epi32(a, b))
        }

        unsafe fn sum_alternate(a: __m512i, b: __m512i) -> __m512i {
            _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
        }

        unsafe fn sum_pairs(a: __m512i, b: __m512i) -> __m512i {
            _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
        }

        unsafe fn sum_lanes(a: __m512i, b: __m512i) -> __m512i {
            // Lanes 0 and 2, and lanes 1 and 3, of `a`, then of `b`.
            let first = _mm512_shuffle_i32x4(a, b, 0b10_00_10_00);
            let second = _mm512_shuffle_i32x4(a, b, 0b11_01_11_01);
            let sums = _mm512_add_epi32(first, second);
            _mm512_shuffle_i32x4(sums, sums, 0b11_01_10_00)
        }

        unsafe fn zip_lanes(a: __m512i, b: __m512i) -> [__m512i; 2] {
            let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
            let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            [
                _mm512_permutex2var_epi64(a, first, b),
                _mm512_permutex2var_epi64(a, second, b),
            ]
        }

        unsafe fn dot(acc: __m512i, quants: __m512i, x: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, quants, x)
        }

        unsafe fn dot_wide(acc: __m512i, quants: __m512i, x: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, quants, x)
        }

        unsafe fn magnitudes(x: __m512i) -> __m512i {
            _mm512_abs_epi8(x)
        }

        unsafe fn multiply_pairs(quants: __m512i, x: __m512i) -> __m512i {
            _mm512_maddubs_epi16(quants, x)
        }

        unsafe fn add_i16(a: __m512i, b: __m512i) -> __m512i {
            _mm512_add_epi16(a, b)
        }

        unsafe fn add_i16_pairs(acc: __m512i, pairs: __m512i) -> __m512i {
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }

        unsafe fn low_nibbles(v: __m512i) -> __m512i {
            _mm512_and_si512(v, _mm512_set1_epi8(15))
        }

        unsafe fn high_nibbles(v: __m512i) -> __m512i {
            _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))
        }

        unsafe fn add_128(v: __m512i) -> __m512i {
            _mm512_xor_si512(v, _mm512_set1_epi8(-128))
        }

        unsafe fn dot_pairs(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
            _mm512_dpwssd_epi32(acc, a, b)
        }

        unsafe fn dot_scaled(
            acc: __m512i,
            quants: __m512i,
            x: __m512i,
            scales: __m512i,
        ) -> __m512i {
            _mm512_dpwssd_epi32(acc, _mm512_maddubs_epi16(quants, x), scales)
        }

        unsafe fn widen(v: __m256i) -> __m512i {
            _mm512_zextsi256_si512(v)
        }

        unsafe fn halves(v: __m512i) -> [__m256i; 2] {
            [_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)]
        }

        unsafe fn to_floats(v: __m512i) -> __m512 {
            _mm512_cvtepi32_ps(v)
        }

        unsafe fn larger_magnitudes(acc: __m512i, v: __m512) -> __m512i {
            _mm512_max_epi32(acc, _mm512_castps_si512(_mm512_abs_ps(v)))
        }

        unsafe fn largest(v: __m512i) -> u32 {
            _mm512_reduce_max_epi32(v) as u32
        }

        unsafe fn to_i16(a: __m512, b: __m512) -> __m512i {
            _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b))
        }

        unsafe fn second_halves(first: __m512, second: __m512) -> __m512 {
            _mm512_mask_mov_ps(first, 0xf0f0, second)
        }
    }

    #[inline(always)]
    unsafe fn dot_with_magnitudes(
        acc: __m512i,
        quants: __m512i,
        x: __m512i,
        _: __m512i,
    ) -> __m512i {
        // SAFETY: `dot_signed` takes the same registers, and needs the AVX-512 BW and VNNI that the
        // caller guarantees with the level.
        unsafe { Self::dot_signed(acc, quants, x) }
    }
    #[inline(always)]
    unsafe fn load_int(p: *const u8) -> __m512i {
        // SAFETY: one load of 64 bytes, all of which the caller guarantees to be readable at `p`.
        // AVX-512 F, which the caller guarantees, has the instruction.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut u8, v: __m512i) {
        // SAFETY: one store of 64 bytes, all of which the caller guarantees to be writable at `p`.
        // AVX-512 F, which the caller guarantees, has the instruction.
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    register_fns! {
        avx512;
        unsafe fn dot_signed(acc: __m512i, quants: __m512i, x: __m512i) -> __m512i {
            let negative = _mm512_movepi8_mask(quants);
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            _mm512_dpbusd_epi32(acc, _mm512_abs_epi8(quants), x)
        }

        unsafe fn widen_pairs(v: __m512i) -> [__m512i; 2] {
            let first = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8);
            [first, _mm512_srai_epi16(v, 8)]
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], v: __m512i) -> __m512i {
        // SAFETY: the load reads the 16 bytes of `table`, a variable of this function. The shuffle
        // needs AVX-512 BW, which the caller guarantees.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v)
        }
    }
    #[inline(always)]
    unsafe fn transpose_words(rows: *const *const u8, offset: usize) -> [__m512i; 4] {
        // SAFETY: `load` is called with 0 to 15, so it reads the 16 pointers that the caller
        // guarantees at `rows`, and 16 bytes, four words, at `offset` of each. Broadcasts and
        // unpacking are on registers and need AVX-512 F.
        unsafe {
            let load = |r: usize| _mm_loadu_si128((*rows.add(r)).add(offset).cast());
            // Lane `l` of 128 bits has row `4 l + r`.
            let four = |r: usize| {
                let v = _mm512_castsi128_si512(load(r));
                let v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load(r + 4));
                let v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load(r + 8));
                _mm512_mask_broadcast_i32x4(v, 0xf000, load(r + 12))
            };
            let (a, b, c, d) = (four(0), four(1), four(2), four(3));
            let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab_low, cd_low),
                _mm512_unpackhi_epi64(ab_low, cd_low),
                _mm512_unpacklo_epi64(ab_high, cd_high),
                _mm512_unpackhi_epi64(ab_high, cd_high),
            ]
        }
    }

    #[inline(always)]
    unsafe fn dot_scaled_wide(
        acc: __m512i,
        quants: __m512i,
        x: __m512i,
        scales: __m512i,
    ) -> __m512i {
        // SAFETY: everything is on registers. `dot_scaled` needs AVX-512 BW and VNNI, and the rest
        // AVX-512 BW, which the caller guarantees with the level.
        unsafe {
            // The sign of a quant is applied to `x`, so that the sum of two products fits 16 bits.
            let signed = _mm512_xor_si512(quants, _mm512_set1_epi8(-128));
            let negative = _mm512_movepi8_mask(signed);
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            Self::dot_scaled(acc, _mm512_abs_epi8(signed), x, scales)
        }
    }

    #[inline(always)]
    unsafe fn sum_both(v: __m512, more: __m256) -> f32 {
        // SAFETY: `sum_both` of `Avx2` takes registers and needs AVX2, and the halves of `v` need
        // AVX-512 DQ. The caller guarantees both with the level.
        unsafe {
            let high = _mm512_extractf32x8_ps(v, 1);
            <Avx2 as IntSimd>::sum_both(_mm256_add_ps(_mm512_castps512_ps256(v), high), more)
        }
    }

    #[inline(always)]
    unsafe fn spread_groups(scales: __m256, v: usize) -> __m512 {
        const fn lanes(v: i32) -> [i32; 16] {
            let (a, b) = (2 * v, 2 * v + 1);
            [a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b]
        }
        const LANES: [[i32; 16]; 4] = [lanes(0), lanes(1), lanes(2), lanes(3)];
        // SAFETY: the load reads `LANES[v]`, 64 bytes of a constant; `LANES` has four entries, and
        // the index is checked. The permutation needs AVX-512 F, which the caller guarantees.
        unsafe {
            let lanes = _mm512_loadu_si512(LANES[v].as_ptr().cast());
            _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(scales))
        }
    }

    #[inline(always)]
    unsafe fn spread_quads(scales: __m256, v: usize) -> __m512 {
        const fn lanes(v: i32) -> [i32; 16] {
            let (a, b, c, d) = (4 * v, 4 * v + 1, 4 * v + 2, 4 * v + 3);
            [a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d]
        }
        const LANES: [[i32; 16]; 2] = [lanes(0), lanes(1)];
        // SAFETY: the load reads `LANES[v]`, 64 bytes of a constant; `LANES` has two entries, and
        // the index is checked. The permutation needs AVX-512 F, which the caller guarantees.
        unsafe {
            let lanes = _mm512_loadu_si512(LANES[v].as_ptr().cast());
            _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(scales))
        }
    }

    const QUADS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

    #[inline(always)]
    unsafe fn load_quads(p: *const u8, stride: usize, last: usize) -> __m512i {
        // SAFETY: four loads of 16 bytes, at lanes 0 to 3, or at `last` where a lane is after it.
        // So each lane is at most `last`, and the caller guarantees its 16 bytes. The broadcasts
        // need AVX-512 F.
        unsafe {
            let load = |i: usize| _mm_loadu_si128(p.add(stride * i.min(last)).cast());
            let v = _mm512_castsi128_si512(load(0));
            let v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load(1));
            let v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load(2));
            _mm512_mask_broadcast_i32x4(v, 0xf000, load(3))
        }
    }
}

impl<const VNNI: bool> IntSimd for Ymm<VNNI> {
    const PANEL: usize = if VNNI { 2 } else { 1 };
    const COLS: usize = if VNNI { 6 } else { 4 };
    const WIDE_IS_SIGNED: bool = !VNNI;
    const SUMS_I16: bool = !VNNI;
    const ONE_ORDER: bool = !VNNI;

    type I = __m256i;

    register_fns! {
        avx2;
        unsafe fn zero_int() -> __m256i {
            _mm256_setzero_si256()
        }

        unsafe fn splat_int(bits: u32) -> __m256i {
            _mm256_set1_epi32(bits as i32)
        }

        unsafe fn sub_int(a: __m256i, b: __m256i) -> __m256i {
            _mm256_sub_epi32(a, b)
        }

        unsafe fn multiply_add_int(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
            _mm256_add_epi32(acc, _mm256_mullo_epi32(a, b))
        }

        unsafe fn sum_alternate(a: __m256i, b: __m256i) -> __m256i {
            _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b))
        }

        unsafe fn sum_pairs(a: __m256i, b: __m256i) -> __m256i {
            _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
        }

        unsafe fn sum_lanes(a: __m256i, b: __m256i) -> __m256i {
            let first = _mm256_permute2x128_si256(a, b, 0x20);
            let second = _mm256_permute2x128_si256(a, b, 0x31);
            _mm256_add_epi32(first, second)
        }

        unsafe fn zip_lanes(a: __m256i, b: __m256i) -> [__m256i; 2] {
            [
                _mm256_permute2x128_si256(a, b, 0x20),
                _mm256_permute2x128_si256(a, b, 0x31),
            ]
        }

        unsafe fn magnitudes(x: __m256i) -> __m256i {
            _mm256_abs_epi8(x)
        }

        unsafe fn multiply_pairs(quants: __m256i, x: __m256i) -> __m256i {
            _mm256_maddubs_epi16(quants, x)
        }

        unsafe fn add_i16(a: __m256i, b: __m256i) -> __m256i {
            _mm256_add_epi16(a, b)
        }

        unsafe fn low_nibbles(v: __m256i) -> __m256i {
            _mm256_and_si256(v, _mm256_set1_epi8(15))
        }

        unsafe fn high_nibbles(v: __m256i) -> __m256i {
            _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))
        }

        unsafe fn add_128(v: __m256i) -> __m256i {
            _mm256_xor_si256(v, _mm256_set1_epi8(-128))
        }

        unsafe fn halves(v: __m256i) -> [__m256i; 2] {
            [v, _mm256_setzero_si256()]
        }

        unsafe fn to_floats(v: __m256i) -> __m256 {
            _mm256_cvtepi32_ps(v)
        }

        unsafe fn to_i16(a: __m256, b: __m256) -> __m256i {
            _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b))
        }

        unsafe fn spread_groups(scales: __m256, v: usize) -> __m256 {
            _mm256_permutevar8x32_ps(scales, _mm256_set1_epi32(v as i32))
        }

        unsafe fn second_halves(first: __m256, second: __m256) -> __m256 {
            _mm256_blend_ps(first, second, 0xf0)
        }
    }

    #[inline(always)]
    unsafe fn load_int(p: *const u8) -> __m256i {
        // SAFETY: one load of 32 bytes, all of which the caller guarantees to be readable at `p`.
        // AVX, which the caller guarantees, has the instruction.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_int(p: *mut u8, v: __m256i) {
        // SAFETY: one store of 32 bytes, all of which the caller guarantees to be writable at `p`.
        // AVX, which the caller guarantees, has the instruction.
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn dot(acc: __m256i, quants: __m256i, x: __m256i) -> __m256i {
        // SAFETY: everything is on registers. The caller guarantees AVX-VNNI if `VNNI`, and AVX2,
        // which the rest needs.
        unsafe {
            // Without VNNI, the sum of two products is at most 2 * 127 * 128, which fits 16 bits.
            if VNNI {
                return _mm256_dpbusd_avx_epi32(acc, quants, x);
            }
            let pairs = _mm256_maddubs_epi16(quants, x);
            Self::add_i16_pairs(acc, pairs)
        }
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: __m256i, quants: __m256i, x: __m256i) -> __m256i {
        // SAFETY: `dot_signed` has the contract of this function. The rest is on registers, and
        // needs AVX-VNNI only if `VNNI`, otherwise AVX2, as the caller guarantees.
        unsafe {
            // Without VNNI, the magnitude of a quant minus 128 is at most 128, and its sign is
            // applied to `x`.
            if VNNI {
                return _mm256_dpbusd_avx_epi32(acc, quants, x);
            }
            let signed = _mm256_xor_si256(quants, _mm256_set1_epi8(-128));
            Self::dot_signed(acc, signed, x)
        }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: __m256i, quants: __m256i, x: __m256i) -> __m256i {
        // SAFETY: `dot` takes registers, and the caller guarantees its instructions with the type.
        // The magnitudes and the signs need AVX2, which every `Ymm` has.
        unsafe { Self::dot(acc, _mm256_abs_epi8(quants), _mm256_sign_epi8(x, quants)) }
    }
    #[inline(always)]
    unsafe fn dot_with_magnitudes(
        acc: __m256i,
        quants: __m256i,
        x: __m256i,
        magnitudes: __m256i,
    ) -> __m256i {
        // SAFETY: `dot` takes registers, and the caller guarantees its instructions with the type.
        // The signs need AVX2, which every `Ymm` has.
        unsafe { Self::dot(acc, magnitudes, _mm256_sign_epi8(quants, x)) }
    }
    #[inline(always)]
    unsafe fn add_i16_pairs(acc: __m256i, pairs: __m256i) -> __m256i {
        // SAFETY: `dot_pairs` takes registers, the second all ones in 16 bits, and the caller
        // guarantees its instructions with the type.
        unsafe { Self::dot_pairs(acc, pairs, _mm256_set1_epi16(1)) }
    }
    #[inline(always)]
    unsafe fn dot_scaled(acc: __m256i, quants: __m256i, x: __m256i, scales: __m256i) -> __m256i {
        // SAFETY: `dot_pairs` takes registers, and the caller guarantees its instructions with the
        // type. The products in 16 bits need AVX2, which every `Ymm` has.
        unsafe { Self::dot_pairs(acc, _mm256_maddubs_epi16(quants, x), scales) }
    }
    #[inline(always)]
    unsafe fn sum_both(v: __m256, more: __m256) -> f32 {
        // SAFETY: `v_sum` and the addition are on registers, and need the AVX of every `Ymm`, which
        // the caller guarantees.
        unsafe { Self::v_sum(_mm256_add_ps(v, more)) }
    }
    register_fns! {
        avx2;
        unsafe fn widen_pairs(v: __m256i) -> [__m256i; 2] {
            let first = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
            [first, _mm256_srai_epi16(v, 8)]
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], v: __m256i) -> __m256i {
        // SAFETY: the load reads the 16 bytes of `table`, a variable of this function. The shuffle
        // needs AVX2, which the caller guarantees.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v)
        }
    }
    #[inline(always)]
    unsafe fn transpose_words(rows: *const *const u8, offset: usize) -> [__m256i; 4] {
        // SAFETY: `load` is called with 0 to 7, so it reads the eight pointers that the caller
        // guarantees at `rows`, and 16 bytes, four words, at `offset` of each. Unpacking is on
        // registers and needs AVX2.
        unsafe {
            let load = |r: usize| _mm_loadu_si128((*rows.add(r)).add(offset).cast());
            let two = |r: usize| _mm256_set_m128i(load(r + 4), load(r));
            let (a, b, c, d) = (two(0), two(1), two(2), two(3));
            let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            [
                _mm256_unpacklo_epi64(ab_low, cd_low),
                _mm256_unpackhi_epi64(ab_low, cd_low),
                _mm256_unpacklo_epi64(ab_high, cd_high),
                _mm256_unpackhi_epi64(ab_high, cd_high),
            ]
        }
    }
    #[inline(always)]
    unsafe fn dot_pairs(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: both arms are on registers. The first needs AVX-VNNI, which the caller guarantees
        // if `VNNI`; the second needs AVX2, which every `Ymm` has.
        unsafe {
            match VNNI {
                true => _mm256_dpwssd_avx_epi32(acc, a, b),
                false => _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)),
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_scaled_wide(
        acc: __m256i,
        quants: __m256i,
        x: __m256i,
        scales: __m256i,
    ) -> __m256i {
        // SAFETY: `dot_scaled` takes registers, and the caller guarantees its instructions with the
        // type. The signs and the magnitudes need AVX2, which every `Ymm` has.
        unsafe {
            let signed = _mm256_xor_si256(quants, _mm256_set1_epi8(-128));
            let x = _mm256_sign_epi8(x, signed);
            Self::dot_scaled(acc, _mm256_abs_epi8(signed), x, scales)
        }
    }

    #[inline(always)]
    unsafe fn widen(v: __m256i) -> __m256i {
        v
    }

    register_fns! {
        avx2;
        unsafe fn larger_magnitudes(acc: __m256i, v: __m256) -> __m256i {
            let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), v);
            _mm256_max_epi32(acc, _mm256_castps_si256(magnitude))
        }

        unsafe fn largest(v: __m256i) -> u32 {
            let v = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
            let v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0b00_00_11_10));
            let v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0b00_00_00_01));
            _mm_cvtsi128_si32(v) as u32
        }

        unsafe fn spread_quads(scales: __m256, v: usize) -> __m256 {
            match v {
                0 => _mm256_permute_ps(scales, 0b00_00_00_00),
                1 => _mm256_permute_ps(scales, 0b01_01_01_01),
                2 => _mm256_permute_ps(scales, 0b10_10_10_10),
                _ => _mm256_permute_ps(scales, 0b11_11_11_11),
            }
        }
    }

    // The groups of one 128-bit half are adjacent.
    const QUADS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

    #[inline(always)]
    unsafe fn load_quads(p: *const u8, stride: usize, last: usize) -> __m256i {
        // SAFETY: two loads of 16 bytes, at lanes 0 and 1, or at lane 0 twice if `last` is 0. The
        // caller guarantees the 16 bytes of each lane up to `last`, and AVX.
        unsafe {
            let load = |i: usize| _mm_loadu_si128(p.add(stride * i.min(last)).cast());
            _mm256_set_m128i(load(1), load(0))
        }
    }
}
