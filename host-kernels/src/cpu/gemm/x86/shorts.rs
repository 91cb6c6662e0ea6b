//! Products of floats through integers of 14 bits, for levels whose instructions multiply twice as many of those as of
//! floats: every 32 elements of a row or of a column have a scale of their own (see
//! [`super::super::MatmulKernel::rounded`]).

use std::marker::PhantomData;

use super::Call;
use super::floats::{F32, Float};
use super::panel::{self, Ahead, Panel, Tile};
use super::simd::Simd;

/// Elements that share a scale.
const GROUP: usize = 32;
/// Elements of `k` in a panel.
const CHUNK: usize = 256;
const GROUPS: usize = CHUNK / GROUP;
/// The largest integer: 32 products of two such are the most that 32 bits hold.
const MOST: f32 = 8191.0;
const _: () = assert!(GROUP as i64 * 8191 * 8191 <= i32::MAX as i64);
/// Groups without a larger element are zero: the inverse of their scale might be infinite.
const LEAST: f32 = 1e-30;

/// From this many columns on it pays to round the weights.
pub(super) const COLUMNS: usize = 24;
/// From this length of a column on, the error of its largest products is small beside their sum.
pub(super) const ELEMENTS: usize = CHUNK;

/// Multiplies.
///
/// # Safety
/// As [`super::super::Gemm`], with the features of `S`; the activations are `f32`.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd, W: Float>(call: &Call) {
    // SAFETY: the caller's promise.
    unsafe { panel::gemm::<S, ShortPanel<S, W>>(call) }
}

/// Rounds `len` elements to whole multiples of the scales of their groups, zeros behind the last. A group that is not
/// finite gets a scale that is not, and so do its products.
///
/// # Safety
/// `from` has `len` elements; there is room for whole groups.
#[inline(always)]
unsafe fn round<S: Simd, T: Float>(from: *const u8, len: usize, to: *mut u8, scales: *mut f32) {
    let whole = len / GROUP;
    // SAFETY: the caller's promise; what is left of a group is less than the room for one of the widest elements.
    unsafe {
        for g in 0..whole {
            let to = to.add(2 * g * GROUP);
            *scales.add(g) = round_group::<S, T>(from.add(g * GROUP * T::BYTES), to);
        }
        let left = len - whole * GROUP;
        if left > 0 {
            let mut group = [0; GROUP * F32::BYTES];
            let from = from.add(whole * GROUP * T::BYTES);
            group
                .as_mut_ptr()
                .copy_from_nonoverlapping(from, left * T::BYTES);
            let to = to.add(2 * whole * GROUP);
            *scales.add(whole) = round_group::<S, T>(group.as_ptr(), to);
        }
    }
}

/// Rounds a whole group; returns its scale.
///
/// # Safety
/// As [`round`], for `GROUP` elements.
#[inline(always)]
unsafe fn round_group<S: Simd, T: Float>(from: *const u8, to: *mut u8) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = [S::zero_floats(); 4];
        let vectors = GROUP / S::LANES;
        let mut largest = S::zero();
        for i in 0..vectors {
            x[i] = T::load::<S>(from.add(i * S::LANES * T::BYTES));
            largest = S::larger_magnitudes(largest, x[i]);
        }
        let largest = f32::from_bits(S::largest(largest));
        let is_usual = largest > LEAST && largest.is_finite();
        let factor = S::splat_float(if is_usual { MOST / largest } else { 0.0 });
        for i in 0..vectors / 2 {
            let shorts = S::to_shorts(S::mul(x[2 * i], factor), S::mul(x[2 * i + 1], factor));
            S::store(to.add(4 * S::LANES * i), shorts);
        }
        largest * (1.0 / MOST)
    }
}

/// A rounded chunk of a column.
#[derive(Clone, Copy)]
#[repr(C)]
struct ShortColumn {
    /// Pairs of integers, in the order of [`Simd::to_shorts`].
    pairs: [u32; CHUNK / 2],
    scales: [f32; GROUPS],
}

