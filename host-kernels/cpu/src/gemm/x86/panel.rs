//! Products of many columns. The weights of a panel of rows are unpacked once, interleaved so that
//! a vector holds the same elements of every row, and multiplied with all columns. No sum crosses
//! lanes, and unpacking costs as much as multiplying a few columns.
//!
//! Order of loops: blocks of columns and rows whose sums fit the L2 cache, chunks of `k`, panels,
//! tiles of columns. The sums are kept apart from `dst`, whose columns are often a power of two
//! apart and would map to few cache sets. With few columns the product is bound by memory: a panel
//! is multiplied along all of `k` before the next panel, whose rows are prefetched meanwhile, a few
//! cache lines at a time ([`Prefetch`]). Each result is a sum over the chunks of `k` in order,
//! whatever the order of the loops around them.

use std::arch::x86_64::_MM_HINT_T0;

use super::int_simd::{IntSimd, prefetch_line};
use crate::gemm::kernel::{GemmArgs, PANEL_COLUMNS};
use crate::gemm::thread_memory::PREPARED;

/// Columns of a block.
const COLUMNS: usize = PANEL_COLUMNS;
/// Rows of a block.
const ROWS: usize = 256;
/// Up to this many columns, each panel is multiplied along the whole of `k` before the next.
const FEW_COLUMNS: usize = 32;

/// How one family of formats fills and uses a panel.
///
/// # Safety
/// The processor has the instructions of `S` and those that the implementing type documents.
/// `start` is a multiple of `CHUNK`, `start + len <= k` and `0 < len <= CHUNK`.
/// - [`Panel::prepare`]: `x` is readable for a column of `k` activations, `column` is a valid
///   column that no one else accesses;
/// - [`Panel::unpack`]: the contract of [`crate::gemm::Gemm`] holds for the call, and
///   `row < call.rows`;
/// - [`Panel::multiply`]: the panel has been unpacked with the same `len`; the tile has `C`
///   columns, each prepared with the same `start` and `len`, and sums of `P * S::LANES` floats for
///   each column; `P == VECTORS`.
pub(super) trait Panel<S: IntSimd>: Sized {
    /// The elements of `k` that are unpacked at once.
    const CHUNK: usize;
    /// Bytes of a chunk of a row of weights.
    const BYTES: usize;
    /// Vectors of rows in a panel: 1 or 2.
    const VECTORS: usize;
    /// Columns of a tile: 4, 6 or 12, so that the sums fit the registers.
    const COLS: usize;
    /// A chunk of a column, prepared. The chunks of the columns of a tile are adjacent, wherever
    /// the columns are.
    type Column: Copy;
    /// How often [`Panel::multiply`] calls [`Prefetch::step`] in a whole chunk.
    const UNITS: usize;

    /// A panel of zeros.
    fn new() -> Self;
    /// Prepares a chunk of the column at `x`.
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut Self::Column);
    /// Unpacks a chunk of the `VECTORS * S::LANES` rows from `row` on. The last row of the weights
    /// is repeated if there are fewer.
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize);
    /// Adds the products with the `C` columns of a tile to their sums.
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<Self::Column>,
        len: usize,
        prefetch: &mut Prefetch,
    );
}

/// The columns that are multiplied with a panel at once.
#[derive(Clone, Copy)]
pub(super) struct Tile<C> {
    /// The prepared chunks of the columns.
    pub(super) columns: *const C,
    /// The sums of the columns.
    pub(super) sums: TileSums,
}

/// The software prefetch of the next weights, a few cache lines at each step: the processor has few
/// line fill buffers, and stalls when they are full.
pub(super) struct Prefetch {
    next: *const u8,
    /// Cache lines of a step.
    lines: usize,
}

impl Prefetch {
    /// No prefetch.
    const NONE: Prefetch = Prefetch {
        next: std::ptr::null(),
        lines: 0,
    };

    /// Prefetches `bytes` bytes at `next` in `steps` steps.
    fn new(next: *const u8, bytes: usize, steps: usize) -> Prefetch {
        let lines = bytes.div_ceil(64).div_ceil(steps.max(1));
        Prefetch { next, lines }
    }

    /// Prefetches the cache lines of one step.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        for _ in 0..self.lines {
            prefetch_line::<_MM_HINT_T0>(self.next);
            self.next = self.next.wrapping_add(64);
        }
    }
}

/// The sums of a tile: for each column, one float for each row of the panel.
#[derive(Clone, Copy)]
pub(super) struct TileSums(*mut f32);

