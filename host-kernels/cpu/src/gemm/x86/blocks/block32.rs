//! Decoding of the formats with scales per 32 elements to vectors of quants.

use std::arch::x86_64::*;

use super::scales::{
    eight_bytes, eight_halves, halved_powers, halves, halves_of_18, pick_words, scales_of_blocks,
};
use super::{
    Block32Kernel, Codes, IQ4_TABLE, bits, look_up, look_up_pair, nibble_pair, nibbles, unsigned,
};
use crate::formats::{
    BlockIq4Nl, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ4_0, BlockQ4_1, BlockQ5_0,
    BlockQ5_1, BlockQ8_0, FP4_VALUES, IQ4_VALUES, NVFP4_SCALES,
};
use crate::gemm::x86::int_simd::IntSimd;

const IQ4_SIGNED_TABLE: [u8; 16] = unsigned(&IQ4_VALUES, 0);
const FP4_TABLE: [u8; 16] = unsigned(&FP4_VALUES, 12);

/// 16 in each byte whose bit is set.
#[inline(always)]
unsafe fn fifth_bits(qh: u32) -> __m256i {
    // SAFETY: the operands are registers. The caller guarantees the instructions.
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

macro_rules! nibble_groups {
    ($($block:ty, $bytes:literal: d at 0, m at $m:expr, qh at $qh:expr, qs at $qs:literal;)*) => {
        $(
            impl Block32Kernel for $block {
                const MAX_QUANT: usize = match $qh {
                    Some(_) => 31,
                    None => 15,
                };
                const CODES: Codes = match $qh {
                    Some(_) => Codes::Other,
                    None => Codes::Nibbles($qs),
                };

                #[inline(always)]
                unsafe fn single(row: *const u8, g: usize) -> __m256i {
                    // SAFETY: the caller guarantees the block of group `g` in the row and the
                    // instructions. `qs` and `qh` are offsets of fields of the block.
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
                    // SAFETY: the caller guarantees the blocks of groups `g` and `h` in the row and
                    // the instructions. `qs` and `qh` are offsets of fields of the block.
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
                    // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row
                    // and the instructions. `m` is the offset of a field of the block.
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
                    // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row
                    // and the instructions.
                    unsafe {
                        match $bytes {
                            18 => (halves_of_18(row.add(g * $bytes)), _mm256_setzero_ps()),
                            _ => Self::scales(row, g, 8),
                        }
                    }
                }

                #[inline(always)]
                unsafe fn scales_in_order(
                    row: *const u8,
                    g: usize,
                    order: [usize; 8],
                ) -> (__m256, __m256) {
                    // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row
                    // and the instructions. Every entry of `order` is below 8. `m` is the offset of
                    // a field of the block.
                    unsafe {
                        let block = row.add(g * $bytes);
                        let d = eight_halves(block, $bytes, order);
                        match $m {
                            Some(m) => (d, eight_halves(block.add(m), $bytes, order)),
                            None => (d, _mm256_setzero_ps()),
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

impl Block32Kernel for BlockQ8_0 {
    const MAX_QUANT: usize = 255;
    const CODES: Codes = Codes::Bytes(2);

    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        // SAFETY: the operands are registers. The caller guarantees the instructions.
        unsafe { S::add_128(codes) }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the caller guarantees the block of group `g` in the row and the instructions.
        unsafe {
            let q = _mm256_loadu_si256(row.add(g * size_of::<Self>() + 2).cast());
            _mm256_xor_si256(q, _mm256_set1_epi8(-128))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row and the
        // instructions.
        unsafe {
            let d = halves(row.add(g * size_of::<Self>()), size_of::<Self>(), n);
            (d, _mm256_setzero_ps())
        }
    }
}

impl Block32Kernel for BlockIq4Nl {
    const MAX_QUANT: usize = 255;
    const CAN_NEGATE: bool = true;
    const CODES: Codes = Codes::Nibbles(2);

    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        // SAFETY: the operands are registers. The caller guarantees the instructions.
        unsafe {
            if S::WIDE_IS_SIGNED {
                // The compiler removes this `add_128` together with the `add_128` of the product.
                S::add_128(S::look_up(IQ4_SIGNED_TABLE, codes))
            } else {
                S::look_up(IQ4_TABLE, codes)
            }
        }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the caller guarantees the block of group `g` in the row and the instructions.
        unsafe { look_up(IQ4_TABLE, nibbles(row.add(g * size_of::<Self>() + 2))) }
    }

    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: the caller guarantees the blocks of groups `g` and `h` in the row and the
        // instructions.
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
        // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row and the
        // instructions.
        unsafe {
            let d = halves(row.add(g * size_of::<Self>()), size_of::<Self>(), n);
            (d, _mm256_setzero_ps())
        }
    }

    #[inline(always)]
    unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
        const { assert!(size_of::<Self>() == 18) }
        // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row and the
        // instructions.
        unsafe {
            let d = halves_of_18(row.add(g * size_of::<Self>()));
            (d, _mm256_setzero_ps())
        }
    }
    #[inline(always)]
    unsafe fn scales_in_order(row: *const u8, g: usize, order: [usize; 8]) -> (__m256, __m256) {
        // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row and the
        // instructions. Every entry of `order` is below 8.
        unsafe {
            let block = row.add(g * size_of::<Self>());
            let d = eight_halves(block, size_of::<Self>(), order);
            (d, _mm256_setzero_ps())
        }
    }
}

impl Block32Kernel for BlockMxfp4 {
    const MAX_QUANT: usize = 24;
    const CODES: Codes = Codes::Nibbles(1);

    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        // SAFETY: the operands are registers. The caller guarantees the instructions.
        unsafe { S::look_up(FP4_TABLE, codes) }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the caller guarantees the block of group `g` in the row and the instructions.
        unsafe { look_up(FP4_TABLE, nibbles(row.add(g * size_of::<Self>() + 1))) }
    }

    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: the caller guarantees the blocks of groups `g` and `h` in the row and the
        // instructions.
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
        // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row and the
        // instructions.
        unsafe {
            let mut exponents = 0u64;
            for i in 0..n {
                exponents |= u64::from(*row.add((g + i) * size_of::<Self>())) << (8 * i);
            }
            let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(exponents as i64));
            let d = halved_powers(e);
            // The scales of missing groups are set to 0: exponent 0 is not 0.
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
        // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row and the
        // instructions. Eight blocks have 136 bytes, and begin with the exponent.
        unsafe {
            let blocks = row.add(g * size_of::<Self>());
            let words = pick_words(blocks, [0, 8, 17, 25, 34, 42, 51, 59]);
            // Every second exponent is the high byte of its word.
            let words = _mm_srlv_epi16(words, _mm_setr_epi16(0, 8, 0, 8, 0, 8, 0, 8));
            let e = _mm256_cvtepu16_epi32(_mm_and_si128(words, _mm_set1_epi16(0xff)));
            (_mm256_castsi256_ps(halved_powers(e)), _mm256_setzero_ps())
        }
    }
    #[inline(always)]
    unsafe fn scales_in_order(row: *const u8, g: usize, order: [usize; 8]) -> (__m256, __m256) {
        // SAFETY: the caller guarantees the blocks of groups `g .. g + 8` in the row and the
        // instructions. Every entry of `order` is below 8. Blocks begin with the exponent.
        unsafe {
            let e = eight_bytes(row.add(g * size_of::<Self>()), size_of::<Self>(), order);
            (_mm256_castsi256_ps(halved_powers(e)), _mm256_setzero_ps())
        }
    }
}

impl Block32Kernel for BlockNvfp4 {
    const MAX_QUANT: usize = 24;

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the caller guarantees the block of group `g` in the row and the instructions. 16
        // bytes for each group begin at 4.
        unsafe {
            let qs = row.add(g / 2 * size_of::<Self>() + 4 + g % 2 * 16);
            let (both, low) = (_mm_loadu_si128(qs.cast()), _mm_set1_epi8(15));
            let high = _mm_and_si128(_mm_srli_epi16(both, 4), low);
            let low = _mm_and_si128(both, low);
            // The 16 elements of eight bytes are the low nibbles, then the high nibbles.
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
            // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row and the
            // instructions. The scales begin at 0.
            let [a, b] = unsafe {
                let scales = row.add(g / 2 * size_of::<Self>() + g % 2 * 2);
                scales.cast::<[u8; 2]>().read()
            };
            first[i] = NVFP4_SCALES[usize::from(a)];
            second[i] = NVFP4_SCALES[usize::from(b)];
        }
        // SAFETY: `first` and `second` have the eight floats of a vector. The caller guarantees the
        // instructions.
        unsafe {
            (
                _mm256_loadu_ps(first.as_ptr()),
                _mm256_loadu_ps(second.as_ptr()),
            )
        }
    }
}

impl Block32Kernel for BlockQ1_0 {
    const MAX_QUANT: usize = 2;

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the caller guarantees the block of group `g` in the row and the instructions. 4
        // bytes of signs for each group begin at 2.
        unsafe {
            let signs = bits(row.add(g / 4 * size_of::<Self>() + 2 + g % 4 * 4));
            _mm256_srli_epi16(fifth_bits(signs), 3)
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row and the
        // instructions.
        unsafe { (scales_of_blocks::<Self>(row, g, n), _mm256_setzero_ps()) }
    }
}

impl Block32Kernel for BlockQ2_0 {
    const MAX_QUANT: usize = 3;

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the caller guarantees the block of group `g` in the row and the instructions. 8
        // bytes for each group begin at 2.
        unsafe {
            let qs = row.add(g / 2 * size_of::<Self>() + 2 + g % 2 * 8);
            // Expands the four quants of a byte to the four bytes of a word.
            let words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(qs.cast()));
            let two = _mm256_or_si256(words, _mm256_slli_epi32(words, 6));
            let four = _mm256_or_si256(two, _mm256_slli_epi32(two, 12));
            _mm256_and_si256(four, _mm256_set1_epi8(3))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row and the
        // instructions.
        unsafe { (scales_of_blocks::<Self>(row, g, n), _mm256_setzero_ps()) }
    }
}
