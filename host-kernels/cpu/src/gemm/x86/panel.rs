//! Products of many columns. The weights of a panel of rows are unpacked once, interleaved so that
//! a vector holds the same elements of every row, and multiplied with all columns. No sum crosses
//! lanes, and unpacking costs as much as multiplying a few columns.
//!
//! Order of loops: blocks of columns and rows whose sums fit the L2 cache, chunks of `k`, panels,
//! tiles of columns. The sums are kept apart from `dst`, whose columns are often a power of two
//! apart and would map to few cache sets. With few columns the product is bound by memory: a panel
//! is multiplied along all of `k` before the next panel, whose rows are prefetched meanwhile, a few
//! cache lines at a time ([`Ahead`]). Each result is a sum over the chunks of `k` in order,
//! whatever the order of the loops around them.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::int_simd::IntSimd;
use super::scratch::PREPARED;
use crate::gemm::kernel::GemmArgs;

/// Columns of a block.
const COLUMNS: usize = 256;
/// Rows of a block.
const ROWS: usize = 256;
/// Up to so many columns, panels go along the whole of `k` one by one.
const FEW_COLUMNS: usize = 32;

/// How one family of formats fills and uses a panel.
///
/// # Safety
/// As in [`IntSimd`]; `start` is a multiple of `CHUNK`, `start + len <= k` and `len <= CHUNK`.
pub(super) trait Panel<S: IntSimd>: Sized {
    /// Elements of `k` unpacked at once.
    const CHUNK: usize;
    /// Bytes of a chunk of a row of weights.
    const BYTES: usize;
    /// Vectors of rows in a panel: 1 or 2.
    const VECTORS: usize;
    /// Columns of a tile, as many as the registers have room for: 4, 6 or 12.
    const COLS: usize;
    /// What is precomputed of a column's chunk.
    type Column: Copy;
    /// How often [`Panel::multiply`] asks [`Ahead::more`] in a whole chunk.
    const UNITS: usize;

    /// A panel of zeros.
    fn new() -> Self;
    /// Precomputes from the column at `x`.
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut Self::Column);
    /// Unpacks a chunk of the rows `row..`, repeating the last one where there are fewer than
    /// `VECTORS * S::LANES`.
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize);
    /// Adds the products with the `C` columns of a tile to their sums.
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<Self::Column>,
        start: usize,
        len: usize,
        ahead: &mut Ahead,
    );
}

/// A few columns.
#[derive(Clone, Copy)]
pub(super) struct Tile<C> {
    /// The first column, and the bytes to the next.
    pub(super) x: *const u8,
    pub(super) x_stride: usize,
    /// What was precomputed of them.
    pub(super) columns: *const C,
    pub(super) sums: Sums,
}

/// Weights that are asked for while others are multiplied: not many at once, since the processor
/// keeps track of few, and waits where there are more.
pub(super) struct Ahead {
    next: *const u8,
    /// Lines of 64 bytes at a time.
    lines: usize,
}

impl Ahead {
    /// Nothing is asked for.
    const NOTHING: Ahead = Ahead {
        next: std::ptr::null(),
        lines: 0,
    };

    /// `bytes` from `next` on, in `turns` turns.
    fn new(next: *const u8, bytes: usize, turns: usize) -> Ahead {
        let lines = bytes.div_ceil(64).div_ceil(turns.max(1));
        Ahead { next, lines }
    }

    /// Asks for the next few lines.
    #[inline(always)]
    pub(super) fn more(&mut self) {
        for _ in 0..self.lines {
            // SAFETY: a hint; the address need not be valid.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.next.cast()) };
            self.next = self.next.wrapping_add(64);
        }
    }
}

/// The running sums of a tile: for each column, the rows of a panel.
#[derive(Clone, Copy)]
pub(super) struct Sums(*mut f32);

impl Sums {
    /// Vector `p` of `P` of column `c`.
    ///
    /// # Safety
    /// The tile has the column, and the panel `P` vectors.
    #[inline(always)]
    pub(super) unsafe fn load<S: IntSimd, const P: usize>(self, p: usize, c: usize) -> S::Vector {
        // SAFETY: the caller's contract covers these accesses.
        unsafe { S::v_load(self.0.add((c * P + p) * S::LANES), S::LANES) }
    }

    /// Writes vector `p` of `P` of column `c`.
    ///
    /// # Safety
    /// As [`Sums::load`].
    #[inline(always)]
    pub(super) unsafe fn store<S: IntSimd, const P: usize>(self, p: usize, c: usize, v: S::Vector) {
        // SAFETY: by the caller's contract; a whole vector is asked for.
        unsafe { S::v_store(v, self.0.add((c * P + p) * S::LANES), S::LANES) }
    }
}

