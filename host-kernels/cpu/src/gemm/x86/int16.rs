//! Products of 16-bit integers with one scale per 32 elements of a row or column.
//!
//! Floats are rounded to 14 bits (see
//! [`MatmulKernel::rounded`](crate::gemm::MatmulKernel::rounded)) at levels that multiply twice as
//! many 16-bit integers as floats. 8-bit quants are widened (`q8_int16`) at levels that cannot
//! multiply signed bytes.

use std::marker::PhantomData;

use super::block_simd::BlockSimd;
use super::floats::{F32, Float};
use super::panel::{self, Panel, Prefetch, Tile};
use crate::gemm::kernel::GemmArgs;

/// Elements that share a scale.
const GROUP: usize = 32;
/// Elements of `k` in a panel.
pub(super) const CHUNK: usize = 256;
const GROUPS: usize = CHUNK / GROUP;
/// Vectors of rows in a panel.
pub(super) const VECTORS: usize = 2;
/// The largest integer: 32 products of two such are the most that 32 bits hold.
const MAX_VALUE: f32 = 8191.0;
const _: () = assert!(GROUP as i64 * 8191 * 8191 <= i32::MAX as i64);
/// A group without a larger element becomes zero: the inverse of its scale might be infinite.
const MIN_VALUE: f32 = 1e-30;

/// Bytes of `k` rounded activations: whole chunks.
pub(in crate::gemm) const fn column_bytes(k: usize) -> usize {
    k.div_ceil(CHUNK) * size_of::<I16Column>()
}

/// From this many columns on it pays to round the weights.
pub(super) const COLUMNS: usize = 24;
/// From this length of a column on, the error of its largest products is small beside their sum.
pub(super) const ELEMENTS: usize = CHUNK;

/// Multiplies floats.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`; the activations are of [`round_column`].
#[inline(always)]
pub(super) unsafe fn gemm<S: BlockSimd, W: Float>(call: &GemmArgs) {
    // SAFETY: the caller's contract covers these accesses.
    unsafe { panel::gemm::<S, I16Panel<S, Rounded<W>>>(call) }
}

/// Rounds a column of `k` activations, chunk by chunk: what [`gemm`] takes.
///
/// # Safety
/// As [`crate::formats::QuantizeRow`], with the features of `S`; there is room for [`column_bytes`].
#[inline(always)]
pub(super) unsafe fn round_column<S: BlockSimd>(from: *const f32, to: *mut u8, k: usize) {
    let to = to.cast::<I16Column>();
    for chunk in 0..k.div_ceil(CHUNK) {
        let start = chunk * CHUNK;
        // SAFETY: by the caller's contract: the chunk's elements are there, and room for all of its
        // columns' bytes, which are only ever pointed to, since nothing is known of their
        // alignment.
        unsafe {
            let column = to.add(chunk);
            let (pairs, scales) = (&raw mut (*column).pairs, &raw mut (*column).scales);
            let len = CHUNK.min(k - start);
            round::<S, F32>(from.add(start).cast(), len, pairs.cast(), scales.cast());
        }
    }
}

/// Rounds `len` elements to whole multiples of the scales of their groups, zeros behind the last. A
/// group that is not finite gets a scale that is not, and so do its products.
///
/// # Safety
/// `from` has `len` elements; there is room for whole groups. No alignment.
#[inline(always)]
unsafe fn round<S: BlockSimd, T: Float>(
    from: *const u8,
    len: usize,
    to: *mut u8,
    scales: *mut f32,
) {
    let whole = len / GROUP;
    // SAFETY: by the caller's contract; what is left of a group is less than the room for one of
    // the widest elements.
    unsafe {
        for g in 0..whole {
            let to = to.add(2 * g * GROUP);
            let scale = round_group::<S, T>(from.add(g * GROUP * T::BYTES), to);
            scales.add(g).write_unaligned(scale);
        }
        let left = len - whole * GROUP;
        if left > 0 {
            let mut group = [0; GROUP * F32::BYTES];
            let from = from.add(whole * GROUP * T::BYTES);
            group
                .as_mut_ptr()
                .copy_from_nonoverlapping(from, left * T::BYTES);
            let to = to.add(2 * whole * GROUP);
            let scale = round_group::<S, T>(group.as_ptr(), to);
            scales.add(whole).write_unaligned(scale);
        }
    }
}

