//! Decoding of the super-block formats to vectors of quants.

use std::arch::x86_64::*;
use std::mem::offset_of;

use super::{IQ4_TABLE, SuperBlockKernel, bits, half, nibble_pair, nibbles};
use crate::formats::{BlockIq4Xs, BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K, BlockTq2_0};
use crate::gemm::x86::int_simd::IntSimd;
use crate::simd::{Avx2, Avx512, register_fns};

register_fns! {
    avx512;
    /// `(a & a_mask) | (b & b_mask)`
    unsafe fn merge(a: __m512i, a_mask: __m512i, b: __m512i, b_mask: __m512i) -> __m512i {
        _mm512_or_si512(_mm512_and_si512(a, a_mask), _mm512_and_si512(b, b_mask))
    }
}

/// The eight 6-bit scales and minimums of Q4_K and Q5_K; see `unpack_scales` of the formats.
///
/// # Safety
/// `packed` is readable for 12 bytes.
#[inline(always)]
unsafe fn six_bit_scales(packed: *const u8) -> (__m256i, __m256i) {
    // SAFETY: three reads of four bytes are the 12 bytes at `packed` that the caller guarantees.
    // `widen` takes numbers and needs AVX2, which the caller guarantees.
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

register_fns! {
    avx2;
    /// Eight bytes as 16-bit lanes; the upper eight lanes are 0.
    unsafe fn widen(low: u32, high: u32) -> __m256i {
        let bytes = u64::from(high) << 32 | u64::from(low);
        _mm256_zextsi128_si256(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bytes as i64)))
    }
}

/// The two F16 at `p`.
///
/// # Safety
/// `p` is readable for four bytes.
#[inline(always)]
unsafe fn two_halves(p: *const u8) -> (f32, f32) {
    // SAFETY: `bits` reads the four bytes at `p` that the caller guarantees. The conversion takes a
    // register and needs F16C, which the caller guarantees.
    unsafe {
        let both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits(p) as i32));
        (_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both)))
    }
}

// `two_halves` reads the scale and the scale of the minimums at once.
const _: () = assert!(
    offset_of!(BlockQ2K, dmin) == offset_of!(BlockQ2K, d) + 2
        && offset_of!(BlockQ4K, dmin) == offset_of!(BlockQ4K, d) + 2
        && offset_of!(BlockQ5K, dmin) == offset_of!(BlockQ5K, d) + 2
);

/// The order of sub-blocks of 32 elements if 64 bytes of nibbles of Q4_K and Q5_K are decoded at
/// once: the low nibbles, then the high nibbles.
const NIBBLE_ORDER: [usize; 8] = [0, 2, 1, 3, 4, 6, 5, 7];

