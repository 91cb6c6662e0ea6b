//! The tiles of a product. Threads take them one at a time, or in runs.

use std::ops::Range;

use vgpu_transport::ir::Op;

use super::super::scratch::Output;
use super::activations::Activations;
use super::term::add_row;
use super::weight_rows::WeightRows;
use crate::formats::Format;
use crate::gemm::{Column, GemmArgs, MAX_PREPARED, MIN_COLUMNS, MatmulKernel};
use crate::kernel::Worker;
use crate::operands::{Operands, parameters};
use crate::view::View;

/// The most rows in a tile of several columns: the block of rows of [`crate::gemm`].
pub(super) const TILE_ROWS: usize = 256;

/// The most products in a tile, about: some milliseconds. Tiles of rows of up to 8192 elements are
/// not limited by it. Longer rows than those of models do not stay in the caches, and a product
/// takes several times as long.
pub(super) const fn tile_products(k: usize) -> usize {
    match k <= 1 << 16 {
        true => 1 << 29,
        false => 1 << 26,
    }
}

/// Bytes of weights in a tile of one column: enough to make the cost of taking a tile small.
const TILE_WEIGHT_BYTES: usize = 128 << 10;

/// Floats of a cache line. Tiles are multiples of a cache line of results, so that no two threads
/// write to the same line.
pub(super) const LINE_FLOATS: usize = 16;

/// The columns of a tile, of `columns`: whole cache lines of results, in parts that are as equal as
/// possible. Longer columns have smaller tiles.
pub(super) fn tile_columns(kernel: &MatmulKernel, k: usize, columns: usize) -> usize {
    // The gemm of some types prepares the columns as f32.
    let most = MAX_PREPARED / size_of::<f32>() / k.max(1);
    let most = most.clamp(MIN_COLUMNS, kernel.most_columns);
    let tiles = columns.div_ceil(most).max(1);
    columns.div_ceil(tiles).max(1).next_multiple_of(LINE_FLOATS)
}

/// The rows of weights in a tile of `columns` columns, if there are `others` tiles of the same
/// rows.
pub(super) fn tile_rows(
    kernel: &MatmulKernel,
    k: usize,
    rows: usize,
    columns: usize,
    others: usize,
    workers: usize,
) -> usize {
    let format = Format::of(kernel.weight).expect("every weight type is a format");
    let most = if columns == 1 {
        TILE_WEIGHT_BYTES / format.row_bytes(k).max(1)
    } else {
        (tile_products(k) / k.saturating_mul(columns).max(1)).min(TILE_ROWS)
    };
    // At least four tiles for each thread, if there are enough rows.
    let cuts = (4 * workers).div_ceil(others.max(1));
    most.min(rows.div_ceil(cuts))
        .max(1)
        .next_multiple_of(LINE_FLOATS.next_multiple_of(kernel.row_tile.max(1)))
}

/// A loop over matrices: the count, and the stride of each operand in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MatrixLoop {
    count: usize,
    w: usize,
    x: usize,
    dst: usize,
}

impl MatrixLoop {
    const ONCE: MatrixLoop = MatrixLoop {
        count: 1,
        w: 0,
        x: 0,
        dst: 0,
    };
}

/// The loops around the product of two matrices.
struct Nest {
    /// The columns that are multiplied with the same weights at once.
    columns: MatrixLoop,
    /// The other loops.
    outer: [MatrixLoop; 4],
}

impl Nest {
    /// Weights are broadcast over groups of activations. If the columns of a group are at equal
    /// distances, they become one matrix, so that the weights are read once.
    fn new(weight: &View, x: &View, x_strides: [usize; 3], dst_strides: [usize; 3]) -> Nest {
        let repeats = [x.ne[2] / weight.ne[2].max(1), x.ne[3] / weight.ne[3].max(1)];
        let step = |count, d: usize| MatrixLoop {
            count,
            w: 0,
            x: x_strides[d],
            dst: dst_strides[d],
        };
        let mut same_weights = vec![step(x.ne[1], 0), step(repeats[0], 1), step(repeats[1], 2)];
        same_weights.retain(|l| l.count != 1);
        let mut folded: Vec<MatrixLoop> = Vec::new();
        for l in same_weights {
            match folded.last_mut() {
                Some(inner) if l.x == inner.x * inner.count && l.dst == inner.dst * inner.count => {
                    inner.count *= l.count;
                }
                _ => folded.push(l),
            }
        }
        let weights = [0, 1].map(|d| MatrixLoop {
            count: weight.ne[d + 2],
            w: weight.nb[d + 2],
            x: x_strides[d + 1].saturating_mul(repeats[d]),
            dst: dst_strides[d + 1].saturating_mul(repeats[d]),
        });
        let mut rest = folded.iter().skip(1).copied();
        Nest {
            columns: folded.first().copied().unwrap_or(MatrixLoop::ONCE),
            outer: [
                rest.next().unwrap_or(MatrixLoop::ONCE),
                rest.next().unwrap_or(MatrixLoop::ONCE),
                weights[0],
                weights[1],
            ],
        }
    }

