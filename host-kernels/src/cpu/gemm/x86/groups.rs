//! Products with the group formats: `d_w * d_x * (integer dot product)` for every 32 elements.

use std::marker::PhantomData;

use super::Call;
use super::blocks::{Groups, half};
use super::panel::{self, Panel, Sums};
use super::scratch::PREPARED;
use super::simd::Simd;
use crate::cpu::formats::{BlockQ8_0, BlockQ8_1};
use std::arch::x86_64::*;

/// Elements handled at once; their eight scales fill a vector.
const CHUNK: usize = 256;
/// Groups in a chunk.
const GROUPS: usize = CHUNK / 32;

/// The offset that a dot product of level `S` leaves in the quants of `B`.
const fn offset<S: Simd, B: Groups>() -> i32 {
    if B::WIDE && S::WIDE_IS_SIGNED {
        0
    } else {
        B::OFFSET
    }
}

#[inline(always)]
unsafe fn dot<S: Simd, B: Groups>(acc: S::I, quants: S::I, x: S::I) -> S::I {
    // SAFETY: the contract of `simd`.
    unsafe {
        if B::WIDE {
            S::dot_wide(acc, quants, x)
        } else {
            S::dot(acc, quants, x)
        }
    }
}

/// Bytes of an activation block of `B`, and where its quants begin.
const fn activation<B: Groups>() -> (usize, usize) {
    if B::HAS_MIN {
        (size_of::<BlockQ8_1>(), 4)
    } else {
        (size_of::<BlockQ8_0>(), 2)
    }
}

/// From this many columns on, interleaving a panel pays.
pub(super) const PANEL_COLS: usize = 5;

/// Multiplies, choosing between rows and panels.
///
/// # Safety
/// As [`super::super::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd, B: Groups>(call: &Call) {
    // SAFETY: the caller's promise.
    unsafe {
        if call.cols >= PANEL_COLS {
            panel::gemm::<S, GroupPanel<S, B>>(call);
        } else {
            rows::<S, B>(call);
        }
    }
}

/// What is prepared of a column for products by rows: vectors of quants, of corrections for the offset,
/// and the scales.
struct Columns {
    /// Bytes from the quants of one column to those of the next.
    stride: usize,
    /// From a column's quants to its corrections, lane by lane.
    corrections: usize,
    /// To its scales, then the sums.
    scales: usize,
    sums: usize,
}

/// Few columns: each row once through the registers, its unpacked groups multiplied with up to four
/// columns.
///
/// # Safety
/// As [`super::super::Gemm`], with the features of `S`.
#[inline(always)]
unsafe fn rows<S: Simd, B: Groups>(call: &Call) {
    let groups = call.k / 32;
    // Whole chunks, so that a vector may be read past the last group; what lies there is 0.
    let padded = call.k.next_multiple_of(CHUNK);
    let layout = Columns {
        stride: padded * 2 + padded / 4,
        corrections: padded,
        scales: padded * 2,
        sums: padded * 2 + padded / 8,
    };
    let mut memory = PREPARED.take(call.cols * layout.stride);
    let columns = memory.as_mut_ptr().cast::<u8>();
    // SAFETY: all offsets are those of rows, columns and groups of the call, or of the layout.
    unsafe {
        for c in 0..call.cols {
            prepare::<S, B>(
                call.x.add(c * call.x_stride),
                groups,
                padded,
                columns.add(c * layout.stride),
                &layout,
            );
        }
        for r in 0..call.rows {
            let row = call.w.add(r * call.w_stride);
            let mut c = 0;
            while c < call.cols {
                let x = columns.add(c * layout.stride);
                let dst = call.dst.add(c * call.dst_stride + r);
                c += match call.cols - c {
                    4.. => {
                        row_times::<S, B, 4>(row, groups, x, &layout, dst, call.dst_stride);
                        4
                    }
                    2.. => {
                        row_times::<S, B, 2>(row, groups, x, &layout, dst, call.dst_stride);
                        2
                    }
                    _ => {
                        row_times::<S, B, 1>(row, groups, x, &layout, dst, call.dst_stride);
                        1
                    }
                };
            }
        }
    }
    PREPARED.give_back(memory);
}