impl SuperBlockKernel for BlockQ4K {
    const MAX_QUANT: usize = 15;
    const ONE_ORDER_LANES: usize = 8;
    const ORDER_512: [usize; 8] = NIBBLE_ORDER;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: four loads of 32 bytes are the 128 bytes of `qs` of the block, which is readable.
        // Loads and shifts need AVX2, which the caller guarantees.
        unsafe {
            let low = _mm256_set1_epi8(15);
            let mut q = [low; 8];
            for i in 0..4 {
                let nibbles = _mm256_loadu_si256(block.add(offset_of!(Self, qs) + 32 * i).cast());
                q[2 * i] = _mm256_and_si256(nibbles, low);
                q[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), low);
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: two loads of 64 bytes are the 128 bytes of `qs` of the block, which is readable.
        // Loads and shifts need AVX-512 F and BW, which the caller guarantees.
        unsafe {
            let low = _mm512_set1_epi8(15);
            let a = _mm512_loadu_si512(block.add(offset_of!(Self, qs)).cast());
            let b = _mm512_loadu_si512(block.add(offset_of!(Self, qs) + 64).cast());
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
        // SAFETY: `six_bit_scales` reads 12 bytes: `scales` of the Q4_K block, which is readable.
        // The caller guarantees AVX2.
        unsafe { six_bit_scales(block.add(offset_of!(Self, scales))) }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: `two_halves` reads four bytes: `d` and `dmin` of the Q4_K block, which is
        // readable. The caller guarantees F16C.
        unsafe { two_halves(block.add(offset_of!(Self, d))) }
    }
}

impl SuperBlockKernel for BlockQ5K {
    const MAX_QUANT: usize = 31;
    const ONE_ORDER_LANES: usize = 8;
    const ORDER_512: [usize; 8] = NIBBLE_ORDER;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: one load of 32 bytes is `qh`, and four loads of 32 bytes are the 128 bytes of
        // `qs`, of the block, which is readable. The loads and the shifts need AVX2, which the
        // caller guarantees.
        unsafe {
            let (low, fifth) = (_mm256_set1_epi8(15), _mm256_set1_epi8(16));
            let qh = _mm256_loadu_si256(block.add(offset_of!(Self, qh)).cast());
            // Bit `j` of a byte belongs to sub-block `j`. The bit is shifted to bit 4, and the
            // other bits of the 16-bit shift are masked.
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
                let nibbles = _mm256_loadu_si256(block.add(offset_of!(Self, qs) + 32 * i).cast());
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
        // SAFETY: one load of 32 bytes is `qh`, and two loads of 64 bytes are the 128 bytes of
        // `qs`, of the block, which is readable. The loads and the shifts need AVX-512 F and BW,
        // which the caller guarantees.
        unsafe {
            let (low, fifth) = (_mm512_set1_epi8(15), _mm512_set1_epi8(16));
            let qh =
                _mm512_broadcast_i64x4(_mm256_loadu_si256(block.add(offset_of!(Self, qh)).cast()));
            let a = _mm512_loadu_si512(block.add(offset_of!(Self, qs)).cast());
            let b = _mm512_loadu_si512(block.add(offset_of!(Self, qs) + 64).cast());
            // Shifts to the left move bits 0 to 3 to bit 4, shifts to the right bits 4 to 7.
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
        // SAFETY: `six_bit_scales` reads 12 bytes: `scales` of the Q5_K block, which is readable.
        // The caller guarantees AVX2.
        unsafe { six_bit_scales(block.add(offset_of!(Self, scales))) }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: `two_halves` reads four bytes: `d` and `dmin` of the Q5_K block, which is
        // readable. The caller guarantees F16C.
        unsafe { two_halves(block.add(offset_of!(Self, d))) }
    }
}

impl SuperBlockKernel for BlockQ6K {
    const MAX_QUANT: usize = 63;
    const ONE_ORDER_LANES: usize = 8;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: for each `half`, two loads of 32 bytes are 64 of the 128 bytes of `ql`, and one
        // is 32 of the 64 bytes of `qh`, of the block, which is readable. The caller guarantees
        // AVX2.
        unsafe {
            let (low, high) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
            let mut q = [low; 8];
            for half in 0..2 {
                let a = _mm256_loadu_si256(block.add(offset_of!(Self, ql) + 64 * half).cast());
                let b = _mm256_loadu_si256(block.add(offset_of!(Self, ql) + 64 * half + 32).cast());
                let h = _mm256_loadu_si256(block.add(offset_of!(Self, qh) + 32 * half).cast());
                let sub_blocks = [
                    (a, _mm256_slli_epi16(h, 4)),
                    (b, _mm256_slli_epi16(h, 2)),
                    (_mm256_srli_epi16(a, 4), h),
                    (_mm256_srli_epi16(b, 4), _mm256_srli_epi16(h, 2)),
                ];
                for (i, (l, h)) in sub_blocks.into_iter().enumerate() {
                    q[4 * half + i] =
                        _mm256_or_si256(_mm256_and_si256(l, low), _mm256_and_si256(h, high));
                }
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: for each `half`, a load of 64 bytes is half of the 128 bytes of `ql`, and a load
        // of 32 is half of the 64 bytes of `qh`, of the block, which is readable. The caller
        // guarantees AVX-512 F and BW.
        unsafe {
            let (low, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
            let mut q = [low; 4];
            for half in 0..2 {
                let l = _mm512_loadu_si512(block.add(offset_of!(Self, ql) + 64 * half).cast());
                let h = _mm256_loadu_si256(block.add(offset_of!(Self, qh) + 32 * half).cast());
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
        // SAFETY: one load reads the 16 bytes of `scales` of the block, which is readable. Widening
        // them needs AVX2, which the caller guarantees.
        unsafe {
            let scales =
                _mm256_cvtepi8_epi16(_mm_loadu_si128(block.add(offset_of!(Self, scales)).cast()));
            (scales, _mm256_setzero_si256())
        }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: one unaligned read of the two bytes of `d` of the Q6_K block, which is readable.
        // `half` needs F16C, which the caller guarantees.
        unsafe { (half(block.add(offset_of!(Self, d))), 0.0) }
    }
}

/// The two-bit quants of 256 elements.
///
/// # Safety
/// `qs` is readable for 64 bytes.
#[inline(always)]
unsafe fn two_bits_256(qs: *const u8) -> [__m256i; 8] {
    // SAFETY: two loads of 32 bytes are the 64 bytes at `qs` that the caller guarantees. Loads and
    // shifts need AVX2, which the caller guarantees.
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
///
/// # Safety
/// `qs` is readable for 64 bytes.
#[inline(always)]
unsafe fn two_bits_512(qs: *const u8) -> [__m512i; 4] {
    // SAFETY: two loads of 32 bytes are the 64 bytes at `qs` that the caller guarantees. The shifts
    // by lane need AVX-512 F, which the caller guarantees.
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

impl SuperBlockKernel for BlockQ2K {
    const MAX_QUANT: usize = 3;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: `two_bits_256` reads 64 bytes: `qs` of the Q2_K block, which is readable. The
        // caller guarantees AVX2.
        unsafe { two_bits_256(block.add(offset_of!(Self, qs))) }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: `two_bits_512` reads 64 bytes: `qs` of the Q2_K block, which is readable. The
        // caller guarantees AVX-512 F.
        unsafe { two_bits_512(block.add(offset_of!(Self, qs))) }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: one load reads the 16 bytes of `scales` of the block, which have a scale and a
        // minimum each. The block is readable. Widening needs AVX2, which the caller guarantees.
        unsafe {
            let (both, low) = (
                _mm_loadu_si128(block.add(offset_of!(Self, scales)).cast()),
                _mm_set1_epi8(15),
            );
            let scales = _mm_and_si128(both, low);
            let mins = _mm_and_si128(_mm_srli_epi16(both, 4), low);
            (_mm256_cvtepu8_epi16(scales), _mm256_cvtepu8_epi16(mins))
        }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: `two_halves` reads four bytes: `d` and `dmin` of the Q2_K block, which is
        // readable. The caller guarantees F16C.
        unsafe { two_halves(block.add(offset_of!(Self, d))) }
    }
}

impl SuperBlockKernel for BlockQ3K {
    const MAX_QUANT: usize = 7;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: one load reads the 32 bytes of `hmask`, and `two_bits_256` the 64 bytes of `qs`,
        // of the block, which is readable. The loads and the shifts need AVX2, which the caller
        // guarantees.
        unsafe {
            let third = _mm256_set1_epi8(4);
            let mask = _mm256_loadu_si256(block.add(offset_of!(Self, hmask)).cast());
            // Bit `i` of a byte belongs to sub-block `i`. The bit is shifted to bit 2.
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
            let mut q = two_bits_256(block.add(offset_of!(Self, qs)));
            for (q, bits) in q.iter_mut().zip(thirds) {
                *q = _mm256_or_si256(*q, _mm256_and_si256(bits, third));
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: one load reads the 32 bytes of `hmask`, and `two_bits_512` the 64 bytes of `qs`,
        // of the block, which is readable. The loads and the shifts need AVX-512 F, which the
        // caller guarantees.
        unsafe {
            let (low, third) = (_mm512_set1_epi8(3), _mm512_set1_epi8(4));
            let mask = _mm512_broadcast_i64x4(_mm256_loadu_si256(
                block.add(offset_of!(Self, hmask)).cast(),
            ));
            let q = two_bits_512(block.add(offset_of!(Self, qs)));
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
        // SAFETY: three reads of four bytes are the 12 bytes of `scales` of the block, which is
        // readable. Widening needs AVX2, which the caller guarantees.
        unsafe {
            const LOW: u32 = 0x0f0f_0f0f;
            const HIGH: u32 = 0x3030_3030;
            let (a, b, c) = (
                bits(block.add(offset_of!(Self, scales))),
                bits(block.add(offset_of!(Self, scales) + 4)),
                bits(block.add(offset_of!(Self, scales) + 8)),
            );
            // The two high bits of each scale, shifted to bits 4 and 5.
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
        // SAFETY: one unaligned read of the two bytes of `d` of the Q3_K block, which is readable.
        // `half` needs F16C, which the caller guarantees.
        unsafe { (half(block.add(offset_of!(Self, d))), 0.0) }
    }
}

impl SuperBlockKernel for BlockIq4Xs {
    const MAX_QUANT: usize = 255;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: `nibbles` reads 16 bytes for each `i < 8`: the 128 bytes of `qs` of the block,
        // which is readable. The table is looked up with AVX2, which the caller guarantees.
        unsafe {
            let mut q = [_mm256_setzero_si256(); 8];
            for (i, q) in q.iter_mut().enumerate() {
                *q = Avx2::look_up(IQ4_TABLE, nibbles(block.add(offset_of!(Self, qs) + 16 * i)));
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: `nibble_pair` reads twice 16 bytes for each `i < 4`: the 128 bytes of `qs` of the
        // block, which is readable. The table is looked up with AVX-512 BW, which the caller
        // guarantees.
        unsafe {
            let mut q = [_mm512_setzero_si512(); 4];
            for (i, q) in q.iter_mut().enumerate() {
                let qs = block.add(offset_of!(Self, qs) + 32 * i);
                *q = Avx512::look_up(IQ4_TABLE, nibble_pair(qs, qs.add(16)));
            }
            q
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: two unaligned reads: the four bytes of `scales_l` and the two bytes of `scales_h`
        // of the block, which is readable. The rest is on registers of 128 and 256 bits, and needs
        // AVX2, which the caller guarantees.
        unsafe {
            let nibbles = _mm_cvtsi32_si128(bits(block.add(offset_of!(Self, scales_l))) as i32);
            let low = _mm_set1_epi8(15);
            let low = _mm_unpacklo_epi8(
                _mm_and_si128(nibbles, low),
                _mm_and_si128(_mm_srli_epi16(nibbles, 4), low),
            );
            // Bits `2 j` and `2 j + 1` are moved to the top of lane `j`, then to bits 4 and 5.
            let high = _mm_set1_epi16(
                block
                    .add(offset_of!(Self, scales_h))
                    .cast::<i16>()
                    .read_unaligned(),
            );
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
        // SAFETY: one unaligned read of the two bytes of `d` of the IQ4_XS block, which is
        // readable. `half` needs F16C, which the caller guarantees.
        unsafe { (half(block.add(offset_of!(Self, d))), 0.0) }
    }
}

impl SuperBlockKernel for BlockTq2_0 {
    const MAX_QUANT: usize = 3;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: `two_bits_256` reads 64 bytes: `qs` of the TQ2_0 block, which is readable. The
        // caller guarantees AVX2.
        unsafe { two_bits_256(block.add(offset_of!(Self, qs))) }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: `two_bits_512` reads 64 bytes: `qs` of the TQ2_0 block, which is readable. The
        // caller guarantees AVX-512 F.
        unsafe { two_bits_512(block.add(offset_of!(Self, qs))) }
    }

    #[inline(always)]
    unsafe fn scales(_: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the block is not accessed: TQ2_0 has no scales of sub-blocks, and both vectors
        // are constants. Vectors of 256 bits need AVX, which the caller guarantees.
        unsafe { (_mm256_set1_epi16(1), _mm256_setzero_si256()) }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: one unaligned read of the two bytes of `d` of the TQ2_0 block, which is readable.
        // `half` needs F16C, which the caller guarantees.
        unsafe { (half(block.add(offset_of!(Self, d))), 0.0) }
    }
}
