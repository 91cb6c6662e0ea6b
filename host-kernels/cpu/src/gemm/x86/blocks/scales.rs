//! The scales of several groups, gathered from their blocks.
//!
//! # Safety
//! The instructions are those of [`super`]; [`pick_words`] and [`load_f16x8_stride18`] require
//! AVX-512.

use std::arch::x86_64::*;

use crate::formats::Block32Format;
use crate::simd::register_fns;

/// Makes the compiler assemble `bits` in integer registers. Otherwise it inserts them into vectors,
/// and insertions take the few execution ports of shuffles.
#[inline(always)]
fn in_integers(mut bits: u64) -> i64 {
    // SAFETY: the assembly is a comment: it has no instruction and changes no register.
    unsafe {
        std::arch::asm!(
            "/* {0} */",
            inout(reg) bits,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    bits as i64
}

/// The F16 at `p`, `p + stride`, ...: `n` of eight; 0 in the other lanes.
///
/// # Safety
/// `p + i * stride` is readable for two bytes for each `i < n`, and `n <= 8`.
#[inline(always)]
pub(super) unsafe fn load_f16(p: *const u8, stride: usize, n: usize) -> __m256 {
    // SAFETY: each of the at most eight reads is of the two bytes at `p + i * stride`, `i < n`,
    // which the caller guarantees; `load_f16x8` reads the same for `n = 8`. The vector is made of
    // numbers, and its conversion needs F16C, which the caller guarantees.
    unsafe {
        if n == 8 {
            return load_f16x8(p, stride, [0, 1, 2, 3, 4, 5, 6, 7]);
        }
        let mut h = [0i16; 8];
        for (i, h) in h.iter_mut().enumerate().take(n) {
            *h = p.add(i * stride).cast::<i16>().read_unaligned();
        }
        // Not through memory: eight narrow stores before a wide load prevent store forwarding.
        let h = _mm_setr_epi16(h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]);
        _mm256_cvtph_ps(h)
    }
}

/// The eight F16 at `order[i]` strides from `p`.
///
/// # Safety
/// `p + order[i] * stride` is readable for two bytes for each `i`.
#[inline(always)]
pub(super) unsafe fn load_f16x8(p: *const u8, stride: usize, order: [usize; 8]) -> __m256 {
    // SAFETY: `half(i)` is called for 0 to 7 and reads the two bytes at `p + order[i] * stride`,
    // which the caller guarantees. The conversion takes a register and needs F16C, which the caller
    // guarantees.
    unsafe {
        let half = |i: usize| u64::from(p.add(order[i] * stride).cast::<u16>().read_unaligned());
        let four = |i| half(i) | half(i + 1) << 16 | half(i + 2) << 32 | half(i + 3) << 48;
        _mm256_cvtph_ps(_mm_set_epi64x(in_integers(four(4)), in_integers(four(0))))
    }
}

/// The eight bytes at `order[i]` strides from `p`, as 32-bit lanes.
///
/// # Safety
/// `p + order[i] * stride` is readable for each `i`.
#[inline(always)]
pub(super) unsafe fn eight_bytes(p: *const u8, stride: usize, order: [usize; 8]) -> __m256i {
    // SAFETY: each of the eight reads is of the byte at `p + order[i] * stride`, which the caller
    // guarantees. Widening takes a register and needs AVX2, which the caller guarantees.
    unsafe {
        let mut bytes = 0;
        for (i, index) in order.into_iter().enumerate() {
            bytes |= u64::from(*p.add(index * stride)) << (8 * i);
        }
        _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(in_integers(bytes)))
    }
}

/// Eight of the 64 words of 16 bits at `p`.
///
/// # Safety
/// `p` is readable for 128 bytes. The processor has AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn pick_words(p: *const u8, which: [i16; 8]) -> __m128i {
    // SAFETY: two loads of 64 bytes are the 128 bytes at `p` that the caller guarantees, and a load
    // of 16 bytes is the variable `which`. The permutation needs AVX-512 BW, which the caller
    // guarantees.
    unsafe {
        let (low, high) = (
            _mm512_loadu_si512(p.cast()),
            _mm512_loadu_si512(p.add(64).cast()),
        );
        let which = _mm512_zextsi128_si512(_mm_loadu_si128(which.as_ptr().cast()));
        _mm512_castsi512_si128(_mm512_permutex2var_epi16(low, which, high))
    }
}

/// The F16 scales at the start of eight blocks of 18 bytes.
///
/// # Safety
/// `blocks` is readable for eight blocks. The processor has AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn load_f16x8_stride18(blocks: *const u8) -> __m256 {
    // SAFETY: eight blocks of 18 bytes are 144 bytes, all readable at `blocks`, and `pick_words`
    // requires 128. The caller guarantees its AVX-512 BW, and F16C for the conversion.
    unsafe { _mm256_cvtph_ps(pick_words(blocks, [0, 9, 18, 27, 36, 45, 54, 63])) }
}

register_fns! {
    avx2;
    /// `2^(e - 128)` for each exponent `e`.
    pub(super) unsafe fn halved_powers(e: __m256i) -> __m256i {
        let normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        // For exponents 0 and 1 the result is subnormal. For larger exponents, `small` is at most
        // the normal result.
        let small = _mm256_min_epu32(e, _mm256_set1_epi32(2));
        let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), small);
        _mm256_max_epi32(normal, small)
    }
}

/// The scales of the blocks of the `n <= 8` groups from `g` on, for blocks that begin with their
/// scale.
///
/// # Safety
/// As [`Block32Kernel::scales`](super::Block32Kernel::scales).
#[inline(always)]
pub(super) unsafe fn scales_of_blocks<B: Block32Format>(
    row: *const u8,
    g: usize,
    n: usize,
) -> __m256 {
    let groups = B::ELEMENTS / 32;
    let mut bits = [0u16; 8];
    for (i, bits) in bits.iter_mut().enumerate().take(n) {
        let block = (g + i) / groups * size_of::<B>();
        // SAFETY: `i < n`, so the caller guarantees the whole block of group `g + i`; its first two
        // bytes are read, unaligned.
        *bits = unsafe { row.add(block).cast::<u16>().read_unaligned() };
    }
    // SAFETY: the load reads the eight `u16` of `bits`, 16 bytes. The conversion needs F16C, which
    // the caller guarantees.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bits.as_ptr().cast())) }
}
