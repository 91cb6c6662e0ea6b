//! MUL_MAT_ID, alone and fused: products with the weights of the experts that the router has
//! selected for each token.

mod joint;

use std::ops::Range;
use std::sync::Arc;

use vgpu_engine::{ALLOCATION_BYTES, EngineError};
use vgpu_transport::ir::Op;

use super::super::scratch::{Output, ScratchLayout};
use super::activations::{Activations, converted};
use super::dense::kernel_of;
use super::joint::MAX_COLUMNS;
use super::term::{Term, Unit, add_row};
use super::tiles::{LINE_FLOATS, TILE_ROWS, tile_columns, tile_products, tile_rows};
use super::weight_rows::WeightRows;
use crate::gemm::{GemmArgs, MatmulKernel};
use crate::kernel::{Compiled, Estimate, Fault, Kernel, Worker, check_index};
use crate::operands::{Operands, parameters};
use crate::view::View;

/// Pairs of a token and an expert in a unit of work.
const PAIRS: usize = 1 << 14;

/// Columns of one expert that are multiplied with the same rows.
#[derive(Clone, Copy)]
struct ExpertTile {
    expert: usize,
    /// The index of the first column, in the order of experts.
    first: usize,
    columns: usize,
}

/// The columns of each expert. One thread writes them to the scratch memory, and all threads read
/// them.
///
/// A *pair* is a token and one of its experts, `token * used + slot`. Each pair yields one column
/// of the result.
#[derive(Clone, Copy)]
struct Grouping {
    ids: View,
    experts: usize,
    pairs: usize,
    /// The most columns in a tile.
    grain: usize,
    max_tiles: usize,
    // Offsets in the scratch memory.
    /// The expert of each pair (`u32`).
    chosen: usize,
    /// The first column of each expert, and one past the last column (`usize`).
    starts: usize,
    /// The pairs in the order of experts (`usize`).
    order: usize,
    /// The tiles ([`ExpertTile`]).
    tiles: usize,
    /// The number of tiles (`usize`).
    count: usize,
}

impl Grouping {
    fn new(ids: View, experts: usize, grain: usize, scratch: &mut ScratchLayout) -> Grouping {
        let pairs = ids.ne[0] * ids.ne[1];
        let max_tiles = pairs.min(experts) + pairs / grain;
        Grouping {
            ids,
            experts,
            pairs,
            grain,
            max_tiles,
            chosen: scratch.room(pairs, size_of::<u32>()),
            starts: scratch.room(experts + 1, size_of::<usize>()),
            order: scratch.room(pairs, size_of::<usize>()),
            tiles: scratch.room(max_tiles, size_of::<ExpertTile>()),
            count: scratch.room(1, size_of::<usize>()),
        }
    }

