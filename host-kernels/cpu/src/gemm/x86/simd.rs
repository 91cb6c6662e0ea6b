//! The few vector operations the kernels are written in, for AVX2 (with and without AVX-VNNI) and for AVX-512.
//!
//! The kernels are generic over [`Simd`] and `#[inline(always)]`; only their outermost functions carry
//! `#[target_feature]`, into which everything is inlined and so compiled for the right instructions.
//!
//! # Safety
//! Every function here requires the instructions of its level and, where it takes pointers, memory of
//! one vector behind them; no alignment. Callers run inside a function with the level's
//! `#[target_feature]`, which the table of kernels hands out only where [`super::Level::is_supported`].

use std::arch::x86_64::*;

use super::blocks::{Groups, Supers};

/// How far ahead of its use a stream of weights is asked for: across the end of a page, where the
/// processor's own prefetching stops.
const AHEAD: usize = 4096;

/// Vectors of one level.
pub(super) trait Simd: Copy + 'static {
    /// 32-bit lanes of a vector.
    const LANES: usize;
    /// Groups of 32 bytes in a vector.
    const GROUPS: usize = Self::LANES / 8;
    /// Vectors of bytes in a super-block of 256.
    const SUPER: usize = 64 / Self::LANES;
    /// Vectors of rows in a panel of integers; with the columns of a tile they fill the registers.
    const PANEL: usize;
    /// Columns of a tile of integers: with [`Simd::PANEL`] so many sums that no dot product waits for the one before.
    const COLS: usize;
    /// Whether [`Simd::dot_wide`] takes the offset of 128 out itself.
    const WIDE_IS_SIGNED: bool;

    /// Whether [`Simd::dot`] takes several instructions, so that products of small quants are better summed in 16
    /// bits first: see [`Simd::multiply_pairs`].
    const SHORTS: bool;

    /// Integers.
    type I: Copy;
    /// Floats.
    type F: Copy;

    /// Asks for the `bytes` that lie some way ahead of `p` in a stream.
    #[inline(always)]
    unsafe fn prefetch(p: *const u8, bytes: usize) {
        for i in (0..bytes).step_by(64) {
            // SAFETY: a hint; the address need not be valid.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(AHEAD + i).cast()) }
        }
    }

    unsafe fn zero() -> Self::I;
    unsafe fn load(p: *const u8) -> Self::I;
    unsafe fn store(p: *mut u8, v: Self::I);
    /// Every lane the same 32 bits.
    unsafe fn splat(bits: u32) -> Self::I;
    unsafe fn sub(a: Self::I, b: Self::I) -> Self::I;
    /// Each lane of `acc` plus the dot product of four quants below 128 with four signed bytes.
    unsafe fn dot(acc: Self::I, quants: Self::I, x: Self::I) -> Self::I;
    /// The same for quants up to 255, which stand for quants less 128 if `WIDE_IS_SIGNED`.
    unsafe fn dot_wide(acc: Self::I, quants: Self::I, x: Self::I) -> Self::I;
    /// The same for signed quants, above -128 or times an `x` above -128.
    unsafe fn dot_signed(acc: Self::I, quants: Self::I, x: Self::I) -> Self::I;
    /// The same for signed quants above -128 whose sign moves from `x` to them: `magnitudes` are those of `x`.
    unsafe fn dot_turned(acc: Self::I, quants: Self::I, x: Self::I, magnitudes: Self::I)
    -> Self::I;
    /// The magnitudes of signed bytes.
    unsafe fn magnitudes(x: Self::I) -> Self::I;
    /// Of the four signed bytes of each lane, the first and the third in 16 bits, and the second and the fourth.
    unsafe fn widen_pairs(v: Self::I) -> [Self::I; 2];
    /// For each 16-bit lane, the sum of two products of quants below 128 with signed bytes.
    unsafe fn multiply_pairs(quants: Self::I, x: Self::I) -> Self::I;
    /// The sums of 16-bit lanes.
    unsafe fn add_shorts(a: Self::I, b: Self::I) -> Self::I;
    /// Each lane of `acc` plus two 16-bit lanes.
    unsafe fn add_short_pairs(acc: Self::I, shorts: Self::I) -> Self::I;
    /// Each lane of `acc` plus the dot product of two signed 16-bit pairs.
    unsafe fn dot_pairs(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Each lane of `acc` plus the dot product of four quants below 128 with four signed bytes, the
    /// first two times the first 16-bit scale of the lane, the others times the second.
    unsafe fn dot_scaled(acc: Self::I, quants: Self::I, x: Self::I, scales: Self::I) -> Self::I;
    /// The same for quants up to 255, which stand for quants less 128.
    unsafe fn dot_scaled_wide(
        acc: Self::I,
        quants: Self::I,
        x: Self::I,
        scales: Self::I,
    ) -> Self::I;

    /// The low 256 bits from `v`, the rest 0.
    unsafe fn widen(v: __m256i) -> Self::I;

    /// The groups of 32 bytes; the second is 0 where a vector has but one.
    unsafe fn halves(v: Self::I) -> [__m256i; 2];

    unsafe fn to_floats(v: Self::I) -> Self::F;
    /// For each lane, the larger of `acc` and the bits of the magnitude of `v`; those of what is not finite are largest.
    unsafe fn larger_magnitudes(acc: Self::I, v: Self::F) -> Self::I;
    /// The largest lane.
    unsafe fn largest(v: Self::I) -> u32;
    /// The nearest integers of both in 16 bits, pairs of neighbours side by side.
    unsafe fn to_shorts(a: Self::F, b: Self::F) -> Self::I;
    unsafe fn zero_floats() -> Self::F;
    unsafe fn load_floats(p: *const f32) -> Self::F;
    unsafe fn splat_float(x: f32) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn add_floats(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `c - a * b`, rounded once.
    unsafe fn neg_mul_add(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The sum of the lanes.
    unsafe fn sum(v: Self::F) -> f32;
    /// The sum of the lanes of both.
    unsafe fn sum_both(v: Self::F, more: __m256) -> f32;
    /// Writes the first `n` floats (all if `n >= LANES`).
    unsafe fn store_first(p: *mut f32, n: usize, v: Self::F);
    /// `LANES` halves as floats.
    unsafe fn load_halves(p: *const u8) -> Self::F;
    /// `LANES` bfloat16 as floats.
    unsafe fn load_bf16(p: *const u8) -> Self::F;

    /// Of the eight scales of eight groups, those of the groups of vector `v`, over their lanes.
    unsafe fn spread_groups(scales: __m256, v: usize) -> Self::F;
    /// Of the eight scales of eight groups in the order of [`Simd::QUADS`], those of `LANES / 4` groups from `v` times as
    /// many on, each over four lanes.
    unsafe fn spread_quads(scales: __m256, v: usize) -> Self::F;
    /// `first`, with the second half of each group's lanes from `second`.
    unsafe fn second_halves(first: Self::F, second: Self::F) -> Self::F;
    /// Transposes `LANES` rows of `LANES` 32-bit words: word `i` of row `r` goes to word `r` of row
    /// `i`; rows are `src_stride` and `dst_stride` bytes apart.
    unsafe fn transpose(src: *const u8, src_stride: usize, dst: *mut u8, dst_stride: usize);

    /// The low four bits of each byte.
    unsafe fn low_nibbles(v: Self::I) -> Self::I;
    /// The high four bits of each byte.
    unsafe fn high_nibbles(v: Self::I) -> Self::I;
    /// Bytes below 16 through a table.
    unsafe fn look_up(table: [u8; 16], v: Self::I) -> Self::I;
    /// Every byte plus 128.
    unsafe fn flip(v: Self::I) -> Self::I;
    /// The four words at `offset` behind each of `LANES` pointers: vector `j` has word `j` of each.
    unsafe fn transpose_words(rows: *const *const u8, offset: usize) -> [Self::I; 4];

    /// The order in which the scales of eight groups are spread soonest by [`Simd::spread_quads`].
    const QUADS: [usize; 8];
    /// [`Simd::scales`] in the order of [`Simd::QUADS`].
    unsafe fn scales_for_quads<B: Groups>(row: *const u8, g: usize, n: usize) -> (__m256, __m256);
    /// 16 bytes at `p` and every `stride` bytes on, a vector of them, the last of them `last` strides on.
    unsafe fn load_quads(p: *const u8, stride: usize, last: usize) -> Self::I;

    /// The quants of a vector's worth of groups, from group `g` of a row on; past group `last` the
    /// contents do not matter, but are not read.
    unsafe fn groups<B: Groups>(row: *const u8, g: usize, last: usize) -> Self::I;
    /// [`Groups::scales`], by the instructions of the level.
    unsafe fn scales<B: Groups>(row: *const u8, g: usize, n: usize) -> (__m256, __m256);
    /// Vector `v` of a super-block's quants, in the order of [`Simd::order`].
    unsafe fn quants<B: Supers>(block: *const u8) -> [Self::I; 8];
    /// Which piece of 32 elements lies in half `i` of the vectors of [`Simd::quants`].
    fn order<B: Supers>(i: usize) -> usize;
    /// Of a super-block's 16-bit scales, those of vector `v`, over their 16-bit lanes.
    unsafe fn spread_supers<B: Supers>(scales: __m256i, v: usize) -> Self::I;
}

/// AVX2, FMA, F16C, and AVX-VNNI if `VNNI`: 256 bits.
#[derive(Clone, Copy)]
pub(super) struct Ymm<const VNNI: bool>;

/// AVX2, FMA, F16C.
pub(super) type Avx2 = Ymm<false>;

/// The same with AVX-VNNI.
pub(super) type Avx2Vnni = Ymm<true>;

/// AVX-512 F, BW, DQ, VL, VNNI: 512 bits.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

// SAFETY (of every block below): see the module's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    const LANES: usize = 16;
    const PANEL: usize = 2;
    const COLS: usize = 4;
    const WIDE_IS_SIGNED: bool = false;
    const SHORTS: bool = false;

    type I = __m512i;
    type F = __m512;

    #[inline(always)]
    unsafe fn zero() -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn splat(bits: u32) -> __m512i {
        unsafe { _mm512_set1_epi32(bits as i32) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn dot(acc: __m512i, quants: __m512i, x: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, quants, x) }
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: __m512i, quants: __m512i, x: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, quants, x) }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: __m512i, quants: __m512i, x: __m512i) -> __m512i {
        unsafe {
            let negative = _mm512_movepi8_mask(quants);
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            _mm512_dpbusd_epi32(acc, _mm512_abs_epi8(quants), x)
        }
    }
    #[inline(always)]
    unsafe fn dot_turned(acc: __m512i, quants: __m512i, x: __m512i, _: __m512i) -> __m512i {
        unsafe { Self::dot_signed(acc, quants, x) }
    }
    #[inline(always)]
    unsafe fn magnitudes(x: __m512i) -> __m512i {
        unsafe { _mm512_abs_epi8(x) }
    }
    #[inline(always)]
    unsafe fn widen_pairs(v: __m512i) -> [__m512i; 2] {
        unsafe {
            let first = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8);
            [first, _mm512_srai_epi16(v, 8)]
        }
    }
    #[inline(always)]
    unsafe fn multiply_pairs(quants: __m512i, x: __m512i) -> __m512i {
        unsafe { _mm512_maddubs_epi16(quants, x) }
    }
    #[inline(always)]
    unsafe fn add_shorts(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi16(a, b) }
    }
    #[inline(always)]
    unsafe fn add_short_pairs(acc: __m512i, shorts: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(acc, _mm512_madd_epi16(shorts, _mm512_set1_epi16(1))) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(v: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(v, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(v: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], v: __m512i) -> __m512i {
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v)
        }
    }
    #[inline(always)]
    unsafe fn flip(v: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(v, _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    unsafe fn transpose_words(rows: *const *const u8, offset: usize) -> [__m512i; 4] {
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
    unsafe fn dot_pairs(acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_dpwssd_epi32(acc, a, b) }
    }
    #[inline(always)]
    unsafe fn dot_scaled(acc: __m512i, quants: __m512i, x: __m512i, scales: __m512i) -> __m512i {
        unsafe { _mm512_dpwssd_epi32(acc, _mm512_maddubs_epi16(quants, x), scales) }
    }

    #[inline(always)]
    unsafe fn dot_scaled_wide(
        acc: __m512i,
        quants: __m512i,
        x: __m512i,
        scales: __m512i,
    ) -> __m512i {
        // The sign of a quant moves to `x`, so that pairs of products fit 16 bits.
        unsafe {
            let signed = _mm512_xor_si512(quants, _mm512_set1_epi8(-128));
            let negative = _mm512_movepi8_mask(signed);
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            Self::dot_scaled(acc, _mm512_abs_epi8(signed), x, scales)
        }
    }

    #[inline(always)]
    unsafe fn widen(v: __m256i) -> __m512i {
        unsafe { _mm512_zextsi256_si512(v) }
    }
    #[inline(always)]
    unsafe fn halves(v: __m512i) -> [__m256i; 2] {
        unsafe { [_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)] }
    }

    #[inline(always)]
    unsafe fn to_floats(v: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn larger_magnitudes(acc: __m512i, v: __m512) -> __m512i {
        unsafe { _mm512_max_epi32(acc, _mm512_castps_si512(_mm512_abs_ps(v))) }
    }
    #[inline(always)]
    unsafe fn largest(v: __m512i) -> u32 {
        unsafe { _mm512_reduce_max_epi32(v) as u32 }
    }
    #[inline(always)]
    unsafe fn to_shorts(a: __m512, b: __m512) -> __m512i {
        unsafe { _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b)) }
    }
    #[inline(always)]
    unsafe fn zero_floats() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load_floats(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn splat_float(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add_floats(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn neg_mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        unsafe {
            let high = _mm512_extractf32x8_ps(v, 1);
            Avx2::sum(_mm256_add_ps(_mm512_castps512_ps256(v), high))
        }
    }
    #[inline(always)]
    unsafe fn sum_both(v: __m512, more: __m256) -> f32 {
        unsafe {
            let high = _mm512_extractf32x8_ps(v, 1);
            Avx2::sum_both(_mm256_add_ps(_mm512_castps512_ps256(v), high), more)
        }
    }
    #[inline(always)]
    unsafe fn store_first(p: *mut f32, n: usize, v: __m512) {
        unsafe { _mm512_mask_storeu_ps(p, first_lanes(n), v) }
    }
    #[inline(always)]
    unsafe fn load_halves(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))
        }
    }

    #[inline(always)]
    unsafe fn spread_groups(scales: __m256, v: usize) -> __m512 {
        const fn lanes(v: i32) -> [i32; 16] {
            let (a, b) = (2 * v, 2 * v + 1);
            [a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b]
        }
        const LANES: [[i32; 16]; 4] = [lanes(0), lanes(1), lanes(2), lanes(3)];
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
        unsafe {
            let lanes = _mm512_loadu_si512(LANES[v].as_ptr().cast());
            _mm512_permutexvar_ps(lanes, _mm512_castps256_ps512(scales))
        }
    }

    const QUADS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

    #[inline(always)]
    unsafe fn scales_for_quads<B: Groups>(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        unsafe { Self::scales::<B>(row, g, n) }
    }

    #[inline(always)]
    unsafe fn load_quads(p: *const u8, stride: usize, last: usize) -> __m512i {
        unsafe {
            let load = |i: usize| _mm_loadu_si128(p.add(stride * i.min(last)).cast());
            let v = _mm512_castsi128_si512(load(0));
            let v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load(1));
            let v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load(2));
            _mm512_mask_broadcast_i32x4(v, 0xf000, load(3))
        }
    }

    #[inline(always)]
    unsafe fn second_halves(first: __m512, second: __m512) -> __m512 {
        unsafe { _mm512_mask_mov_ps(first, 0xf0f0, second) }
    }

    #[inline(always)]
    unsafe fn transpose(src: *const u8, src_stride: usize, dst: *mut u8, dst_stride: usize) {
        unsafe {
            // Words of two rows side by side, then of four: a vector holds, in each 128-bit lane `l`,
            // word `4 l + j` of rows `4 i .. 4 i + 4`.
            let mut quads = [_mm512_setzero_si512(); 16];
            for i in 0..4 {
                let row = src.add(4 * i * src_stride);
                let (a, b) = (Self::load(row), Self::load(row.add(src_stride)));
                let row = row.add(2 * src_stride);
                let (c, d) = (Self::load(row), Self::load(row.add(src_stride)));
                let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
                let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
                quads[4 * i] = _mm512_unpacklo_epi64(ab_low, cd_low);
                quads[4 * i + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
                quads[4 * i + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
                quads[4 * i + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
            }
            // What is left is a 4 x 4 transposition of 128-bit lanes for each `j`.
            for j in 0..4 {
                let (a, b, c, d) = (quads[j], quads[4 + j], quads[8 + j], quads[12 + j]);
                let even_low = _mm512_shuffle_i32x4(a, b, 0b10_00_10_00);
                let odd_low = _mm512_shuffle_i32x4(a, b, 0b11_01_11_01);
                let even_high = _mm512_shuffle_i32x4(c, d, 0b10_00_10_00);
                let odd_high = _mm512_shuffle_i32x4(c, d, 0b11_01_11_01);
                let out = dst.add(j * dst_stride);
                let four = 4 * dst_stride;
                Self::store(
                    out,
                    _mm512_shuffle_i32x4(even_low, even_high, 0b10_00_10_00),
                );
                Self::store(
                    out.add(four),
                    _mm512_shuffle_i32x4(odd_low, odd_high, 0b10_00_10_00),
                );
                let out = out.add(2 * four);
                Self::store(
                    out,
                    _mm512_shuffle_i32x4(even_low, even_high, 0b11_01_11_01),
                );
                Self::store(
                    out.add(four),
                    _mm512_shuffle_i32x4(odd_low, odd_high, 0b11_01_11_01),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<B: Groups>(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        unsafe {
            match n {
                8 => B::eight_scales(row, g),
                _ => B::scales(row, g, n),
            }
        }
    }
    #[inline(always)]
    unsafe fn groups<B: Groups>(row: *const u8, g: usize, last: usize) -> __m512i {
        unsafe { B::pair(row, g, (g + 1).min(last)) }
    }
    #[inline(always)]
    unsafe fn quants<B: Supers>(block: *const u8) -> [__m512i; 8] {
        unsafe {
            let [a, b, c, d] = B::quants_512(block);
            let zero = _mm512_setzero_si512();
            [a, b, c, d, zero, zero, zero, zero]
        }
    }
    #[inline(always)]
    fn order<B: Supers>(i: usize) -> usize {
        B::ORDER_512[i]
    }
    #[inline(always)]
    unsafe fn spread_supers<B: Supers>(scales: __m256i, v: usize) -> __m512i {
        unsafe {
            let lanes = _mm512_loadu_si512(B::SPREAD_512[v].as_ptr().cast());
            _mm512_permutexvar_epi16(lanes, _mm512_castsi256_si512(scales))
        }
    }
}

/// A mask of the first `n` of 16 lanes.
#[inline(always)]
fn first_lanes(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}

// SAFETY (of every block below): see the module's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<const VNNI: bool> Simd for Ymm<VNNI> {
    const LANES: usize = 8;
    const PANEL: usize = if VNNI { 2 } else { 1 };
    const COLS: usize = if VNNI { 6 } else { 4 };
    const WIDE_IS_SIGNED: bool = !VNNI;
    const SHORTS: bool = !VNNI;

    type I = __m256i;
    type F = __m256;

    #[inline(always)]
    unsafe fn zero() -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut u8, v: __m256i) {
        unsafe { _mm256_storeu_si256(p.cast(), v) }
    }
    #[inline(always)]
    unsafe fn splat(bits: u32) -> __m256i {
        unsafe { _mm256_set1_epi32(bits as i32) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn dot(acc: __m256i, quants: __m256i, x: __m256i) -> __m256i {
        // Without the instruction: a pair of products is at most 2 * 127 * 127, which 16 bits hold.
        unsafe {
            if VNNI {
                return _mm256_dpbusd_avx_epi32(acc, quants, x);
            }
            let pairs = _mm256_maddubs_epi16(quants, x);
            Self::add_short_pairs(acc, pairs)
        }
    }
    #[inline(always)]
    unsafe fn dot_wide(acc: __m256i, quants: __m256i, x: __m256i) -> __m256i {
        // Without the instruction: the magnitude of a quant less 128 is at most 128; the sign moves to `x`.
        unsafe {
            if VNNI {
                return _mm256_dpbusd_avx_epi32(acc, quants, x);
            }
            let signed = _mm256_xor_si256(quants, _mm256_set1_epi8(-128));
            Self::dot_signed(acc, signed, x)
        }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: __m256i, quants: __m256i, x: __m256i) -> __m256i {
        unsafe { Self::dot(acc, _mm256_abs_epi8(quants), _mm256_sign_epi8(x, quants)) }
    }
    #[inline(always)]
    unsafe fn dot_turned(
        acc: __m256i,
        quants: __m256i,
        x: __m256i,
        magnitudes: __m256i,
    ) -> __m256i {
        unsafe { Self::dot(acc, magnitudes, _mm256_sign_epi8(quants, x)) }
    }
    #[inline(always)]
    unsafe fn magnitudes(x: __m256i) -> __m256i {
        unsafe { _mm256_abs_epi8(x) }
    }
    #[inline(always)]
    unsafe fn widen_pairs(v: __m256i) -> [__m256i; 2] {
        unsafe {
            let first = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
            [first, _mm256_srai_epi16(v, 8)]
        }
    }
    #[inline(always)]
    unsafe fn multiply_pairs(quants: __m256i, x: __m256i) -> __m256i {
        unsafe { _mm256_maddubs_epi16(quants, x) }
    }
    #[inline(always)]
    unsafe fn add_shorts(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi16(a, b) }
    }
    #[inline(always)]
    unsafe fn add_short_pairs(acc: __m256i, shorts: __m256i) -> __m256i {
        unsafe { Self::dot_pairs(acc, shorts, _mm256_set1_epi16(1)) }
    }
    #[inline(always)]
    unsafe fn low_nibbles(v: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(v, _mm256_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn high_nibbles(v: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], v: __m256i) -> __m256i {
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v)
        }
    }
    #[inline(always)]
    unsafe fn flip(v: __m256i) -> __m256i {
        unsafe { _mm256_xor_si256(v, _mm256_set1_epi8(-128)) }
    }
    #[inline(always)]
    unsafe fn transpose_words(rows: *const *const u8, offset: usize) -> [__m256i; 4] {
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
        unsafe {
            match VNNI {
                true => _mm256_dpwssd_avx_epi32(acc, a, b),
                false => _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)),
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_scaled(acc: __m256i, quants: __m256i, x: __m256i, scales: __m256i) -> __m256i {
        unsafe { Self::dot_pairs(acc, _mm256_maddubs_epi16(quants, x), scales) }
    }

    #[inline(always)]
    unsafe fn dot_scaled_wide(
        acc: __m256i,
        quants: __m256i,
        x: __m256i,
        scales: __m256i,
    ) -> __m256i {
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
    #[inline(always)]
    unsafe fn halves(v: __m256i) -> [__m256i; 2] {
        unsafe { [v, _mm256_setzero_si256()] }
    }

    #[inline(always)]
    unsafe fn to_floats(v: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(v) }
    }
    #[inline(always)]
    unsafe fn larger_magnitudes(acc: __m256i, v: __m256) -> __m256i {
        unsafe {
            let magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0), v);
            _mm256_max_epi32(acc, _mm256_castps_si256(magnitude))
        }
    }
    #[inline(always)]
    unsafe fn largest(v: __m256i) -> u32 {
        unsafe {
            let v = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
            let v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0b00_00_11_10));
            let v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0b00_00_00_01));
            _mm_cvtsi128_si32(v) as u32
        }
    }
    #[inline(always)]
    unsafe fn to_shorts(a: __m256, b: __m256) -> __m256i {
        unsafe { _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)) }
    }
    #[inline(always)]
    unsafe fn zero_floats() -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn load_floats(p: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn splat_float(x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add_floats(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn neg_mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum_both(v: __m256, more: __m256) -> f32 {
        unsafe { Self::sum(_mm256_add_ps(v, more)) }
    }
    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        unsafe {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }
    #[inline(always)]
    unsafe fn store_first(p: *mut f32, n: usize, v: __m256) {
        unsafe { _mm256_maskstore_ps(p, first_lanes_mask(n), v) }
    }
    #[inline(always)]
    unsafe fn load_halves(p: *const u8) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m256 {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))
        }
    }

    #[inline(always)]
    unsafe fn spread_groups(scales: __m256, v: usize) -> __m256 {
        unsafe { _mm256_permutevar8x32_ps(scales, _mm256_set1_epi32(v as i32)) }
    }

    #[inline(always)]
    unsafe fn spread_quads(scales: __m256, v: usize) -> __m256 {
        unsafe {
            match v {
                0 => _mm256_permute_ps(scales, 0b00_00_00_00),
                1 => _mm256_permute_ps(scales, 0b01_01_01_01),
                2 => _mm256_permute_ps(scales, 0b10_10_10_10),
                _ => _mm256_permute_ps(scales, 0b11_11_11_11),
            }
        }
    }

    // The groups of each 128-bit half of a vector side by side.
    const QUADS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

    #[inline(always)]
    unsafe fn scales_for_quads<B: Groups>(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
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
    unsafe fn load_quads(p: *const u8, stride: usize, last: usize) -> __m256i {
        unsafe {
            let load = |i: usize| _mm_loadu_si128(p.add(stride * i.min(last)).cast());
            _mm256_set_m128i(load(1), load(0))
        }
    }

    #[inline(always)]
    unsafe fn second_halves(first: __m256, second: __m256) -> __m256 {
        unsafe { _mm256_blend_ps(first, second, 0xf0) }
    }

    #[inline(always)]
    unsafe fn transpose(src: *const u8, src_stride: usize, dst: *mut u8, dst_stride: usize) {
        unsafe {
            let mut quads = [_mm256_setzero_si256(); 8];
            for i in 0..2 {
                let row = src.add(4 * i * src_stride);
                let (a, b) = (Self::load(row), Self::load(row.add(src_stride)));
                let row = row.add(2 * src_stride);
                let (c, d) = (Self::load(row), Self::load(row.add(src_stride)));
                let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                quads[4 * i] = _mm256_unpacklo_epi64(ab_low, cd_low);
                quads[4 * i + 1] = _mm256_unpackhi_epi64(ab_low, cd_low);
                quads[4 * i + 2] = _mm256_unpacklo_epi64(ab_high, cd_high);
                quads[4 * i + 3] = _mm256_unpackhi_epi64(ab_high, cd_high);
            }
            for j in 0..4 {
                let (low, high) = (quads[j], quads[4 + j]);
                let out = dst.add(j * dst_stride);
                Self::store(out, _mm256_permute2x128_si256(low, high, 0x20));
                Self::store(
                    out.add(4 * dst_stride),
                    _mm256_permute2x128_si256(low, high, 0x31),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<B: Groups>(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        unsafe { B::scales(row, g, n) }
    }
    #[inline(always)]
    unsafe fn groups<B: Groups>(row: *const u8, g: usize, _: usize) -> __m256i {
        unsafe { B::single(row, g) }
    }
    #[inline(always)]
    unsafe fn quants<B: Supers>(block: *const u8) -> [__m256i; 8] {
        unsafe { B::quants_256(block) }
    }
    #[inline(always)]
    fn order<B: Supers>(i: usize) -> usize {
        i
    }
    #[inline(always)]
    unsafe fn spread_supers<B: Supers>(scales: __m256i, v: usize) -> __m256i {
        // Vector `v` is sub-block `v` of 32 elements, or sub-blocks `2 v` and `2 v + 1` of 16.
        unsafe {
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

/// A mask of the first `n` of 8 lanes.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn first_lanes_mask(n: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), lanes)
    }
}
