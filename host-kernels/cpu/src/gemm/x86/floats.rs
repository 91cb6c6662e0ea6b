//! Products with F32, F16 and BF16, multiplied and summed in single precision.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::int_simd::IntSimd;
use super::panel::{self, Panel, Prefetch, Tile};
use super::scratch::{DECODED, PREPARED};
use crate::gemm::kernel::GemmArgs;

/// Elements of `k` in a panel: with a tile's columns, half of the first-level cache.
const CHUNK: usize = 128;
/// Elements of `k` between two times that more weights are asked for.
const STEP: usize = 16;
/// From this many columns on, interleaving a panel pays.
pub(super) const PANEL_COLS: usize = 32;

/// A float format as vectors of `f32`.
///
/// # Safety
/// As in [`IntSimd`].
pub(super) trait Float: Copy + 'static {
    /// Bytes of an element.
    const BYTES: usize;
    /// A vector of elements.
    unsafe fn load<S: IntSimd>(p: *const u8) -> S::Vector;

    /// `n < S::LANES` elements, the rest 0.
    #[inline(always)]
    unsafe fn load_first<S: IntSimd>(p: *const u8, n: usize) -> S::Vector {
        let mut elements = [0u8; 64];
        // SAFETY: the module's contract; an element has at most 4 bytes, a vector at most 16
        // elements.
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
        // SAFETY: the module's contract.
        unsafe { S::v_load(p.cast(), S::LANES) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: IntSimd>(p: *const u8) -> S::Vector {
        // SAFETY: the module's contract.
        unsafe { S::v_load_f16(p.cast(), S::LANES) }
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: IntSimd>(p: *const u8) -> S::Vector {
        // SAFETY: the module's contract.
        unsafe { S::v_load_bf16(p.cast(), S::LANES) }
    }
}

/// Multiplies, choosing between rows and panels.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
pub(super) unsafe fn gemm<S: IntSimd, T: Float>(call: &GemmArgs) {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        if call.cols >= PANEL_COLS {
            panel::gemm::<S, FloatPanel<S, T>>(call);
        } else {
            rows::<S, T>(call);
        }
    }
}

/// Writes `n` elements as `f32`, and zeros up to `padded`.
///
/// # Safety
/// `x` has `n` elements, `to` room for `padded`, a multiple of `S::LANES`.
#[inline(always)]
unsafe fn widen<S: IntSimd, T: Float>(x: *const u8, n: usize, padded: usize, to: *mut f32) {
    // SAFETY: the caller's contract covers these accesses.
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

/// Fewer columns than pay for a panel: tiles of rows and columns, each product summed in a vector
/// of its own.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`.
#[inline(always)]
unsafe fn rows<S: IntSimd, T: Float>(call: &GemmArgs) {
    if call.cols == 1 {
        for r in 0..call.rows {
            // SAFETY: a row of the call, its column, and its place in the result.
            unsafe {
                let row = call.w.add(r * call.w_stride);
                *call.dst.add(r) = dot::<S, T>(row, call.x, call.k);
            }
        }
        return;
    }
    let room = call.k.next_multiple_of(DEPTH);
    let mut memory = PREPARED.take(call.cols * room * size_of::<f32>());
    let columns = memory.as_mut_ptr().cast::<f32>();
    // SAFETY: all offsets are those of columns and elements of the call; there is room for whole
    // vectors of each column, and only the last block may end within one.
    unsafe {
        for block in Block::all(call) {
            let padded = block.len.next_multiple_of(S::LANES);
            for c in 0..call.cols {
                let x = call.x.add(c * call.x_stride + block.start * T::BYTES);
                widen::<S, T>(x, block.len, padded, columns.add(block.column(c)));
            }
        }
        few::<S, T>(call, columns);
    }
    PREPARED.give_back(memory);
}

/// Rows that are multiplied together, block of `k` by block: whole tiles at every level.
const FEW_ROWS: usize = 12;
/// Columns of a tile, if there are as many.
const TILE_COLUMNS: usize = 4;
/// The same where registers have 16 lanes, of which there are twice as many, and so many columns at
/// least: each weight is converted once for all of them.
const WIDE_COLUMNS: usize = 8;
/// Elements of a block of `k`: few enough that those of all columns stay in the first-level cache.
const DEPTH: usize = 512;

/// A block of `k`. Its elements of all columns lie together, each column's in a place of [`DEPTH`]:
/// whole columns apart, which often is a power of two, they would share few sets of the first-level
/// cache.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    len: usize,
    cols: usize,
}

impl Block {
    /// All blocks of a call, in order: an empty one if it has no elements, since it has results.
    fn all(call: &GemmArgs) -> impl Iterator<Item = Block> {
        let &GemmArgs { k, cols, .. } = call;
        (0..k.max(1)).step_by(DEPTH).map(move |start| Block {
            start,
            len: DEPTH.min(k - start),
            cols,
        })
    }

    fn end(&self) -> usize {
        self.start + self.len
    }

    /// Its elements in whole vectors.
    fn whole<S: IntSimd>(&self) -> usize {
        self.len / S::LANES * S::LANES
    }

    /// Where its elements of a column begin.
    fn column(&self, c: usize) -> usize {
        self.start * self.cols + c * DEPTH
    }
}

/// A few columns: for each block of `k`, tiles of rows and columns. The sums wait in memory for the
/// next block, vectors as they are; the last one's are the results.
///
/// # Safety
/// As [`crate::gemm::Gemm`], with the features of `S`; at `columns` are those of the call, as `f32`, block by block and
/// padded with zeros.
#[inline(always)]
unsafe fn few<S: IntSimd, T: Float>(call: &GemmArgs, columns: *const f32) {
    let mut memory = DECODED.take(FEW_ROWS * call.cols * 4 * S::LANES);
    let sums = memory.as_mut_ptr().cast::<f32>();
    let wide = S::LANES == 16 && call.cols >= WIDE_COLUMNS;
    let across = match wide {
        true => call.cols / WIDE_COLUMNS + (call.cols % WIDE_COLUMNS).div_ceil(TILE_COLUMNS),
        false => call.cols.div_ceil(TILE_COLUMNS),
    };
    for first in (0..call.rows).step_by(FEW_ROWS) {
        let rows = FEW_ROWS.min(call.rows - first);
        // SAFETY: the rows, columns and elements are those of the call; there is a vector of sums
        // for each row and column.
        unsafe {
            for block in Block::all(call) {
                let mut tiles = Tiles {
                    call,
                    columns,
                    first,
                    block,
                    sums,
                    ahead: match (block.end() < call.k, first + FEW_ROWS < call.rows) {
                        (true, _) => call.row(first).add(block.end() * T::BYTES),
                        (_, true) => call.row(first + FEW_ROWS),
                        _ => std::ptr::null(),
                    },
                    lines: (block.whole::<S>() * T::BYTES).div_ceil(64),
                    line: 0,
                    across,
                    owed: 0,
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

/// A block of `k` of a few rows.
struct Tiles<'a> {
    call: &'a GemmArgs,
    columns: *const f32,
    first: usize,
    block: Block,
    sums: *mut f32,
    /// A row of the next weights: of the next block of `k`, behind the last one of the next rows;
    /// null where nothing comes next.
    ahead: *const u8,
    /// Lines of a row in whole vectors of the block.
    lines: usize,
    /// The line of the row ahead that is asked for next.
    line: usize,
    /// How many tiles have all columns.
    across: usize,
    /// What is to be asked for, in parts of a line: as many as a row has tiles.
    owed: usize,
}

impl Tiles<'_> {
    /// Called for each line of weights of `rows` rows that a tile reads. All tiles of those rows
    /// ask for as many lines of the next block, which the processor would not foresee while it goes
    /// from row to row: evenly, since it keeps track of few that are on their way; one row after
    /// the other, which is the order in which it fetches more by itself; into the second-level
    /// cache, since there are more than the first one has room for; and no further ahead, since
    /// the first ones of a call have not been prefetched.
    #[inline(always)]
    fn ask(&mut self, rows: usize) {
        if self.ahead.is_null() {
            return;
        }
        self.owed += rows;
        while self.owed >= self.across {
            self.owed -= self.across;
            let line = self.ahead.wrapping_add(64 * self.line);
            // SAFETY: a hint; the address need not be valid.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
            self.line += 1;
            if self.line == self.lines {
                self.line = 0;
                self.ahead = self.ahead.wrapping_add(self.call.w_stride);
            }
        }
    }

    /// `R` rows from the `r`th on times all columns; returns `R`.
    ///
    /// # Safety
    /// As [`few`]; there are as many rows.
    #[inline(always)]
    unsafe fn row<S: IntSimd, T: Float, const R: usize>(&mut self, r: usize) -> usize {
        let mut c = 0;
        while c < self.call.cols {
            // SAFETY: the caller's contract covers these accesses.
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

    /// `R` rows times `C` columns; returns `C`.
    ///
    /// # Safety
    /// As [`few`]; there are as many rows and columns.
    #[inline(always)]
    unsafe fn tile<S: IntSimd, T: Float, const R: usize, const C: usize>(
        &mut self,
        r: usize,
        c: usize,
    ) -> usize {
        let Tiles { call, block, .. } = *self;
        // SAFETY: by the caller's contract: the rows, the columns, which are padded with zeros to
        // whole vectors, and their results are the call's; sums are read that the last block has
        // written.
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
                    self.ask(R);
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
                let dst = call.dst.add(c * call.dst_stride + self.first + r);
                for c in 0..C {
                    for r in 0..R {
                        *dst.add(c * call.dst_stride + r) = S::v_sum(acc[r][c]);
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

/// Running sums of a single product, so that one multiplication need not wait for the last.
const UNROLL: usize = 4;

/// One row times one column: weights in one stream, which is what the memory is fastest at.
///
/// # Safety
/// Both have `k` elements.
#[inline(always)]
unsafe fn dot<S: IntSimd, T: Float>(row: *const u8, x: *const u8, k: usize) -> f32 {
    // SAFETY: the caller's contract covers these accesses.
    unsafe {
        let mut acc = [S::v_splat(0.0); UNROLL];
        let mut i = 0;
        while i + UNROLL * S::LANES <= k {
            S::prefetch(row.add(i * T::BYTES), UNROLL * S::LANES * T::BYTES);
            for u in 0..UNROLL {
                let at = (i + u * S::LANES) * T::BYTES;
                acc[u] = S::v_mul_add(T::load::<S>(row.add(at)), T::load::<S>(x.add(at)), acc[u]);
            }
            i += UNROLL * S::LANES;
        }
        while i < k {
            let (w, x) = (row.add(i * T::BYTES), x.add(i * T::BYTES));
            let (w, x) = match k - i {
                left if left < S::LANES => {
                    (T::load_first::<S>(w, left), T::load_first::<S>(x, left))
                }
                _ => (T::load::<S>(w), T::load::<S>(x)),
            };
            acc[0] = S::v_mul_add(w, x, acc[0]);
            i += S::LANES;
        }
        let (low, high) = (S::v_add(acc[0], acc[1]), S::v_add(acc[2], acc[3]));
        S::v_sum(S::v_add(low, high))
    }
}

/// Rows of a chunk, interleaved.
#[repr(C, align(64))]
struct FloatPanel<S, T> {
    /// Each element of every row.
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
        // SAFETY: the caller's contract covers these accesses.
        unsafe {
            let padded = len.next_multiple_of(S::LANES);
            widen::<S, T>(x.add(start * T::BYTES), len, padded, column.cast());
        }
    }

    #[inline(always)]
    unsafe fn unpack(&mut self, call: &GemmArgs, row: usize, start: usize, len: usize) {
        // SAFETY: the caller's contract covers these accesses.
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
        _: usize,
        len: usize,
        prefetch: &mut Prefetch,
    ) {
        let Tile { columns, sums, .. } = tile;
        // SAFETY: by the caller's contract; the panel has `len` elements.
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
