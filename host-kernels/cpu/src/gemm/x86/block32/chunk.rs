//! Chunks of a column of activations, prepared for panels and for products of eight rows.

use std::arch::x86_64::*;

use super::dot::{above_minus_128, half_sums, offset};
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::{GROUPS, activation};
use crate::gemm::x86::blocks::{Block32Kernel, half};

/// Elements of a chunk: the eight scales of its groups fill a vector.
pub(super) const CHUNK: usize = GROUPS * 32;

/// A prepared chunk of a column. What belongs to groups behind the end of the column is never read.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GroupColumn {
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
    let (bytes, quants) = activation::<B>();
    // SAFETY: `x` is readable for `start + len` activations, so block `start / 32 + g` is: the
    // scale, the sum of a block with one, and 32 quants. `column` is valid and accessed by no one
    // else, and `g < len / 32 <= GROUPS`; the quants of a group have 32 bytes. The caller
    // guarantees the instructions of `S`.
    unsafe {
        let column = &mut *column;
        for g in 0..len / 32 {
            let block = x.add((start / 32 + g) * bytes);
            column.scales[g] = half(block);
            if B::HAS_MIN {
                column.sums[g] = half(block.add(2));
            }
            let mut x = _mm256_loadu_si256(block.add(quants).cast());
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
