//! 8-bit quants widened to 16 bits, for levels that multiply bytes only if one operand is unsigned.
//! At these levels, 8-bit products need an extra sign operation for every product, so many columns
//! are multiplied in 16 bits (`int16`).

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::block_simd::BlockSimd;
use super::block32::above_minus_128;
use super::block32_decode::{activations, chunk_scales, decode_words, rows_from};
use super::blocks::{Block32Kernel, Codes};
use super::int_simd::IntSimd;
use super::int16::{CHUNK, I16Column, I16Panel, Source, VECTORS};
use crate::gemm::kernel::GemmArgs;
use crate::simd::Avx2;

/// The quants of weights and of activations, widened.
pub(super) struct Q8AsI16<B>(PhantomData<B>);

impl<B: Block32Kernel> Source for Q8AsI16<B> {
    const BYTES: usize = CHUNK / B::ELEMENTS * size_of::<B>();

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut I16Column) {
        const { assert!(!(B::WIDE && (B::HAS_MIN || B::HALF_SCALES))) }
        // SAFETY: `x` is readable for `start + len` activations, so block `start / 32 + g` is.
        // `column` is valid, aligned, and accessed by no one else; `g < GROUPS`. The two vectors
        // are the 16 pairs, 64 bytes, of `pairs[g]`. The contract of `Source` includes AVX2 and
        // F16C.
        unsafe {
            let column = &mut *column;
            for g in 0..len / 32 {
                let x = activations::<B>(x, start / 32 + g);
                column.scales[g] = x.scale;
                let x = above_minus_128(x.quants);
                let to = column.pairs[g].as_mut_ptr();
                for (i, pairs) in <Avx2 as IntSimd>::widen_pairs(x).into_iter().enumerate() {
                    _mm256_storeu_si256(to.add(8 * i).cast(), pairs);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack<S: BlockSimd>(
        panel: &mut I16Panel<S, Self>,
        call: &GemmArgs,
        row: usize,
        start: usize,
        len: usize,
    ) {
        const { assert!(!(B::WIDE && matches!(B::CODES, Codes::Other))) }
        let from = rows_from(call, row, VECTORS * S::LANES);
        let (first, groups) = (start / 32, len / 32);
        // SAFETY: `rows_from` returns rows of the call, readable for `call.k >= start + len`
        // weights: groups `first .. first + groups`, `groups <= 8`. Eight scales fit the 16 floats
        // of a row. Word `i < 8` of group `g` is pairs `16 g + i` and `16 g + 8 + i`, below `CHUNK
        // / 2`. The contract of `Source` includes the instructions of `S`.
        unsafe {
            for r in 0..VECTORS * S::LANES {
                let (d, _) = chunk_scales::<S, B>(from[r], first, groups);
                _mm256_storeu_ps(panel.row_scales(r).as_mut_ptr(), d);
            }
            panel.interleave_scales(groups);
            for g in 0..groups {
                let block = (first + g) * size_of::<B>();
                for v in 0..VECTORS {
                    let rows = from.as_ptr().add(v * S::LANES);
                    decode_words::<S, B>(rows, block, |i, quants| {
                        let [even, odd] = S::widen_pairs(S::add_128(quants));
                        panel.set_pairs(16 * g + i, v, even);
                        panel.set_pairs(16 * g + 8 + i, v, odd);
                    });
                }
            }
        }
    }
}
