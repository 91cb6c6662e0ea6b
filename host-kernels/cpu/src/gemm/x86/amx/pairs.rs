//! Weights, unpacked to pairs of BF16.

use std::arch::x86_64::*;

use crate::gemm::kernel::GemmArgs;
use crate::gemm::x86::bf16_dot::{Bf16Weights, PairPanel};
use crate::gemm::x86::panel::Panel;
use crate::simd::Avx512;

/// Rows that are unpacked together: two vectors of words.
pub(in crate::gemm::x86) const PAIR_ROWS: usize = 32;

/// A format whose weights are unpacked to pairs of BF16.
///
/// # Safety
/// As [`Panel`], with AVX-512 BF16. [`PairWeights::unpack`]: `pairs` is writable for `len / 2`
/// pairs of [`PAIR_ROWS`] rows, and aligned to a cache line.
pub(in crate::gemm::x86) trait PairWeights: Sized {
    /// The most elements of `k` that are unpacked in one call.
    const CHUNK: usize;
    /// Bytes of a chunk of a row of weights.
    const BYTES: usize;

    /// Memory to unpack with.
    fn new() -> Self;
    /// Unpacks `len` weights from `start` on of the [`PAIR_ROWS`] rows from `row` on. The last row
    /// of the weights is repeated if there are fewer.
    unsafe fn unpack(
        &mut self,
        call: &GemmArgs,
        row: usize,
        start: usize,
        len: usize,
        pairs: *mut [u32; PAIR_ROWS],
    );
}

/// A panel of bytes. A weight is `d * byte + m`. An infinite `d`, or one whose products overflow,
/// makes NaN or infinite weights, not always the same as the format's own.
///
/// # Safety
/// The panel has been unpacked with a `len` that includes the word or group, and `v < 2`. The
/// processor has AVX-512.
pub(in crate::gemm::x86) trait BytePanel: Panel<Avx512> {
    /// Elements with the same `d` and `m`.
    const GROUP: usize;

    /// Four bytes of each row of vector `v`: elements `4 * word` to `4 * word + 3`.
    unsafe fn bytes(&self, word: usize, v: usize) -> __m512i;
    /// `d` and `m` of a group, for each row of vector `v`.
    unsafe fn factors(&self, group: usize, v: usize) -> (__m512, __m512);
}

/// The weights of a panel of bytes.
pub(in crate::gemm::x86) struct Bytes<P>(P);

impl<P: BytePanel> PairWeights for Bytes<P> {
    const CHUNK: usize = P::CHUNK;
    const BYTES: usize = P::BYTES;

    #[inline(always)]
    fn new() -> Self {
        Bytes(P::new())
    }

    #[inline(always)]
    unsafe fn unpack(
        &mut self,
        call: &GemmArgs,
        row: usize,
        start: usize,
        len: usize,
        pairs: *mut [u32; PAIR_ROWS],
    ) {
        const { assert!(P::VECTORS == 2) }
        let words = P::GROUP / 4;
        // SAFETY: the caller guarantees the rows and the chunk for the panel, which then has the
        // words and groups of `len` elements, a multiple of `GROUP` as `k` and `CHUNK` are. Word
        // `word` has the pairs `2 * word` and the next, below `len / 2`, each with two vectors of
        // rows. The caller guarantees AVX-512.
        unsafe {
            self.0.unpack(call, row, start, len);
            for group in 0..len / P::GROUP {
                for v in 0..2 {
                    let (d, m) = self.0.factors(group, v);
                    for word in group * words..(group + 1) * words {
                        let to = pairs.add(2 * word).cast::<__m512i>().add(v);
                        let [first, second] = weights(self.0.bytes(word, v), d, m);
                        to.write(first);
                        to.add(2).write(second);
                    }
                }
            }
        }
    }
}

/// `d * byte + m` for the four bytes of each lane, as two pairs of BF16, rounded to nearest, ties
/// to even.
///
/// # Safety
/// The processor has AVX-512 with BF16.
#[inline(always)]
unsafe fn weights(bytes: __m512i, d: __m512, m: __m512) -> [__m512i; 2] {
    // SAFETY: `LANES` has the 64 bytes of a vector, which the load does not require to be aligned.
    // `__m512bh` and `__m512i` both have 64 bytes, any of which are valid. All else takes
    // registers. The caller guarantees the instructions.
    unsafe {
        let low = _mm512_set1_epi32(0xff);
        let elements = [
            _mm512_and_si512(bytes, low),
            _mm512_and_si512(_mm512_srli_epi32::<8>(bytes), low),
            _mm512_and_si512(_mm512_srli_epi32::<16>(bytes), low),
            _mm512_srli_epi32::<24>(bytes),
        ];
        let mut floats = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            floats[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(elements[i]), d, m);
        }
        let lanes = _mm512_loadu_si512(LANES.as_ptr().cast());
        let mut pairs = [_mm512_setzero_si512(); 2];
        for i in 0..2 {
            // The first elements of all lanes, then the second.
            let both = _mm512_cvtne2ps_pbh(floats[2 * i + 1], floats[2 * i]);
            let both = std::mem::transmute::<__m512bh, __m512i>(both);
            pairs[i] = _mm512_permutexvar_epi16(lanes, both);
        }
        pairs
    }
}

/// The index of each word of pairs in two halves of words.
const LANES: [u16; 32] = {
    let mut lanes = [0; 32];
    let mut i = 0;
    while i < 32 {
        lanes[i] = (i / 2 + i % 2 * 16) as u16;
        i += 1;
    }
    lanes
};

impl<W: Bf16Weights> PairWeights for PairPanel<W> {
    const CHUNK: usize = <Self as Panel<Avx512>>::CHUNK;
    const BYTES: usize = <Self as Panel<Avx512>>::BYTES;

    #[inline(always)]
    fn new() -> Self {
        <Self as Panel<Avx512>>::new()
    }

    #[inline(always)]
    unsafe fn unpack(
        &mut self,
        call: &GemmArgs,
        row: usize,
        start: usize,
        len: usize,
        pairs: *mut [u32; PAIR_ROWS],
    ) {
        // SAFETY: the caller guarantees the rows and the chunk for `unpack_to`, and room for `len /
        // 2` pairs: `len` is a multiple of 32, so no vector of pairs is padded.
        unsafe { self.unpack_to(call, row, start, len, pairs) }
    }
}