/// Multiplies through panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: IntSimd, T: Panel<S>>(call: &GemmArgs) {
    let height = T::VECTORS * S::LANES;
    if call.cols <= FEW_COLUMNS {
        // SAFETY: the caller's contract covers these accesses.
        return unsafe { by_panels::<S, T>(call, height) };
    }
    let (block_cols, block_rows) = (call.cols.min(COLUMNS), call.rows.min(ROWS));
    let sum_bytes = block_cols * block_rows.next_multiple_of(height) * size_of::<f32>();
    let mut memory = PREPARED.take(sum_bytes + block_cols * size_of::<T::Column>());
    let sums = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: the memory has room for the sums, whole lines, and the columns behind them.
    let columns = unsafe { memory.as_mut_ptr().byte_add(sum_bytes).cast::<T::Column>() };
    let mut panel = T::new();
    for first_col in (0..call.cols).step_by(COLUMNS) {
        for first_row in (0..call.rows).step_by(ROWS) {
            let block = Block {
                first_row,
                rows: ROWS.min(call.rows - first_row),
                first_col,
                cols: COLUMNS.min(call.cols - first_col),
            };
            // SAFETY: by the caller's contract, for a part of the rows and columns.
            unsafe { multiply_block::<S, T>(call, &mut panel, block, sums, columns, height) }
        }
    }
    PREPARED.give_back(memory);
}

/// A part of the results.
#[derive(Clone, Copy)]
struct Block {
    first_row: usize,
    rows: usize,
    first_col: usize,
    cols: usize,
}

/// One block of [`gemm`].
///
/// # Safety
/// As [`crate::gemm::Gemm`]; `sums` and `columns` have room for the block.
#[inline(always)]
unsafe fn multiply_block<S: IntSimd, T: Panel<S>>(
    call: &GemmArgs,
    panel: &mut T,
    block: Block,
    sums: *mut f32,
    columns: *mut T::Column,
    height: usize,
) {
    let panels = block.rows.div_ceil(height);
    // SAFETY: the offsets are those of rows, columns and elements of the call, or of sums of the
    // block.
    unsafe {
        sums.write_bytes(0, panels * block.cols * height);
        let x = call.x.add(block.first_col * call.x_stride);
        for start in (0..call.k).step_by(T::CHUNK) {
            let len = T::CHUNK.min(call.k - start);
            for c in 0..block.cols {
                T::prepare(x.add(c * call.x_stride), start, len, columns.add(c));
            }
            for i in 0..panels {
                panel.unpack(call, block.first_row + i * height, start, len);
                // Where the next panel begins, its rows far apart: nothing the processor would
                // foresee.
                let (row, chunk) = if i + 1 < panels {
                    (block.first_row + (i + 1) * height, start / T::CHUNK)
                } else {
                    (block.first_row, start / T::CHUNK + 1)
                };
                for r in row..call.rows.min(row + height) {
                    let from = call.w.wrapping_add(r * call.w_stride + chunk * T::BYTES);
                    for line in (0..T::BYTES).step_by(64) {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast());
                    }
                }
                let tile = Tile {
                    x,
                    x_stride: call.x_stride,
                    columns,
                    sums: Sums(sums.add(i * block.cols * height)),
                };
                let mut nothing = Ahead::NOTHING;
                tiles::<S, T>(panel, tile, block.cols, start, len, &mut nothing);
            }
        }
        // Whole columns: a column of `dst` is contiguous.
        for c in 0..block.cols {
            for i in 0..panels {
                let row = block.first_row + i * height;
                let dst = call.dst.add((block.first_col + c) * call.dst_stride + row);
                let sums = sums.add((i * block.cols + c) * height);
                for v in (0..height.min(call.rows - row)).step_by(S::LANES) {
                    let left = call.rows - row - v;
                    S::v_store(
                        S::v_load(sums.add(v), S::LANES),
                        dst.add(v),
                        left.min(S::LANES),
                    );
                }
            }
        }
    }
}

