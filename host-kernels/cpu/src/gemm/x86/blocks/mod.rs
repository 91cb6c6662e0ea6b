//! Decoding of blocks to vectors of unsigned quants.
//!
//! # Safety
//! A function with a `__m512i` in its signature, and [`Block32Kernel::eight_scales`], require the
//! instructions of [`Level::Avx512`](crate::isa::Level::Avx512). The others require those of
//! [`Level::Avx2`](crate::isa::Level::Avx2). Generic functions require those of their `S`.
//!
//! No pointer needs alignment. Each function documents the memory that it reads; the traits do so
//! for their implementations.

mod block32;
mod k_quants;
mod scales;

use std::arch::x86_64::*;

use super::int_simd::IntSimd;
use crate::formats::{Block32Format, IQ4_VALUES, SuperBlockFormat};
use crate::simd::register_fns;

/// How the quants of a group are stored in a block of one group.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Codes {
    /// 16 bytes at this offset: the low nibbles, then the high nibbles.
    Nibbles(usize),
    /// 32 bytes at this offset.
    Bytes(usize),
    /// In another way.
    Other,
}

/// A format with scales per 32 elements, decoded to vectors.
///
/// # Safety
/// `row` points to blocks of the format, without gaps. All groups that a function is asked for are
/// readable, each with its whole block: block `g * 32 / ELEMENTS` for group `g`. The instructions
/// are those of the module.
pub(super) trait Block32Kernel: Block32Format {
    /// Whether quants can be larger than 127.
    const WIDE: bool = Self::OFFSET > 64;

    /// The largest quant.
    const MAX_QUANT: usize;

    /// Whether a quant minus 128 is never -128, so that it can be negated.
    const CAN_NEGATE: bool = false;

    /// The lanes of a level from which on few columns are multiplied in the order of sums of a
    /// panel, eight rows at a time, if the level does so ([`IntSimd::ONE_ORDER`]): where a single
    /// column is then about as fast as row by row. Then a block has one group and one scale.
    const ONE_ORDER_LANES: usize = usize::MAX;

    /// Whether a block of one group begins with the F16 of its scale, then that of its minimum, if
    /// the format has one.
    const SCALE_FIRST: bool = false;

    /// How the codes are stored that [`Block32Kernel::decode`] converts to quants.
    const CODES: Codes = Codes::Other;

    /// Converts codes to quants.
    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        codes
    }

    /// The quants of group `g` of a row.
    unsafe fn single(row: *const u8, g: usize) -> __m256i;

    /// The quants of group `g` of a row, minus the offset, for offsets of up to 128.
    #[inline(always)]
    unsafe fn signed(row: *const u8, g: usize) -> __m256i {
        // SAFETY: group `g` is readable for `single` as for this function. The subtraction is on
        // registers and needs AVX2, which the caller guarantees.
        unsafe {
            let offset = _mm256_set1_epi8(Self::OFFSET as i8);
            _mm256_sub_epi8(Self::single(row, g), offset)
        }
    }

    /// The quants of groups `g` and `h` of a row.
    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: groups `g` and `h` are readable for both calls as for this one. Joining takes
        // registers, and needs AVX-512 F, which the caller guarantees for the result.
        unsafe { join(Self::single(row, g), Self::single(row, h)) }
    }

    /// The scales and minimums of the `n <= 8` groups from `g` on; 0 in the other lanes. For a
    /// format with scales of half groups, the second vector has the scales of the second halves.
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256);

    /// As `scales`, for eight groups, with AVX-512.
    #[inline(always)]
    unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
        // SAFETY: `scales` reads the same eight groups, `g .. g + 8`, and requires only AVX2, which
        // the AVX-512 of the caller includes.
        unsafe { Self::scales(row, g, 8) }
    }

    /// As `scales`, for eight groups in another order, for formats of [`Codes::Nibbles`] with AVX2.
    /// `order` is a permutation of 0 to 7.
    #[inline(always)]
    unsafe fn scales_in_order(row: *const u8, g: usize, order: [usize; 8]) -> (__m256, __m256) {
        // SAFETY: the load reads the eight `i32` of `lanes`, a variable. `scales` reads groups `g
        // .. g + 8`, which the caller guarantees with any `order`. All need AVX2, which the caller
        // guarantees.
        unsafe {
            let lanes = order.map(|lane| lane as i32);
            let lanes = _mm256_loadu_si256(lanes.as_ptr().cast());
            let (d, m) = Self::scales(row, g, 8);
            (
                _mm256_permutevar8x32_ps(d, lanes),
                _mm256_permutevar8x32_ps(m, lanes),
            )
        }
    }
}

