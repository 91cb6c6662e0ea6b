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
/// The elements of `k` in a panel.
pub(super) const CHUNK: usize = 256;
const GROUPS: usize = CHUNK / GROUP;
/// Vectors of rows in a panel.
pub(super) const VECTORS: usize = 2;
/// The largest integer: the sum of 32 products of two such integers fits 32 bits.
const MAX_VALUE: f32 = 8191.0;
const _: () = assert!(GROUP as i64 * 8191 * 8191 <= i32::MAX as i64);
/// A group without a larger element becomes zero: the inverse of its scale might be infinite.
const MIN_VALUE: f32 = 1e-30;

/// Bytes of `k` rounded activations: whole chunks.
pub(in crate::gemm) const fn column_bytes(k: usize) -> usize {
    k.div_ceil(CHUNK) * size_of::<I16Column>()
}

/// From this many columns on, rounding the weights and multiplying integers is faster than
/// multiplying floats.
pub(super) const COLUMNS: usize = 24;
/// From this many elements of `k` on, the rounding errors are small compared to the sum of the
/// products.
pub(super) const ELEMENTS: usize = CHUNK;

/// Multiplies floats.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`. The activations are columns of
/// [`round_column`].
#[inline(always)]
pub(super) unsafe fn gemm<S: BlockSimd, W: Float>(call: &GemmArgs) {
    // SAFETY: `panel::gemm` requires the contract of `Gemm` for `call`, as it is, with columns that
    // `Rounded::prepare` can read: those of `round_column`. The caller guarantees both, and the
    // features of `S`.
    unsafe { panel::gemm::<S, I16Panel<S, Rounded<W>>>(call) }
}

/// Rounds a column of `k` activations for [`gemm`], chunk by chunk.
///
/// # Safety
/// As [`crate::formats::QuantizeRow`], with the features of `S`. `to` is writable for
/// [`column_bytes`].
#[inline(always)]
pub(super) unsafe fn round_column<S: BlockSimd>(from: *const f32, to: *mut u8, k: usize) {
    let to = to.cast::<I16Column>();
    for chunk in 0..k.div_ceil(CHUNK) {
        let start = chunk * CHUNK;
        // SAFETY: `from` is readable for `k` floats, and `start + len <= k`. `to` is writable for
        // `size_of::<I16Column>()` bytes for each chunk: `len <= CHUNK` integers and a scale for
        // each group. The column may be unaligned, so it is accessed only through raw pointers, and
        // `round` needs no alignment.
        unsafe {
            let column = to.add(chunk);
            let (pairs, scales) = (&raw mut (*column).pairs, &raw mut (*column).scales);
            let len = CHUNK.min(k - start);
            round::<S, F32>(from.add(start).cast(), len, pairs.cast(), scales.cast());
        }
    }
}

/// Rounds `len` elements to integer multiples of the scales of their groups, and fills the last
/// group with zeros. A group with an element that is not finite gets a scale that is not finite,
/// and so its products are not finite.
///
/// # Safety
/// `from` is readable for `len` elements, `to` writable for 16-bit integers of whole groups,
/// `scales` for a float for each group. No alignment is needed. The processor has the instructions
/// of `S`.
#[inline(always)]
unsafe fn round<S: BlockSimd, T: Float>(
    from: *const u8,
    len: usize,
    to: *mut u8,
    scales: *mut f32,
) {
    let whole = len / GROUP;
    // SAFETY: `from` is readable for `len` elements: `g < whole`, so group `g` has `GROUP`, and
    // after the whole groups `left < GROUP` are copied to `group`, which has room for `GROUP`
    // elements of up to four bytes. `to` and `scales` have room for `len.div_ceil(GROUP)` groups.
    // The caller guarantees the instructions of `S`.
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

/// Rounds a whole group. Returns the scale of the group.
///
/// # Safety
/// As [`round`], for `GROUP` elements.
#[inline(always)]
unsafe fn round_group<S: BlockSimd, T: Float>(from: *const u8, to: *mut u8) -> f32 {
    // SAFETY: `GROUP / S::LANES` vectors, two or four, are the `GROUP` elements that are readable
    // at `from`. Half as many vectors of 16-bit integers are the `2 * GROUP` bytes that are
    // writable at `to`. The caller guarantees the instructions of `S`.
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

/// A prepared chunk of a column. Groups behind the end of the column are never read.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct I16Column {
    /// Pairs of integers. The weights have the same order.
    pub(super) pairs: [[u32; GROUP / 2]; GROUPS],
    /// The scale of each group.
    pub(super) scales: [f32; GROUPS],
}

/// Up to 32 rows of a chunk, interleaved by pairs.
#[repr(C, align(64))]
pub(super) struct I16Panel<S, W> {
    /// For each pair of elements, the pair of each row.
    pairs: [[u32; 32]; CHUNK / 2],
    /// For each group, the scale of each row. There are 16 groups because up to 16 words are
    /// transposed at once.
    scales: [[f32; 32]; 16],
    rows: [[u32; CHUNK / 2]; 32],
    row_scales: [[f32; 16]; 32],
    format: PhantomData<(S, W)>,
}

/// How weights and activations are converted to 16-bit integers.
///
/// # Safety
/// As in [`Panel`], with at least AVX2, FMA and F16C.
pub(super) trait Source: Sized {
    /// Bytes of a chunk of a row of weights.
    const BYTES: usize;
    /// Converts a chunk of the column at `x`.
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut I16Column);
    /// Converts a chunk of rows of weights, as [`Panel::unpack`].
    unsafe fn unpack<S: BlockSimd>(
        panel: &mut I16Panel<S, Self>,
        call: &GemmArgs,
        row: usize,
        start: usize,
        len: usize,
    );
}

