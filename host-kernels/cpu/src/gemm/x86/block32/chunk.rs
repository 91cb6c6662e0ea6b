//! Chunks of a column of activations, prepared for panels and for products of eight rows.

use std::arch::x86_64::*;

use super::dot::{above_minus_128, half_sums, offset};
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::{GROUPS, activations};
use crate::gemm::x86::blocks::Block32Kernel;

/// Elements of a chunk: the eight scales of its groups fill a vector.
pub(super) const CHUNK: usize = GROUPS * 32;

/// A prepared chunk of a column. What belongs to groups behind the end of the column is arbitrary,
/// and no result depends on it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::gemm::x86) struct GroupColumn {
    /// The quants of each group, by fours.
    pub(super) quants: [[u32; 8]; GROUPS],
    /// The scale of each group.
    pub(super) scales: [f32; GROUPS],
    /// `scale * sum` of each group.
    pub(super) sums: [f32; GROUPS],
    /// What the offset of the weights adds to the integer dot product of the group, negated; or of
    /// each half of the group, if the halves have scales.
    pub(super) corrections: [[i32; 2]; GROUPS],
}

/// Prepares the `len` elements from `start` on of the column at `x`.
///
/// # Safety
/// `x` is readable for `start + len` activations for weights of `B`. `start` and `len` are
/// multiples of 32, `len <= CHUNK`. `column` is a valid column that no one else accesses. The
/// processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn prepare<S: BlockSimd, B: Block32Kernel>(
    x: *const u8,
    start: usize,
    len: usize,
    column: *mut GroupColumn,
) {
    // SAFETY: `x` is readable for `start + len` activations, so block `start / 32 + g` is. `column`
    // is valid and accessed by no one else, and `g < len / 32 <= GROUPS`; the quants of a group
    // have 32 bytes. The caller guarantees the instructions of `S`, which include AVX2 and F16C.
    unsafe {
        let column = &mut *column;
        for g in 0..len / 32 {
            let block = activations::<B>(x, start / 32 + g);
            column.scales[g] = block.scale;
            if B::HAS_MIN {
                column.sums[g] = block.sum;
            }
            let mut x = block.quants;
            if B::WIDE && S::WIDE_IS_SIGNED {
                x = above_minus_128(x);
            }
            _mm256_storeu_si256(column.quants[g].as_mut_ptr().cast(), x);
            if offset::<S, B>() != 0 {
                let [first, second] = half_sums(x);
                column.corrections[g] = if B::HALF_SCALES {
                    [first, second].map(|sum| -offset::<S, B>() * sum)
                } else {
                    [-offset::<S, B>() * (first + second), 0]
                };
            }
        }
    }
}
