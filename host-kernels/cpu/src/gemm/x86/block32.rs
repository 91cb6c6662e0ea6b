//! Products with the formats with scales per 32 elements: `d_w * d_x * (integer dot product)` for
//! every 32 elements.

use std::marker::PhantomData;

use super::block_simd::BlockSimd;
use super::block32_decode::{activation, chunk_scales, decode_words, depth, rows_from};
use super::blocks::{Block32Kernel, Codes, half};
use super::int16::I16Panel;
use super::panel::{self, Ahead, Panel, Tile};
use super::q8_int16::Q8AsI16;
use super::scratch::PREPARED;
use crate::gemm::kernel::GemmArgs;
use std::arch::x86_64::*;

/// Elements handled at once; their eight scales fill a vector.
const CHUNK: usize = 256;
/// Groups of 32 in a chunk.
const GROUPS: usize = CHUNK / 32;

/// The offset that a dot product of level `S` leaves in the quants of `B`.
const fn offset<S: BlockSimd, B: Block32Kernel>() -> i32 {
    if B::WIDE && S::WIDE_IS_SIGNED {
        0
    } else {
        B::OFFSET
    }
}

#[inline(always)]
unsafe fn dot<S: BlockSimd, B: Block32Kernel>(acc: S::I, quants: S::I, x: S::I) -> S::I {
    // SAFETY: the contract of `simd`.
    unsafe {
        if B::WIDE {
            S::dot_wide(acc, quants, x)
        } else {
            S::dot(acc, quants, x)
        }
    }
}

/// Whether what the offset adds is taken off each product with the scales of the weights, as a
/// minimum is, rather than from every integer. A format with scales of half groups has no one scale
/// to do that with.
const fn folds<S: BlockSimd, B: Block32Kernel>() -> bool {
    offset::<S, B>() != 0 && !B::HALF_SCALES
}

/// Whether products by rows move the signs of the activations to the weights: then it is the
/// activations whose magnitudes are needed, and those are prepared once for all rows.
const fn turns<S: BlockSimd, B: Block32Kernel>() -> bool {
    B::WIDE && S::WIDE_IS_SIGNED && B::TURNS && matches!(B::CODES, Codes::Nibbles(_))
}

/// Where the scale of group `g` of a prepared column lies.
const fn scale_place<S: BlockSimd, B: Block32Kernel>(g: usize) -> usize {
    if !matches!(B::CODES, Codes::Nibbles(_)) {
        return g;
    }
    let mut place = 0;
    while S::QUADS[place] != g % GROUPS {
        place += 1;
    }
    g / GROUPS * GROUPS + place
}

/// The sums of the halves of a group's quants.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn half_sums(x: __m256i) -> [i32; 2] {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        // Bytes plus 128 are unsigned: summed by eights, less 16 * 128.
        let x = _mm256_xor_si256(x, _mm256_set1_epi8(-128));
        let eights = _mm256_sad_epu8(x, _mm256_setzero_si256());
        [
            _mm256_castsi256_si128(eights),
            _mm256_extracti128_si256(eights, 1),
        ]
        .map(|sums| _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128)
    }
}

/// From this many columns on, interleaving a panel pays.
pub(super) const PANEL_COLS: usize = 5;

/// Multiplies, choosing between rows and panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: BlockSimd, B: Block32Kernel>(call: &GemmArgs) {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        if call.cols >= PANEL_COLS {
            if B::WIDE && S::WIDE_IS_SIGNED {
                panel::gemm::<S, I16Panel<S, Q8AsI16<B>>>(call);
            } else {
                panel::gemm::<S, Block32Panel<S, B>>(call);
            }
        } else {
            rows::<S, B>(call);
        }
    }
}

/// What is prepared of a column for products by rows: vectors of quants, of corrections for the
/// offset, and the scales.
struct Columns {
    /// Bytes from the quants of one column to those of the next.
    stride: usize,
    /// From a column's quants to its corrections, lane by lane, if they are not folded, or to its
    /// magnitudes, if its signs move to the weights.
    corrections: usize,
    /// To its scales, then what each group's scale or minimum is multiplied with once.
    scales: usize,
    sums: usize,
}

/// Few columns: each row once through the registers, its unpacked groups multiplied with up to four
/// columns.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
unsafe fn rows<S: BlockSimd, B: Block32Kernel>(call: &GemmArgs) {
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
                        row_times::<S, B, 4, 1>(row, groups, x, &layout, dst, call.dst_stride);
                        4
                    }
                    2.. => {
                        row_times::<S, B, 2, 2>(row, groups, x, &layout, dst, call.dst_stride);
                        2
                    }
                    _ => {
                        row_times::<S, B, 1, 4>(row, groups, x, &layout, dst, call.dst_stride);
                        1
                    }
                };
            }
        }
    }
    PREPARED.give_back(memory);
}