/// A super-block format, decoded to vectors.
///
/// # Safety
/// `block` is readable for one block of the format, `size_of::<Self>()` bytes. The instructions are
/// those of the module.
pub(super) trait SuperBlockKernel: SuperBlockFormat {
    /// Whether quants can be larger than 127.
    const WIDE: bool = Self::OFFSET > 64;

    /// The largest quant.
    const MAX_QUANT: usize;

    /// As [`Block32Kernel::ONE_ORDER_LANES`].
    const ONE_ORDER_LANES: usize = usize::MAX;

    /// The index of the 32 elements in each half of [`SuperBlockKernel::quants_512`].
    const ORDER_512: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

    /// For each 16-bit lane of vector `v`, the index of its scale.
    const SPREAD_512: [[i16; 32]; 4] = {
        let mut spread = [[0; 32]; 4];
        let mut i = 0;
        while i < 128 {
            // 16-bit lane `i` has elements `2 i` and `2 i + 1` of the reordered block.
            let element = Self::ORDER_512[i / 16] * 32 + 2 * (i % 16);
            spread[i / 32][i % 32] = (element / Self::SUB) as i16;
            i += 1;
        }
        spread
    };

    /// The quants in element order.
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8];

    /// The quants; the halves are in the order of `ORDER_512`.
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4];

    /// The scales and the minimums of the sub-blocks, 16 bits each.
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i);

    /// The scale of the scales and the scale of the minimums.
    unsafe fn d(block: *const u8) -> (f32, f32);
}

register_fns! {
    avx512;
    /// Two halves as one vector.
    unsafe fn join(low: __m256i, high: __m256i) -> __m512i {
        _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)
    }
}

/// The value of the F16 at `p`.
///
/// # Safety
/// `p` is readable for two bytes, and the processor has F16C. No alignment is needed.
#[inline(always)]
pub(super) unsafe fn half(p: *const u8) -> f32 {
    // SAFETY: one unaligned read of the two bytes at `p` that the caller guarantees. The conversion
    // is on registers, and needs F16C, which the caller guarantees.
    unsafe {
        let bits = p.cast::<u16>().read_unaligned();
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }
}

/// The low nibbles of 16 bytes, then the high ones.
///
/// # Safety
/// `qs` is readable for 16 bytes.
#[inline(always)]
unsafe fn nibbles(qs: *const u8) -> __m256i {
    // SAFETY: one load of the 16 bytes at `qs` that the caller guarantees. The rest is on
    // registers, and needs AVX2, which the caller guarantees.
    unsafe {
        let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(qs.cast()));
        let shifted = _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4));
        _mm256_and_si256(shifted, _mm256_set1_epi8(15))
    }
}

/// [`nibbles`] of two groups.
///
/// # Safety
/// `a` and `b` are readable for 16 bytes each.
#[inline(always)]
unsafe fn nibble_pair(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: two loads, of the 16 bytes at `a` and of the 16 bytes at `b`, which the caller
    // guarantees. The rest is on registers, and needs AVX-512 F and BW, which the caller
    // guarantees.
    unsafe {
        let twice = join(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(a.cast())),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(b.cast())),
        );
        let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
        _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), _mm512_set1_epi8(15))
    }
}

/// A table of `values + offset`.
const fn unsigned(values: &[i8; 16], offset: i32) -> [u8; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (values[i] as i32 + offset) as u8;
        i += 1;
    }
    table
}

const IQ4_TABLE: [u8; 16] = unsigned(&IQ4_VALUES, 128);

/// A 32-bit word.
///
/// # Safety
/// `p` is readable for four bytes.
#[inline(always)]
unsafe fn bits(p: *const u8) -> u32 {
    // SAFETY: one unaligned read of the four bytes at `p` that the caller guarantees. Every bit
    // pattern is a `u32`.
    unsafe { p.cast::<u32>().read_unaligned() }
}