    /// The number of iterations of the outer loops.
    fn batches(&self) -> usize {
        self.outer.iter().map(|l| l.count).product()
    }

    /// The offset of each operand, in bytes, in iteration `batch` of the outer loops.
    fn offsets(&self, mut batch: usize) -> MatrixLoop {
        let mut at = MatrixLoop::ONCE;
        for l in &self.outer {
            let i = batch % l.count;
            batch /= l.count;
            at.w += i * l.w;
            at.x += i * l.x;
            at.dst += i * l.dst;
        }
        at
    }
}

/// A MUL_MAT, divided into tiles. Its operands have passed the operator's check: `weight` has dense
/// rows as long as the columns of activations, whose batches the batches of `weight` divide, and
/// the destination has a dense row of as many floats as `weight` has rows, for each column.
pub(super) struct TiledProduct {
    pub(super) kernel: MatmulKernel,
    pub(super) weight: View,
    activations: Activations,
    pub(super) output: Output,
    /// A row that is added to every column of the result.
    bias: Option<View>,
    nest: Nest,
    pub(super) columns: usize,
    grain_columns: usize,
    column_tiles: usize,
    pub(super) grain_rows: usize,
    row_tiles: usize,
    /// Tiles of the same rows.
    pub(super) others: usize,
}

impl TiledProduct {
    /// `bias` is a dense row with one float for each row of the weights. `beside` is the number of
    /// products that are computed at once, including this one.
    pub(super) fn new(
        operands: &Operands<'_>,
        activations: Activations,
        output: Output,
        bias: Option<View>,
        beside: usize,
    ) -> TiledProduct {
        parameters!(operands, Op::MulMat { .. });
        let (weight, x, kernel) = (operands.src(0), operands.src(1), activations.kernel);
        let nest = Nest::new(&weight, &x, activations.strides(), output.strides());
        let (k, rows) = (weight.ne[0], weight.ne[1]);
        let columns = nest.columns.count;
        let grain_columns = tile_columns(&kernel, k, columns);
        let column_tiles = columns.div_ceil(grain_columns);
        let others = column_tiles * nest.batches();
        let at_once = grain_columns.min(columns);
        let workers = operands.workers();
        let grain_rows = tile_rows(&kernel, k, rows, at_once, others * beside, workers);
        TiledProduct {
            kernel,
            weight,
            activations,
            output,
            bias,
            nest,
            columns,
            grain_columns,
            column_tiles,
            grain_rows,
            row_tiles: rows.div_ceil(grain_rows),
            others,
        }
    }

    /// The number of tiles. Adjacent tiles have the same activations, which stay in the cache.
    pub(super) fn tiles(&self) -> usize {
        self.others * self.row_tiles
    }

    /// The floats of the largest tile, rounded up to whole cache lines.
    pub(super) fn tile_floats(&self) -> usize {
        (self.grain_rows * self.grain_columns.min(self.columns)).next_multiple_of(LINE_FLOATS)
    }

    /// The rows and columns of a tile of the result.
    pub(super) fn ranges(&self, tile: usize) -> (Range<usize>, Range<usize>) {
        let cut = |part: usize, grain: usize, end: usize| part * grain..end.min((part + 1) * grain);
        let (row, column) = (
            tile % self.row_tiles,
            tile / self.row_tiles % self.column_tiles,
        );
        (
            cut(row, self.grain_rows, self.weight.ne[1]),
            cut(column, self.grain_columns, self.columns),
        )
    }

    /// Computes a tile in the destination. `weights`: how the kernel gets the weights.
    ///
    /// # Safety
    /// As [`TiledProduct::multiply`]; no other thread computes this tile.
    pub(super) unsafe fn tile(&self, w: &Worker<'_>, tile: usize, weights: WeightRows) {
        // SAFETY: the results of a tile are inside the destination, or inside the scratch memory
        // that replaces it if it overlaps a source (`Output`). No other tile has these results.
        unsafe { self.multiply(w, tile, self.results(w, tile), weights) };
    }

    /// Where the results of a tile are: the first, and the floats from one column to the next.
    pub(super) fn results(&self, w: &Worker<'_>, tile: usize) -> (*mut f32, usize) {
        let (rows, columns) = self.ranges(tile);
        let stride = self.nest.columns.dst;
        let at = self.offsets(tile).dst + columns.start * stride;
        // `ranges` and `offsets` are inside the destination, by the check of MUL_MAT.
        let out = self.output.base(w.scratch()).wrapping_add(at).cast::<f32>();
        (out.wrapping_add(rows.start), stride / size_of::<f32>())
    }

