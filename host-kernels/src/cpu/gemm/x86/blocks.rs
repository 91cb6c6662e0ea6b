//! Blocks as vectors of unsigned quants.
//!
//! # Safety
//! As in [`super::simd`]: functions on `__m256i` need AVX2 and F16C, those on `__m512i` AVX-512. `row`
//! and `block` point to whole blocks of the format, at least up to the group asked for.

use std::arch::x86_64::*;

use super::simd::Simd;
use crate::cpu::formats::{
    BlockIq4Nl, BlockIq4Xs, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ2K, BlockQ3K,
    BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
    BlockTq2_0, FP4_VALUES, GroupBlock, IQ4_VALUES, NVFP4_SCALES, SuperBlock,
};

/// How the quants of a group lie in a block of one group.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Codes {
    /// 16 bytes from here on: low nibbles, then high ones.
    Nibbles(usize),
    /// 32 bytes from here on.
    Bytes(usize),
    /// Some other way.
    Other,
}

/// A group format as vectors.
pub(super) trait Groups: GroupBlock {
    /// Whether quants go beyond 127.
    const WIDE: bool = Self::OFFSET > 64;

    /// The largest quant.
    const MOST: usize;

    /// Where the codes are that [`Groups::decode`] makes quants of.
    const CODES: Codes = Codes::Other;

    /// The quants that codes stand for.
    #[inline(always)]
    unsafe fn decode<S: Simd>(codes: S::I) -> S::I {
        codes
    }

    /// The quants of group `g` of a row.
    unsafe fn single(row: *const u8, g: usize) -> __m256i;

    /// The quants of groups `g` and `h` of a row.
    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: the module's contract.
        unsafe { join(Self::single(row, g), Self::single(row, h)) }
    }

    /// The scales and minimums of the `n <= 8` groups from `g` on, the rest 0. A format with scales of
    /// half groups has those of the second halves in place of minimums.
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256);

    /// The same of eight groups, with AVX-512.
    #[inline(always)]
    unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
        // SAFETY: the module's contract.
        unsafe { Self::scales(row, g, 8) }
    }
}

/// A super-block format as vectors.
pub(super) trait Supers: SuperBlock {
    /// Whether quants go beyond 127.
    const WIDE: bool = Self::OFFSET > 64;

    /// The largest quant.
    const MOST: usize;

    /// The piece of 32 elements in each half of [`Supers::quants_512`].
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

    /// The quants, halves in the order of `ORDER_512`.
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4];

    /// The scales and the minimums of the sub-blocks, 16 bits each.
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i);

    /// The scale of the scales and the scale of the minimums.
    unsafe fn d(block: *const u8) -> (f32, f32);
}

/// Two halves as one vector.
#[inline(always)]
unsafe fn join(low: __m256i, high: __m256i) -> __m512i {
    // SAFETY: the module's contract.
    unsafe { _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1) }
}

/// The value of one half.
#[inline(always)]
pub(super) unsafe fn half(bits: u16) -> f32 {
    // SAFETY: the module's contract.
    unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
}

/// The halves at `p`, `p + stride`, ...: `n` of eight, the rest 0.
#[inline(always)]
unsafe fn halves(p: *const u8, stride: usize, n: usize) -> __m256 {
    // SAFETY: the module's contract, for the `n` halves.
    unsafe {
        let mut h = [0i16; 8];
        for (i, h) in h.iter_mut().enumerate().take(n) {
            *h = p.add(i * stride).cast::<i16>().read_unaligned();
        }
        // Not through memory: eight narrow stores followed by a wide load would stall.
        let h = _mm_setr_epi16(h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]);
        _mm256_cvtph_ps(h)
    }
}

/// Eight of the 64 words at `p`.
#[inline(always)]
unsafe fn pick_words(p: *const u8, which: [i16; 8]) -> __m128i {
    // SAFETY: the module's contract, for 128 bytes.
    unsafe {
        let (low, high) = (
            _mm512_loadu_si512(p.cast()),
            _mm512_loadu_si512(p.add(64).cast()),
        );
        let which = _mm512_zextsi128_si512(_mm_loadu_si128(which.as_ptr().cast()));
        _mm512_castsi512_si128(_mm512_permutex2var_epi16(low, which, high))
    }
}