    /// The parts of the scratch memory: the expert of each pair, the first columns, the order, the
    /// tiles and their number.
    ///
    /// # Safety
    /// Until the next barrier only the calling thread accesses them, and only through this result.
    #[expect(clippy::mut_from_ref, reason = "the scratch memory belongs to the run")]
    unsafe fn parts<'w>(
        &self,
        w: &'w Worker<'_>,
    ) -> (
        &'w mut [u32],
        &'w mut [usize],
        &'w mut [usize],
        &'w mut [ExpertTile],
        &'w mut usize,
    ) {
        let part = |offset| w.scratch().wrapping_add(offset);
        // SAFETY: the slices are the parts of the scratch memory that `new` has reserved, aligned
        // to 64 bytes, and the caller guarantees that no other thread accesses them. The slices
        // hold integers, for which any bytes are valid.
        unsafe {
            (
                std::slice::from_raw_parts_mut(part(self.chosen).cast(), self.pairs),
                std::slice::from_raw_parts_mut(part(self.starts).cast(), self.experts + 1),
                std::slice::from_raw_parts_mut(part(self.order).cast(), self.pairs),
                std::slice::from_raw_parts_mut(part(self.tiles).cast(), self.max_tiles),
                &mut *part(self.count).cast(),
            )
        }
    }

    /// The kernels that group the pairs. The first thread executes them.
    fn kernels(self) -> [Kernel; 3] {
        let units = self.pairs.div_ceil(PAIRS);
        let pairs = move |unit: usize| unit * PAIRS..self.pairs.min((unit + 1) * PAIRS);
        let count: Kernel = Box::new(move |w| {
            for unit in w.alone(units).each(Estimate::steps(PAIRS)) {
                // SAFETY: the scratch memory is this operator's, and only the first thread has
                // units: no other thread accesses the parts before the barrier behind this kernel.
                let (chosen, starts, ..) = unsafe { self.parts(w) };
                if unit == 0 {
                    starts.fill(0);
                }
                for pair in pairs(unit) {
                    let expert = self.expert(pair)?;
                    chosen[pair] = expert as u32;
                    starts[expert + 1] += 1;
                }
            }
            Ok(())
        });
        let cut: Kernel = Box::new(move |w| {
            for expert in w
                .alone(self.experts)
                .each(Estimate::steps(self.pairs / self.grain + 1))
            {
                // SAFETY: the scratch memory is this operator's, and only the first thread has
                // units: no other thread accesses the parts before the barrier behind this kernel.
                let (_, starts, _, tiles, count) = unsafe { self.parts(w) };
                if expert == 0 {
                    *count = 0;
                }
                let (first, columns) = (starts[expert], starts[expert + 1]);
                starts[expert + 1] += first;
                for offset in (0..columns).step_by(self.grain) {
                    tiles[*count] = ExpertTile {
                        expert,
                        first: first + offset,
                        columns: self.grain.min(columns - offset),
                    };
                    *count += 1;
                }
            }
            Ok(())
        });
        let order: Kernel = Box::new(move |w| {
            for unit in w.alone(units).each(Estimate::steps(PAIRS)) {
                // SAFETY: the scratch memory is this operator's, and only the first thread has
                // units: no other thread accesses the parts before the barrier behind this kernel.
                let (chosen, starts, order, ..) = unsafe { self.parts(w) };
                for pair in pairs(unit) {
                    let next = &mut starts[chosen[pair] as usize];
                    order[*next] = pair;
                    *next += 1;
                }
            }
            Ok(())
        });
        [count, cut, order]
    }

    /// The expert of a pair, read from the ids.
    fn expert(&self, pair: usize) -> Result<usize, Fault> {
        let used = self.ids.ne[0];
        let (slot, token) = (pair % used, pair / used);
        let id = self.ids.row_ptr([token, 0, 0]);
        let id = id.wrapping_add(slot * self.ids.nb[0]);
        // SAFETY: `slot` and `token` are below the lengths of the ids, which are i32 by the check
        // of MUL_MAT_ID. The volatile read happens once: the checked value is the value that is
        // used, even if a guest changes the memory.
        let id = unsafe { id.cast::<i32>().read_volatile() };
        check_index(i64::from(id), self.experts)
    }

    /// The tiles, and the pairs in the order of experts.
    ///
    /// # Safety
    /// The kernels of [`Grouping::kernels`] ran in this scratch memory before the last barrier.
    unsafe fn get<'w>(&self, w: &'w Worker<'_>) -> (&'w [ExpertTile], &'w [usize]) {
        // SAFETY: the kernels have written `count` tiles and `pairs` entries of the order, and no
        // one writes them after the barrier.
        unsafe {
            let count = w.scratch().add(self.count).cast::<usize>().read();
            let tiles = w.scratch().add(self.tiles).cast::<ExpertTile>();
            let order = w.scratch().add(self.order).cast::<usize>();
            (
                std::slice::from_raw_parts(tiles, count),
                std::slice::from_raw_parts(order, self.pairs),
            )
        }
    }
}

/// The columns of activations, and their experts.
#[derive(Clone, Copy)]
struct ExpertColumns {
    activations: Activations,
    ids: View,
    experts: usize,
    used: usize,
    pairs: usize,
    /// The grouping of columns by expert. `None` for a single token, which has at most a few
    /// columns for an expert: every thread reads the ids itself, and no thread waits for the
    /// grouping.
    grouping: Option<Grouping>,
    /// The offset of the grouped columns in the scratch memory.
    gathered: usize,
    /// The most columns in a tile.
    grain: usize,
}