/// Up to 32 rows of a rounded chunk, interleaved by pairs.
#[repr(C, align(64))]
struct ShortPanel<S, W> {
    /// For each pair of elements, that of each row.
    pairs: [[u32; 32]; CHUNK / 2],
    /// For each group, the scale of each row. (A vector has up to 16 lanes to be transposed.)
    scales: [[f32; 32]; 16],
    rows: [[u32; CHUNK / 2]; 32],
    row_scales: [[f32; 16]; 32],
    format: PhantomData<(S, W)>,
}

impl<S: Simd, W: Float> Panel<S> for ShortPanel<S, W> {
    const CHUNK: usize = CHUNK;
    const BYTES: usize = CHUNK * W::BYTES;
    const VECTORS: usize = 2;
    const COLS: usize = 6;
    type Column = ShortColumn;
    const UNITS: usize = GROUPS;

    #[inline(always)]
    fn new() -> Self {
        ShortPanel {
            pairs: [[0; 32]; CHUNK / 2],
            scales: [[0.0; 32]; 16],
            rows: [[0; CHUNK / 2]; 32],
            row_scales: [[0.0; 16]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut ShortColumn) {
        // SAFETY: the caller's promise.
        unsafe {
            let (pairs, scales) = (&raw mut (*column).pairs, &raw mut (*column).scales);
            round::<S, F32>(x.add(start * F32::BYTES), len, pairs.cast(), scales.cast());
        }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &Call, row: usize, start: usize, len: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            for r in 0..2 * S::LANES {
                let from = call.w.add((row + r).min(call.rows - 1) * call.w_stride);
                let to = self.rows[r].as_mut_ptr().cast();
                let scales = self.row_scales[r].as_mut_ptr();
                round::<S, W>(from.add(start * W::BYTES), len, to, scales);
            }
            let groups = len.div_ceil(GROUP);
            let (rows, pairs) = (self.rows.as_ptr().cast(), self.pairs.as_mut_ptr().cast());
            panel::interleave::<S>(rows, CHUNK * 2, groups * GROUP / 2, 2, pairs);
            let rows = self.row_scales.as_ptr().cast();
            let scales = self.scales.as_mut_ptr().cast();
            panel::interleave::<S>(rows, 64, groups, 2, scales);
        }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<ShortColumn>,
        _: usize,
        len: usize,
        ahead: &mut Ahead,
    ) {
        let Tile { columns, sums, .. } = tile;
        let height = P * S::LANES;
        // SAFETY: the caller's promise; the panel has `len` elements.
        unsafe {
            let mut acc = [[S::zero_floats(); C]; P];
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = sums.load::<S, P>(p, c);
                }
            }
            let mut panel = self.pairs.as_ptr().cast::<u8>();
            let scales = self.scales.as_ptr().cast::<f32>();
            for g in 0..len.div_ceil(GROUP) {
                ahead.more();
                let mut dots = [[S::zero(); C]; P];
                for i in 0..GROUP / 2 {
                    let mut w = [S::zero(); P];
                    for p in 0..P {
                        w[p] = S::load(panel.add(p * S::LANES * 4));
                    }
                    panel = panel.add(height * 4);
                    for c in 0..C {
                        let x = S::splat((*columns.add(c)).pairs[g * GROUP / 2 + i]);
                        for p in 0..P {
                            dots[p][c] = S::dot_pairs(dots[p][c], w[p], x);
                        }
                    }
                }
                for p in 0..P {
                    let d = S::load_floats(scales.add(g * height + p * S::LANES));
                    for c in 0..C {
                        let d_x = S::splat_float((*columns.add(c)).scales[g]);
                        let dot = S::to_floats(dots[p][c]);
                        acc[p][c] = S::mul_add(dot, S::mul(d, d_x), acc[p][c]);
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
