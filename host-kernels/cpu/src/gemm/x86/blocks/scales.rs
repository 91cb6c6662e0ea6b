//! The scales of several groups, gathered from their blocks.

use std::arch::x86_64::*;

use crate::formats::Block32Format;

/// Makes the compiler assemble `bits` in integer registers. Otherwise it inserts them into vectors,
/// and insertions take the few execution ports of shuffles.
#[inline(always)]
fn in_integers(mut bits: u64) -> i64 {
    // SAFETY: the assembly is a comment: it has no instruction and changes no register.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) bits, options(pure, nomem, nostack, preserves_flags));
    }
    bits as i64
}

/// The F16 at `p`, `p + stride`, ...: `n` of eight; 0 in the other lanes.
#[inline(always)]
pub(super) unsafe fn halves(p: *const u8, stride: usize, n: usize) -> __m256 {
    // SAFETY: the caller guarantees `n` F16 at `p`, `stride` bytes apart, and the instructions.
    unsafe {
        if n == 8 {
            return eight_halves(p, stride, [0, 1, 2, 3, 4, 5, 6, 7]);
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
#[inline(always)]
pub(super) unsafe fn eight_halves(p: *const u8, stride: usize, order: [usize; 8]) -> __m256 {
    // SAFETY: the caller guarantees an F16 at `order[i] * stride` bytes from `p` for each `i`, and
    // the instructions.
    unsafe {
        let half = |i: usize| u64::from(p.add(order[i] * stride).cast::<u16>().read_unaligned());
        let four = |i| half(i) | half(i + 1) << 16 | half(i + 2) << 32 | half(i + 3) << 48;
        _mm256_cvtph_ps(_mm_set_epi64x(in_integers(four(4)), in_integers(four(0))))
    }
}

/// The eight bytes at `order[i]` strides from `p`, as 32-bit lanes.
#[inline(always)]
pub(super) unsafe fn eight_bytes(p: *const u8, stride: usize, order: [usize; 8]) -> __m256i {
    // SAFETY: the caller guarantees a byte at `order[i] * stride` bytes from `p` for each `i`, and
    // the instructions.
    unsafe {
        let mut bytes = 0;
        for (i, index) in order.into_iter().enumerate() {
            bytes |= u64::from(*p.add(index * stride)) << (8 * i);
        }
        _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(in_integers(bytes)))
    }
}

/// Eight of the 64 words of 16 bits at `p`.
#[inline(always)]
pub(super) unsafe fn pick_words(p: *const u8, which: [i16; 8]) -> __m128i {
    // SAFETY: the caller guarantees 128 bytes at `p`, which are two vectors, and the instructions.
    // `which` has the 16 bytes that are loaded.
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
#[inline(always)]
pub(super) unsafe fn halves_of_18(blocks: *const u8) -> __m256 {
    // SAFETY: the caller guarantees eight blocks of 18 bytes at `blocks`, 144 bytes, of which
    // `pick_words` reads 128, and the instructions.
    unsafe { _mm256_cvtph_ps(pick_words(blocks, [0, 9, 18, 27, 36, 45, 54, 63])) }
}

/// `2^(e - 128)` for each exponent `e`.
#[inline(always)]
pub(super) unsafe fn halved_powers(e: __m256i) -> __m256i {
    // SAFETY: the operands are registers. The caller guarantees the instructions.
    unsafe {
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
        // SAFETY: the caller guarantees the blocks of groups `g .. g + n` in the row, which begin
        // with their scale. The read is unaligned.
        *bits = unsafe { row.add(block).cast::<u16>().read_unaligned() };
    }
    // SAFETY: `bits` has the 16 bytes that are loaded. The caller guarantees the instructions.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bits.as_ptr().cast())) }
}