/// Columns that are multiplied with the same weights.
struct ColumnTile<'w> {
    expert: usize,
    /// The pairs. `None` for a single token, whose tiles have the pair `only`.
    grouped: Option<&'w [usize]>,
    only: usize,
    /// The first column. The others are behind it.
    columns: *const u8,
}

impl ColumnTile<'_> {
    fn pairs(&self) -> &[usize] {
        self.grouped.unwrap_or(std::slice::from_ref(&self.only))
    }
}

impl ExpertColumns {
    fn new(
        first: &Operands<'_>,
        activations: Activations,
        scratch: &mut ScratchLayout,
    ) -> ExpertColumns {
        parameters!(first, Op::MulMatId { .. });
        let (ids, experts) = (first.src(2), first.src(0).ne[2]);
        let [used, tokens, ..] = ids.ne;
        let pairs = used * tokens;
        let is_grouped = tokens > 1;
        let grain = if is_grouped {
            tile_columns(&activations.kernel, activations.source.ne[0], pairs)
        } else {
            1
        };
        ExpertColumns {
            activations,
            ids,
            experts,
            used,
            pairs,
            grouping: is_grouped.then(|| Grouping::new(ids, experts, grain, scratch)),
            gathered: scratch.room(if is_grouped { pairs } else { 0 }, activations.column_bytes),
            grain,
        }
    }

    /// The rows of weights in a tile, if `beside` products are computed at once.
    fn grain_rows(&self, weight: &View, beside: usize, workers: usize) -> usize {
        let others = (self.pairs.min(self.experts)).max(self.pairs.div_ceil(self.grain));
        let at_once = self.pairs.div_ceil(others);
        let [k, rows, ..] = weight.ne;
        let kernel = &self.activations.kernel;
        let rows = tile_rows(kernel, k, rows, at_once, others * beside, workers);
        // The ids can give a tile more columns than the average.
        let most = tile_products(k) / k.saturating_mul(self.grain).max(1);
        let least = LINE_FLOATS.next_multiple_of(kernel.row_tile.max(1));
        match self.grain {
            1 => rows,
            _ => rows.min((most / least).max(1) * least),
        }
    }

    /// Whether a batch may have these columns, by their number.
    fn are_few(&self) -> bool {
        (1..MAX_COLUMNS).contains(&self.ids.ne[1])
    }

    /// The rows of weights in a tile of a batch. The number of tokens does not matter.
    fn batch_rows(&self, weight: &View, beside: usize, workers: usize) -> usize {
        let [k, rows, ..] = weight.ne;
        let others = self.used.min(self.experts) * beside;
        tile_rows(&self.activations.kernel, k, rows, 1, others, workers).min(TILE_ROWS)
    }

    /// The kernels that convert the activations and group them by expert.
    fn prepare(self, first: &Operands<'_>) -> Vec<Kernel> {
        let ExpertColumns {
            activations,
            pairs,
            gathered,
            ..
        } = self;
        let Some(grouping) = self.grouping else {
            return Vec::from_iter(converted(first, activations));
        };
        let mut kernels: Vec<Kernel> = Vec::from_iter(converted(first, activations));
        kernels.extend(grouping.kernels());
        kernels.push(Box::new(move |w| {
            // SAFETY: the kernels before this one are those of the grouping, and a barrier is
            // between them.
            let (_, order) = unsafe { grouping.get(w) };
            let bytes = activations.column_bytes;
            for column in w.range_of(pairs) {
                // SAFETY: `from` is a converted column of `bytes` bytes: by the check of
                // MUL_MAT_ID, the activations have the tokens of the ids. The scratch memory has
                // `pairs > column` columns at `gathered`, and one worker writes this column.
                unsafe {
                    let from = self.column(w, order[column]);
                    let to = w.scratch().add(gathered + column * bytes);
                    from.copy_to_nonoverlapping(to, bytes);
                }
            }
            Ok(())
        }));
        kernels
    }

    /// The converted column of a pair.
    fn column(&self, w: &Worker<'_>, pair: usize) -> *const u8 {
        let strides = self.activations.strides();
        let slot = pair % self.used % self.activations.source.ne[1];
        let at = slot * strides[0] + pair / self.used * strides[1];
        self.activations.base(w).wrapping_add(at)
    }