/// The halves that eight blocks of 18 bytes begin with.
#[inline(always)]
unsafe fn halves_of_18(blocks: *const u8) -> __m256 {
    // SAFETY: the module's contract; the blocks have 144 bytes.
    unsafe { _mm256_cvtph_ps(pick_words(blocks, [0, 9, 18, 27, 36, 45, 54, 63])) }
}

/// The low nibbles of 16 bytes, then the high ones.
#[inline(always)]
unsafe fn nibbles(qs: *const u8) -> __m256i {
    // SAFETY: the module's contract.
    unsafe {
        let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(qs.cast()));
        let shifted = _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4));
        _mm256_and_si256(shifted, _mm256_set1_epi8(15))
    }
}

/// [`nibbles`] at two places.
#[inline(always)]
unsafe fn nibble_pair(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: the module's contract.
    unsafe {
        let twice = join(
            _mm256_broadcastsi128_si256(_mm_loadu_si128(a.cast())),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(b.cast())),
        );
        let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
        _mm512_and_si512(_mm512_srlv_epi64(twice, shifts), _mm512_set1_epi8(15))
    }
}

/// `(a & a_mask) | (b & b_mask)`
#[inline(always)]
unsafe fn merge(a: __m512i, a_mask: __m512i, b: __m512i, b_mask: __m512i) -> __m512i {
    // SAFETY: the module's contract.
    unsafe { _mm512_or_si512(_mm512_and_si512(a, a_mask), _mm512_and_si512(b, b_mask)) }
}

/// 16 in each byte whose bit is set.
#[inline(always)]
unsafe fn fifth_bits(qh: u32) -> __m256i {
    // SAFETY: the module's contract.
    unsafe {
        let byte_of = _mm256_setr_epi64x(
            0,
            0x0101_0101_0101_0101,
            0x0202_0202_0202_0202,
            0x0303_0303_0303_0303,
        );
        let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(qh as i32), byte_of);
        let bit_of = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

/// Nibbles through a table of bytes.
#[inline(always)]
unsafe fn look_up(table: [u8; 16], nibbles: __m256i) -> __m256i {
    // SAFETY: the module's contract.
    unsafe {
        let table = _mm_loadu_si128(table.as_ptr().cast());
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles)
    }
}

/// [`look_up`] of two groups.
#[inline(always)]
unsafe fn look_up_pair(table: [u8; 16], nibbles: __m512i) -> __m512i {
    // SAFETY: the module's contract.
    unsafe {
        let table = _mm_loadu_si128(table.as_ptr().cast());
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles)
    }
}

/// `values + offset`, to look nibbles up in.
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
const IQ4_SIGNED_TABLE: [u8; 16] = unsigned(&IQ4_VALUES, 0);
const FP4_TABLE: [u8; 16] = unsigned(&FP4_VALUES, 12);

/// A 32-bit field of bits.
#[inline(always)]
unsafe fn bits(p: *const u8) -> u32 {
    // SAFETY: the module's contract.
    unsafe { p.cast::<u32>().read_unaligned() }
}

