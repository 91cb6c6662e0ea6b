//! Super-block formats without a kernel of their own. The portable code of a format decodes blocks
//! into one plain format, which is then multiplied like any other. The codebook lookups take most
//! of the time either way.

use std::arch::x86_64::*;
use std::mem::offset_of;

use super::block_simd::BlockSimd;
use super::blocks::SuperBlockKernel;
use super::k_quants::{self, PANEL_COLS};
use crate::formats::{Quants256, SuperBlockFormat};
use crate::gemm::kernel::GemmArgs;
use crate::gemm::thread_memory::DECODED;

/// Rows that are decoded at once for a panel.
const PANEL_ROWS: usize = crate::gemm::limits::DECODED_ROWS;
/// Rows that are decoded at once for products row by row.
const ROWS: usize = 4;

/// A decoded super-block.
#[derive(Clone, Copy)]
#[repr(C, packed)]
pub(super) struct PlainSuper {
    q: [u8; 256],
    /// One scale for each 16 quants.
    scales: [i16; 16],
    /// One minimum for each 16 quants: of the format, or the scale times the offset of the quants.
    mins: [i16; 16],
    d: f32,
    dmin: f32,
}

// The quants are read from the start of a block, scales and minimums at once, and `d` and `dmin`.
const _: () = assert!(
    offset_of!(PlainSuper, q) == 0
        && offset_of!(PlainSuper, mins) == offset_of!(PlainSuper, scales) + 32
        && offset_of!(PlainSuper, dmin) == offset_of!(PlainSuper, d) + 4
);

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
        // SAFETY: `block` is readable for a `PlainSuper`, which begins with the 256 bytes of `q`:
        // eight vectors of 32 bytes. The read is unaligned; the caller guarantees AVX.
        unsafe { block.cast::<[__m256i; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn quants_512(block: *const u8) -> [__m512i; 4] {
        // SAFETY: `block` is readable for a `PlainSuper`, which begins with the 256 bytes of `q`:
        // four vectors of 64 bytes. The read is unaligned; the caller guarantees AVX-512 F.
        unsafe { block.cast::<[__m512i; 4]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> (__m256i, __m256i) {
        // SAFETY: `block` is readable for a `PlainSuper`, whose 32 bytes of `scales` and 32 of
        // `mins`, adjacent, are read as two vectors. The read is unaligned; the caller guarantees
        // AVX.
        unsafe {
            block
                .add(offset_of!(Self, scales))
                .cast::<(__m256i, __m256i)>()
                .read_unaligned()
        }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: `block` is readable for a `PlainSuper`, whose `d` and `dmin`, adjacent, are eight
        // bytes. The read is unaligned, and every bit pattern is a float.
        unsafe {
            block
                .add(offset_of!(Self, d))
                .cast::<(f32, f32)>()
                .read_unaligned()
        }
    }
}

/// Decodes a few rows of `B` at a time and calls `multiply` with them.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with blocks `B`; `multiply` is [`multiply`] in a function with
/// instructions that the processor has.
#[inline(always)]
pub(super) unsafe fn gemm<B: SuperBlockFormat>(call: &GemmArgs, multiply: unsafe fn(&GemmArgs)) {
    let blocks = call.k / 256;
    let w_stride = blocks * size_of::<PlainSuper>();
    let step = if call.cols < PANEL_COLS || call.table.is_some() {
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
                // SAFETY: `first + r < call.rows` and `b < blocks`, so the block of weights is
                // readable. A block consists of numbers, so any bytes are valid. The memory has
                // `step * blocks` decoded blocks, and `r < n <= step`. Both types are packed, so
                // any address is aligned.
                unsafe {
                    let row = call.w.add((first + r) * call.w_stride);
                    decode(&*row.cast::<B>().add(b), &mut *rows.add(r * blocks + b));
                }
            }
        }
        // SAFETY: `multiply` gets `n <= step` rows of `blocks` blocks, all just decoded to `rows`.
        // `multiply` writes `n` floats of each column from `dst + first` on, where
        // `first + n <= call.rows`. The columns are those of `call`. The caller guarantees columns,
        // results and the instructions of `multiply`.
        unsafe {
            multiply(&call.with_rows(first, n, rows.cast(), w_stride));
        }
    }
    DECODED.give_back(memory);
}

/// Multiplies decoded rows, for every format: the second step of [`gemm`].
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`; the weights are decoded.
#[inline(always)]
pub(super) unsafe fn multiply<S: BlockSimd>(call: &GemmArgs) {
    // SAFETY: `k_quants::gemm` has the contract of this function: `call.rows` rows of blocks of
    // `PlainSuper`, the columns and results of `call`, and the features of `S`.
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