    /// The number of tiles of columns.
    ///
    /// # Safety
    /// The kernels of [`ExpertColumns::prepare`] ran before the last barrier.
    unsafe fn tiles(&self, w: &Worker<'_>) -> usize {
        match self.grouping {
            None => self.pairs,
            // SAFETY: the caller guarantees that the kernels of the grouping ran before the
            // last barrier.
            Some(grouping) => unsafe { grouping.get(w).0.len() },
        }
    }

    /// Tile `at`.
    ///
    /// # Safety
    /// As [`ExpertColumns::tiles`].
    unsafe fn tile<'w>(&self, w: &'w Worker<'_>, at: usize) -> Result<ColumnTile<'w>, Fault> {
        let Some(grouping) = self.grouping else {
            let id = self.ids.row_ptr([at / self.used, 0, 0]);
            let id = id.wrapping_add(at % self.used * self.ids.nb[0]);
            // SAFETY: `slot` and `token` are below the lengths of the ids, which are i32 by the
            // check of MUL_MAT_ID. The volatile read happens once: the checked value is the value
            // that is used, even if a guest changes the memory.
            let id = unsafe { id.cast::<i32>().read_volatile() };
            return Ok(ColumnTile {
                expert: check_index(i64::from(id), self.experts)?,
                grouped: None,
                only: at,
                columns: self.column(w, at),
            });
        };
        // SAFETY: the caller guarantees that the kernels of the grouping ran before the last
        // barrier.
        let (tiles, order) = unsafe { grouping.get(w) };
        let tile = tiles[at];
        let gathered = self.gathered + tile.first * self.activations.column_bytes;
        Ok(ColumnTile {
            expert: tile.expert,
            grouped: Some(&order[tile.first..tile.first + tile.columns]),
            only: 0,
            columns: w.scratch().wrapping_add(gathered),
        })
    }
}

/// A product with the weights of experts, and its bias.
#[derive(Clone, Copy)]
struct ExpertProduct {
    kernel: MatmulKernel,
    weight: View,
    bias: Option<View>,
    /// Bytes of a converted column.
    column_bytes: usize,
    /// Rows of a tile.
    grain: usize,
    /// Rows of a tile of a batch.
    batch_grain: usize,
}

impl ExpertProduct {
    /// `beside` is the number of products whose tiles threads take at once.
    fn new(term: &Term<'_>, columns: &ExpertColumns, beside: usize) -> ExpertProduct {
        let (weight, workers) = (term.weight(), term.node.workers());
        ExpertProduct {
            kernel: columns.activations.kernel,
            weight,
            bias: term.bias,
            column_bytes: columns.activations.column_bytes,
            grain: columns.grain_rows(&weight, beside, workers),
            batch_grain: columns.batch_rows(&weight, beside, workers),
        }
    }

    fn rows(&self) -> usize {
        self.weight.ne[1]
    }

    /// Floats of the largest tile of a batch.
    fn batch_floats(&self) -> usize {
        self.batch_grain * MAX_COLUMNS
    }