/// Lays out one column.
///
/// # Safety
/// `x` has `groups` blocks, and `column` room for the layout.
#[inline(always)]
unsafe fn prepare<S: Simd, B: Groups>(
    x: *const u8,
    groups: usize,
    padded: usize,
    column: *mut u8,
    layout: &Columns,
) {
    let (bytes, quants) = activation::<B>();
    // SAFETY: the caller's promise.
    unsafe {
        let scales = column.add(layout.scales).cast::<f32>();
        let sums = column.add(layout.sums).cast::<f32>();
        for g in 0..padded / 32 {
            let to = column.add(g * 32).cast::<__m256i>();
            if g < groups {
                let block = x.add(g * bytes);
                to.write_unaligned(block.add(quants).cast::<__m256i>().read_unaligned());
                *scales.add(g) = half(block.cast::<u16>().read_unaligned());
                if B::HAS_MIN {
                    *sums.add(g) = half(block.cast::<u16>().add(1).read_unaligned());
                }
            } else {
                to.write_unaligned(_mm256_setzero_si256());
                *scales.add(g) = 0.0;
                *sums.add(g) = 0.0;
            }
        }
        let offset = offset::<S, B>();
        if offset != 0 {
            let offsets = S::splat(u32::from_ne_bytes([offset as u8; 4]));
            for v in 0..padded / (4 * S::LANES) {
                let x = S::load(column.add(v * 4 * S::LANES));
                let excess = dot::<S, B>(S::zero(), offsets, x);
                let to = column.add(layout.corrections + v * 4 * S::LANES);
                S::store(to, S::sub(S::zero(), excess));
            }
        }
    }
}

/// One row times `C` columns.
///
/// # Safety
/// The row has `groups` groups, the columns are prepared, and `dst` has `C` floats.
#[inline(always)]
unsafe fn row_times<S: Simd, B: Groups, const C: usize>(
    row: *const u8,
    groups: usize,
    x: *const u8,
    layout: &Columns,
    dst: *mut f32,
    dst_stride: usize,
) {
    // SAFETY: the caller's promise; past the last group the prepared columns are 0 and so are the
    // scales of the weights.
    unsafe {
        let mut acc = [S::zero_floats(); C];
        let mut mins = [_mm256_setzero_ps(); C];
        let mut chunk = 0;
        while chunk + GROUPS <= groups {
            chunk_times::<S, B, C>(row, chunk, GROUPS, groups, x, layout, &mut acc, &mut mins);
            chunk += GROUPS;
        }
        if chunk < groups {
            let n = groups - chunk;
            chunk_times::<S, B, C>(row, chunk, n, groups, x, layout, &mut acc, &mut mins);
        }
        for c in 0..C {
            let mut sum = S::sum(acc[c]);
            if B::HAS_MIN {
                sum += super::simd::Avx2::sum(mins[c]);
            }
            *dst.add(c * dst_stride) = sum;
        }
    }
}

