//! The products of dense weights of one plan, or of the plans of several guests at once.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use vgpu_engine::ALLOCATION_BYTES;

use super::term::Unit;
use super::tiles::{TiledProduct, tile_products};
use super::weight_rows::WeightRows;
use crate::batch::MAX_BATCH;
use crate::gemm::{Column, MatmulKernel};
use crate::kernel::{JointKernel, JointMember, Kernel, Runs, Worker};
use crate::operands::Operands;

/// The most columns that are multiplied at once: the memory of a thread is enough for them
/// ([`prepared_bytes`](crate::gemm::prepared_bytes)).
pub(super) const MAX_COLUMNS: usize = 32;

/// From this many columns of a plan on, a batch does not have its products with this kernel: panels
/// would change the results, or the columns are many.
pub(super) fn columns_end(kernel: &MatmulKernel) -> usize {
    match kernel.one_order {
        true => MAX_COLUMNS,
        false => kernel.panel_cols.min(MAX_COLUMNS),
    }
}

/// The bytes of weights that a thread multiplies with few columns without asking for more: some
/// tens of microseconds with one column.
const RUN_BYTES: usize = 1 << 20;

/// The bytes of weights that a thread prefetches before the barrier before a product.
const PREFETCHED_BYTES: usize = 32 << 10;

/// Products of the same activations with dense weights, in the type of the kernel. Threads take
/// the tiles of all products.
pub(super) struct DenseProducts {
    products: Vec<TiledProduct>,
    gate: Option<Gate>,
}

/// The GLU of two products. The first product is computed in the destination, the second in a tile
/// of each thread.
pub(super) struct Gate {
    pub(super) unit: Unit,
    /// The offset of the tiles of all threads in the scratch memory.
    pub(super) own: usize,
}

impl DenseProducts {
    /// Products whose destinations do not overlap each other.
    pub(super) fn new(products: Vec<TiledProduct>) -> DenseProducts {
        DenseProducts {
            products,
            gate: None,
        }
    }

    /// Two products with the same tiles, of which only the GLU is stored.
    pub(super) fn gated(products: [TiledProduct; 2], gate: Gate) -> DenseProducts {
        DenseProducts {
            products: Vec::from(products),
            gate: Some(gate),
        }
    }

    /// The kernel of the products: the last kernel of the node or group of `first`.
    ///
    /// # Safety
    /// The activations are those of every product, and are converted before the barrier before the
    /// kernel. The destinations do not overlap each other.
    pub(super) unsafe fn kernel(self, first: &Operands<'_>) -> Kernel {
        first.holds(
            size_of::<DenseProducts>()
                + self.products.capacity() * size_of::<TiledProduct>()
                + 2 * ALLOCATION_BYTES,
        );
        let products = Arc::new(self);
        if products.can_join() {
            first.ends_with(Arc::clone(&products) as _);
        }
        Box::new(move |w| {
            for tiles in w.runs(products.tiles(), products.longest_run()) {
                // SAFETY: `runs` returns each tile to one worker. The caller guarantees the
                // activations and the destinations.
                unsafe { products.compute_run(w, tiles) };
            }
            Ok(())
        })
    }

    /// Whether plans can compute the products together: each result is the same beside other
    /// columns. The columns are few, and those of one matrix.
    fn can_join(&self) -> bool {
        self.products.iter().all(|product| {
            product.kernel.takes_tables
                && product.columns < columns_end(&product.kernel)
                && product.others == 1
                && product.tile_of_batch() <= tile_products(product.weight.ne[0])
                && !product.output.is_staged()
        })
    }

    /// Whether each product has one matrix of weights and few columns, so that much of its time is
    /// that of reading them. The same for all numbers of columns that a batch may have together.
    fn has_few_columns(&self) -> bool {
        { self.products.iter() }
            .all(|product| product.others == 1 && product.columns < columns_end(&product.kernel))
    }

    /// The products that a tile of this kernel computes, and the tile of each.
    fn of_tile(&self, mut tile: usize) -> (&[TiledProduct], usize) {
        if self.gate.is_some() {
            return (&self.products, tile);
        }
        for product in &self.products {
            if tile < product.tiles() {
                return (std::slice::from_ref(product), tile);
            }
            tile -= product.tiles();
        }
        unreachable!("a tile that this kernel does not have")
    }