macro_rules! nibble_groups {
    ($($block:ty, $bytes:literal: d at 0, m at $m:expr, qh at $qh:expr, qs at $qs:literal;)*) => {
        $(
            // SAFETY (of the blocks below): the module's contract; the offsets are those of the fields.
            impl Groups for $block {
                const MOST: usize = match $qh {
                    Some(_) => 31,
                    None => 15,
                };
                const CODES: Codes = match $qh {
                    Some(_) => Codes::Other,
                    None => Codes::Nibbles($qs),
                };

                #[inline(always)]
                unsafe fn single(row: *const u8, g: usize) -> __m256i {
                    // SAFETY: as above.
                    unsafe {
                        let block = row.add(g * $bytes);
                        let q = nibbles(block.add($qs));
                        match $qh {
                            Some(qh) => _mm256_or_si256(q, fifth_bits(bits(block.add(qh)))),
                            None => q,
                        }
                    }
                }

                #[inline(always)]
                unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
                    // SAFETY: as above.
                    unsafe {
                        let (a, b) = (row.add(g * $bytes), row.add(h * $bytes));
                        let q = nibble_pair(a.add($qs), b.add($qs));
                        match $qh {
                            Some(qh) => {
                                let high = u64::from(bits(b.add(qh))) << 32;
                                let set = high | u64::from(bits(a.add(qh)));
                                _mm512_mask_add_epi8(q, set, q, _mm512_set1_epi8(16))
                            }
                            None => q,
                        }
                    }
                }

                #[inline(always)]
                unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
                    // SAFETY: as above.
                    unsafe {
                        let block = row.add(g * $bytes);
                        let d = halves(block, $bytes, n);
                        match $m {
                            Some(m) => (d, halves(block.add(m), $bytes, n)),
                            None => (d, _mm256_setzero_ps()),
                        }
                    }
                }

                #[inline(always)]
                unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
                    // SAFETY: as above.
                    unsafe {
                        match $bytes {
                            18 => (halves_of_18(row.add(g * $bytes)), _mm256_setzero_ps()),
                            _ => Self::scales(row, g, 8),
                        }
                    }
                }
            }
            const _: () = assert!(size_of::<$block>() == $bytes);
        )*
    };
}

nibble_groups! {
    BlockQ4_0, 18: d at 0, m at None::<usize>, qh at None::<usize>, qs at 2;
    BlockQ4_1, 20: d at 0, m at Some(2), qh at None::<usize>, qs at 4;
    BlockQ5_0, 22: d at 0, m at None::<usize>, qh at Some(2), qs at 6;
    BlockQ5_1, 24: d at 0, m at Some(2), qh at Some(4), qs at 8;
}

impl Groups for BlockQ8_0 {
    const MOST: usize = 255;
    const CODES: Codes = Codes::Bytes(2);

    #[inline(always)]
    unsafe fn decode<S: Simd>(codes: S::I) -> S::I {
        // SAFETY: the module's contract.
        unsafe { S::flip(codes) }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the module's contract.
        unsafe {
            let q = _mm256_loadu_si256(row.add(g * size_of::<Self>() + 2).cast());
            _mm256_xor_si256(q, _mm256_set1_epi8(-128))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the module's contract.
        unsafe {
            let d = halves(row.add(g * size_of::<Self>()), size_of::<Self>(), n);
            (d, _mm256_setzero_ps())
        }
    }
}

impl Groups for BlockIq4Nl {
    const MOST: usize = 255;
    const CODES: Codes = Codes::Nibbles(2);

    #[inline(always)]
    unsafe fn decode<S: Simd>(codes: S::I) -> S::I {
        // SAFETY: the module's contract.
        unsafe {
            if S::WIDE_IS_SIGNED {
                // The level turns the bit over at once; twice is nothing.
                S::flip(S::look_up(IQ4_SIGNED_TABLE, codes))
            } else {
                S::look_up(IQ4_TABLE, codes)
            }
        }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the module's contract.
        unsafe { look_up(IQ4_TABLE, nibbles(row.add(g * size_of::<Self>() + 2))) }
    }

    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: the module's contract.
        unsafe {
            let (a, b) = (
                row.add(g * size_of::<Self>() + 2),
                row.add(h * size_of::<Self>() + 2),
            );
            look_up_pair(IQ4_TABLE, nibble_pair(a, b))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the module's contract.
        unsafe {
            let d = halves(row.add(g * size_of::<Self>()), size_of::<Self>(), n);
            (d, _mm256_setzero_ps())
        }
    }

    #[inline(always)]
    unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
        const { assert!(size_of::<Self>() == 18) }
        // SAFETY: the module's contract.
        unsafe {
            let d = halves_of_18(row.add(g * size_of::<Self>()));
            (d, _mm256_setzero_ps())
        }
    }
}

/// Half of two to the power of each exponent, less 127.
#[inline(always)]
unsafe fn halved_powers(e: __m256i) -> __m256i {
    // SAFETY: the module's contract.
    unsafe {
        let normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        // Exponents 0 and 1 are subnormal.
        let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
        let is_normal = _mm256_cmpgt_epi32(e, _mm256_set1_epi32(1));
        _mm256_blendv_epi8(small, normal, is_normal)
    }
}