/// `n` groups of [`row_times`], from group `first` of `groups` on.
///
/// # Safety
/// As [`row_times`].
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn chunk_times<S: Simd, B: Groups, const C: usize>(
    row: *const u8,
    first: usize,
    n: usize,
    groups: usize,
    x: *const u8,
    layout: &Columns,
    acc: &mut [S::F; C],
    mins: &mut [__m256; C],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (d, m) = B::scales(row, first, n);
        let mut scales = [_mm256_setzero_ps(); C];
        let mut second_scales = [_mm256_setzero_ps(); C];
        for c in 0..C {
            let column = x.add(c * layout.stride);
            let d_x = _mm256_loadu_ps(column.add(layout.scales).cast::<f32>().add(first));
            scales[c] = _mm256_mul_ps(d, d_x);
            if B::HALF_SCALES {
                second_scales[c] = _mm256_mul_ps(m, d_x);
            }
            if B::HAS_MIN {
                let s_x = _mm256_loadu_ps(column.add(layout.sums).cast::<f32>().add(first));
                mins[c] = _mm256_fmadd_ps(m, s_x, mins[c]);
            }
        }
        for v in 0..n.div_ceil(S::GROUPS) {
            let g = first + v * S::GROUPS;
            let q = S::groups::<B>(row, g, groups - 1);
            for c in 0..C {
                let column = x.add(c * layout.stride + g * 32);
                let start = match offset::<S, B>() {
                    0 => S::zero(),
                    _ => S::load(column.add(layout.corrections)),
                };
                let dot = dot::<S, B>(start, q, S::load(column));
                let mut scale = S::spread_groups(scales[c], v);
                if B::HALF_SCALES {
                    scale = S::second_halves(scale, S::spread_groups(second_scales[c], v));
                }
                acc[c] = S::mul_add(S::to_floats(dot), scale, acc[c]);
            }
        }
    }
}

/// Up to 32 rows of a chunk, interleaved.
#[repr(C, align(64))]
struct GroupPanel<S, B> {
    /// For each four elements, four bytes of each row.
    quants: [[u8; 128]; CHUNK / 4],
    /// For each group, the scale of each row.
    scales: [[f32; 32]; GROUPS],
    /// For each group, the minimum of each row, or the scale of its second half.
    mins: [[f32; 32]; GROUPS],
    rows: [[u8; CHUNK]; 32],
    row_scales: [[f32; 16]; 32],
    format: PhantomData<(S, B)>,
}

/// A chunk of a column.
#[derive(Clone, Copy)]
#[repr(C)]
struct GroupColumn {
    /// The scale of each group.
    scales: [f32; GROUPS],
    /// `scale * sum` of each group.
    sums: [f32; GROUPS],
    /// What the offset of the weights adds to each integer dot product, negated: to that of the group,
    /// or to those of its halves if they have scales of their own.
    corrections: [[i32; 2]; GROUPS],
}

impl<S: Simd, B: Groups> Panel<S> for GroupPanel<S, B> {
    const CHUNK: usize = CHUNK;
    const VECTORS: usize = S::PANEL;
    const COLS: usize = 4;
    type Column = GroupColumn;