/// Rounds a whole group; returns its scale.
///
/// # Safety
/// As [`round`], for `GROUP` elements.
#[inline(always)]
unsafe fn round_group<S: BlockSimd, T: Float>(from: *const u8, to: *mut u8) -> f32 {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        let mut x = [S::v_splat(0.0); 4];
        let vectors = GROUP / S::LANES;
        let mut largest = S::zero_int();
        for i in 0..vectors {
            x[i] = T::load::<S>(from.add(i * S::LANES * T::BYTES));
            largest = S::larger_magnitudes(largest, x[i]);
        }
        let largest = f32::from_bits(S::largest(largest));
        let is_usual = largest > MIN_VALUE && largest.is_finite();
        let factor = S::v_splat(if is_usual { MAX_VALUE / largest } else { 0.0 });
        for i in 0..vectors / 2 {
            let words = S::to_i16(S::v_mul(x[2 * i], factor), S::v_mul(x[2 * i + 1], factor));
            S::store_int(to.add(4 * S::LANES * i), words);
        }
        largest * (1.0 / MAX_VALUE)
    }
}

/// A chunk of a column. Groups beyond the end of the column are never read.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct I16Column {
    /// Bf16Weights of integers, in an order that the weights share.
    pub(super) pairs: [[u32; GROUP / 2]; GROUPS],
    /// The scale of each group.
    pub(super) scales: [f32; GROUPS],
}

/// Up to 32 rows of a chunk, interleaved by pairs.
#[repr(C, align(64))]
pub(super) struct I16Panel<S, W> {
    /// For each pair of elements, that of each row.
    pairs: [[u32; 32]; CHUNK / 2],
    /// For each group, the scale of each row. (A vector has up to 16 lanes to be transposed.)
    scales: [[f32; 32]; 16],
    rows: [[u32; CHUNK / 2]; 32],
    row_scales: [[f32; 16]; 32],
    format: PhantomData<(S, W)>,
}

/// Where the integers of weights and activations come from.
///
/// # Safety
/// As in [`Panel`].
pub(super) trait Source: Sized {
    /// Bytes of a chunk of a row of weights.
    const BYTES: usize;
    /// The integers of the column at `x`.
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut I16Column);
    /// Those of the weights, as [`Panel::unpack`].
    unsafe fn unpack<S: BlockSimd>(
        panel: &mut I16Panel<S, Self>,
        call: &GemmArgs,
        row: usize,
        start: usize,
        len: usize,
    );
}

/// Floats `W`, rounded; the activations are rounded before.
struct Rounded<W>(PhantomData<W>);

impl<W: Float> Source for Rounded<W> {
    const BYTES: usize = CHUNK * W::BYTES;

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, _: usize, column: *mut I16Column) {
        // Side by side with the same chunk of the other columns: columns are whole pages apart.
        // SAFETY: by the caller's contract; a column has whole chunks, aligned or not.
        unsafe {
            let chunk = x.add(column_bytes(start));
            let bytes = size_of::<I16Column>();
            column.cast::<u8>().copy_from_nonoverlapping(chunk, bytes);
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
        // SAFETY: the caller's contract covers these accesses.
        unsafe {
            for r in 0..VECTORS * S::LANES {
                let from = call.row(row + r);
                let to = panel.rows[r].as_mut_ptr().cast();
                let scales = panel.row_scales[r].as_mut_ptr();
                round::<S, W>(from.add(start * W::BYTES), len, to, scales);
            }
            let groups = len.div_ceil(GROUP);
            let (rows, pairs) = (panel.rows.as_ptr().cast(), panel.pairs.as_mut_ptr().cast());
            panel::interleave::<S>(rows, CHUNK * 2, groups * GROUP / 2, VECTORS, pairs);
            panel.interleave_scales(groups);
        }
    }
}