/// Floats `W`, rounded. The activations are already rounded ([`round_column`]).
struct Rounded<W>(PhantomData<W>);

impl<W: Float> Source for Rounded<W> {
    const BYTES: usize = CHUNK * W::BYTES;

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, _: usize, column: *mut I16Column) {
        // The copy is adjacent to the same chunk of the other columns. Without the copy, the
        // columns would be whole pages apart.
        // SAFETY: `x` is readable for a column of `round_column`, which has a whole `I16Column` for
        // each chunk, so the one at `column_bytes(start)` is readable. `column` is writable for
        // one, and no one else accesses it. The copy is by bytes, for any alignment.
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
        // SAFETY: `call.row` returns a row of the call, readable for `call.k >= start + len`
        // weights. `len <= CHUNK`, so `round` writes at most `CHUNK` integers and `GROUPS` scales:
        // a row of `panel.rows` has as many, one of `panel.row_scales` 16. `interleave` reads 32
        // such rows, whole vectors of words, and writes at most `CHUNK / 2` pairs.
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
    /// The processor has the instructions of `S`. `pair < CHUNK / 2` and `v < VECTORS`.
    #[inline(always)]
    pub(super) unsafe fn set_pairs(&mut self, pair: usize, v: usize, pairs: S::I) {
        debug_assert!(pair < CHUNK / 2 && v < VECTORS);
        let to = self.pairs.as_mut_ptr().cast::<u32>();
        // SAFETY: `pair < CHUNK / 2` and `v < VECTORS`, so the vector ends at or before word
        // `VECTORS * S::LANES * CHUNK / 2`, and `self.pairs` has `32 * CHUNK / 2` words, at least
        // as many. The caller guarantees the instructions of `S`.
        unsafe { S::store_int(to.add((VECTORS * pair + v) * S::LANES).cast(), pairs) }
    }

    /// The scales of the groups of a row.
    #[inline(always)]
    pub(super) fn row_scales(&mut self, row: usize) -> &mut [f32; 16] {
        &mut self.row_scales[row]
    }

    /// Interleaves the scales of `groups` groups of all rows.
    ///
    /// # Safety
    /// The processor has the instructions of `S`. `groups <= GROUPS`.
    #[inline(always)]
    pub(super) unsafe fn interleave_scales(&mut self, groups: usize) {
        let rows = self.row_scales.as_ptr().cast();
        let scales = self.scales.as_mut_ptr().cast();
        // SAFETY: the source has `VECTORS * S::LANES <= 32` rows of 16 floats, 64 bytes apart, and
        // `groups <= GROUPS = 8`, rounded up to whole vectors, is at most 16. The destination has
        // 16 groups of 32 rows. The caller guarantees the instructions of `S`.
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
        // SAFETY: `Source::prepare` has the contract of `Panel::prepare`: a column of `start + len`
        // activations at `x`, and a valid `column` that no one else accesses.
        unsafe { W::prepare(x, start, len, column) }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize) {
        // SAFETY: `Source::unpack` has the contract of `Panel::unpack`: that of `Gemm` for `call`,
        // `row < call.rows`, and a chunk that ends at or before `call.k`.
        unsafe { W::unpack::<S>(self, call, row, start, len) }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<I16Column>,
        len: usize,
        prefetch: &mut Prefetch,
    ) {
        let Tile { columns, sums } = tile;
        let height = P * S::LANES;
        // SAFETY: group `g < len.div_ceil(GROUP) <= GROUPS` of the panel has `GROUP / 2` pairs and
        // a scale for each of `P * S::LANES` rows, written by `unpack` with `P == VECTORS`. Column
        // `c < C` of `columns` has as many groups. The contract of `Panel` includes `C` columns,
        // their sums, and the instructions of `S`.
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
