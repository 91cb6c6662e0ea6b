//! Decoding blocks of 32 weights, for the kernels that multiply their quants in 8 and in 16 bits.

use std::arch::x86_64::*;
use std::mem::offset_of;

use super::block_simd::BlockSimd;
use super::blocks::{Block32Kernel, Codes, half};
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

/// A block of activations.
pub(super) struct Activations {
    pub(super) scale: f32,
    /// `scale * sum`, for weights with minimums; otherwise 0.
    pub(super) sum: f32,
    pub(super) quants: __m256i,
}

/// Block `index` of a column of activations for weights of `B`.
///
/// # Safety
/// `x` is readable for blocks 0 to `index`. The processor has AVX2 and F16C.
#[inline(always)]
pub(super) unsafe fn activations<B: Block32Kernel>(x: *const u8, index: usize) -> Activations {
    let (bytes, quants) = if B::HAS_MIN {
        (size_of::<BlockQ8_1>(), offset_of!(BlockQ8_1, qs))
    } else {
        (size_of::<BlockQ8_0>(), offset_of!(BlockQ8_0, qs))
    };
    // SAFETY: block `index` is readable: the F16 of its scale, the one of its sum, which the blocks
    // of weights with minimums have behind the scale, and 32 quants. The caller guarantees AVX2 for
    // the load and F16C for the conversions.
    unsafe {
        let block = x.add(index * bytes);
        Activations {
            scale: half(block),
            sum: if B::HAS_MIN { half(block.add(2)) } else { 0.0 },
            quants: _mm256_loadu_si256(block.add(quants).cast()),
        }
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
