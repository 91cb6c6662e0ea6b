//! Decoding blocks of 32 weights, for the kernels that multiply their quants in 8 and in 16 bits.

use std::arch::x86_64::*;

use super::block_simd::BlockSimd;
use super::blocks::{Block32Kernel, Codes};
use crate::formats::{BlockQ8_0, BlockQ8_1};
use crate::gemm::kernel::GemmArgs;

/// Groups of 32 elements in a chunk of 256.
pub(super) const GROUPS: usize = 256 / 32;

/// Of quants up to `most`, how many products of a lane are summed in 16 bits before they are
/// widened: 1 if the level has an instruction that sums in 32 bits.
pub(super) const fn depth<S: BlockSimd>(most: usize, words: usize) -> usize {
    let mut depth = words;
    // Two products with signed bytes go to each 16-bit lane.
    while depth > 1 && (!S::SUMS_I16 || depth * 2 * 128 * most > i16::MAX as usize) {
        depth /= 2;
    }
    depth
}

/// Bytes of an activation block of `B`, and where its quants begin.
pub(super) const fn activation<B: Block32Kernel>() -> (usize, usize) {
    if B::HAS_MIN {
        (size_of::<BlockQ8_1>(), 4)
    } else {
        (size_of::<BlockQ8_0>(), 2)
    }
}

/// Where `n` rows of weights begin, from `row` on; the last one is repeated where there are fewer.
#[inline(always)]
pub(super) fn rows_from(call: &GemmArgs, row: usize, n: usize) -> [*const u8; 32] {
    let mut from = [call.w; 32];
    for r in 0..n {
        from[r] = call.row(row + r);
    }
    from
}

/// The scales and minimums of `groups` groups of a row, of which there usually are as many as in a
/// chunk: then that is a constant, and no loop over it is left.
///
/// # Safety
/// As [`BlockSimd::scales`].
#[inline(always)]
pub(super) unsafe fn chunk_scales<S: BlockSimd, B: Block32Kernel>(
    row: *const u8,
    first: usize,
    groups: usize,
) -> (__m256, __m256) {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        match groups {
            GROUPS => S::scales::<B>(row, first, GROUPS),
            _ => S::scales::<B>(row, first, groups),
        }
    }
}

/// The quants of the group in block `block` of a vector of rows, decoded where they lie: for each
/// four elements `i`, a vector with those of each row.
///
/// # Safety
/// As [`IntSimd::transpose_words`](super::int_simd::IntSimd::transpose_words), for each row.
#[inline(always)]
pub(super) unsafe fn decode_words<S: BlockSimd, B: Block32Kernel>(
    rows: *const *const u8,
    block: usize,
    mut place: impl FnMut(usize, S::I),
) {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        match B::CODES {
            Codes::Nibbles(offset) => {
                let words = S::transpose_words(rows, block + offset);
                for (i, word) in words.into_iter().enumerate() {
                    place(i, B::decode::<S>(S::low_nibbles(word)));
                    place(4 + i, B::decode::<S>(S::high_nibbles(word)));
                }
            }
            Codes::Bytes(offset) => {
                for half in 0..2 {
                    let words = S::transpose_words(rows, block + offset + 16 * half);
                    for (i, word) in words.into_iter().enumerate() {
                        place(4 * half + i, B::decode::<S>(word));
                    }
                }
            }
            Codes::Other => {}
        }
    }
}