    /// Column `c` of the activations of a product without other loops.
    pub(super) fn column(&self, w: &Worker<'_>, c: usize) -> *const u8 {
        debug_assert!(self.others == 1 && c < self.columns);
        let base = self.activations.base(w);
        base.wrapping_add(c * self.nest.columns.x)
    }

    /// Multiplies the rows of a tile of a product without other loops with other columns, which
    /// have the results of the tile from their first on.
    ///
    /// # Safety
    /// The kernel takes tables. Each column is readable for the activations of a column of this
    /// product, converted, and writable for a float for each row of the tile. The results overlap
    /// no source and are not accessed by other threads.
    pub(super) unsafe fn multiply_table(&self, tile: usize, columns: &mut [Column]) {
        if columns.is_empty() {
            return;
        }
        let weight = &self.weight;
        let (rows, _) = self.ranges(tile);
        // SAFETY: the rows of a tile are inside the weights. The caller guarantees the columns of
        // the table, and a kernel that takes one.
        unsafe {
            let w = weight.ptr().add(rows.start * weight.nb[1]);
            let size = (weight.ne[0], rows.len());
            (self.kernel.gemm)(&GemmArgs::with_table((w, weight.nb[1]), size, columns));
        }
    }

    /// Adds the bias, if there is one, to results: these rows and columns ([`Self::ranges`]).
    ///
    /// # Safety
    /// `out` is writable for the columns, `stride` floats apart, and accessed by no other thread.
    pub(super) unsafe fn add_bias(
        &self,
        (rows, columns): (Range<usize>, Range<usize>),
        (out, stride): (*mut f32, usize),
    ) {
        let Some(bias) = &self.bias else {
            return;
        };
        for column in 0..columns.len() {
            // SAFETY: the bias is a dense row with a float for each row of the weights (`new`), and
            // overlaps no result. The caller guarantees the columns at `out`.
            unsafe {
                let bias = bias.ptr().cast::<f32>().add(rows.start);
                add_row(out.add(column * stride), bias, rows.len());
            }
        }
    }

    /// The offset of the matrices of a tile in each operand, in bytes.
    fn offsets(&self, tile: usize) -> MatrixLoop {
        self.nest.offsets(tile / self.row_tiles / self.column_tiles)
    }

    /// Computes a tile, with the bias, at `out`. The columns of `out` are `stride` floats apart.
    ///
    /// # Safety
    /// The activations are those of the operands, and were converted before the last barrier. `out`
    /// is writable for the columns of the tile, overlaps no source, and no other thread accesses
    /// it. `weights` was made for these weights and this kernel.
    pub(super) unsafe fn multiply(
        &self,
        w: &Worker<'_>,
        tile: usize,
        out: (*mut f32, usize),
        weights: WeightRows,
    ) {
        // SAFETY: the caller guarantees the same for a tile.
        unsafe { self.multiply_run(w, tile..tile + 1, out, weights) };
    }

    /// Computes tiles of adjacent rows of one column in the destination, as one product.
    ///
    /// # Safety
    /// As [`TiledProduct::multiply`]; no other thread computes one of these tiles. The product has
    /// one column and one matrix of weights.
    pub(super) unsafe fn run(&self, w: &Worker<'_>, tiles: Range<usize>) {
        let out = self.results(w, tiles.start);
        // SAFETY: the results of adjacent tiles of one column are adjacent, inside the destination,
        // or inside the scratch memory that replaces it. No other tile has these results.
        unsafe { self.multiply_run(w, tiles, out, WeightRows::InPlace) };
    }

    /// As [`TiledProduct::multiply`], for several tiles if they are adjacent rows of one column.
    ///
    /// # Safety
    /// As [`TiledProduct::multiply`], for each tile.
    unsafe fn multiply_run(
        &self,
        w: &Worker<'_>,
        tiles: Range<usize>,
        (out, stride): (*mut f32, usize),
        weights: WeightRows,
    ) {
        let weight = &self.weight;
        let (rows, columns) = self.ranges(tiles.start);
        let rows = rows.start..self.ranges(tiles.end - 1).0.end;
        let at = self.offsets(tiles.start);
        let x = self.nest.columns.x;
        // SAFETY: `rows` and `columns` are inside the weights and the activations at the offsets of
        // the tile, by the check of MUL_MAT. The caller guarantees the activations, the memory of
        // the results, and `weights`.
        unsafe {
            let args = GemmArgs {
                k: weight.ne[0],
                w: weight.ptr().add(at.w + rows.start * weight.nb[1]),
                w_stride: weight.nb[1],
                rows: rows.len(),
                x: self.activations.base(w).add(at.x + columns.start * x),
                x_stride: x,
                cols: columns.len(),
                dst: out,
                dst_stride: stride,
                table: None,
            };
            weights.multiply(w, &self.kernel, &args);
            self.add_bias((rows, columns), (out, stride));
        }
    }
}