impl Groups for BlockMxfp4 {
    const MOST: usize = 24;
    const CODES: Codes = Codes::Nibbles(1);

    #[inline(always)]
    unsafe fn decode<S: Simd>(codes: S::I) -> S::I {
        // SAFETY: the module's contract.
        unsafe { S::look_up(FP4_TABLE, codes) }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the module's contract.
        unsafe { look_up(FP4_TABLE, nibbles(row.add(g * size_of::<Self>() + 1))) }
    }

    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: the module's contract.
        unsafe {
            let (a, b) = (
                row.add(g * size_of::<Self>() + 1),
                row.add(h * size_of::<Self>() + 1),
            );
            look_up_pair(FP4_TABLE, nibble_pair(a, b))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the module's contract.
        unsafe {
            let mut exponents = 0u64;
            for i in 0..n {
                exponents |= u64::from(*row.add((g + i) * size_of::<Self>())) << (8 * i);
            }
            let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(exponents as i64));
            let d = halved_powers(e);
            // What is missing has exponent 0, but is to be 0.
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let present = _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes);
            (
                _mm256_castsi256_ps(_mm256_and_si256(d, present)),
                _mm256_setzero_ps(),
            )
        }
    }

    #[inline(always)]
    unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
        const { assert!(size_of::<Self>() == 17) }
        // SAFETY: the module's contract; eight blocks have 136 bytes, and begin with the exponent.
        unsafe {
            let blocks = row.add(g * size_of::<Self>());
            let words = pick_words(blocks, [0, 8, 17, 25, 34, 42, 51, 59]);
            // Every second exponent is the high byte of its word.
            let words = _mm_srlv_epi16(words, _mm_setr_epi16(0, 8, 0, 8, 0, 8, 0, 8));
            let e = _mm256_cvtepu16_epi32(_mm_and_si128(words, _mm_set1_epi16(0xff)));
            (_mm256_castsi256_ps(halved_powers(e)), _mm256_setzero_ps())
        }
    }
}

impl Groups for BlockNvfp4 {
    const MOST: usize = 24;

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the module's contract; 16 bytes for each group begin at 4.
        unsafe {
            let qs = row.add(g / 2 * size_of::<Self>() + 4 + g % 2 * 16);
            let (both, low) = (_mm_loadu_si128(qs.cast()), _mm_set1_epi8(15));
            let high = _mm_and_si128(_mm_srli_epi16(both, 4), low);
            let low = _mm_and_si128(both, low);
            // Eight low nibbles and the eight high ones of the same bytes make 16 elements.
            let halves =
                _mm256_set_m128i(_mm_unpackhi_epi64(low, high), _mm_unpacklo_epi64(low, high));
            look_up(FP4_TABLE, halves)
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        let (mut first, mut second) = ([0.0f32; 8], [0.0f32; 8]);
        for i in 0..n {
            let g = g + i;
            // SAFETY: the module's contract; the scales begin at 0.
            let [a, b] = unsafe {
                let scales = row.add(g / 2 * size_of::<Self>() + g % 2 * 2);
                scales.cast::<[u8; 2]>().read()
            };
            first[i] = NVFP4_SCALES[usize::from(a)];
            second[i] = NVFP4_SCALES[usize::from(b)];
        }
        // SAFETY: the module's contract.
        unsafe {
            (
                _mm256_loadu_ps(first.as_ptr()),
                _mm256_loadu_ps(second.as_ptr()),
            )
        }
    }
}

/// The scale of the block of each of `n <= 8` groups from `g` on, blocks beginning with it.
#[inline(always)]
unsafe fn scales_of_blocks<B: GroupBlock>(row: *const u8, g: usize, n: usize) -> __m256 {
    let groups = B::ELEMENTS / 32;
    let mut bits = [0u16; 8];
    for (i, bits) in bits.iter_mut().enumerate().take(n) {
        let block = (g + i) / groups * size_of::<B>();
        // SAFETY: the module's contract.
        *bits = unsafe { row.add(block).cast::<u16>().read_unaligned() };
    }
    // SAFETY: the module's contract.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bits.as_ptr().cast())) }
}

