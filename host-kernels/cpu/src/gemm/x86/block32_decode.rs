//! Decoding blocks of 32 weights, for the kernels that multiply their quants in 8 and in 16 bits.

use std::arch::x86_64::*;
use std::mem::offset_of;

use super::block_simd::BlockSimd;
use super::blocks::{Block32Kernel, Codes};
use crate::formats::{BlockQ8_0, BlockQ8_1};
use crate::gemm::kernel::GemmArgs;

/// Groups of 32 elements in a chunk of 256.
pub(super) const GROUPS: usize = 256 / 32;

/// How many products of a lane are summed in 16 bits before they are widened, for quants up to
/// `max_quant`: 1 if the level has an instruction that sums in 32 bits.
pub(super) const fn depth<S: BlockSimd>(max_quant: usize, words: usize) -> usize {
    let mut depth = words;
    // Each 16-bit lane sums two products with signed bytes.
    while depth > 1 && (!S::SUMS_I16 || depth * 2 * 128 * max_quant > i16::MAX as usize) {
        depth /= 2;
    }
    depth
}

/// The bytes of a block of activations for weights of `B`, and the offset of its quants.
pub(super) const fn activation<B: Block32Kernel>() -> (usize, usize) {
    if B::HAS_MIN {
        (size_of::<BlockQ8_1>(), offset_of!(BlockQ8_1, qs))
    } else {
        (size_of::<BlockQ8_0>(), offset_of!(BlockQ8_0, qs))
    }
}

/// Pointers to the `n` rows of weights from `row` on. The last row is repeated if there are fewer.
#[inline(always)]
pub(super) fn rows_from(call: &GemmArgs, row: usize, n: usize) -> [*const u8; 32] {
    let mut from = [call.w; 32];
    for r in 0..n {
        from[r] = call.row(row + r);
    }
    from
}

/// The scales and minimums of `groups` groups of a row. For a whole chunk, the number is passed as
/// a constant, so that the compiler unrolls the loop over the groups.
///
/// # Safety
/// As [`BlockSimd::scales`].
#[inline(always)]
pub(super) unsafe fn chunk_scales<S: BlockSimd, B: Block32Kernel>(
    row: *const u8,
    first: usize,
    groups: usize,
) -> (__m256, __m256) {
    // SAFETY: both arms ask for groups `first .. first + groups` of `row`, which the caller
    // guarantees with `groups <= GROUPS`, and for the instructions of `S`. `GROUPS` is the value of
    // `groups` in the first arm.
    unsafe {
        match groups {
            GROUPS => S::scales::<B>(row, first, GROUPS),
            _ => S::scales::<B>(row, first, groups),
        }
    }
}

/// Decodes the quants of the block at byte `block` of `S::LANES` rows. Calls `store(i, v)` for each
/// four elements `i`; `v` has these four elements of each row.
///
/// # Safety
/// `rows` points to `S::LANES` pointers, each of which is readable for a block of `B` from byte
/// `block` on. The processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn decode_words<S: BlockSimd, B: Block32Kernel>(
    rows: *const *const u8,
    block: usize,
    mut store: impl FnMut(usize, S::I),
) {
    // SAFETY: the block at byte `block` is readable in each of the `S::LANES` rows. `CODES` says
    // where it has its codes: 16 bytes at `offset`, one call of `transpose_words`, or 32 bytes, two
    // calls for 16 bytes each. The caller guarantees the rows and the instructions of `S`.
    unsafe {
        match B::CODES {
            Codes::Nibbles(offset) => {
                let words = S::transpose_words(rows, block + offset);
                for (i, word) in words.into_iter().enumerate() {
                    store(i, B::decode::<S>(S::low_nibbles(word)));
                    store(4 + i, B::decode::<S>(S::high_nibbles(word)));
                }
            }
            Codes::Bytes(offset) => {
                for half in 0..2 {
                    let words = S::transpose_words(rows, block + offset + 16 * half);
                    for (i, word) in words.into_iter().enumerate() {
                        store(4 * half + i, B::decode::<S>(word));
                    }
                }
            }
            Codes::Other => {}
        }
    }
}