impl<S: BlockSimd, W> I16Panel<S, W> {
    /// Sets vector `v` of pair `pair` of the rows.
    ///
    /// # Safety
    /// The contract of [`super::int_simd`]; a chunk has the pair, and a panel the vector.
    #[inline(always)]
    pub(super) unsafe fn set_pairs(&mut self, pair: usize, v: usize, pairs: S::I) {
        debug_assert!(pair < CHUNK / 2 && v < VECTORS);
        let to = self.pairs.as_mut_ptr().cast::<u32>();
        // SAFETY: there is room for 32 words of each pair, as many as two vectors have at most.
        unsafe { S::store_int(to.add((VECTORS * pair + v) * S::LANES).cast(), pairs) }
    }

    /// The scales of the groups of a row.
    #[inline(always)]
    pub(super) fn row_scales(&mut self, row: usize) -> &mut [f32; 16] {
        &mut self.row_scales[row]
    }

    /// Has the scales of `groups` groups of all rows in their place.
    ///
    /// # Safety
    /// As [`panel::interleave`].
    #[inline(always)]
    pub(super) unsafe fn interleave_scales(&mut self, groups: usize) {
        let rows = self.row_scales.as_ptr().cast();
        let scales = self.scales.as_mut_ptr().cast();
        // SAFETY: by the caller's contract; whole vectors have room.
        unsafe { panel::interleave::<S>(rows, 64, groups, VECTORS, scales) }
    }
}

impl<S: BlockSimd, W: Source> Panel<S> for I16Panel<S, W> {
    const CHUNK: usize = CHUNK;
    const BYTES: usize = W::BYTES;
    const VECTORS: usize = VECTORS;
    const COLS: usize = 6;
    type Column = I16Column;
    const UNITS: usize = GROUPS;

    #[inline(always)]
    fn new() -> Self {
        I16Panel {
            pairs: [[0; 32]; CHUNK / 2],
            scales: [[0.0; 32]; 16],
            rows: [[0; CHUNK / 2]; 32],
            row_scales: [[0.0; 16]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut I16Column) {
        // SAFETY: the caller's contract covers these accesses.
        unsafe { W::prepare(x, start, len, column) }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize) {
        // SAFETY: the caller's contract covers these accesses.
        unsafe { W::unpack::<S>(self, call, row, start, len) }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<I16Column>,
        _: usize,
        len: usize,
        prefetch: &mut Prefetch,
    ) {
        let Tile { columns, sums, .. } = tile;
        let height = P * S::LANES;
        // SAFETY: by the caller's contract; the panel has `len` elements.
        unsafe {
            let mut acc = [[S::v_splat(0.0); C]; P];
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = sums.load::<S, P>(p, c);
                }
            }
            let mut panel = self.pairs.as_ptr().cast::<u8>();
            let scales = self.scales.as_ptr().cast::<f32>();
            for g in 0..len.div_ceil(GROUP) {
                prefetch.step();
                let mut dots = [[S::zero_int(); C]; P];
                for i in 0..GROUP / 2 {
                    let mut w = [S::zero_int(); P];
                    for p in 0..P {
                        w[p] = S::load_int(panel.add(p * S::LANES * 4));
                    }
                    panel = panel.add(height * 4);
                    for c in 0..C {
                        let x = S::splat_int((*columns.add(c)).pairs[g][i]);
                        for p in 0..P {
                            dots[p][c] = S::dot_pairs(dots[p][c], w[p], x);
                        }
                    }
                }
                for p in 0..P {
                    let d = S::v_load(scales.add(g * height + p * S::LANES), S::LANES);
                    for c in 0..C {
                        let d_x = S::v_splat((*columns.add(c)).scales[g]);
                        let dot = S::to_floats(dots[p][c]);
                        acc[p][c] = S::v_mul_add(dot, S::v_mul(d, d_x), acc[p][c]);
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
