//! Decoding of the formats with scales per 32 elements to vectors of quants.

use std::arch::x86_64::*;
use std::mem::offset_of;

use super::scales::{
    eight_bytes, halved_powers, load_f16, load_f16x8, load_f16x8_stride18, pick_words,
    scales_of_blocks,
};
use super::{Block32Kernel, Codes, IQ4_TABLE, bits, nibble_pair, nibbles, unsigned};
use crate::formats::{
    BlockIq4Nl, BlockMxfp4, BlockNvfp4, BlockQ1_0, BlockQ2_0, BlockQ4_0, BlockQ4_1, BlockQ5_0,
    BlockQ5_1, BlockQ8_0, FP4_VALUES, IQ4_VALUES, NVFP4_SCALES,
};
use crate::gemm::x86::int_simd::IntSimd;
use crate::simd::{Avx2, Avx512, register_fns};

const IQ4_SIGNED_TABLE: [u8; 16] = unsigned(&IQ4_VALUES, 0);
const FP4_TABLE: [u8; 16] = unsigned(&FP4_VALUES, 12);

register_fns! {
    avx2;
    /// 16 in each byte whose bit is set.
    unsafe fn fifth_bits(qh: u32) -> __m256i {
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
    ($($block:ty, $bytes:literal: m at $m:expr, qh at $qh:expr;)*) => {
        $(
            impl Block32Kernel for $block {
                const MAX_QUANT: usize = match $qh {
                    Some(_) => 31,
                    None => 15,
                };
                const ONE_ORDER_LANES: usize = match $qh {
                    Some(_) => usize::MAX,
                    None => 16,
                };
                const SCALE_FIRST: bool = true;
                const CODES: Codes = match $qh {
                    Some(_) => Codes::Other,
                    None => Codes::Nibbles(offset_of!(Self, qs)),
                };

                #[inline(always)]
                unsafe fn single(row: *const u8, g: usize) -> __m256i {
                    // SAFETY: block `g` of `row` is readable. `nibbles` reads the 16 bytes of its
                    // `qs`, `bits` the four bytes of its `qh`. The rest is on registers, and needs
                    // AVX2, which the caller guarantees.
                    unsafe {
                        let block = row.add(g * $bytes);
                        let q = nibbles(block.add(offset_of!(Self, qs)));
                        match $qh {
                            Some(qh) => _mm256_or_si256(q, fifth_bits(bits(block.add(qh)))),
                            None => q,
                        }
                    }
                }

                #[inline(always)]
                unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
                    // SAFETY: blocks `g` and `h` of `row` are readable. `nibble_pair` reads the 16
                    // bytes of `qs` of each, `bits` the four bytes of `qh` of each. The caller
                    // guarantees AVX-512 F and BW, also for the masked addition.
                    unsafe {
                        let (a, b) = (row.add(g * $bytes), row.add(h * $bytes));
                        let qs = offset_of!(Self, qs);
                        let q = nibble_pair(a.add(qs), b.add(qs));
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
                    // SAFETY: blocks `g .. g + n` of `row` are readable, `$bytes` bytes apart.
                    // `load_f16` reads the two bytes of `d`, the first field, of each, and the two
                    // bytes of `m` of each. The caller guarantees `n <= 8` and F16C.
                    unsafe {
                        let block = row.add(g * $bytes);
                        let d = load_f16(block, $bytes, n);
                        match $m {
                            Some(m) => (d, load_f16(block.add(m), $bytes, n)),
                            None => (d, _mm256_setzero_ps()),
                        }
                    }
                }

                #[inline(always)]
                unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
                    // SAFETY: blocks `g .. g + 8` of `row` are readable: eight blocks of 18 bytes
                    // for `load_f16x8_stride18`, or the eight groups of `scales`. The caller
                    // guarantees AVX-512 BW.
                    unsafe {
                        match $bytes {
                            18 => (load_f16x8_stride18(row.add(g * $bytes)), _mm256_setzero_ps()),
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
                    // SAFETY: `order` is a permutation of 0 to 7, so `load_f16x8` reads the two
                    // bytes of `d`, and of `m`, of blocks `g .. g + 8` of `row`, all readable. The
                    // caller guarantees F16C.
                    unsafe {
                        let block = row.add(g * $bytes);
                        let d = load_f16x8(block, $bytes, order);
                        match $m {
                            Some(m) => (d, load_f16x8(block.add(m), $bytes, order)),
                            None => (d, _mm256_setzero_ps()),
                        }
                    }
                }
            }
            const _: () = assert!(size_of::<$block>() == $bytes && offset_of!($block, d) == 0);
            const _: () = assert!(match $m {
                Some(m) => m == size_of::<u16>(),
                None => true,
            });
        )*
    };
}

nibble_groups! {
    BlockQ4_0, 18: m at None::<usize>, qh at None::<usize>;
    BlockQ4_1, 20: m at Some(offset_of!(BlockQ4_1, m)), qh at None::<usize>;
    BlockQ5_0, 22: m at None::<usize>, qh at Some(offset_of!(BlockQ5_0, qh));
    BlockQ5_1, 24: m at Some(offset_of!(BlockQ5_1, m)), qh at Some(offset_of!(BlockQ5_1, qh));
}

impl Block32Kernel for BlockQ8_0 {
    const MAX_QUANT: usize = 255;
    const ONE_ORDER_LANES: usize = 8;
    const SCALE_FIRST: bool = true;
    const CODES: Codes = Codes::Bytes(offset_of!(Self, qs));

    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        // SAFETY: the addition is on a register and needs the instructions of `S`, which the caller
        // guarantees.
        unsafe { S::add_128(codes) }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: block `g` of `row` is readable. One load reads the 32 bytes of its `qs`; the sign
        // bits are flipped in a register. Both need AVX2, which the caller guarantees.
        unsafe {
            let q =
                _mm256_loadu_si256(row.add(g * size_of::<Self>() + offset_of!(Self, qs)).cast());
            _mm256_xor_si256(q, _mm256_set1_epi8(-128))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: `load_f16` reads the F16 at the start of each of the blocks `g .. g + n` of 34
        // bytes, which are readable in `row`. The caller guarantees `n <= 8` and F16C.
        unsafe {
            let d = load_f16(row.add(g * size_of::<Self>()), size_of::<Self>(), n);
            (d, _mm256_setzero_ps())
        }
    }
}

impl Block32Kernel for BlockIq4Nl {
    const MAX_QUANT: usize = 255;
    const CAN_NEGATE: bool = true;
    const ONE_ORDER_LANES: usize = 16;
    const SCALE_FIRST: bool = true;
    const CODES: Codes = Codes::Nibbles(offset_of!(Self, qs));

    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        // SAFETY: `look_up` takes its table by value, and `add_128` a register. Both need the
        // instructions of `S`, which the caller guarantees.
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
        // SAFETY: block `g` of `row` is readable, and `nibbles` reads the 16 bytes of its `qs`. The
        // table is looked up in registers. Both need AVX2, which the caller guarantees.
        unsafe {
            Avx2::look_up(
                IQ4_TABLE,
                nibbles(row.add(g * size_of::<Self>() + offset_of!(Self, qs))),
            )
        }
    }

    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: blocks `g` and `h` of `row` are readable, and `nibble_pair` reads the 16 bytes of
        // `qs` of each. The table is looked up in registers. Both need AVX-512 BW, which the caller
        // guarantees.
        unsafe {
            let (a, b) = (
                row.add(g * size_of::<Self>() + offset_of!(Self, qs)),
                row.add(h * size_of::<Self>() + offset_of!(Self, qs)),
            );
            Avx512::look_up(IQ4_TABLE, nibble_pair(a, b))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: `load_f16` reads the F16 at the start of each of the blocks `g .. g + n` of 18
        // bytes, which are readable in `row`. The caller guarantees `n <= 8` and F16C.
        unsafe {
            let d = load_f16(row.add(g * size_of::<Self>()), size_of::<Self>(), n);
            (d, _mm256_setzero_ps())
        }
    }

    #[inline(always)]
    unsafe fn eight_scales(row: *const u8, g: usize) -> (__m256, __m256) {
        const { assert!(size_of::<Self>() == 18) }
        // SAFETY: `load_f16x8_stride18` requires eight readable blocks of 18 bytes, the size
        // asserted above: blocks `g .. g + 8` of `row`. The caller guarantees AVX-512 BW.
        unsafe {
            let d = load_f16x8_stride18(row.add(g * size_of::<Self>()));
            (d, _mm256_setzero_ps())
        }
    }
    #[inline(always)]
    unsafe fn scales_in_order(row: *const u8, g: usize, order: [usize; 8]) -> (__m256, __m256) {
        // SAFETY: `order` is a permutation of 0 to 7, so `load_f16x8` reads the F16 at the start
        // of each of the blocks `g .. g + 8` of `row`, all readable. The caller guarantees F16C.
        unsafe {
            let block = row.add(g * size_of::<Self>());
            let d = load_f16x8(block, size_of::<Self>(), order);
            (d, _mm256_setzero_ps())
        }
    }
}

impl Block32Kernel for BlockMxfp4 {
    const MAX_QUANT: usize = 24;
    const CODES: Codes = Codes::Nibbles(offset_of!(Self, qs));

    #[inline(always)]
    unsafe fn decode<S: IntSimd>(codes: S::I) -> S::I {
        // SAFETY: `look_up` takes the table by value, and needs the instructions of `S`, which the
        // caller guarantees.
        unsafe { S::look_up(FP4_TABLE, codes) }
    }

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: block `g` of `row` is readable, and `nibbles` reads the 16 bytes of its `qs`,
        // behind the exponent. The table is looked up in registers. Both need AVX2, which the
        // caller guarantees.
        unsafe {
            Avx2::look_up(
                FP4_TABLE,
                nibbles(row.add(g * size_of::<Self>() + offset_of!(Self, qs))),
            )
        }
    }

    #[inline(always)]
    unsafe fn pair(row: *const u8, g: usize, h: usize) -> __m512i {
        // SAFETY: blocks `g` and `h` of `row` are readable, and `nibble_pair` reads the 16 bytes of
        // `qs` of each, behind the exponent. The table is looked up in registers. Both need AVX-512
        // BW, which the caller guarantees.
        unsafe {
            let (a, b) = (
                row.add(g * size_of::<Self>() + offset_of!(Self, qs)),
                row.add(h * size_of::<Self>() + offset_of!(Self, qs)),
            );
            Avx512::look_up(FP4_TABLE, nibble_pair(a, b))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: `i < n`, so block `g + i` of `row` is readable, and its first byte, the exponent,
        // is read. The rest is on registers, and needs AVX2, which the caller guarantees.
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
        // SAFETY: blocks `g .. g + 8` of `row` are readable: 8 * 17 = 136 bytes, of which
        // `pick_words` reads 128. The last exponent is byte 119. The caller guarantees AVX-512 BW,
        // and VL for the shift of words.
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
        // SAFETY: `order` is a permutation of 0 to 7, so `eight_bytes` reads the first byte, the
        // exponent, of each of the blocks `g .. g + 8` of `row`, all readable. The caller
        // guarantees AVX2.
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
        // SAFETY: block `g / 2`, which has group `g`, is readable in `row`. The `qs` of a block has
        // 16 bytes for each of its two groups, and one load reads those of group `g`. The rest is
        // on registers, and needs AVX2, which the caller guarantees.
        unsafe {
            let qs = row.add(g / 2 * size_of::<Self>() + offset_of!(Self, qs) + g % 2 * 16);
            let (both, low) = (_mm_loadu_si128(qs.cast()), _mm_set1_epi8(15));
            let high = _mm_and_si128(_mm_srli_epi16(both, 4), low);
            let low = _mm_and_si128(both, low);
            // The 16 elements of eight bytes are the low nibbles, then the high nibbles.
            let halves =
                _mm256_set_m128i(_mm_unpackhi_epi64(low, high), _mm_unpacklo_epi64(low, high));
            Avx2::look_up(FP4_TABLE, halves)
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        let (mut first, mut second) = ([0.0f32; 8], [0.0f32; 8]);
        for i in 0..n {
            let g = g + i;
            // SAFETY: `g` is one of the `n` groups, so block `g / 2` of `row` is readable. The `d`
            // of a block has two bytes for each of its two groups. An array of bytes is aligned at
            // any address.
            let [a, b] = unsafe {
                let scales = row.add(g / 2 * size_of::<Self>() + offset_of!(Self, d) + g % 2 * 2);
                scales.cast::<[u8; 2]>().read()
            };
            first[i] = NVFP4_SCALES[usize::from(a)];
            second[i] = NVFP4_SCALES[usize::from(b)];
        }
        // SAFETY: the two loads read the eight floats of `first` and of `second`, and need AVX,
        // which the caller guarantees.
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
        // SAFETY: block `g / 4`, which has group `g`, is readable in `row`. The `qs` of a block has
        // four bytes for each of its four groups, and `bits` reads those of group `g`. The rest is
        // on registers, and needs AVX2, which the caller guarantees.
        unsafe {
            let signs = bits(row.add(g / 4 * size_of::<Self>() + offset_of!(Self, qs) + g % 4 * 4));
            _mm256_srli_epi16(fifth_bits(signs), 3)
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: `scales_of_blocks` has the contract of this function: blocks of groups `g .. g +
        // n` that begin with `d`, 18 bytes for each four groups, `n <= 8`, and AVX2 with F16C.
        unsafe { (scales_of_blocks::<Self>(row, g, n), _mm256_setzero_ps()) }
    }
}

impl Block32Kernel for BlockQ2_0 {
    const MAX_QUANT: usize = 3;

    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: block `g / 2`, which has group `g`, is readable in `row`. The `qs` of a block has
        // eight bytes for each of its two groups, and one load reads those of group `g`. The rest
        // is on registers, and needs AVX2, which the caller guarantees.
        unsafe {
            let qs = row.add(g / 2 * size_of::<Self>() + offset_of!(Self, qs) + g % 2 * 8);
            // Expands the four quants of a byte to the four bytes of a word.
            let words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(qs.cast()));
            let two = _mm256_or_si256(words, _mm256_slli_epi32(words, 6));
            let four = _mm256_or_si256(two, _mm256_slli_epi32(two, 12));
            _mm256_and_si256(four, _mm256_set1_epi8(3))
        }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        // SAFETY: `scales_of_blocks` has the contract of this function: blocks of groups `g .. g +
        // n` that begin with `d`, 18 bytes for each two groups, `n <= 8`, and AVX2 with F16C.
        unsafe { (scales_of_blocks::<Self>(row, g, n), _mm256_setzero_ps()) }
    }
}
