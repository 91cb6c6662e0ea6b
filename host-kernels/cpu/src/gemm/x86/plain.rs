//! Super-block formats without a kernel of their own. Their portable code decodes blocks into one
//! plain format, which is then multiplied like any other. The codebook lookups take most of the
//! time either way.

use std::arch::x86_64::*;

use super::block_simd::BlockSimd;
use super::blocks::SuperBlockKernel;
use super::k_quants::{self, PANEL_COLS};
use super::scratch::DECODED;
use crate::formats::{Quants256, SuperBlockFormat};
use crate::gemm::kernel::GemmArgs;

/// Rows decoded at once for a panel, and for few columns.
const PANEL_ROWS: usize = 32;
const ROWS: usize = 4;

/// A decoded super-block.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct PlainSuper {
    q: [u8; 256],
    /// Scales of every 16.
    scales: [i16; 16],
    /// Minimums of every 16, or what the offset of the quants makes of the scales.
    mins: [i16; 16],
    d: f32,
    dmin: f32,
}

impl SuperBlockFormat for PlainSuper {
    const SUB: usize = 16;
    const OFFSET: i32 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn decode(&self) -> Quants256 {
        Quants256 {
            q: self.q,
            scales: self.scales,
            mins: self.mins,
            d: self.d,
            dmin: self.dmin,
        }
    }
}

impl SuperBlockKernel for PlainSuper {
    const MAX_QUANT: usize = 127;

    #[inline(always)]
    unsafe fn quants_256(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the contract of `blocks`.
        unsafe { block.cast::<[__m256i; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: the contract of `blocks`.
        unsafe { block.cast::<[__m512i; 4]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: the contract of `blocks`; the scales and minimums follow the quants.
        unsafe { block.add(256).cast::<(__m256i, __m256i)>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the contract of `blocks`; the scales of both are the last fields.
        unsafe { block.add(320).cast::<(f32, f32)>().read_unaligned() }
    }
}

/// Decodes a few rows of `B` at a time and hands them to `multiply`.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with blocks `B`; `multiply` is [`multiply`] in a function with instructions
/// that the processor has.
#[inline(always)]
pub(super) unsafe fn gemm<B: SuperBlockFormat>(call: &GemmArgs, multiply: unsafe fn(&GemmArgs)) {
    let blocks = call.k / 256;
    let w_stride = blocks * size_of::<PlainSuper>();
    let step = if call.cols < PANEL_COLS {
        ROWS
    } else {
        PANEL_ROWS
    };
    let mut memory = DECODED.take(step * w_stride);
    let rows = memory.as_mut_ptr().cast::<PlainSuper>();
    for first in (0..call.rows).step_by(step) {
        let n = step.min(call.rows - first);
        for r in 0..n {
            for b in 0..blocks {
                // SAFETY: the block is one of the call's, and any bytes are a valid one; the memory
                // has room for `step` rows; both are packed.
                unsafe {
                    let row = call.w.add((first + r) * call.w_stride);
                    decode(&*row.cast::<B>().add(b), &mut *rows.add(r * blocks + b));
                }
            }
        }
        // SAFETY: the caller's promise for these rows, now decoded.
        unsafe {
            let dst = call.dst.add(first);
            multiply(&GemmArgs {
                w: rows.cast(),
                w_stride,
                rows: n,
                dst,
                ..*call
            });
        }
    }
    DECODED.give_back(memory);
}

/// Multiplies with decoded rows: the second half of [`gemm`], the same for every format.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`; the weights are decoded.
#[inline(always)]
pub(super) unsafe fn multiply<S: BlockSimd>(call: &GemmArgs) {
    // SAFETY: the caller's contract covers these accesses.
    unsafe { k_quants::gemm::<S, PlainSuper>(call) }
}

#[inline(always)]
fn decode<B: SuperBlockFormat>(block: &B, plain: &mut PlainSuper) {
    let block = block.decode();
    let (mut scales, mut mins) = ([0; 16], [0; 16]);
    for i in 0..16 {
        scales[i] = block.scales[i * 16 / B::SUB];
        mins[i] = if B::HAS_MIN {
            block.mins[i * 16 / B::SUB]
        } else {
            scales[i] * B::OFFSET as i16
        };
    }
    let dmin = if B::HAS_MIN { block.dmin } else { block.d };
    *plain = PlainSuper {
        q: block.q,
        scales,
        mins,
        d: block.d,
        dmin,
    };
}
