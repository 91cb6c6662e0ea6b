//! MUL_MAT_ID, alone and fused: products with the weights of the experts that the router has
//! selected for each token.

use vgpu_transport::ir::Op;

use super::super::scratch::{Output, ScratchLayout};
use super::activations::{Activations, converted};
use super::dense::kernel_of;
use super::term::{Term, Unit, add_row};
use super::tiles::{LINE_FLOATS, tile_columns, tile_products, tile_rows};
use super::weight_rows::WeightRows;
use crate::gemm::{GemmArgs, MatmulKernel};
use crate::kernel::{Compiled, Estimate, Fault, Kernel, Worker, check_index};
use crate::operands::{Operands, parameters};
use crate::view::View;
use vgpu_engine::EngineError;

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
    pairs: &'w [usize],
    columns: *const u8,
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
            tile_columns(activations.source.ne[0], pairs)
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

    /// Tile `at`. Without grouping, `pair` holds the only pair of the tile.
    ///
    /// # Safety
    /// As [`ExpertColumns::tiles`].
    unsafe fn tile<'w>(
        &self,
        w: &'w Worker<'_>,
        at: usize,
        pair: &'w mut usize,
    ) -> Result<ColumnTile<'w>, Fault> {
        let Some(grouping) = self.grouping else {
            *pair = at;
            let id = self.ids.row_ptr([at / self.used, 0, 0]);
            let id = id.wrapping_add(at % self.used * self.ids.nb[0]);
            // SAFETY: `slot` and `token` are below the lengths of the ids, which are i32 by the
            // check of MUL_MAT_ID. The volatile read happens once: the checked value is the value
            // that is used, even if a guest changes the memory.
            let id = unsafe { id.cast::<i32>().read_volatile() };
            return Ok(ColumnTile {
                expert: check_index(i64::from(id), self.experts)?,
                pairs: std::slice::from_ref(pair),
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
            pairs: &order[tile.first..tile.first + tile.columns],
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
}

impl ExpertProduct {
    fn new(
        weight: View,
        bias: Option<View>,
        columns: &ExpertColumns,
        grain: usize,
    ) -> ExpertProduct {
        ExpertProduct {
            kernel: columns.activations.kernel,
            weight,
            bias,
            column_bytes: columns.activations.column_bytes,
            grain,
        }
    }

    fn rows(&self) -> usize {
        self.weight.ne[1]
    }

    /// The number of tiles of rows.
    fn row_tiles(&self) -> usize {
        self.rows().div_ceil(self.grain)
    }

    /// The rows of the tile that begins with `row`.
    fn height(&self, row: usize) -> usize {
        self.grain.min(self.rows() - row)
    }

    /// Multiplies the rows of a tile from `row` on with its columns. The columns of `out` are
    /// [`ExpertProduct::grain`] floats apart.
    ///
    /// # Safety
    /// The columns of `tile` are converted. `row` is below the rows of the weights. `out` is
    /// writable for the columns of the tile, and no one else accesses it. `weights` was made for
    /// these weights and this kernel.
    unsafe fn multiply(
        &self,
        (w, weights): (&Worker<'_>, WeightRows),
        tile: &ColumnTile<'_>,
        row: usize,
        out: *mut f32,
    ) {
        let (weight, columns) = (&self.weight, tile.pairs.len());
        // SAFETY: `tile.expert` is below the number of experts, which is the third length of the
        // weights and the second of the bias (`is_plain`). `row + self.height(row)` is at most the
        // rows of the weights, which is the length of a row of the bias. The caller guarantees
        // columns, `out` and `weights`.
        unsafe {
            let args = GemmArgs {
                k: weight.ne[0],
                w: { weight.ptr() }.add(tile.expert * weight.nb[2] + row * weight.nb[1]),
                w_stride: weight.nb[1],
                rows: self.height(row),
                x: tile.columns,
                x_stride: self.column_bytes,
                cols: columns,
                dst: out,
                dst_stride: self.grain,
                table: None,
            };
            weights.multiply(w, &self.kernel, &args);
            if let Some(bias) = &self.bias {
                let bias = bias.row_ptr([tile.expert, 0, 0]).cast::<f32>().add(row);
                for column in 0..columns {
                    add_row(out.add(column * self.grain), bias, self.height(row));
                }
            }
        }
    }
}

/// Reserves `count` tiles of floats for each thread. Returns the offset of the first tile and the
/// floats of a tile.
fn own_floats(
    first: &Operands<'_>,
    columns: &ExpertColumns,
    grain: usize,
    count: usize,
    scratch: &mut ScratchLayout,
) -> (usize, usize) {
    let floats = (grain * columns.grain).next_multiple_of(LINE_FLOATS);
    let size = floats * size_of::<f32>();
    (scratch.room(count * first.workers(), size), floats)
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
    Ok(unsafe { compile(&[term], &[output], scratch) })
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
    Some(unsafe { compile(terms, &outputs, scratch) })
}

/// Whether `term` can be computed together with `first`, with the columns of `first`.
fn is_plain(first: &Term<'_>, term: &Term<'_>) -> bool {
    let (one, other) = (first.weight(), term.weight());
    matches!(term.node.op(), Op::MulMatId { .. })
        && (one.ty, one.ne[0], one.ne[2]) == (other.ty, other.ne[0], other.ne[2])
        && term.bias.is_none_or(|bias| bias.ne[1] == other.ne[2])
}

fn activations(first: &Operands<'_>) -> Activations {
    Activations::new(first, first.src(1), kernel_of(first))
}

/// # Safety
/// The terms are MUL_MAT_IDs of the same activations, the same ids and as many experts. Their
/// outputs do not overlap each other or a source.
unsafe fn compile(terms: &[Term<'_>], outputs: &[Output], mut scratch: ScratchLayout) -> Compiled {
    let first = terms[0].node;
    let columns = ExpertColumns::new(first, activations(first), &mut scratch);
    let weight_rows = WeightRows::new(first, &columns.activations.kernel, &mut scratch);
    let each = terms.iter().zip(outputs).map(|(term, &output)| {
        let grain = columns.grain_rows(&term.weight(), terms.len(), first.workers());
        (
            ExpertProduct::new(term.weight(), term.bias, &columns, grain),
            output,
        )
    });
    let products: Vec<(ExpertProduct, Output)> = each.collect();
    let row_tiles = products
        .iter()
        .map(|(product, _)| product.row_tiles())
        .sum::<usize>();
    let grain = products.iter().map(|(product, _)| product.grain).max();
    let (own, floats) = own_floats(first, &columns, grain.unwrap_or(0), 1, &mut scratch);
    let mut kernels = columns.prepare(first);
    kernels.push(Box::new(move |w| {
        // SAFETY: the kernels of `prepare` ran before the barrier before this kernel.
        let tiles = unsafe { columns.tiles(w) };
        for unit in w.chunks(tiles * row_tiles, 1).flatten() {
            let (mut pair, mut at) = (0, unit % row_tiles);
            // SAFETY: the kernels of `prepare` ran before the barrier before this kernel.
            let tile = unsafe { columns.tile(w, unit / row_tiles, &mut pair)? };
            let found = products.iter().find(|(product, _)| {
                let is_here = at < product.row_tiles();
                at -= if is_here { 0 } else { product.row_tiles() };
                is_here
            });
            let (product, output) = found.expect("a tile belongs to a product");
            let row = at * product.grain;
            let [slot_stride, token_stride, _] = output.strides();
            // SAFETY: the columns of the tile, which the caller guarantees to be those of every
            // term, are converted and grouped, and `row` is below the rows of the product. `result`
            // is a tile of `floats` floats of this worker in the scratch memory. The nodes have
            // passed the check of MUL_MAT_ID, so the destination has a dense row of as many floats
            // as the weights have rows for each slot and token. `to` has `height(row)` of them,
            // which no other unit writes.
            unsafe {
                let result = w.scratch().add(own).cast::<f32>();
                let result = result.add(w.index() * floats);
                product.multiply((w, weight_rows), &tile, row, result);
                for (column, &pair) in tile.pairs.iter().enumerate() {
                    let (slot, token) = (pair % columns.used, pair / columns.used);
                    let to =
                        { output.base(w.scratch()) }.add(slot * slot_stride + token * token_stride);
                    let to = to.cast::<f32>().add(row);
                    let from = result.add(column * product.grain);
                    to.copy_from_nonoverlapping(from, product.height(row));
                }
            }
        }
        Ok(())
    }));
    for output in outputs {
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
/// Both terms have the activations and the ids of `first`.
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
    let grain = columns.grain_rows(&terms[0].weight(), 1, first.workers());
    let [activated, factor] =
        terms.map(|term| ExpertProduct::new(term.weight(), term.bias, &columns, grain));
    let row_tiles = activated.row_tiles();
    // Each thread has one tile for each product.
    let (own, floats) = own_floats(first, &columns, grain, 2, &mut scratch);
    let mut kernels = columns.prepare(first);
    kernels.push(Box::new(move |w| {
        // SAFETY: the kernels of `prepare` ran before the barrier before this kernel. The scratch
        // memory has two tiles of `floats` floats for each worker at offset `own`.
        let (tiles, [a, b]) = unsafe {
            let own = w.scratch().add(own).cast::<f32>();
            let own = [0, 1].map(|i| own.add((2 * w.index() + i) * floats));
            (columns.tiles(w), own)
        };
        for part in w.chunks(tiles * row_tiles, 1).flatten() {
            let (mut pair, row) = (0, part % row_tiles * grain);
            // SAFETY: the columns of the tile, which the caller guarantees to be those of both
            // products, are converted and grouped, and `row` is below the rows of the products,
            // which have the same shape. `a` and `b` are tiles of this worker. The destination has
            // the lengths of the products, and overlaps no source (`Term::fits`). No other part
            // writes these results.
            unsafe {
                let tile = columns.tile(w, part / row_tiles, &mut pair)?;
                activated.multiply((w, WeightRows::InPlace), &tile, row, a);
                factor.multiply((w, WeightRows::InPlace), &tile, row, b);
                for (column, &pair) in tile.pairs.iter().enumerate() {
                    let (slot, token) = (pair % columns.used, pair / columns.used);
                    let to = unit.dst.row_ptr([slot, token, 0]).cast::<f32>().add(row);
                    let from = [a, b].map(|x| x.add(column * grain));
                    unit.apply(to, from, activated.height(row));
                }
            }
        }
        Ok(())
    }));
    Some(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}
