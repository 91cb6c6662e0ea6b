//! The rare formats: decoded by their portable code into one plain format for each family, which is then
//! multiplied like any other. Looking codebooks up takes most of the time however it is done.

use std::arch::x86_64::*;

use super::blocks::{Groups, Supers};
use super::{Call, scratch};
use crate::cpu::formats::{Group, GroupBlock, Super, SuperBlock};

/// Multiplies with a plain format.
pub(super) type Multiply = unsafe fn(&Call);

/// Rows decoded at once for a panel, and for few columns.
const PANEL_ROWS: usize = 32;
const ROWS: usize = 4;

/// A decoded group of 32: quants plus 16, and the scale of each half.
#[derive(Clone, Copy)]
#[repr(C, packed)]
pub(super) struct PlainGroup {
    q: [u8; 32],
    d: [f32; 2],
}

/// A decoded super-block.
#[derive(Clone, Copy)]
#[repr(C, packed)]
pub(super) struct PlainSuper {
    q: [u8; 256],
    /// Scales of every 16.
    scales: [i16; 16],
    /// Minimums of every 16, or what the offset of the quants makes of the scales.
    mins: [i16; 16],
    d: f32,
    dmin: f32,
}

impl GroupBlock for PlainGroup {
    const ELEMENTS: usize = 32;
    const OFFSET: i32 = 16;
    const HALF_SCALES: bool = true;

    #[inline(always)]
    fn group(&self, _: usize) -> Group {
        Group {
            q: self.q,
            d: self.d,
            m: 0.0,
        }
    }
}

impl SuperBlock for PlainSuper {
    const SUB: usize = 16;
    const OFFSET: i32 = 0;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn decode(&self) -> Super {
        Super {
            q: self.q,
            scales: self.scales,
            mins: self.mins,
            d: self.d,
            dmin: self.dmin,
        }
    }
}

impl Groups for PlainGroup {
    #[inline(always)]
    unsafe fn single(row: *const u8, g: usize) -> __m256i {
        // SAFETY: the contract of `blocks`.
        unsafe { _mm256_loadu_si256((&raw const (*row.cast::<Self>().add(g)).q).cast()) }
    }

    #[inline(always)]
    unsafe fn scales(row: *const u8, g: usize, n: usize) -> (__m256, __m256) {
        let (mut first, mut second) = ([0.0f32; 8], [0.0f32; 8]);
        for i in 0..n {
            // SAFETY: the contract of `blocks`.
            [first[i], second[i]] = unsafe { (*row.cast::<Self>().add(g + i)).d };
        }
        // SAFETY: the contract of `blocks`.
        unsafe {
            (
                _mm256_loadu_ps(first.as_ptr()),
                _mm256_loadu_ps(second.as_ptr()),
            )
        }
    }
}

impl Supers for PlainSuper {
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
        // SAFETY: the contract of `blocks`; the scales follow the quants.
        unsafe { block.add(256).cast::<(__m256i, __m256i)>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn d(block: *const u8) -> (f32, f32) {
        // SAFETY: the contract of `blocks`; the scales are the last fields.
        unsafe { block.add(320).cast::<(f32, f32)>().read_unaligned() }
    }
}

/// Multiplies with a rare group format.
///
/// # Safety
/// As [`super::super::Gemm`] with blocks `B`; `multiply` does it for [`PlainGroup`].
pub(super) unsafe fn groups<B: GroupBlock>(call: &Call, multiply: Multiply) {
    let decode = |row: *const u8, g: usize| {
        let groups = B::ELEMENTS / 32;
        // SAFETY: the group is one of the row's; B is packed, and any bytes are a valid one.
        let group = unsafe { (*row.cast::<B>().add(g / groups)).group(g % groups) };
        let q = group
            .q
            .map(|q| (i32::from(q) - B::OFFSET + PlainGroup::OFFSET) as u8);
        PlainGroup { q, d: group.d }
    };
    // SAFETY: the caller's promise.
    unsafe { decoded(call, 32, decode, multiply) }
}

/// Multiplies with a rare super-block format.
///
/// # Safety
/// As [`super::super::Gemm`] with blocks `B`; `multiply` does it for [`PlainSuper`].
pub(super) unsafe fn supers<B: SuperBlock>(call: &Call, multiply: Multiply) {
    let decode = |row: *const u8, b: usize| {
        // SAFETY: the block is one of the row's; B is packed, and any bytes are a valid one.
        let block = unsafe { (*row.cast::<B>().add(b)).decode() };
        let (mut scales, mut mins, mut dmin) = ([0; 16], [0; 16], block.dmin);
        for i in 0..16 {
            scales[i] = block.scales[i * 16 / B::SUB];
            mins[i] = block.mins[i * 16 / B::SUB];
        }
        if !B::HAS_MIN {
            (mins, dmin) = (scales.map(|scale| scale * B::OFFSET as i16), block.d);
        }
        PlainSuper {
            q: block.q,
            scales,
            mins,
            d: block.d,
            dmin,
        }
    };
    // SAFETY: the caller's promise.
    unsafe { decoded(call, 256, decode, multiply) }
}

/// Decodes a few rows at a time into blocks `P` of `elements` and multiplies those.
///
/// # Safety
/// As [`super::super::Gemm`], if `decode` makes blocks of the rows; `multiply` does it for `P`.
unsafe fn decoded<P>(
    call: &Call,
    elements: usize,
    decode: impl Fn(*const u8, usize) -> P,
    multiply: Multiply,
) {
    let blocks = call.k / elements;
    let w_stride = blocks * size_of::<P>();
    let step = if call.cols < super::supers::PANEL_COLS {
        ROWS
    } else {
        PANEL_ROWS
    };
    let mut memory = scratch::DECODED.take(step * w_stride);
    let rows = memory.as_mut_ptr().cast::<P>();
    for first in (0..call.rows).step_by(step) {
        let n = step.min(call.rows - first);
        for r in 0..n {
            // SAFETY: the row is one of the call's.
            let row = unsafe { call.w.add((first + r) * call.w_stride) };
            for b in 0..blocks {
                // SAFETY: the memory has room for `step` rows; P is packed.
                unsafe { rows.add(r * blocks + b).write_unaligned(decode(row, b)) };
            }
        }
        // SAFETY: the caller's promise for these rows, now in blocks `P`.
        unsafe {
            let dst = call.dst.add(first);
            multiply(&Call {
                w: rows.cast(),
                w_stride,
                rows: n,
                dst,
                ..*call
            });
        }
    }
    scratch::DECODED.give_back(memory);
}
