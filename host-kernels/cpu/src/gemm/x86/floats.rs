//! Products with F32, F16 and BF16, multiplied and summed in single precision.

use std::arch::x86_64::_MM_HINT_T1;
use std::marker::PhantomData;

use super::int_simd::{IntSimd, prefetch_line};
use super::panel::{self, Panel, Prefetch, Tile};
use crate::gemm::kernel::GemmArgs;
use crate::gemm::thread_memory::{DECODED, PREPARED};

/// The elements of `k` in a panel: with the columns of a tile, half of the L1 cache.
const CHUNK: usize = 128;
/// The elements of `k` between two steps of the prefetch.
const STEP: usize = 16;
/// From this many columns on, a panel is faster than tiles of rows and columns.
pub(super) const PANEL_COLS: usize = 32;

/// A float format as vectors of `f32`.
///
/// # Safety
/// The processor has the instructions of `S`. `p` is readable for the elements that are loaded, of
/// [`Float::BYTES`] bytes each: `S::LANES`, or `n`. No alignment is needed.
pub(super) trait Float: Copy + 'static {
    /// Bytes of an element.
    const BYTES: usize;
    /// A vector of elements.
    unsafe fn load<S: IntSimd>(p: *const u8) -> S::Vector;

    /// `n < S::LANES` elements, the rest 0.
    #[inline(always)]
    unsafe fn load_first<S: IntSimd>(p: *const u8, n: usize) -> S::Vector {
        let mut elements = [0u8; 64];
        // SAFETY: the copy reads `n` elements, which are readable at `p`, and writes `n * BYTES`
        // bytes: `n < S::LANES <= 16` and `BYTES <= 4`, so at most 60 of the 64 of `elements`.
        // `load` reads at most 64. The caller guarantees the instructions of `S`.
        unsafe {
            p.copy_to_nonoverlapping(elements.as_mut_ptr(), n * Self::BYTES);
            Self::load::<S>(elements.as_ptr())
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct F32;
#[derive(Clone, Copy)]
pub(super) struct F16;
#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: IntSimd>(p: *const u8) -> S::Vector {
        // SAFETY: `v_load` reads `S::LANES` floats, which are readable at `p`, and has the
        // instructions of `S` that this function has.
        unsafe { S::v_load(p.cast(), S::LANES) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: IntSimd>(p: *const u8) -> S::Vector {
        // SAFETY: `v_load_f16` reads `S::LANES` F16, two bytes each, which are readable at `p`. The
        // conversion is among the instructions of `S`, which the caller guarantees.
        unsafe { S::v_load_f16(p.cast(), S::LANES) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: IntSimd>(p: *const u8) -> S::Vector {
        // SAFETY: `v_load_bf16` reads `S::LANES` BF16, two bytes each, which are readable at `p`,
        // and widens them with the instructions of `S`, which the caller guarantees.
        unsafe { S::v_load_bf16(p.cast(), S::LANES) }
    }
}

/// Multiplies, in tiles of rows and columns or through panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: IntSimd, T: Float>(call: &GemmArgs) {
    // SAFETY: `panel::gemm` and `rows` have the contract of this function: the `rows` rows and
    // `cols` columns of `k` elements `T`, the results of `call`, and the features of `S`. `call` is
    // passed on as it is.
    unsafe {
        if call.cols >= PANEL_COLS && call.table.is_none() {
            panel::gemm::<S, FloatPanel<S, T>>(call);
        } else {
            rows::<S, T>(call);
        }
    }
}

/// Writes `n` elements as `f32`, and zeros up to `padded`.
///
/// # Safety
/// `x` is readable for `n` elements, `to` writable for `padded` floats, a multiple of `S::LANES`.
/// The processor has the instructions of `S`.
#[inline(always)]
unsafe fn widen<S: IntSimd, T: Float>(x: *const u8, n: usize, padded: usize, to: *mut f32) {
    // SAFETY: `left = n - i` elements are readable from element `i` of `x` on: a whole vector is
    // loaded only if at least `S::LANES` are left, otherwise `left`. `i < padded`, both multiples
    // of `S::LANES`, so the store is inside the `padded` floats of `to`. The caller guarantees the
    // instructions of `S`.
    unsafe {
        let mut i = 0;
        while i < padded {
            let v = match n.saturating_sub(i) {
                0 => S::v_splat(0.0),
                left if left < S::LANES => T::load_first::<S>(x.add(i * T::BYTES), left),
                _ => T::load::<S>(x.add(i * T::BYTES)),
            };
            S::v_store(v, to.add(i), S::LANES);
            i += S::LANES;
        }
    }
}

/// Multiplies fewer columns than [`PANEL_COLS`]: in tiles of rows and columns, where each product
/// is summed in its own vector.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
unsafe fn rows<S: IntSimd, T: Float>(call: &GemmArgs) {
    if call.cols == 1 {
        let is_short = call.k * T::BYTES <= SHORT_ROW;
        let mut r = 0;
        while r < call.rows {
            // SAFETY: `dots::<R>(r)` is called only with `R <= call.rows - r`. There is one column.
            // The caller guarantees the contract of `Gemm` and the features of `S`.
            r += unsafe {
                match call.rows - r {
                    ROWS_AT_ONCE.. if !is_short => dots::<S, T, ROWS_AT_ONCE>(call, r),
                    _ => dots::<S, T, 1>(call, r),
                }
            };
        }
        return;
    }
    // If `k` is 0 there is still one block ([`DepthBlock::all`]), which needs memory to point to.
    let padded_k = call.k.max(1).next_multiple_of(DEPTH);
    let mut memory = PREPARED.take(call.cols * padded_k * size_of::<f32>());
    let columns = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: a block ends at or before `call.k`, so its `len` elements of column `c` are readable.
    // `columns` has `DEPTH` floats for each block of each column, and `padded <= DEPTH`. `few` gets
    // the columns after all blocks are written. The caller guarantees the rest of the contract of
    // `few`.
    unsafe {
        for block in DepthBlock::all(call) {
            let padded = block.len.next_multiple_of(S::LANES);
            for c in 0..call.cols {
                let x = call.column(c).add(block.start * T::BYTES);
                widen::<S, T>(x, block.len, padded, columns.add(block.column(c)));
            }
        }
        few::<S, T>(call, columns);
    }
    PREPARED.give_back(memory);
}

/// Rows that are multiplied at once with a block of `k`: a multiple of the rows of every tile.
const FEW_ROWS: usize = 12;
/// Columns of a tile.
const TILE_COLUMNS: usize = 4;
/// Columns of a tile with AVX-512, which has twice as many registers, if there are at least this
/// many columns: each weight is converted once for all columns of a tile.
const WIDE_COLUMNS: usize = 8;
/// The elements of a block of `k`: the block of all columns fits the L1 cache.
const DEPTH: usize = 512;

/// A block of `k`. The elements of a block are adjacent for all columns, [`DEPTH`] floats for each
/// column. Whole columns are often a power of two apart, and would map to few sets of the L1 cache.
#[derive(Clone, Copy)]
struct DepthBlock {
    start: usize,
    len: usize,
    cols: usize,
}

impl DepthBlock {
    /// All blocks of a call, in order. If `k` is 0 there is one empty block, which writes the
    /// results.
    fn all(call: &GemmArgs) -> impl Iterator<Item = DepthBlock> {
        let &GemmArgs { k, cols, .. } = call;
        (0..k.max(1)).step_by(DEPTH).map(move |start| DepthBlock {
            start,
            len: DEPTH.min(k - start),
            cols,
        })
    }

    fn end(&self) -> usize {
        self.start + self.len
    }

    /// The elements in whole vectors.
    fn whole<S: IntSimd>(&self) -> usize {
        self.len / S::LANES * S::LANES
    }

    /// The offset of the elements of column `c`, in floats.
    fn column(&self, c: usize) -> usize {
        self.start * self.cols + c * DEPTH
    }
}

/// Multiplies few columns: for each block of `k`, tiles of rows and columns. Between two blocks the
/// sums are stored as vectors; the last block writes the results.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`. `columns` has the columns of the call as
/// `f32`, block by block, padded with zeros to whole vectors.
#[inline(always)]
unsafe fn few<S: IntSimd, T: Float>(call: &GemmArgs, columns: *const f32) {
    let mut memory = DECODED.take(FEW_ROWS * call.cols * 4 * S::LANES);
    let sums = memory.as_mut_ptr().cast::<f32>();
    let wide = S::LANES == 16 && call.cols >= WIDE_COLUMNS;
    let tiles_per_row = match wide {
        true => call.cols / WIDE_COLUMNS + (call.cols % WIDE_COLUMNS).div_ceil(TILE_COLUMNS),
        false => call.cols.div_ceil(TILE_COLUMNS),
    };
    for first in (0..call.rows).step_by(FEW_ROWS) {
        let rows = FEW_ROWS.min(call.rows - first);
        // SAFETY: `tiles.row::<R>(r)` is called only with `R <= rows - r`, so `first + r + R <=
        // call.rows`. `sums` has a vector for each of `FEW_ROWS` rows and each column.
        // `call.row(first)` has more than `block.end()` elements where that offset is added. The
        // caller guarantees `columns` and the contract of `Gemm`.
        unsafe {
            for block in DepthBlock::all(call) {
                let mut tiles = Tiles {
                    call,
                    columns,
                    first,
                    block,
                    sums,
                    next: match (block.end() < call.k, first + FEW_ROWS < call.rows) {
                        (true, _) => call.row(first).add(block.end() * T::BYTES),
                        (_, true) => call.row(first + FEW_ROWS),
                        _ => std::ptr::null(),
                    },
                    lines: (block.whole::<S>() * T::BYTES).div_ceil(64),
                    line: 0,
                    tiles_per_row,
                    pending: 0,
                };
                let mut r = 0;
                while r < rows {
                    r += match rows - r {
                        4.. if S::LANES == 16 && !wide => tiles.row::<S, T, 4>(r),
                        3.. => tiles.row::<S, T, 3>(r),
                        2 => tiles.row::<S, T, 2>(r),
                        _ => tiles.row::<S, T, 1>(r),
                    };
                }
            }
        }
    }
    DECODED.give_back(memory);
}

/// The products of a block of `k` with up to [`FEW_ROWS`] rows.
struct Tiles<'a> {
    call: &'a GemmArgs,
    columns: *const f32,
    first: usize,
    block: DepthBlock,
    sums: *mut f32,
    /// The row of weights to prefetch: of the next block of `k`, or after the last block, of the
    /// next rows. Null if there are no more weights.
    next: *const u8,
    /// The cache lines of a row in whole vectors of the block.
    lines: usize,
    /// The cache line of `next` to prefetch.
    line: usize,
    /// The number of tiles that cover all columns.
    tiles_per_row: usize,
    /// The cache lines that are still to be prefetched, in units of `1 / tiles_per_row`.
    pending: usize,
}

impl Tiles<'_> {
    /// Prefetches weights of the next block. A tile calls this for each cache line of weights of
    /// its `rows` rows, and the tiles of a row together prefetch one line for each line that they
    /// read.
    ///
    /// The hardware prefetcher does not find the next block, because the reads go from row to row.
    /// The prefetches are spread evenly, because the processor has few line fill buffers.
    /// Prefetches go row by row, the order in which the hardware prefetcher continues, and to the
    /// L2 cache, because a block does not fit the L1 cache. Prefetches are at most one block ahead,
    /// because the first block of a call is not prefetched.
    #[inline(always)]
    fn prefetch(&mut self, rows: usize) {
        if self.next.is_null() {
            return;
        }
        self.pending += rows;
        while self.pending >= self.tiles_per_row {
            self.pending -= self.tiles_per_row;
            let line = self.next.wrapping_add(64 * self.line);
            prefetch_line::<_MM_HINT_T1>(line);
            self.line += 1;
            if self.line == self.lines {
                self.line = 0;
                self.next = self.next.wrapping_add(self.call.w_stride);
            }
        }
    }

    /// Multiplies rows `r .. r + R` with all columns. Returns `R`.
    ///
    /// # Safety
    /// As [`few`]; `self.first + r + R <= call.rows`.
    #[inline(always)]
    unsafe fn row<S: IntSimd, T: Float, const R: usize>(&mut self, r: usize) -> usize {
        let mut c = 0;
        while c < self.call.cols {
            // SAFETY: `tile::<R, C>(r, c)` is called only with `C <= call.cols - c`. The caller
            // guarantees the rows, `first + r + R <= call.rows`, and the contract of `few`.
            unsafe {
                c += match self.call.cols - c {
                    WIDE_COLUMNS.. if S::LANES == 16 && R <= 3 => {
                        self.tile::<S, T, R, WIDE_COLUMNS>(r, c)
                    }
                    TILE_COLUMNS.. => self.tile::<S, T, R, TILE_COLUMNS>(r, c),
                    2.. => self.tile::<S, T, R, 2>(r, c),
                    _ => self.tile::<S, T, R, 1>(r, c),
                };
            }
        }
        R
    }

    /// Multiplies rows `r .. r + R` with columns `c .. c + C`. Returns `C`.
    ///
    /// # Safety
    /// As [`few`]; `self.first + r + R <= call.rows` and `c + C <= call.cols`.
    #[inline(always)]
    unsafe fn tile<S: IntSimd, T: Float, const R: usize, const C: usize>(
        &mut self,
        r: usize,
        c: usize,
    ) -> usize {
        let Tiles { call, block, .. } = *self;
        // SAFETY: rows `first + r .. first + r + R` and columns `c .. c + C` are in the call, and
        // `dst` has a float for each. Vectors of weights end at or before `block.len`; those of
        // `columns` may end in the padding. `sums` has a vector for each row and column, and the
        // block before this one has written those that are read. The caller guarantees the rest of
        // the contract of `few`.
        unsafe {
            let w = call
                .w
                .add((self.first + r) * call.w_stride + block.start * T::BYTES);
            let x = self.columns.add(block.column(c));
            let sums = self.sums.add((r * call.cols + c) * S::LANES);
            let mut acc = [[S::v_splat(0.0); C]; R];
            if block.start > 0 {
                for r in 0..R {
                    for c in 0..C {
                        acc[r][c] = S::v_load(sums.add((r * call.cols + c) * S::LANES), S::LANES);
                    }
                }
            }
            let whole = block.whole::<S>();
            for i in (0..whole).step_by(S::LANES) {
                if i % (64 / T::BYTES) == 0 {
                    self.prefetch(R);
                }
                let mut w_now = [S::v_splat(0.0); R];
                for r in 0..R {
                    w_now[r] = T::load::<S>(w.add(r * call.w_stride + i * T::BYTES));
                }
                for c in 0..C {
                    let x = S::v_load(x.add(c * DEPTH + i), S::LANES);
                    for r in 0..R {
                        acc[r][c] = S::v_mul_add(w_now[r], x, acc[r][c]);
                    }
                }
            }
            if whole < block.len {
                for r in 0..R {
                    let w = w.add(r * call.w_stride + whole * T::BYTES);
                    let w = T::load_first::<S>(w, block.len - whole);
                    for c in 0..C {
                        let x = S::v_load(x.add(c * DEPTH + whole), S::LANES);
                        acc[r][c] = S::v_mul_add(w, x, acc[r][c]);
                    }
                }
            }
            if block.end() == call.k {
                for i in 0..C {
                    let dst = call.result(c + i).add(self.first + r);
                    for r in 0..R {
                        *dst.add(r) = S::v_sum(acc[r][i]);
                    }
                }
                return C;
            }
            for r in 0..R {
                for c in 0..C {
                    S::v_store(
                        acc[r][c],
                        sums.add((r * call.cols + c) * S::LANES),
                        S::LANES,
                    );
                }
            }
        }
        C
    }
}

/// Rows that are multiplied at once with one column: independent sums hide the latency of an
/// addition.
const ROWS_AT_ONCE: usize = 4;
/// Bytes of a row of weights up to which a row is multiplied after the other: the processor begins
/// the next rows before the sum of one is complete, and its prefetcher follows the order of memory.
/// On Zen 5, rows of 512 bytes take 0.6 of the time that four at once take, of 1 KiB 0.88, and of
/// 2 KiB as much: `cargo bench -p vgpu-cpu --bench gemm -- --cols 1 --k 512 f16`.
const SHORT_ROW: usize = 1024;

/// Rows `r .. r + R` times the only column, in the order of [`Tiles::tile`]. Returns `R`.
///
/// # Safety
/// As [`rows`]; `call.cols == 1` and `r + R <= call.rows`.
#[inline(always)]
unsafe fn dots<S: IntSimd, T: Float, const R: usize>(call: &GemmArgs, r: usize) -> usize {
    // SAFETY: rows `r .. r + R` and the column are readable for `call.k` elements, and `dst` is
    // writable for as many floats. A whole vector is loaded from element `i` only if `S::LANES`
    // elements are left, otherwise `load_first` reads those that are. The caller guarantees the
    // instructions of `S`.
    unsafe {
        let w = call.w.add(r * call.w_stride);
        let (x, dst) = (call.column(0), call.result(0));
        let mut acc = [S::v_splat(0.0); R];
        let whole = call.k / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            let x = T::load::<S>(x.add(i * T::BYTES));
            for r in 0..R {
                let w = w.add(r * call.w_stride + i * T::BYTES);
                if R > 1 && i * T::BYTES % 64 == 0 {
                    prefetch_line::<_MM_HINT_T1>(w.wrapping_add(R.wrapping_mul(call.w_stride)));
                }
                acc[r] = S::v_mul_add(T::load::<S>(w), x, acc[r]);
            }
        }
        if whole < call.k {
            let left = call.k - whole;
            let x = T::load_first::<S>(x.add(whole * T::BYTES), left);
            for r in 0..R {
                let w = w.add(r * call.w_stride + whole * T::BYTES);
                acc[r] = S::v_mul_add(T::load_first::<S>(w, left), x, acc[r]);
            }
        }
        for r_tile in 0..R {
            *dst.add(r + r_tile) = S::v_sum(acc[r_tile]);
        }
    }
    R
}