    #[inline(always)]
    fn new() -> Self {
        GroupPanel {
            quants: [[0; 128]; CHUNK / 4],
            scales: [[0.0; 32]; GROUPS],
            mins: [[0.0; 32]; GROUPS],
            rows: [[0; CHUNK]; 32],
            row_scales: [[0.0; 16]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut GroupColumn) {
        let (bytes, quants) = activation::<B>();
        // SAFETY: the caller's promise.
        unsafe {
            let column = &mut *column;
            for g in 0..len / 32 {
                let block = x.add((start / 32 + g) * bytes);
                column.scales[g] = half(block.cast::<u16>().read_unaligned());
                if B::HAS_MIN {
                    column.sums[g] = half(block.cast::<u16>().add(1).read_unaligned());
                }
                if offset::<S, B>() != 0 {
                    let x = _mm256_loadu_si256(block.add(quants).cast());
                    // Bytes plus 128 are unsigned: summed by eights, less 32 * 128.
                    let x = _mm256_xor_si256(x, _mm256_set1_epi8(-128));
                    let eights = _mm256_sad_epu8(x, _mm256_setzero_si256());
                    let high = _mm256_extracti128_si256(eights, 1);
                    let sums = _mm_add_epi64(_mm256_castsi256_si128(eights), high);
                    if B::HALF_SCALES {
                        let low = _mm256_castsi256_si128(eights);
                        for (half, sums) in [low, high].into_iter().enumerate() {
                            let sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2);
                            column.corrections[g][half] = -offset::<S, B>() * (sum - 16 * 128);
                        }
                    } else {
                        let sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 32 * 128;
                        column.corrections[g][0] = -offset::<S, B>() * sum;
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &Call, row: usize, start: usize, len: usize) {
        let height = S::PANEL * S::LANES;
        let groups = len / 32;
        // SAFETY: the caller's promise: groups `start / 32 ..` exist in every row below `call.rows`.
        unsafe {
            let first = start / 32;
            let last = first + groups - 1;
            for r in 0..height {
                let from = call.w.add((row + r).min(call.rows - 1) * call.w_stride);
                let (d, m) = B::scales(from, first, groups);
                _mm256_storeu_ps(self.row_scales[r].as_mut_ptr(), d);
                _mm256_storeu_ps(self.row_scales[r].as_mut_ptr().add(8), m);
                let mut g = 0;
                while g < groups {
                    let q = S::groups::<B>(from, first + g, last);
                    S::store(self.rows[r].as_mut_ptr().add(32 * g), q);
                    g += S::GROUPS;
                }
            }
            let rows = self.rows.as_ptr().cast();
            let quants = self.quants.as_mut_ptr().cast();
            panel::interleave::<S>(rows, CHUNK, groups * 8, S::PANEL, quants);
            for r in 0..height {
                for g in 0..groups {
                    self.scales[g][r] = self.row_scales[r][g];
                    if B::HAS_MIN || B::HALF_SCALES {
                        self.mins[g][r] = self.row_scales[r][8 + g];
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        x: *const u8,
        x_stride: usize,
        columns: *const GroupColumn,
        start: usize,
        len: usize,
        sums: Sums,
    ) {
        let (bytes, quants) = activation::<B>();
        // SAFETY: the caller's promise; the panel has as many groups as `len` says.
        unsafe {
            let x = x.add(start / 32 * bytes + quants);
            let mut acc = [[S::zero_floats(); C]; P];
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = sums.load::<S, P>(p, c);
                }
            }
            let mut panel = self.quants.as_ptr().cast::<u8>();
            // A scale covers a group, or half of one.
            let parts = if B::HALF_SCALES { 2 } else { 1 };
            for unit in 0..len / 32 * parts {
                let (g, part) = (unit / parts, unit % parts);
                let mut dots = [[S::zero(); C]; P];
                if offset::<S, B>() != 0 {
                    for c in 0..C {
                        let correction = S::splat((*columns.add(c)).corrections[g][part] as u32);
                        for p in 0..P {
                            dots[p][c] = correction;
                        }
                    }
                }
                let words = 8 / parts;
                for i in 0..words {
                    let mut w = [S::zero(); P];
                    for p in 0..P {
                        w[p] = S::load(panel.add(p * S::LANES * 4));
                    }
                    panel = panel.add(P * S::LANES * 4);
                    for c in 0..C {
                        let x = x.add(c * x_stride + g * bytes + 4 * (part * words + i));
                        let x = S::splat(x.cast::<u32>().read_unaligned());
                        for p in 0..P {
                            dots[p][c] = dot::<S, B>(dots[p][c], w[p], x);
                        }
                    }
                }
                let scales = if part == 0 {
                    &self.scales[g]
                } else {
                    &self.mins[g]
                };
                for p in 0..P {
                    let d = S::load_floats(scales.as_ptr().add(p * S::LANES));
                    for c in 0..C {
                        let d_x = S::splat_float((*columns.add(c)).scales[g]);
                        let dot = S::to_floats(dots[p][c]);
                        acc[p][c] = S::mul_add(dot, S::mul(d, d_x), acc[p][c]);
                    }
                    if B::HAS_MIN {
                        let m = S::load_floats(self.mins[g].as_ptr().add(p * S::LANES));
                        for c in 0..C {
                            let s_x = S::splat_float((*columns.add(c)).sums[g]);
                            acc[p][c] = S::mul_add(m, s_x, acc[p][c]);
                        }
                    }
                }
            }
            for p in 0..P {
                for c in 0..C {
                    sums.store::<S, P>(p, c, acc[p][c]);
                }
            }
        }
    }
}