impl TileSums {
    /// Vector `p` of `P` of column `c`.
    ///
    /// # Safety
    /// The sums have column `c` and `P > p` vectors for each column. The processor has the
    /// instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn load<S: IntSimd, const P: usize>(self, p: usize, c: usize) -> S::Vector {
        // SAFETY: the caller guarantees column `c`, which begins `c * P` vectors behind the first
        // sum, and `p < P`, so the `S::LANES` floats of vector `p` are readable. The caller
        // guarantees the instructions of `S`.
        unsafe { S::v_load(self.0.add((c * P + p) * S::LANES), S::LANES) }
    }

    /// Writes vector `p` of `P` of column `c`.
    ///
    /// # Safety
    /// As [`TileSums::load`].
    #[inline(always)]
    pub(super) unsafe fn store<S: IntSimd, const P: usize>(self, p: usize, c: usize, v: S::Vector) {
        // SAFETY: the caller guarantees column `c`, which begins `c * P` vectors behind the first
        // sum, and `p < P`, so the `S::LANES` floats of vector `p` are writable. The caller
        // guarantees the instructions of `S`.
        unsafe { S::v_store(v, self.0.add((c * P + p) * S::LANES), S::LANES) }
    }
}

/// Multiplies through panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: IntSimd, T: Panel<S>>(call: &GemmArgs) {
    const { assert!(align_of::<T::Column>() <= align_of::<f32>()) }
    let height = T::VECTORS * S::LANES;
    if call.cols <= FEW_COLUMNS {
        // SAFETY: `by_panels` requires the contract of `Gemm` for `call`, as it is, and the
        // features of `S`. The caller guarantees both. `height` is the rows of a panel.
        return unsafe { by_panels::<S, T>(call, height) };
    }
    let (block_cols, block_rows) = (call.cols.min(COLUMNS), call.rows.min(ROWS));
    let sum_bytes = block_cols * block_rows.next_multiple_of(height) * size_of::<f32>();
    let mut memory = PREPARED.take(sum_bytes + block_cols * size_of::<T::Column>());
    let sums = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: `memory` has `sum_bytes` bytes, and behind them `block_cols` columns. `sum_bytes` is
    // a multiple of four, so the columns, whose alignment is asserted above, are aligned.
    let columns = unsafe { memory.as_mut_ptr().byte_add(sum_bytes).cast::<T::Column>() };
    let mut panel = T::new();
    for first_col in (0..call.cols).step_by(COLUMNS) {
        for first_row in (0..call.rows).step_by(ROWS) {
            let block = DstBlock {
                first_row,
                rows: ROWS.min(call.rows - first_row),
                first_col,
                cols: COLUMNS.min(call.cols - first_col),
            };
            // SAFETY: `block` is inside the destination: its rows end at or before `call.rows`, its
            // columns at or before `call.cols`. The block has at most `block_rows` rows and
            // `block_cols` columns, so the memory has room for its sums, of whole panels, and for
            // its prepared columns. The caller guarantees the contract of `Gemm`.
            unsafe { multiply_block::<S, T>(call, &mut panel, block, sums, columns, height) }
        }
    }
    PREPARED.give_back(memory);
}

/// A block of the destination.
#[derive(Clone, Copy)]
struct DstBlock {
    first_row: usize,
    rows: usize,
    first_col: usize,
    cols: usize,
}