impl Groups for BlockQ1_0 {
    const MOST: usize = 2;

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the module's contract; 4 bytes of signs for each group begin at 2.
        unsafe {
            let signs = bits(row.add(g / 4 * size_of::<Self>() + 2 + g % 4 * 4));
            _mm256_srli_epi16(fifth_bits(signs), 3)
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the module's contract.
        unsafe { (scales_of_blocks::<Self>(row, g, n), _mm256_setzero_ps()) }
    }
}

impl Groups for BlockQ2_0 {
    const MOST: usize = 3;

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the module's contract; 8 bytes for each group begin at 2.
        unsafe {
            let qs = row.add(g / 2 * size_of::<Self>() + 2 + g % 2 * 8);
            // The four quants of a byte to the four bytes of a word.
            let words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(qs.cast()));
            let two = _mm256_or_si256(words, _mm256_slli_epi32(words, 6));
            let four = _mm256_or_si256(two, _mm256_slli_epi32(two, 12));
            _mm256_and_si256(four, _mm256_set1_epi8(3))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the module's contract.
        unsafe { (scales_of_blocks::<Self>(row, g, n), _mm256_setzero_ps()) }
    }
}

/// The eight 6-bit scales and minimums of Q4_K and Q5_K; see `unpack_scales` of the formats.
#[inline(always)]
unsafe fn six_bit_scales(packed: *const u8) -> (__m256i, __m256i) {
    // SAFETY: the module's contract, for 12 bytes.
    unsafe {
        let (a, b, c) = (bits(packed), bits(packed.add(4)), bits(packed.add(8)));
        const SIX: u32 = 0x3f3f_3f3f;
        const FOUR: u32 = 0x0f0f_0f0f;
        const TOP: u32 = 0x3030_3030;
        let scales = widen(a & SIX, c & FOUR | a >> 2 & TOP);
        let mins = widen(b & SIX, c >> 4 & FOUR | b >> 2 & TOP);
        (scales, mins)
    }
}

/// Eight bytes as 16-bit lanes; the upper eight lanes are 0.
#[inline(always)]
unsafe fn widen(low: u32, high: u32) -> __m256i {
    // SAFETY: the module's contract.
    unsafe {
        let bytes = u64::from(high) << 32 | u64::from(low);
        _mm256_zextsi128_si256(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bytes as i64)))
    }
}

/// The two halves at the start of a block.
#[inline(always)]
unsafe fn two_halves(block: *const u8) -> (f32, f32) {
    // SAFETY: the module's contract.
    unsafe {
        let both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits(block) as i32));
        (_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both)))
    }
}

/// Where 64 bytes of nibbles of Q4_K and Q5_K, low ones before high ones, put pieces of 32.
const NIBBLE_ORDER: [usize; 8] = [0, 2, 1, 3, 4, 6, 5, 7];