    /// Multiplies rows with the columns of a tile. The columns of `out` are `stride` floats apart.
    ///
    /// # Safety
    /// The columns of `tile` are converted. The weights have `rows`. `out` is writable for the
    /// columns of the tile, and no one else accesses it. `weights` was made for these weights and
    /// this kernel.
    unsafe fn multiply(
        &self,
        (w, weights): (&Worker<'_>, WeightRows),
        tile: &ColumnTile<'_>,
        rows: &Range<usize>,
        (out, stride): (*mut f32, usize),
    ) {
        let (weight, columns) = (&self.weight, tile.pairs().len());
        // SAFETY: `tile.expert` is below the number of experts, which is the third length of the
        // weights. The caller guarantees rows, columns, `out` and `weights`.
        unsafe {
            let args = GemmArgs {
                k: weight.ne[0],
                w: self.weights_of(tile.expert, rows),
                w_stride: weight.nb[1],
                rows: rows.len(),
                x: tile.columns,
                x_stride: self.column_bytes,
                cols: columns,
                dst: out,
                dst_stride: stride,
                table: None,
            };
            weights.multiply(w, &self.kernel, &args);
            for column in 0..columns {
                self.add_bias(tile.expert, rows, out.add(column * stride));
            }
        }
    }

    /// The first of these rows of an expert.
    fn weights_of(&self, expert: usize, rows: &Range<usize>) -> *const u8 {
        let weight = &self.weight;
        let at = expert * weight.nb[2] + rows.start * weight.nb[1];
        weight.ptr().wrapping_add(at).cast_const()
    }

    /// Adds the bias of these rows of an expert, if there is one, to a column of results.
    ///
    /// # Safety
    /// The weights have the expert and the rows. `to` is writable for a float for each row, and no
    /// one else accesses it.
    unsafe fn add_bias(&self, expert: usize, rows: &Range<usize>, to: *mut f32) {
        let Some(bias) = &self.bias else {
            return;
        };
        // SAFETY: the bias has a dense row for each expert (`is_plain`), as long as the weights
        // have rows, and overlaps no result (`Term::fits`). The caller guarantees the rest.
        unsafe {
            let bias = bias.row_ptr([expert, 0, 0]).cast::<f32>().add(rows.start);
            add_row(to, bias, rows.len());
        }
    }
}

/// Where the results of products are.
enum Results {
    /// Those of each product.
    Each(Vec<Output>),
    /// The GLU of two products of the same shape. The products are in memory of each thread.
    Gated(Unit),
}

/// Products of the same columns, in the type of the kernel or converted to it. Threads take the
/// tiles of all products.
struct ExpertProducts {
    columns: ExpertColumns,
    products: Vec<ExpertProduct>,
    results: Results,
    weight_rows: WeightRows,
    /// The offset of the tiles of all threads in the scratch memory.
    own: usize,
    /// Floats of such a tile.
    floats: usize,
    /// Floats from one column of such a tile to the next.
    stride: usize,
    /// For a GLU in a batch, the offset of a tile for each thread.
    factors: usize,
}

impl ExpertProducts {
    fn new(
        first: &Operands<'_>,
        (columns, products): (ExpertColumns, Vec<ExpertProduct>),
        results: Results,
        scratch: &mut ScratchLayout,
    ) -> ExpertProducts {
        let (few, workers) = (columns.are_few(), first.workers());
        let grain = |product: &ExpertProduct| match few {
            true => product.grain.max(product.batch_grain),
            false => product.grain,
        };
        let stride = products.iter().map(grain).max().unwrap_or(0);
        let floats = (stride * columns.grain).next_multiple_of(LINE_FLOATS);
        let (at_once, factors) = match results {
            Results::Each(_) => (1, 0),
            Results::Gated(_) => (2, if few { workers } else { 0 }),
        };
        let of_batch = products.first().map_or(0, ExpertProduct::batch_floats);
        ExpertProducts {
            weight_rows: WeightRows::new(first, &columns.activations.kernel, scratch),
            own: scratch.room(at_once * workers, floats * size_of::<f32>()),
            floats,
            stride,
            factors: scratch.room(factors, of_batch * size_of::<f32>()),
            columns,
            products,
            results,
        }
    }

    /// The kernels of the products.
    ///
    /// # Safety
    /// The columns are those of every product. The results overlap neither each other nor a source.
    unsafe fn kernels(self, first: &Operands<'_>) -> Vec<Kernel> {
        let mut kernels = self.columns.prepare(first);
        let outputs = match &self.results {
            Results::Each(outputs) => outputs.capacity() * size_of::<Output>(),
            Results::Gated(_) => 0,
        };
        first.holds(
            size_of::<ExpertProducts>()
                + self.products.capacity() * size_of::<ExpertProduct>()
                + outputs
                + 3 * ALLOCATION_BYTES,
        );
        let products = Arc::new(self);
        if products.can_join() {
            first.ends_with(Arc::clone(&products) as _);
        }
        kernels.push(Box::new(move |w| {
            // SAFETY: the kernels of `prepare` ran before the barrier before this kernel.
            let tiles = unsafe { products.columns.tiles(w) };
            let grain = |product: &ExpertProduct| product.grain;
            let row_tiles = products.row_tiles(grain);
            for unit in w.chunks(tiles * row_tiles, 1).flatten() {
                let (product, rows) = products.rows_of(unit % row_tiles, grain);
                // SAFETY: the kernels of `prepare` ran before the barrier before this kernel. The
                // caller guarantees the columns and the results, which no other unit has.
                unsafe {
                    let tile = products.columns.tile(w, unit / row_tiles)?;
                    products.compute(w, &tile, product, &rows);
                }
            }
            Ok(())
        }));
        kernels
    }

