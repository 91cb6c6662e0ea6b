//! Columns of activations, prepared for products row by row.

use std::arch::x86_64::*;

use super::dot::{dot, folds, half_sums, offset};
use crate::gemm::x86::block_simd::BlockSimd;
use crate::gemm::x86::block32_decode::{GROUPS, activations};
use crate::gemm::x86::blocks::{Block32Kernel, Codes};

/// The layout of prepared columns, in bytes from the quants of a column.
pub(super) struct Columns {
    /// To the quants of the next column.
    pub(super) stride: usize,
    /// To the corrections for the offset, one for each lane, if the offset is not
    /// [folded](folds); or to the magnitudes of the quants, if their signs are moved to the weights
    /// ([`moves_signs`]).
    pub(super) corrections: usize,
    /// To the scale of each group.
    pub(super) scales: usize,
    /// To the factor of the minimum of each group, or of the scale of the weights if the offset is
    /// folded.
    pub(super) sums: usize,
}

impl Columns {
    /// The layout of columns of `padded` elements.
    #[inline(always)]
    pub(super) const fn new(padded: usize) -> Columns {
        Columns {
            stride: padded * 2 + padded / 4,
            corrections: padded,
            scales: padded * 2,
            sums: padded * 2 + padded / 8,
        }
    }
}

/// Whether the signs of the activations are moved to the weights. Then the product needs the
/// magnitudes of the activations, which are prepared once for all rows.
pub(super) const fn moves_signs<S: BlockSimd, B: Block32Kernel>() -> bool {
    B::WIDE && S::WIDE_IS_SIGNED && B::CAN_NEGATE && matches!(B::CODES, Codes::Nibbles(_))
}

/// The index of the scale of group `g` in a prepared column.
const fn scale_index<S: BlockSimd, B: Block32Kernel>(g: usize) -> usize {
    if !matches!(B::CODES, Codes::Nibbles(_)) {
        return g;
    }
    let mut index = 0;
    while S::QUADS[index] != g % GROUPS {
        index += 1;
    }
    g / GROUPS * GROUPS + index
}

/// The offsets of the two halves of group `g` in a prepared column. For formats of nibbles, this is
/// the order that [`IntSimd::load_quads`](crate::gemm::x86::int_simd::IntSimd::load_quads) yields.
const fn half_offsets<S: BlockSimd, B: Block32Kernel>(g: usize) -> (usize, usize) {
    match B::CODES {
        Codes::Nibbles(_) => {
            let quads = S::LANES / 4;
            let first = g / quads * quads * 32 + g % quads * 16;
            (first, first + quads * 16)
        }
        _ => (g * 32, g * 32 + 16),
    }
}

/// Prepares one column of `groups` groups, padded with zeros to `padded` elements.
///
/// # Safety
/// `x` is readable for `groups` blocks of activations. `padded` is a multiple of 256 and at least
/// `32 * groups`, and `layout` is that of `padded`. `column` is writable for `layout.stride` bytes
/// and aligned to a float. The processor has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn prepare<S: BlockSimd, B: Block32Kernel>(
    x: *const u8,
    groups: usize,
    padded: usize,
    column: *mut u8,
    layout: &Columns,
) {
    // SAFETY: `x` is readable for the blocks `g < groups`. Offsets of quants, magnitudes and
    // corrections are below `padded` from their start, those of scales and sums below `padded / 32`
    // floats, and `layout` has as many from each start to the next, up to `stride`. The starts are
    // multiples of 32 from `column`, so the floats are aligned. The caller guarantees `stride`
    // bytes at `column` and the instructions of `S`, which include AVX2 and F16C.
    unsafe {
        let scales = column.add(layout.scales).cast::<f32>();
        let sums = column.add(layout.sums).cast::<f32>();
        for g in 0..padded / 32 {
            let (first, second) = half_offsets::<S, B>(g);
            let index = scale_index::<S, B>(g);
            let store = |x: __m256i| {
                let (low, high) = (_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
                column.add(first).cast::<__m128i>().write_unaligned(low);
                column.add(second).cast::<__m128i>().write_unaligned(high);
            };
            if g < groups {
                let x = activations::<B>(x, g);
                store(x.quants);
                *scales.add(index) = x.scale;
                if folds::<S, B>() {
                    let [first, second] = half_sums(x.quants);
                    let excess = offset::<S, B>() * (first + second);
                    *sums.add(index) = -x.scale * excess as f32;
                } else if B::HAS_MIN {
                    *sums.add(index) = x.sum;
                }
            } else {
                store(_mm256_setzero_si256());
                *scales.add(index) = 0.0;
                *sums.add(index) = 0.0;
            }
        }
        if moves_signs::<S, B>() {
            for at in (0..padded).step_by(4 * S::LANES) {
                let x = S::load_int(column.add(at));
                S::store_int(column.add(layout.corrections + at), S::magnitudes(x));
            }
        }
        let offset = offset::<S, B>();
        if offset != 0 && !folds::<S, B>() {
            let offsets = S::splat_int(u32::from_ne_bytes([offset as u8; 4]));
            for v in 0..padded / (4 * S::LANES) {
                let x = S::load_int(column.add(v * 4 * S::LANES));
                let excess = dot::<S, B>(S::zero_int(), offsets, x);
                let to = column.add(layout.corrections + v * 4 * S::LANES);
                S::store_int(to, S::sub_int(S::zero_int(), excess));
            }
        }
    }
}
