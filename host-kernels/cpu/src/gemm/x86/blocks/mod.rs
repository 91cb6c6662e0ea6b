//! Decoding of blocks to vectors of unsigned quants.
//!
//! # Safety
//! As in [`super::int_simd`]: functions on `__m256i` need AVX2 and F16C, those on `__m512i`
//! AVX-512. `row` and `block` point to whole blocks of the format, at least up to the requested
//! group.

mod block32;
mod k_quants;
mod scales;

use std::arch::x86_64::*;

use super::int_simd::IntSimd;
use crate::formats::{Block32Format, IQ4_VALUES, SuperBlockFormat};

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
pub(super) trait Block32Kernel: Block32Format {
    /// Whether quants can be larger than 127.
    const WIDE: bool = Self::OFFSET > 64;

    /// The largest quant.
    const MAX_QUANT: usize;

    /// Whether a quant minus 128 is never -128, so that it can be negated.
    const CAN_NEGATE: bool = false;

    /// How the codes are stored that [`Block32Kernel::decode`] converts to quants.
    const CODES: Codes = Codes::Other;

    /// Converts codes to quants.
    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        codes
    }

    /// The quants of group `g` of a row.
    unsafe fn single(row: *const u8, g: usize) -> __m256i;

    /// The quants of groups `g` and `h` of a row.
    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: the caller guarantees the blocks of groups `g` and `h` in the row and the
        // instructions.
        unsafe { join(Self::single(row, g), Self::single(row, h)) }
    }

    /// The scales and minimums of the `n <= 8` groups from `g` on; 0 in the other lanes. For a
    /// format with scales of half groups, the second vector has the scales of the second halves.
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256);

    /// As `scales`, for eight groups, with AVX-512.
    #[inline(always)]
    unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
        // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row and the
        // instructions.
        unsafe { Self::scales(row, g, 8) }
    }

    /// As `scales`, for eight groups in another order, for formats of [`Codes::Nibbles`] with AVX2.
    #[inline(always)]
    unsafe fn scales_in_order(row: *const u8, g: usize, order: [usize; 8]) -> (__m256, __m256) {
        // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row and the
        // instructions. `lanes` is one vector.
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
pub(super) trait SuperBlockKernel: SuperBlockFormat {
    /// Whether quants can be larger than 127.
    const WIDE: bool = Self::OFFSET > 64;

    /// The largest quant.
    const MAX_QUANT: usize;

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

/// Two halves as one vector.
#[inline(always)]
unsafe fn join(low: __m256i, high: __m256i) -> __m512i {
    // SAFETY: the operands are registers. The caller guarantees the instructions.
    unsafe { _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1) }
}

/// The value of an F16.
#[inline(always)]
pub(super) unsafe fn half(bits: u16) -> f32 {
    // SAFETY: the operands are registers. The caller guarantees the instructions.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
}

/// The low nibbles of 16 bytes, then the high ones.
#[inline(always)]
unsafe fn nibbles(qs: *const u8) -> __m256i {
    // SAFETY: the caller guarantees 16 bytes at `qs` and the instructions.
    unsafe {
        let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(qs.cast()));
        let shifted = _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4));
        _mm256_and_si256(shifted, _mm256_set1_epi8(15))
    }
}

/// [`nibbles`] of two groups.
#[inline(always)]
unsafe fn nibble_pair(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: the caller guarantees 16 bytes at `a` and at `b`, and the instructions.
    unsafe {
        let twice = join(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(a.cast())),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(b.cast())),
        );
        let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
        _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), _mm512_set1_epi8(15))
    }
}

/// The entries of a table at the nibbles.
#[inline(always)]
unsafe fn look_up(table: [u8; 16], nibbles: __m256i) -> __m256i {
    // SAFETY: `table` has the 16 bytes that are loaded. The caller guarantees the instructions.
    unsafe {
        let table = _mm_loadu_si128(table.as_ptr().cast());
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles)
    }
}

/// [`look_up`] of two groups.
#[inline(always)]
unsafe fn look_up_pair(table: [u8; 16], nibbles: __m512i) -> __m512i {
    // SAFETY: `table` has the 16 bytes that are loaded. The caller guarantees the instructions.
    unsafe {
        let table = _mm_loadu_si128(table.as_ptr().cast());
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles)
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
#[inline(always)]
unsafe fn bits(p: *const u8) -> u32 {
    // SAFETY: the caller guarantees four bytes at `p`. The read is unaligned.
    unsafe { p.cast::<u32>().read_unaligned() }
}