/// Where the halves of group `g` of a prepared column lie: in the order of
/// [`IntSimd::load_quads`](super::int_simd::IntSimd::load_quads) where nibbles are taken apart
/// behind it.
const fn places<S: BlockSimd, B: Block32Kernel>(g: usize) -> (usize, usize) {
    match B::CODES {
        Codes::Nibbles(_) => {
            let quads = S::LANES / 4;
            let first = g / quads * quads * 32 + g % quads * 16;
            (first, first + quads * 16)
        }
        _ => (g * 32, g * 32 + 16),
    }
}

/// Lays out one column.
///
/// # Safety
/// `x` has `groups` blocks, and `column` room for the layout.
#[inline(always)]
unsafe fn prepare<S: BlockSimd, B: Block32Kernel>(
    x: *const u8,
    groups: usize,
    padded: usize,
    column: *mut u8,
    layout: &Columns,
) {
    let (bytes, quants) = activation::<B>();
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        let scales = column.add(layout.scales).cast::<f32>();
        let sums = column.add(layout.sums).cast::<f32>();
        for g in 0..padded / 32 {
            let (first, second) = places::<S, B>(g);
            let place = scale_place::<S, B>(g);
            let store = |x: __m256i| {
                let (low, high) = (_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
                column.add(first).cast::<__m128i>().write_unaligned(low);
                column.add(second).cast::<__m128i>().write_unaligned(high);
            };
            if g < groups {
                let block = x.add(g * bytes);
                let x = block.add(quants).cast::<__m256i>().read_unaligned();
                store(x);
                let d = half(block.cast::<u16>().read_unaligned());
                *scales.add(place) = d;
                if folds::<S, B>() {
                    let [first, second] = half_sums(x);
                    *sums.add(place) = -d * (offset::<S, B>() * (first + second)) as f32;
                } else if B::HAS_MIN {
                    *sums.add(place) = half(block.cast::<u16>().add(1).read_unaligned());
                }
            } else {
                store(_mm256_setzero_si256());
                *scales.add(place) = 0.0;
                *sums.add(place) = 0.0;
            }
        }
        if turns::<S, B>() {
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

/// One row times `C` columns, each summed in `U` vectors by turns, so that one addition need not
/// wait for the last.
///
/// # Safety
/// The row has `groups` groups, the columns are prepared, and `dst` has `C` floats.
#[inline(always)]
unsafe fn row_times<S: BlockSimd, B: Block32Kernel, const C: usize, const U: usize>(
    row: *const u8,
    groups: usize,
    x: *const u8,
    layout: &Columns,
    dst: *mut f32,
    dst_stride: usize,
) {
    // SAFETY: by the caller's contract; past the last group the prepared columns are 0 and so are
    // the scales of the weights.
    unsafe {
        let mut acc = [[S::v_splat(0.0); U]; C];
        let mut mins = [_mm256_setzero_ps(); C];
        let mut chunk = 0;
        while chunk + GROUPS <= groups {
            let bytes = CHUNK / B::ELEMENTS * size_of::<B>();
            S::prefetch(row.add(chunk / GROUPS * bytes), bytes);
            chunk_times::<S, B, C, U>(row, chunk, GROUPS, groups, x, layout, &mut acc, &mut mins);
            chunk += GROUPS;
        }
        if chunk < groups {
            let n = groups - chunk;
            chunk_times::<S, B, C, U>(row, chunk, n, groups, x, layout, &mut acc, &mut mins);
        }
        for c in 0..C {
            let mut all = acc[c][0];
            for u in 1..U {
                all = S::v_add(all, acc[c][u]);
            }
            *dst.add(c * dst_stride) = if B::HAS_MIN || folds::<S, B>() {
                S::sum_both(all, mins[c])
            } else {
                S::v_sum(all)
            };
        }
    }
}

/// `n` groups of [`row_times`], from group `first` of `groups` on.
///
/// # Safety
/// As [`row_times`].
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn chunk_times<S: BlockSimd, B: Block32Kernel, const C: usize, const U: usize>(
    row: *const u8,
    first: usize,
    n: usize,
    groups: usize,
    x: *const u8,
    layout: &Columns,
    acc: &mut [[S::Vector; U]; C],
    mins: &mut [__m256; C],
) {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        let (d, m) = match B::CODES {
            Codes::Nibbles(_) => S::scales_for_quads::<B>(row, first, n),
            _ => S::scales::<B>(row, first, n),
        };
        let mut scales = [_mm256_setzero_ps(); C];
        let mut second_scales = [_mm256_setzero_ps(); C];
        for c in 0..C {
            let column = x.add(c * layout.stride);
            let d_x = _mm256_loadu_ps(column.add(layout.scales).cast::<f32>().add(first));
            scales[c] = _mm256_mul_ps(d, d_x);
            if B::HALF_SCALES {
                second_scales[c] = _mm256_mul_ps(m, d_x);
            }
            if B::HAS_MIN || folds::<S, B>() {
                let s_x = _mm256_loadu_ps(column.add(layout.sums).cast::<f32>().add(first));
                let m = if B::HAS_MIN { m } else { d };
                mins[c] = _mm256_fmadd_ps(m, s_x, mins[c]);
            }
        }
        // Groups whose products are summed in one vector.
        let at_once = match B::CODES {
            Codes::Nibbles(_) => S::LANES / 4,
            _ => S::GROUPS,
        };
        let vectors = n.div_ceil(at_once);
        for first_v in (0..vectors).step_by(U) {
            for u in 0..U {
                let v = first_v + u;
                if v >= vectors {
                    break;
                }
                let g = first + v * at_once;
                let x = x.add(g * 32);
                if let Codes::Nibbles(offset) = B::CODES {
                    let codes = row.add(g * size_of::<B>() + offset);
                    // A constant where the chunk is full.
                    let last = if n == GROUPS { at_once } else { groups - g } - 1;
                    let codes = S::load_quads(codes, size_of::<B>(), last);
                    let low = B::decode::<S>(S::low_nibbles(codes));
                    let high = B::decode::<S>(S::high_nibbles(codes));
                    for c in 0..C {
                        let x = x.add(c * layout.stride);
                        let (x_low, x_high) = (S::load_int(x), S::load_int(x.add(4 * S::LANES)));
                        let dots = if const { depth::<S>(B::MAX_QUANT, 2) } == 2 {
                            let low = S::multiply_pairs(low, x_low);
                            let high = S::multiply_pairs(high, x_high);
                            S::add_i16_pairs(S::zero_int(), S::add_i16(low, high))
                        } else if turns::<S, B>() {
                            let magnitudes = x.add(layout.corrections);
                            let (m_low, m_high) = (
                                S::load_int(magnitudes),
                                S::load_int(magnitudes.add(4 * S::LANES)),
                            );
                            let dots = S::dot_turned(S::zero_int(), S::flip(low), x_low, m_low);
                            S::dot_turned(dots, S::flip(high), x_high, m_high)
                        } else {
                            let dots = dot::<S, B>(S::zero_int(), low, x_low);
                            dot::<S, B>(dots, high, x_high)
                        };
                        let scale = S::spread_quads(scales[c], v);
                        acc[c][u] = S::v_mul_add(S::to_floats(dots), scale, acc[c][u]);
                    }
                    continue;
                }
                let q = S::groups::<B>(row, g, groups - 1);
                for c in 0..C {
                    let x = x.add(c * layout.stride);
                    let start = if offset::<S, B>() == 0 || folds::<S, B>() {
                        S::zero_int()
                    } else {
                        S::load_int(x.add(layout.corrections))
                    };
                    let dots = dot::<S, B>(start, q, S::load_int(x));
                    let mut scale = S::spread_groups(scales[c], v);
                    if B::HALF_SCALES {
                        scale = S::second_halves(scale, S::spread_groups(second_scales[c], v));
                    }
                    acc[c][u] = S::v_mul_add(S::to_floats(dots), scale, acc[c][u]);
                }
            }
        }
    }
}

/// Up to 32 rows of a chunk, interleaved.
#[repr(C, align(64))]
struct Block32Panel<S, B> {
    /// For each four elements, four bytes of each row.
    quants: [[u8; 128]; CHUNK / 4],
    /// For each group, the scale of each row; then for each group, the minimum of each row, or the
    /// scale of its second half.
    scales: [[f32; 32]; 2 * GROUPS],
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
    /// What the offset of the weights adds to each integer dot product, negated: to that of the
    /// group, or to those of its halves if they have scales of their own.
    corrections: [[i32; 2]; GROUPS],
}

impl<S: BlockSimd, B: Block32Kernel> Panel<S> for Block32Panel<S, B> {
    const CHUNK: usize = CHUNK;
    const BYTES: usize = CHUNK / B::ELEMENTS * size_of::<B>();
    const VECTORS: usize = S::PANEL;
    const COLS: usize = S::COLS;
    type Column = GroupColumn;
    const UNITS: usize = GROUPS;

    #[inline(always)]
    fn new() -> Self {
        Block32Panel {
            quants: [[0; 128]; CHUNK / 4],
            scales: [[0.0; 32]; 2 * GROUPS],
            rows: [[0; CHUNK]; 32],
            row_scales: [[0.0; 16]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut GroupColumn) {
        let (bytes, quants) = activation::<B>();
        // SAFETY: the caller's contract covers these accesses.
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

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize) {
        let height = S::PANEL * S::LANES;
        let groups = len / 32;
        // SAFETY: by the caller's contract: groups `start / 32 ..` exist in every row below
        // `call.rows`.
        unsafe {
            let first = start / 32;
            let last = first + groups - 1;
            let from = rows_from(call, row, height);
            for r in 0..height {
                let (d, m) = chunk_scales::<S, B>(from[r], first, groups);
                _mm256_storeu_ps(self.row_scales[r].as_mut_ptr(), d);
                _mm256_storeu_ps(self.row_scales[r].as_mut_ptr().add(8), m);
            }
            let rows = self.row_scales.as_ptr().cast();
            let scales = self.scales.as_mut_ptr().cast();
            let words = if B::HAS_MIN || B::HALF_SCALES { 16 } else { 8 };
            panel::interleave::<S>(rows, 64, words, S::PANEL, scales);

            let quants = self.quants.as_mut_ptr().cast::<u8>();
            for g in 0..groups {
                let block = (first + g) * size_of::<B>();
                for v in 0..S::PANEL {
                    let rows = from.as_ptr().add(v * S::LANES);
                    decode_words::<S, B>(rows, block, |i, word| {
                        let place = ((8 * g + i) * S::PANEL + v) * 4 * S::LANES;
                        S::store_int(quants.add(place), word);
                    });
                }
            }
            if B::CODES == Codes::Other {
                for r in 0..height {
                    let mut g = 0;
                    while g < groups {
                        let q = S::groups::<B>(from[r], first + g, last);
                        S::store_int(self.rows[r].as_mut_ptr().add(32 * g), q);
                        g += S::GROUPS;
                    }
                }
                let rows = self.rows.as_ptr().cast();
                panel::interleave::<S>(rows, CHUNK, groups * 8, S::PANEL, quants);
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<GroupColumn>,
        start: usize,
        len: usize,
        ahead: &mut Ahead,
    ) {
        let Tile {
            x,
            x_stride,
            columns,
            sums,
        } = tile;
        let (bytes, quants) = activation::<B>();
        // SAFETY: by the caller's contract; the panel has as many groups as `len` says.
        unsafe {
            let x = x.add(start / 32 * bytes + quants);
            let mut acc = [[S::v_splat(0.0); C]; P];
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
                if part == 0 {
                    ahead.more();
                }
                let mut dots = [[S::zero_int(); C]; P];
                if offset::<S, B>() != 0 {
                    for c in 0..C {
                        let correction =
                            S::splat_int((*columns.add(c)).corrections[g][part] as u32);
                        for p in 0..P {
                            dots[p][c] = correction;
                        }
                    }
                }
                let words = 8 / parts;
                let depth = const { depth::<S>(B::MAX_QUANT, if B::HALF_SCALES { 4 } else { 8 }) };
                for first in (0..words).step_by(depth) {
                    let mut sums_i16 = [[S::zero_int(); C]; P];
                    for i in first..first + depth {
                        let mut w = [S::zero_int(); P];
                        for p in 0..P {
                            w[p] = S::load_int(panel.add(p * S::LANES * 4));
                        }
                        panel = panel.add(P * S::LANES * 4);
                        for c in 0..C {
                            let x = x.add(c * x_stride + g * bytes + 4 * (part * words + i));
                            let x = S::splat_int(x.cast::<u32>().read_unaligned());
                            for p in 0..P {
                                if depth == 1 {
                                    dots[p][c] = dot::<S, B>(dots[p][c], w[p], x);
                                } else {
                                    let products = S::multiply_pairs(w[p], x);
                                    sums_i16[p][c] = S::add_i16(sums_i16[p][c], products);
                                }
                            }
                        }
                    }
                    if depth > 1 {
                        for p in 0..P {
                            for c in 0..C {
                                dots[p][c] = S::add_i16_pairs(dots[p][c], sums_i16[p][c]);
                            }
                        }
                    }
                }
                let scales = self.scales.as_ptr().cast::<f32>();
                let (height, second) = (P * S::LANES, GROUPS * P * S::LANES);
                let d = scales.add(part * second + g * height);
                for p in 0..P {
                    let d = S::v_load(d.add(p * S::LANES), S::LANES);
                    for c in 0..C {
                        let d_x = S::v_splat((*columns.add(c)).scales[g]);
                        let dot = S::to_floats(dots[p][c]);
                        acc[p][c] = S::v_mul_add(dot, S::v_mul(d, d_x), acc[p][c]);
                    }
                    if B::HAS_MIN {
                        let m = scales.add(second + g * height + p * S::LANES);
                        let m = S::v_load(m, S::LANES);
                        for c in 0..C {
                            let s_x = S::v_splat((*columns.add(c)).sums[g]);
                            acc[p][c] = S::v_mul_add(m, s_x, acc[p][c]);
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