/// One block of [`gemm`].
///
/// # Safety
/// As [`crate::gemm::Gemm`] for `call`, with the features of `S`. `block` is inside the
/// destination. `sums` is writable for `block.cols` columns of `block.rows` floats, rounded up to
/// whole panels of `height`; `columns` is writable for `block.cols` prepared columns.
#[inline(always)]
unsafe fn multiply_block<S: IntSimd, T: Panel<S>>(
    call: &GemmArgs,
    panel: &mut T,
    block: DstBlock,
    sums: *mut f32,
    columns: *mut T::Column,
    height: usize,
) {
    let panels = block.rows.div_ceil(height);
    // SAFETY: chunks end at or before `call.k`, the elements of each row and column of the call.
    // Panel `i` has its own `block.cols * height` sums at `sums`, zeroed first. `columns` has room
    // for `block.cols` columns, prepared before `tiles` reads them. The stores to `dst` are of
    // `left` floats at most, which end at row `call.rows`. The caller guarantees the memory and the
    // features of `S`.
    unsafe {
        sums.write_bytes(0, panels * block.cols * height);
        for start in (0..call.k).step_by(T::CHUNK) {
            let len = T::CHUNK.min(call.k - start);
            for c in 0..block.cols {
                let x = call.column(block.first_col + c);
                T::prepare(x, start, len, columns.add(c));
            }
            for i in 0..panels {
                panel.unpack(call, block.first_row + i * height, start, len);
                // The hardware prefetcher does not find the next panel: its rows are far apart.
                let (row, chunk) = if i + 1 < panels {
                    (block.first_row + (i + 1) * height, start / T::CHUNK)
                } else {
                    (block.first_row, start / T::CHUNK + 1)
                };
                for r in row..call.rows.min(row + height) {
                    let from = call.w.wrapping_add(r * call.w_stride + chunk * T::BYTES);
                    for line in (0..T::BYTES).step_by(64) {
                        prefetch_line::<_MM_HINT_T0>(from.wrapping_add(line));
                    }
                }
                let tile = Tile {
                    columns,
                    sums: TileSums(sums.add(i * block.cols * height)),
                };
                let mut none = Prefetch::NONE;
                tiles::<S, T>(panel, tile, block.cols, len, &mut none);
            }
        }
        // Column by column, since a column of `dst` is contiguous.
        for c in 0..block.cols {
            for i in 0..panels {
                let row = block.first_row + i * height;
                let dst = call.result(block.first_col + c).add(row);
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

/// Multiplies a panel with `cols` columns, the first of which is the first column of `tile`.
///
/// # Safety
/// As [`Panel::multiply`], with `C = cols`.
#[inline(always)]
unsafe fn tiles<S: IntSimd, T: Panel<S>>(
    panel: &T,
    mut tile: Tile<T::Column>,
    cols: usize,
    len: usize,
    prefetch: &mut Prefetch,
) {
    let mut c = 0;
    while c < cols {
        let left = cols - c;
        macro_rules! multiply {
            ($vectors:literal, $columns:literal) => {{
                panel.multiply::<$vectors, $columns>(tile, len, prefetch);
                $columns
            }};
        }
        // SAFETY: each arm multiplies `done <= left` columns, with `P == T::VECTORS` vectors of
        // rows. Then `tile` begins `done` columns later, in the prepared columns and the sums; both
        // have `cols` columns, as the caller guarantees.
        unsafe {
            let done = match (T::VECTORS, left) {
                (2, 12..) if T::COLS == 12 => multiply!(2, 12),
                // Eight columns are two tiles of four.
                (2, 6..) if T::COLS >= 6 && left != 8 => multiply!(2, 6),
                (2, 4..) => multiply!(2, 4),
                (2, 2..) => multiply!(2, 2),
                (2, _) => multiply!(2, 1),
                (_, 4..) => multiply!(1, 4),
                (_, 2..) => multiply!(1, 2),
                _ => multiply!(1, 1),
            };
            tile.columns = tile.columns.add(done);
            tile.sums = TileSums(tile.sums.0.add(done * T::VECTORS * S::LANES));
            c += done;
        }
    }
}

/// A lower bound of the number of tiles that [`tiles`] makes of `cols` columns.
fn tiles_of(cols: usize, most: usize) -> usize {
    (cols / most).max(1)
}

/// [`gemm`] for few columns.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`. `height` is the rows of a panel of `T`.
#[inline(always)]
unsafe fn by_panels<S: IntSimd, T: Panel<S>>(call: &GemmArgs, height: usize) {
    let chunks = call.k.div_ceil(T::CHUNK);
    let sum_bytes = (call.cols * height * size_of::<f32>()).next_multiple_of(64);
    let mut memory = PREPARED.take(sum_bytes + chunks * call.cols * size_of::<T::Column>());
    let sums = memory.as_mut_ptr().cast::<f32>();
    let mut panel = T::new();
    // Whether the rows of weights are dense enough to prefetch the memory between them.
    let dense = call.w_stride < 2 * chunks * T::BYTES;
    let steps = chunks * tiles_of(call.cols, T::COLS) * T::UNITS;
    // SAFETY: the memory has `call.cols * height` sums, and from `sum_bytes` on, a multiple of 64,
    // `call.cols` prepared columns for each chunk. All are prepared before `tiles` reads them.
    // Chunks end at or before `call.k`. A store to `dst` is of `left` floats at most, which end at
    // row `call.rows`. The caller guarantees the contract of `Gemm` and the features of `S`.
    unsafe {
        let columns = memory.as_mut_ptr().byte_add(sum_bytes).cast::<T::Column>();
        for chunk in 0..chunks {
            let start = chunk * T::CHUNK;
            let len = T::CHUNK.min(call.k - start);
            for c in 0..call.cols {
                let to = columns.add(chunk * call.cols + c);
                T::prepare(call.column(c), start, len, to);
            }
        }
        for row in (0..call.rows).step_by(height) {
            let next = row + height;
            // The bytes of the next panel; 0 for the last panel.
            let bytes = call.rows.saturating_sub(next).min(height) * call.w_stride;
            let mut prefetch = if dense {
                Prefetch::new(call.w.wrapping_add(next * call.w_stride), bytes, steps)
            } else {
                Prefetch::NONE
            };
            sums.write_bytes(0, call.cols * height);
            for chunk in 0..chunks {
                let start = chunk * T::CHUNK;
                let len = T::CHUNK.min(call.k - start);
                panel.unpack(call, row, start, len);
                let tile = Tile {
                    columns: columns.add(chunk * call.cols),
                    sums: TileSums(sums),
                };
                tiles::<S, T>(&panel, tile, call.cols, len, &mut prefetch);
            }
            for c in 0..call.cols {
                let dst = call.result(c).add(row);
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
/// `src` is readable for `vectors * S::LANES` rows `src_stride` bytes apart, each of `words` words
/// rounded up to whole vectors. `dst` is writable for as many words of as many rows, and does not
/// overlap `src`. The processor has the instructions of `S`.
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
            // SAFETY: `first` and `v * S::LANES` begin a square of `S::LANES` words and rows of
            // `src`, and of `dst` with words and rows exchanged: row `first + i` of `dst` has
            // `vectors * S::LANES` words. The last words may be in the padding, which both have.
            // The caller guarantees the memory and the instructions of `S`.
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