/// Multiplies a panel with all of `cols` columns.
///
/// # Safety
/// As [`Panel::multiply`], for the columns from those of `tile` on.
#[inline(always)]
unsafe fn tiles<S: IntSimd, T: Panel<S>>(
    panel: &T,
    mut tile: Tile<T::Column>,
    cols: usize,
    start: usize,
    len: usize,
    ahead: &mut Ahead,
) {
    let mut c = 0;
    while c < cols {
        let left = cols - c;
        macro_rules! multiply {
            ($vectors:literal, $columns:literal) => {{
                panel.multiply::<$vectors, $columns>(tile, start, len, ahead);
                $columns
            }};
        }
        // SAFETY: by the caller's contract; as many columns are left.
        unsafe {
            let done = match (T::VECTORS, left) {
                (2, 12..) if T::COLS == 12 => multiply!(2, 12),
                // Eight are two tiles of four.
                (2, 6..) if T::COLS >= 6 && left != 8 => multiply!(2, 6),
                (2, 4..) => multiply!(2, 4),
                (2, 2..) => multiply!(2, 2),
                (2, _) => multiply!(2, 1),
                (_, 4..) => multiply!(1, 4),
                (_, 2..) => multiply!(1, 2),
                _ => multiply!(1, 1),
            };
            tile.x = tile.x.add(done * tile.x_stride);
            tile.columns = tile.columns.add(done);
            tile.sums = Sums(tile.sums.0.add(done * T::VECTORS * S::LANES));
            c += done;
        }
    }
}

/// How many tiles [`tiles`] makes of the columns, or somewhat fewer.
fn tiles_of(cols: usize, most: usize) -> usize {
    (cols / most).max(1)
}

/// [`gemm`] for few columns.
///
/// # Safety
/// As [`crate::gemm::Gemm`].
#[inline(always)]
unsafe fn by_panels<S: IntSimd, T: Panel<S>>(call: &GemmArgs, height: usize) {
    let chunks = call.k.div_ceil(T::CHUNK);
    let sum_bytes = (call.cols * height * size_of::<f32>()).next_multiple_of(64);
    let mut memory = PREPARED.take(sum_bytes + chunks * call.cols * size_of::<T::Column>());
    let sums = memory.as_mut_ptr().cast::<f32>();
    let mut panel = T::new();
    // Whether most of what lies between the first and the last of some rows is rows.
    let dense = call.w_stride < 2 * chunks * T::BYTES;
    let turns = chunks * tiles_of(call.cols, T::COLS) * T::UNITS;
    // SAFETY: the memory has room for the sums, whole lines, and the columns of each chunk behind
    // them; all other offsets are those of rows, columns and elements of the call.
    unsafe {
        let columns = memory.as_mut_ptr().byte_add(sum_bytes).cast::<T::Column>();
        for chunk in 0..chunks {
            let start = chunk * T::CHUNK;
            let len = T::CHUNK.min(call.k - start);
            for c in 0..call.cols {
                let to = columns.add(chunk * call.cols + c);
                T::prepare(call.x.add(c * call.x_stride), start, len, to);
            }
        }
        for row in (0..call.rows).step_by(height) {
            let next = row + height;
            // The rows of the next panel, unless this is the last.
            let bytes = call.rows.saturating_sub(next).min(height) * call.w_stride;
            let mut ahead = if dense {
                Ahead::new(call.w.wrapping_add(next * call.w_stride), bytes, turns)
            } else {
                Ahead::NOTHING
            };
            sums.write_bytes(0, call.cols * height);
            for chunk in 0..chunks {
                let start = chunk * T::CHUNK;
                let len = T::CHUNK.min(call.k - start);
                panel.unpack(call, row, start, len);
                let tile = Tile {
                    x: call.x,
                    x_stride: call.x_stride,
                    columns: columns.add(chunk * call.cols),
                    sums: Sums(sums),
                };
                tiles::<S, T>(&panel, tile, call.cols, start, len, &mut ahead);
            }
            for c in 0..call.cols {
                let dst = call.dst.add(c * call.dst_stride + row);
                for v in (0..height.min(call.rows - row)).step_by(S::LANES) {
                    let left = call.rows - row - v;
                    let sum = S::v_load(sums.add(c * height + v), S::LANES);
                    S::v_store(sum, dst.add(v), left.min(S::LANES));
                }
            }
        }
    }
    PREPARED.give_back(memory);
}

/// Interleaves the words of `vectors * S::LANES` rows: word `i` of row `r` goes to `dst + (i * rows
/// + r) * 4`. `words` is rounded up to whole vectors.
///
/// # Safety
/// As in [`IntSimd`]; `src` has the rows `src_stride` bytes apart, and `dst` room for the words.
#[inline(always)]
pub(super) unsafe fn interleave<S: IntSimd>(
    src: *const u8,
    src_stride: usize,
    words: usize,
    vectors: usize,
    dst: *mut u8,
) {
    let dst_stride = vectors * S::LANES * 4;
    for first in (0..words).step_by(S::LANES) {
        for v in 0..vectors {
            // SAFETY: the caller's contract covers these accesses.
            unsafe {
                S::v_transpose(
                    src.add(v * S::LANES * src_stride + first * 4),
                    src_stride,
                    dst.add(first * dst_stride + v * S::LANES * 4),
                    dst_stride,
                );
            }
        }
    }
}