impl Supers for BlockQ4K {
    const MOST: usize = 15;
    const ORDER_512: [usize; 8] = NIBBLE_ORDER;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the module's contract; 128 bytes of nibbles begin at 16.
        unsafe {
            let low = _mm256_set1_epi8(15);
            let mut q = [low; 8];
            for i in 0..4 {
                let nibbles = _mm256_loadu_si256(block.add(16 + 32 * i).cast());
                q[2 * i] = _mm256_and_si256(nibbles, low);
                q[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low);
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the module's contract; 128 bytes of nibbles begin at 16.
        unsafe {
            let low = _mm512_set1_epi8(15);
            let a = _mm512_loadu_si512(block.add(16).cast());
            let b = _mm512_loadu_si512(block.add(80).cast());
            [
                _mm512_and_si512(a, low),
                _mm512_and_si512(_mm512_srli_epi16(a, 4), low),
                _mm512_and_si512(b, low),
                _mm512_and_si512(_mm512_srli_epi16(b, 4), low),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the module's contract; the packed scales begin at 4.
        unsafe { six_bit_scales(block.add(4)) }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the module's contract.
        unsafe { two_halves(block) }
    }
}

impl Supers for BlockQ5K {
    const MOST: usize = 31;
    const ORDER_512: [usize; 8] = NIBBLE_ORDER;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the module's contract; the fifth bits begin at 16, the nibbles at 48.
        unsafe {
            let (low, fifth) = (_mm256_set1_epi8(15), _mm256_set1_epi8(16));
            let qh = _mm256_loadu_si256(block.add(16).cast());
            // Bit `j` of a byte belongs to piece `j`; shifted to bit 4, whatever else a 16-bit shift
            // drags along is masked off.
            let fifths = [
                _mm256_slli_epi16(qh, 4),
                _mm256_slli_epi16(qh, 3),
                _mm256_slli_epi16(qh, 2),
                _mm256_slli_epi16(qh, 1),
                qh,
                _mm256_srli_epi16(qh, 1),
                _mm256_srli_epi16(qh, 2),
                _mm256_srli_epi16(qh, 3),
            ];
            let mut q = [low; 8];
            for i in 0..4 {
                let nibbles = _mm256_loadu_si256(block.add(48 + 32 * i).cast());
                let pair = [
                    _mm256_and_si256(nibbles, low),
                    _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low),
                ];
                for j in 0..2 {
                    let bit = _mm256_and_si256(fifths[2 * i + j], fifth);
                    q[2 * i + j] = _mm256_or_si256(pair[j], bit);
                }
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the module's contract; the fifth bits begin at 16, the nibbles at 48.
        unsafe {
            let (low, fifth) = (_mm512_set1_epi8(15), _mm512_set1_epi8(16));
            let qh = _mm512_broadcast_i64x4(_mm256_loadu_si256(block.add(16).cast()));
            let a = _mm512_loadu_si512(block.add(48).cast());
            let b = _mm512_loadu_si512(block.add(112).cast());
            // Left by 4 and 2 puts bits 0 and 2 at bit 4; the other pieces follow by shifting right.
            let first = _mm512_sllv_epi64(qh, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2));
            let second = _mm512_sllv_epi64(qh, _mm512_setr_epi64(3, 3, 3, 3, 1, 1, 1, 1));
            let third = _mm512_srlv_epi64(qh, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2));
            let fourth = _mm512_srlv_epi64(qh, _mm512_setr_epi64(1, 1, 1, 1, 3, 3, 3, 3));
            [
                merge(a, low, first, fifth),
                merge(_mm512_srli_epi16(a, 4), low, second, fifth),
                merge(b, low, third, fifth),
                merge(_mm512_srli_epi16(b, 4), low, fourth, fifth),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the module's contract; the packed scales begin at 4.
        unsafe { six_bit_scales(block.add(4)) }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the module's contract.
        unsafe { two_halves(block) }
    }
}

impl Supers for BlockQ6K {
    const MOST: usize = 63;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the module's contract; the low bits begin at 0, the high ones at 128.
        unsafe {
            let (low, high) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
            let mut q = [low; 8];
            for half in 0..2 {
                let a = _mm256_loadu_si256(block.add(64 * half).cast());
                let b = _mm256_loadu_si256(block.add(64 * half + 32).cast());
                let h = _mm256_loadu_si256(block.add(128 + 32 * half).cast());
                let pieces = [
                    (a, _mm256_slli_epi16(h, 4)),
                    (b, _mm256_slli_epi16(h, 2)),
                    (_mm256_srli_epi16(a, 4), h),
                    (_mm256_srli_epi16(b, 4), _mm256_srli_epi16(h, 2)),
                ];
                for (i, (l, h)) in pieces.into_iter().enumerate() {
                    q[4 * half + i] =
                        _mm256_or_si256(_mm256_and_si256(l, low), _mm256_and_si256(h, high));
                }
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the module's contract; the low bits begin at 0, the high ones at 128.
        unsafe {
            let (low, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
            let mut q = [low; 4];
            for half in 0..2 {
                let l = _mm512_loadu_si512(block.add(64 * half).cast());
                let h = _mm256_loadu_si256(block.add(128 + 32 * half).cast());
                let h = _mm512_broadcast_i64x4(h);
                let first = _mm512_sllv_epi64(h, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2));
                let second = _mm512_srlv_epi64(h, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2));
                q[2 * half] = merge(l, low, first, high);
                q[2 * half + 1] = merge(_mm512_srli_epi16(l, 4), low, second, high);
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the module's contract; 16 bytes of scales begin at 192.
        unsafe {
            let scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(block.add(192).cast()));
            (scales, _mm256_setzero_si256())
        }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the module's contract; the scale is at 208.
        unsafe { (half(block.add(208).cast::<u16>().read_unaligned()), 0.0) }
    }
}

/// The two-bit quants of 256 elements.
#[inline(always)]
unsafe fn two_bits_256(qs: *const u8) -> [__m256i; 8] {
    // SAFETY: the module's contract, for 64 bytes.
    unsafe {
        let mask = _mm256_set1_epi8(3);
        let mut q = [mask; 8];
        for half in 0..2 {
            let bits = _mm256_loadu_si256(qs.add(32 * half).cast());
            q[4 * half] = _mm256_and_si256(bits, mask);
            q[4 * half + 1] = _mm256_and_si256(_mm256_srli_epi16(bits, 2), mask);
            q[4 * half + 2] = _mm256_and_si256(_mm256_srli_epi16(bits, 4), mask);
            q[4 * half + 3] = _mm256_and_si256(_mm256_srli_epi16(bits, 6), mask);
        }
        q
    }
}

/// The two-bit quants of 256 elements.
#[inline(always)]
unsafe fn two_bits_512(qs: *const u8) -> [__m512i; 4] {
    // SAFETY: the module's contract, for 64 bytes.
    unsafe {
        let mask = _mm512_set1_epi8(3);
        let mut q = [mask; 4];
        for half in 0..2 {
            let bits = _mm256_loadu_si256(qs.add(32 * half).cast());
            let bits = _mm512_broadcast_i64x4(bits);
            let low = _mm512_srlv_epi64(bits, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2));
            let high = _mm512_srlv_epi64(bits, _mm512_setr_epi64(4, 4, 4, 4, 6, 6, 6, 6));
            q[2 * half] = _mm512_and_si512(low, mask);
            q[2 * half + 1] = _mm512_and_si512(high, mask);
        }
        q
    }
}

impl Supers for BlockQ2K {
    const MOST: usize = 3;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the module's contract; the quants begin at 16.
        unsafe { two_bits_256(block.add(16)) }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the module's contract; the quants begin at 16.
        unsafe { two_bits_512(block.add(16)) }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the module's contract; 16 bytes of scales begin at 0.
        unsafe {
            let (both, low) = (_mm_loadu_si128(block.cast()), _mm_set1_epi8(15));
            let scales = _mm_and_si128(both, low);
            let mins = _mm_and_si128(_mm_srli_epi16(both, 4), low);
            (_mm256_cvtepu8_epi16(scales), _mm256_cvtepu8_epi16(mins))
        }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the module's contract; the scales are at 80.
        unsafe { two_halves(block.add(80)) }
    }
}

impl Supers for BlockQ3K {
    const MOST: usize = 7;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the module's contract; the third bits begin at 0, the others at 32.
        unsafe {
            let third = _mm256_set1_epi8(4);
            let mask = _mm256_loadu_si256(block.cast());
            // Bit `i` of a byte belongs to piece `i`; shifted to bit 2.
            let thirds = [
                _mm256_slli_epi16(mask, 2),
                _mm256_slli_epi16(mask, 1),
                mask,
                _mm256_srli_epi16(mask, 1),
                _mm256_srli_epi16(mask, 2),
                _mm256_srli_epi16(mask, 3),
                _mm256_srli_epi16(mask, 4),
                _mm256_srli_epi16(mask, 5),
            ];
            let mut q = two_bits_256(block.add(32));
            for (q, bits) in q.iter_mut().zip(thirds) {
                *q = _mm256_or_si256(*q, _mm256_and_si256(bits, third));
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the module's contract; the third bits begin at 0, the others at 32.
        unsafe {
            let (low, third) = (_mm512_set1_epi8(3), _mm512_set1_epi8(4));
            let mask = _mm512_broadcast_i64x4(_mm256_loadu_si256(block.cast()));
            let q = two_bits_512(block.add(32));
            [
                merge(
                    q[0],
                    low,
                    _mm512_sllv_epi64(mask, _mm512_setr_epi64(2, 2, 2, 2, 1, 1, 1, 1)),
                    third,
                ),
                merge(
                    q[1],
                    low,
                    _mm512_srlv_epi64(mask, _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1)),
                    third,
                ),
                merge(
                    q[2],
                    low,
                    _mm512_srlv_epi64(mask, _mm512_setr_epi64(2, 2, 2, 2, 3, 3, 3, 3)),
                    third,
                ),
                merge(
                    q[3],
                    low,
                    _mm512_srlv_epi64(mask, _mm512_setr_epi64(4, 4, 4, 4, 5, 5, 5, 5)),
                    third,
                ),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the module's contract; 12 bytes of scales begin at 96.
        unsafe {
            const LOW: u32 = 0x0f0f_0f0f;
            const HIGH: u32 = 0x3030_3030;
            let (a, b, c) = (
                bits(block.add(96)),
                bits(block.add(100)),
                bits(block.add(104)),
            );
            // Two high bits of each, shifted to bits 4 and 5.
            let bytes = _mm_setr_epi32(
                (a & LOW | c << 4 & HIGH) as i32,
                (b & LOW | c << 2 & HIGH) as i32,
                (a >> 4 & LOW | c & HIGH) as i32,
                (b >> 4 & LOW | c >> 2 & HIGH) as i32,
            );
            let scales = _mm256_cvtepi8_epi16(_mm_sub_epi8(bytes, _mm_set1_epi8(32)));
            (scales, _mm256_setzero_si256())
        }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the module's contract; the scale is at 108.
        unsafe { (half(block.add(108).cast::<u16>().read_unaligned()), 0.0) }
    }
}

impl Supers for BlockIq4Xs {
    const MOST: usize = 255;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the module's contract; 16 bytes of nibbles for each piece begin at 8.
        unsafe {
            let mut q = [_mm256_setzero_si256(); 8];
            for (i, q) in q.iter_mut().enumerate() {
                *q = look_up(IQ4_TABLE, nibbles(block.add(8 + 16 * i)));
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the module's contract; 16 bytes of nibbles for each piece begin at 8.
        unsafe {
            let mut q = [_mm512_setzero_si512(); 4];
            for (i, q) in q.iter_mut().enumerate() {
                let qs = block.add(8 + 32 * i);
                *q = look_up_pair(IQ4_TABLE, nibble_pair(qs, qs.add(16)));
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the module's contract; 16 high bits are at 2, 4 bytes of nibbles at 4.
        unsafe {
            let nibbles = _mm_cvtsi32_si128(bits(block.add(4)) as i32);
            let low = _mm_set1_epi8(15);
            let low = _mm_unpacklo_epi8(
                _mm_and_si128(nibbles, low),
                _mm_and_si128(_mm_srli_epi16(nibbles, 4), low),
            );
            // Bits `2 j` and `2 j + 1` to the top of lane `j`, then to bits 4 and 5.
            let high = _mm_set1_epi16(block.add(2).cast::<i16>().read_unaligned());
            let to_top =
                _mm_setr_epi16(1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1);
            let high = _mm_slli_epi16(_mm_srli_epi16(_mm_mullo_epi16(high, to_top), 14), 4);
            let scales = _mm_or_si128(_mm_cvtepu8_epi16(low), high);
            let scales = _mm_sub_epi16(scales, _mm_set1_epi16(32));
            (_mm256_zextsi128_si256(scales), _mm256_setzero_si256())
        }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the module's contract; the scale is at 0.
        unsafe { (half(block.cast::<u16>().read_unaligned()), 0.0) }
    }
}

impl Supers for BlockTq2_0 {
    const MOST: usize = 3;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the module's contract; the quants begin at 0.
        unsafe { two_bits_256(block) }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the module's contract; the quants begin at 0.
        unsafe { two_bits_512(block) }
    }

    #[inline(always)]
    unsafe fn scales(_: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the module's contract.
        unsafe { (_mm256_set1_epi16(1), _mm256_setzero_si256()) }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the module's contract; the scale is at 64.
        unsafe { (half(block.add(64).cast::<u16>().read_unaligned()), 0.0) }
    }
}