    /// The products whose rows are divided into tiles. The products of a GLU have the same tiles.
    fn tiled(&self) -> &[ExpertProduct] {
        match self.results {
            Results::Each(_) => &self.products,
            Results::Gated(_) => &self.products[..1],
        }
    }

    /// The number of tiles of rows of all products, of as many rows as `grain` says.
    fn row_tiles(&self, grain: impl Fn(&ExpertProduct) -> usize) -> usize {
        let each = self.tiled().iter();
        each.map(|product| product.rows().div_ceil(grain(product)))
            .sum()
    }

    /// The product and the rows of a tile of rows.
    fn rows_of(
        &self,
        mut tile: usize,
        grain: impl Fn(&ExpertProduct) -> usize,
    ) -> (usize, Range<usize>) {
        for (i, product) in self.tiled().iter().enumerate() {
            let (rows, grain) = (product.rows(), grain(product));
            let tiles = rows.div_ceil(grain);
            if tile < tiles {
                let start = tile * grain;
                return (i, start..rows.min(start + grain));
            }
            tile -= tiles;
        }
        unreachable!("a tile that no product has")
    }

    /// The result of a pair in the first row of a product.
    fn result(&self, w: &Worker<'_>, product: usize, pair: usize) -> *mut f32 {
        let (slot, token) = (pair % self.columns.used, pair / self.columns.used);
        match &self.results {
            Results::Each(outputs) => {
                let [slot_stride, token_stride, _] = outputs[product].strides();
                let base = outputs[product].base(w.scratch());
                base.wrapping_add(slot * slot_stride + token * token_stride)
                    .cast()
            }
            Results::Gated(unit) => unit.dst.row_ptr([slot, token, 0]).cast(),
        }
    }