    /// Computes a run of tiles of one plan.
    ///
    /// # Safety
    /// As [`DenseProducts::compute`], for each tile.
    unsafe fn compute_run(&self, w: &Worker<'_>, tiles: Range<usize>) {
        let is_one = |product: &TiledProduct| product.columns == 1 && product.others == 1;
        if self.gate.is_some() || !self.products.iter().all(is_one) {
            for tile in tiles {
                // SAFETY: the caller guarantees the same.
                unsafe { self.compute(w, tile) };
            }
            return;
        }
        let mut first = 0;
        for product in &self.products {
            let end = first + product.tiles();
            let (from, to) = (tiles.start.max(first), tiles.end.min(end));
            if from < to {
                // SAFETY: the caller guarantees the activations, and that no other thread computes
                // these tiles of the product, which has one column and one matrix.
                unsafe { product.run(w, from - first..to - first) };
            }
            first = end;
        }
    }

    /// Computes a tile of one plan.
    ///
    /// # Safety
    /// As [`DenseProducts::kernel`]; no other thread computes this tile.
    unsafe fn compute(&self, w: &Worker<'_>, tile: usize) {
        let (products, tile) = self.of_tile(tile);
        // SAFETY: the caller guarantees the activations and that no other thread computes the tile.
        // Both products of a GLU have the same tiles, and the scratch memory has a tile for each
        // worker at `own`. No other tile has these results, which overlap no source.
        unsafe {
            products[0].tile(w, tile, WeightRows::InPlace);
            if let (Some(gate), Some(factor)) = (&self.gate, products.get(1)) {
                let factors = gate.tile_of(w, factor);
                let out = (factors, factor.grain_rows);
                factor.multiply(w, tile, out, WeightRows::InPlace);
                gate.apply(factor, tile, factors);
            }
        }
    }
}

impl Gate {
    /// The memory of a worker for a tile of the second product.
    fn tile_of(&self, w: &Worker<'_>, factor: &TiledProduct) -> *mut f32 {
        let own = w.scratch().wrapping_add(self.own).cast::<f32>();
        own.wrapping_add(w.index() * factor.tile_floats())
    }

    /// The GLU of a tile: the first product is in the destination, the second at `factors`.
    ///
    /// # Safety
    /// Both are computed, `factors` by this thread, and no other thread accesses them.
    unsafe fn apply(&self, factor: &TiledProduct, tile: usize, factors: *mut f32) {
        let (rows, columns) = factor.ranges(tile);
        for (i, column) in columns.enumerate() {
            let row = self.unit.dst.row_ptr([column, 0, 0]).cast::<f32>();
            // SAFETY: the destination has a row of floats for each column, and `rows` are inside
            // it, by the check of MUL_MAT and GLU. The tile at `factors` has `grain_rows` floats
            // for each column.
            unsafe {
                let to = row.add(rows.start);
                let factors = factors.add(i * factor.grain_rows);
                self.unit.apply(to, [to, factors], rows.len());
            }
        }
    }
}

impl JointKernel for DenseProducts {
    fn key(&self) -> Vec<u64> {
        let mut key = vec![
            u64::from(self.gate.is_some()),
            self.products.len() as u64,
            self.longest_run() as u64,
        ];
        for product in &self.products {
            let weight = &product.weight;
            key.extend([
                weight.ptr() as u64,
                weight.ty as u64,
                weight.ne[0] as u64,
                weight.ne[1] as u64,
                weight.nb[1] as u64,
                product.grain_rows as u64,
                product.kernel.gemm as usize as u64,
            ]);
        }
        key
    }

    fn tiles(&self) -> usize {
        match self.gate {
            Some(_) => self.products[0].tiles(),
            None => self.products.iter().map(TiledProduct::tiles).sum(),
        }
    }

    fn longest_run(&self) -> usize {
        if !self.has_few_columns() {
            return 1;
        }
        // A tile of a GLU is one of each product.
        let products = self.gate.as_ref().map_or(1, |_| self.products.len());
        let longest = self.products.iter().map(TiledProduct::longest_run);
        (longest.min().unwrap_or(1) / products).max(1)
    }

    fn prefetch(&self, index: usize, count: usize) {
        let runs = Runs::new(self.tiles(), self.longest_run(), count);
        let Some(run) = runs.range(index).filter(|_| self.has_few_columns()) else {
            return;
        };
        let (products, tile) = self.of_tile(run.start);
        for product in products {
            let (rows, _) = product.ranges(tile);
            let most = PREFETCHED_BYTES / products.len() / product.weight.nb[1].max(1);
            let first = [rows.start, 0, 0];
            product.weight.prefetch_rows(first, rows.len().min(most));
        }
    }

    fn has_tiles_alone(&self) -> bool {
        true
    }