/// A chunk of `2 * S::LANES` rows of weights, interleaved.
#[repr(C, align(64))]
struct FloatPanel<S, T> {
    /// For each element of `k`, the element of each row.
    elements: [[f32; 32]; CHUNK],
    rows: [[f32; CHUNK]; 32],
    format: PhantomData<(S, T)>,
}

impl<S: IntSimd, T: Float> Panel<S> for FloatPanel<S, T> {
    const CHUNK: usize = CHUNK;
    const BYTES: usize = CHUNK * T::BYTES;
    const VECTORS: usize = 2;
    const COLS: usize = if S::LANES == 16 { 12 } else { 6 };
    type Column = [f32; CHUNK];
    const UNITS: usize = CHUNK / STEP;

    #[inline(always)]
    fn new() -> Self {
        FloatPanel {
            elements: [[0.0; 32]; CHUNK],
            rows: [[0.0; CHUNK]; 32],
            format: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn prepare(x: *const u8, start: usize, len: usize, column: *mut [f32; CHUNK]) {
        // SAFETY: `x` is readable for `start + len` elements, of which `widen` reads the last
        // `len`. `padded <= CHUNK`, because `S::LANES` divides `CHUNK`, so the `CHUNK` floats of
        // `column` have room. The contract of `Panel` includes the instructions of `S`.
        unsafe {
            let padded = len.next_multiple_of(S::LANES);
            widen::<S, T>(x.add(start * T::BYTES), len, padded, column.cast());
        }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize) {
        // SAFETY: `call.row` returns a row of the call, readable for `call.k >= start + len`
        // weights. `padded <= CHUNK` floats fit row `r` of `self.rows`, `r < 2 * S::LANES <= 32`.
        // `interleave` reads these rows up to `padded` words and writes as many elements of `2 *
        // S::LANES` words to `self.elements`, which has `CHUNK` of 32.
        unsafe {
            let padded = len.next_multiple_of(S::LANES);
            for r in 0..2 * S::LANES {
                let from = call.row(row + r);
                widen::<S, T>(
                    from.add(start * T::BYTES),
                    len,
                    padded,
                    self.rows[r].as_mut_ptr(),
                );
            }
            let rows = self.rows.as_ptr().cast();
            let elements = self.elements.as_mut_ptr().cast();
            panel::interleave::<S>(rows, CHUNK * 4, len, 2, elements);
        }
    }

    #[inline(always)]
    unsafe fn multiply<const P: usize, const C: usize>(
        &self,
        tile: Tile<[f32; CHUNK]>,
        len: usize,
        prefetch: &mut Prefetch,
    ) {
        let Tile { columns, sums } = tile;
        // SAFETY: element `i < len <= CHUNK` of the panel has `P * S::LANES` floats, written by
        // `unpack` with `P == VECTORS`. Column `c < C` of `columns` has `CHUNK` floats. The
        // contract of `Panel` includes `C` columns, their sums, and the instructions of `S`.
        unsafe {
            let mut acc = [[S::v_splat(0.0); C]; P];
            for p in 0..P {
                for c in 0..C {
                    acc[p][c] = sums.load::<S, P>(p, c);
                }
            }
            let mut panel = self.elements.as_ptr().cast::<f32>();
            for i in 0..len {
                if i % STEP == 0 {
                    prefetch.step();
                }
                let mut w = [S::v_splat(0.0); P];
                for p in 0..P {
                    w[p] = S::v_load(panel.add(p * S::LANES), S::LANES);
                }
                panel = panel.add(P * S::LANES);
                for c in 0..C {
                    let x = S::v_splat(*columns.cast::<f32>().add(c * CHUNK + i));
                    for p in 0..P {
                        acc[p][c] = S::v_mul_add(w[p], x, acc[p][c]);
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