    /// Computes rows of a product, or of the GLU, for the columns of a tile.
    ///
    /// # Safety
    /// The columns are converted, and those of every product. The products have `rows`. No one else
    /// accesses the results, which overlap no source.
    unsafe fn compute(
        &self,
        w: &Worker<'_>,
        tile: &ColumnTile<'_>,
        product: usize,
        rows: &Range<usize>,
    ) {
        let weights = (w, self.weight_rows);
        let own = w.scratch().wrapping_add(self.own).cast::<f32>();
        // SAFETY: the scratch memory has one tile of `floats` floats for each worker at `own`, or
        // two for a GLU, and `floats` is enough for `rows` of each column of a tile, `stride`
        // floats apart. The nodes have passed the check of MUL_MAT_ID, so the destination has a
        // dense row of as many floats as the weights have rows for each slot and token. The caller
        // guarantees columns, rows and results.
        unsafe {
            match &self.results {
                Results::Each(_) => {
                    let result = own.add(w.index() * self.floats);
                    let to = (result, self.stride);
                    self.products[product].multiply(weights, tile, rows, to);
                    for (column, &pair) in tile.pairs().iter().enumerate() {
                        let to = self.result(w, product, pair).add(rows.start);
                        let from = result.add(column * self.stride);
                        to.copy_from_nonoverlapping(from, rows.len());
                    }
                }
                Results::Gated(unit) => {
                    let both = [0, 1].map(|i| own.add((2 * w.index() + i) * self.floats));
                    for (product, result) in self.products.iter().zip(both) {
                        product.multiply(weights, tile, rows, (result, self.stride));
                    }
                    for (column, &pair) in tile.pairs().iter().enumerate() {
                        let to = self.result(w, product, pair).add(rows.start);
                        let from = both.map(|x| x.add(column * self.stride));
                        unit.apply(to, from, rows.len());
                    }
                }
            }
        }
    }
}

/// MUL_MAT_ID: `dst[:, slot, token] = weights[:, :, ids[slot, token]] . x[:, slot % n, token]`.
pub(in super::super) fn mul_mat_id(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    parameters!(operands, Op::MulMatId { .. });
    let (weight, x, ids) = (operands.src(0), operands.src(1), operands.src(2));
    if operands.dst().elements() == 0 {
        return Ok(Compiled {
            kernels: Vec::new(),
            scratch_bytes: 0,
        });
    }
    let mut scratch = ScratchLayout::default();
    let output = Output::new(operands.dst(), &[weight, x, ids], &mut scratch);
    let term = Term {
        node: operands,
        bias: None,
        dst: operands.dst(),
    };
    // SAFETY: the columns are those of the only term.
    Ok(unsafe { compile(&[term], vec![output], scratch) })
}

/// Products of the same columns: threads take the tiles of all products.
///
/// # Safety
/// The terms have the same activations and the same ids. Their results do not overlap each other.
pub(super) unsafe fn products(terms: &[Term<'_>]) -> Option<Compiled> {
    if !terms
        .iter()
        .all(|term| is_plain(&terms[0], term) && term.fits(&term.dst))
    {
        return None;
    }
    let mut scratch = ScratchLayout::default();
    let outputs = { terms.iter() }.map(|term| Output::new(term.dst, &[], &mut scratch));
    let outputs: Vec<Output> = outputs.collect();
    // SAFETY: the caller guarantees the same columns and separate results, which overlap no source
    // (`Term::fits`). All terms are products of experts, of as many experts (`is_plain`).
    Some(unsafe { compile(terms, outputs, scratch) })
}

/// Whether `term` can be computed together with `first`, with the columns of `first`.
fn is_plain(first: &Term<'_>, term: &Term<'_>) -> bool {
    let (one, other) = (first.weight(), term.weight());
    matches!(term.node.op(), Op::MulMatId { .. })
        && (one.ty, one.ne[0], one.ne[2]) == (other.ty, other.ne[0], other.ne[2])
        // A node may demand single precision.
        && kernel_of(first.node).activation == kernel_of(term.node).activation
        && term.bias.is_none_or(|bias| bias.ne[1] == other.ne[2])
}

fn activations(first: &Operands<'_>) -> Activations {
    Activations::new(first, first.src(1), kernel_of(first))
}

/// # Safety
/// The terms are MUL_MAT_IDs of the same activations, the same ids and as many experts. Their
/// outputs do not overlap each other or a source.
unsafe fn compile(
    terms: &[Term<'_>],
    outputs: Vec<Output>,
    mut scratch: ScratchLayout,
) -> Compiled {
    let first = terms[0].node;
    let columns = ExpertColumns::new(first, activations(first), &mut scratch);
    let products = terms.iter();
    let products = products.map(|term| ExpertProduct::new(term, &columns, terms.len()));
    let products = (columns, products.collect());
    let staged = outputs.clone();
    let products = ExpertProducts::new(first, products, Results::Each(outputs), &mut scratch);
    // SAFETY: the caller guarantees the same columns for all terms, and separate results, which
    // overlap no source or are staged.
    let mut kernels = unsafe { products.kernels(first) };
    for output in staged {
        output.finish(&mut kernels);
    }
    Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    }
}

/// Two products with the columns of `first`, and the GLU of both.
///
/// # Safety
/// Both terms have the activations and the ids of `first`, and the same shape. The destination of
/// `unit` has the lengths of the products, and overlaps no source ([`Term::fits`]).
pub(super) unsafe fn gated(
    first: &Operands<'_>,
    terms: &[Term<'_>; 2],
    unit: Unit,
) -> Option<Compiled> {
    if !terms.iter().all(|term| is_plain(&terms[0], term)) {
        return None;
    }
    let mut scratch = ScratchLayout::default();
    let columns = ExpertColumns::new(first, activations(first), &mut scratch);
    let products = terms.each_ref();
    let products = products.map(|term| ExpertProduct::new(term, &columns, 1));
    let products = (columns, Vec::from(products));
    let products = ExpertProducts::new(first, products, Results::Gated(unit), &mut scratch);
    // SAFETY: the caller guarantees the same columns for both terms, and results that overlap no
    // source.
    let kernels = unsafe { products.kernels(first) };
    Some(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}