    unsafe fn run(&self, members: &[JointMember<'_>], tiles: &mut dyn Iterator<Item = usize>) {
        for tile in tiles {
            // SAFETY: the caller guarantees what `tile` asks.
            unsafe { self.tile(tile, members) };
        }
    }
}

impl DenseProducts {
    /// Computes a tile of each member.
    ///
    /// # Safety
    /// As for [`JointKernel::run`]; no other thread computes this tile.
    unsafe fn tile(&self, tile: usize, members: &[JointMember<'_>]) {
        let (products, own) = self.of_tile(tile);
        for (i, product) in products.iter().enumerate() {
            let mut table = ColumnBuffer::new();
            for member in members {
                let kernel = member.kernel::<DenseProducts>();
                let (out, stride) = kernel.results(member.worker, tile, i);
                let theirs = &kernel.of_tile(tile).0[i];
                for column in 0..theirs.columns {
                    table.push(Column {
                        x: theirs.column(member.worker, column),
                        dst: out.wrapping_add(column * stride),
                    });
                    if table.is_full() {
                        // SAFETY: by the keys of the members and `can_join`, the products have the
                        // same weights, tiles and kernel, which takes tables. The table has columns
                        // of the members' activations and of their results in this tile, which only
                        // this thread accesses.
                        unsafe { product.multiply_table(own, table.take()) };
                    }
                }
            }
            // SAFETY: each member has a product with the same weights, tiles and kernel, by its
            // key, and `can_join` has required a kernel that takes tables. The columns are those of
            // the activations of the members, converted, and of their results in this tile: in
            // their destinations, or in memory of this thread. No other thread accesses these, and
            // they overlap no source.
            unsafe { product.multiply_table(own, table.take()) };
        }
        for member in members {
            let kernel = member.kernel::<DenseProducts>();
            let (products, tile_of_each) = kernel.of_tile(tile);
            for (i, product) in products.iter().enumerate() {
                // SAFETY: the tile is computed, and no other thread accesses its results.
                unsafe {
                    let results = kernel.results(member.worker, tile, i);
                    product.add_bias(product.ranges(tile_of_each), results);
                }
            }
            if let (Some(gate), Some(factor)) = (&kernel.gate, products.get(1)) {
                // SAFETY: both products are computed, the second by this thread in its own memory.
                unsafe { gate.apply(factor, tile, gate.tile_of(member.worker, factor)) };
            }
        }
    }

    /// Where the results of product `i` of a tile are: the first, and the floats from one column to
    /// the next.
    fn results(&self, w: &Worker<'_>, tile: usize, i: usize) -> (*mut f32, usize) {
        let (products, tile) = self.of_tile(tile);
        let product = &products[i];
        match (&self.gate, i) {
            (Some(gate), 1) => (gate.tile_of(w, product), product.grain_rows),
            _ => product.results(w, tile),
        }
    }
}

impl TiledProduct {
    /// The tiles of [`RUN_BYTES`] of weights, or those whose products in the largest batch are as
    /// many as in the largest tile. The same for any number of columns.
    fn longest_run(&self) -> usize {
        let (k, rows) = (self.weight.ne[0], self.grain_rows);
        let columns = columns_end(&self.kernel)
            .saturating_sub(1)
            .saturating_mul(MAX_BATCH);
        let products = k.saturating_mul(rows).saturating_mul(columns);
        let bytes = rows.saturating_mul(self.weight.nb[1]);
        (RUN_BYTES / bytes.max(1)).min(tile_products(k) / products.max(1))
    }

    /// The products of the largest tile of a batch.
    fn tile_of_batch(&self) -> usize {
        let columns = self.columns.saturating_mul(MAX_BATCH);
        let rows = self.grain_rows.min(self.weight.ne[1]);
        self.weight.ne[0]
            .saturating_mul(rows)
            .saturating_mul(columns)
    }
}

/// Columns that are multiplied at once.
struct ColumnBuffer {
    columns: [Column; MAX_COLUMNS],
    len: usize,
}

impl ColumnBuffer {
    fn new() -> ColumnBuffer {
        let none = Column {
            x: ptr::null(),
            dst: ptr::null_mut(),
        };
        ColumnBuffer {
            columns: [none; MAX_COLUMNS],
            len: 0,
        }
    }

    fn is_full(&self) -> bool {
        self.len == MAX_COLUMNS
    }

    /// Adds a column to a buffer that is not full.
    fn push(&mut self, column: Column) {
        self.columns[self.len] = column;
        self.len += 1;
    }

    /// The columns. The buffer is empty afterwards.
    fn take(&mut self) -> &mut [Column] {
        let len = std::mem::take(&mut self.len);
        &mut self.columns[..len]
    }
}
