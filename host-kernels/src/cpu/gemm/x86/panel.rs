//! Many columns: the weights of a panel of rows are unpacked once, interleaved so that a vector holds
//! the same few elements of every row, and multiplied with all columns. Nothing is summed across lanes,
//! and unpacking costs a few columns' worth of multiplying.
//!
//! Order of loops: blocks of columns whose activations stay in the second-level cache, blocks of rows
//! whose results do, chunks of `k`, panels, tiles of columns. Each result is a running sum in `dst` over
//! the chunks of `k` in order, whatever the blocks are.

use super::simd::Simd;
use super::{Call, scratch};

/// Columns whose activations are prepared at once.
const COLUMNS: usize = 512;
/// Rows whose results are revisited for each chunk.
const ROWS: usize = 256;

/// How one family of formats fills and uses a panel.
///
/// # Safety
/// As in [`super::simd`]; `start` is a multiple of `CHUNK`, `start + len <= k` and `len <= CHUNK`.
pub(super) trait Panel<S: Simd>: Sized {
    /// Elements of `k` unpacked at once.
    const CHUNK: usize;
    /// Vectors of rows in a panel: 1 or 2.
    const VECTORS: usize;
    /// What is precomputed of a column's chunk.
    type Column: Copy;

    /// A panel of zeros.
    fn new() -> Self;
    /// Precomputes from the column at `x`.
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut Self::Column);
    /// Unpacks a chunk of the rows `row..`, repeating the last one where there are fewer than
    /// `VECTORS * S::LANES`.
    unsafe fn unpack(&mut self, call: &Call, row: usize, start: usize, len: usize);
    /// Adds the products with `C` columns to `out`, or writes them if `start` is 0.
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        x: *const u8,
        x_stride: usize,
        columns: *const Self::Column,
        start: usize,
        len: usize,
        out: Out,
    );
}

/// A tile of results: `rows` floats in each column.
#[derive(Clone, Copy)]
pub(super) struct Out {
    pub(super) dst: *mut f32,
    pub(super) stride: usize,
    pub(super) rows: usize,
}

impl Out {
    /// What has been summed so far in vector `p` of column `c`.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(self, p: usize, c: usize, start: usize) -> S::F {
        // SAFETY: the tile lies within the caller's `dst`; rows past its end are neither read nor
        // written, as `load_first` promises.
        unsafe {
            if start == 0 {
                return S::zero_floats();
            }
            let first = p * S::LANES;
            if first >= self.rows {
                return S::zero_floats();
            }
            S::load_first(self.dst.add(c * self.stride + first), self.rows - first)
        }
    }

    /// Writes vector `p` of column `c`.
    #[inline(always)]
    pub(super) unsafe fn store<S: Simd>(self, p: usize, c: usize, v: S::F) {
        let first = p * S::LANES;
        if first < self.rows {
            // SAFETY: as in `load`.
            unsafe { S::store_first(self.dst.add(c * self.stride + first), self.rows - first, v) }
        }
    }
}

/// Multiplies through panels.
///
/// # Safety
/// As [`super::super::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: Simd, T: Panel<S>>(call: &Call) {
    if call.k == 0 {
        // SAFETY: the caller's promise.
        return unsafe { call.clear() };
    }
    let mut panel = T::new();
    let height = T::VECTORS * S::LANES;
    let mut columns = scratch::take(call.cols.min(COLUMNS) * size_of::<T::Column>());
    let prepared = columns.as_mut_ptr().cast::<T::Column>();
    for first_col in (0..call.cols).step_by(COLUMNS) {
        let cols = COLUMNS.min(call.cols - first_col);
        // SAFETY: all offsets below are those of rows, columns and elements of the call.
        let x = unsafe { call.x.add(first_col * call.x_stride) };
        for first_row in (0..call.rows).step_by(ROWS) {
            let rows = ROWS.min(call.rows - first_row);
            for start in (0..call.k).step_by(T::CHUNK) {
                let len = T::CHUNK.min(call.k - start);
                for c in 0..cols {
                    // SAFETY: as above; the scratch holds `cols` columns.
                    unsafe { T::prepare(x.add(c * call.x_stride), start, len, prepared.add(c)) }
                }
                for row in (first_row..first_row + rows).step_by(height) {
                    // SAFETY: as above.
                    unsafe {
                        panel.unpack(call, row, start, len);
                        let tile = |c: usize| Out {
                            dst: call.dst.add((first_col + c) * call.dst_stride + row),
                            stride: call.dst_stride,
                            rows: call.rows - row,
                        };
                        let mut c = 0;
                        while c < cols {
                            let (x, prepared, out) =
                                (x.add(c * call.x_stride), prepared.add(c), tile(c));
                            let stride = call.x_stride;
                            c += match (T::VECTORS, cols - c) {
                                (2, 4..) => {
                                    panel.multiply::<2, 4>(x, stride, prepared, start, len, out);
                                    4
                                }
                                (2, 2..) => {
                                    panel.multiply::<2, 2>(x, stride, prepared, start, len, out);
                                    2
                                }
                                (2, _) => {
                                    panel.multiply::<2, 1>(x, stride, prepared, start, len, out);
                                    1
                                }
                                (_, 4..) => {
                                    panel.multiply::<1, 4>(x, stride, prepared, start, len, out);
                                    4
                                }
                                (_, 2..) => {
                                    panel.multiply::<1, 2>(x, stride, prepared, start, len, out);
                                    2
                                }
                                (_, _) => {
                                    panel.multiply::<1, 1>(x, stride, prepared, start, len, out);
                                    1
                                }
                            };
                        }
                    }
                }
            }
        }
    }
    scratch::give_back(columns);
}

/// Interleaves the words of `vectors * S::LANES` rows: word `i` of row `r` goes to `dst + (i * rows + r) * 4`.
/// `words` is rounded up to whole vectors.
///
/// # Safety
/// As in [`super::simd`]; `src` has the rows `src_stride` bytes apart, and `dst` room for the words.
#[inline(always)]
pub(super) unsafe fn interleave<S: Simd>(
    src: *const u8,
    src_stride: usize,
    words: usize,
    vectors: usize,
    dst: *mut u8,
) {
    let dst_stride = vectors * S::LANES * 4;
    for first in (0..words).step_by(S::LANES) {
        for v in 0..vectors {
            // SAFETY: the caller's promise.
            unsafe {
                S::transpose(
                    src.add(v * S::LANES * src_stride + first * 4),
                    src_stride,
                    dst.add(first * dst_stride + v * S::LANES * 4),
                    dst_stride,
                );
            }
        }
    }
}
