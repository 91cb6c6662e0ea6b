//! The products of experts of several plans at once: the columns of all plans, by expert.

use std::ops::Range;

use super::super::super::scratch::Output;
use super::super::joint::{MAX_COLUMNS, columns_end};
use super::super::tiles::tile_products;
use super::super::weight_rows::WeightRows;
use super::{ColumnTile, ExpertProduct, ExpertProducts, Results};
use crate::batch::MAX_BATCH;
use crate::gemm::{Column, GemmArgs};
use crate::kernel::{Fault, JointKernel, JointMember, Worker};

/// The most pairs of a plan in a batch. Each thread has a list of those of all members: up to 4096
/// items of 56 bytes.
const MAX_PAIRS: usize = 256;

/// The most experts in a tile. Most tiles of an expert that no token has selected cost nothing but
/// the taking, if tiles have several experts.
const MAX_EXPERTS: usize = 8;

impl ExpertProducts {
    /// Whether plans can compute the products together: each result is the same beside other
    /// columns, and the columns are few.
    pub(super) fn can_join(&self) -> bool {
        let kernel = &self.columns.activations.kernel;
        let is_direct = match &self.results {
            Results::Each(outputs) => !outputs.iter().any(Output::is_staged),
            Results::Gated(_) => true,
        };
        kernel.takes_tables
            && (1..columns_end(kernel)).contains(&self.columns.ids.ne[1])
            && (1..=MAX_PAIRS).contains(&self.columns.pairs)
            && matches!(self.weight_rows, WeightRows::InPlace)
            && is_direct
            && self.row_tiles(|product| product.batch_grain) > 0
            && (self.products.iter())
                .all(|product| self.tile_of_batch(product) <= tile_products(product.weight.ne[0]))
    }

    /// The products of the largest tile of a batch: all columns have the same expert.
    fn tile_of_batch(&self, product: &ExpertProduct) -> usize {
        let rows = product.batch_grain.min(product.rows());
        { product.weight.ne[0].saturating_mul(rows) }
            .saturating_mul(self.columns.pairs)
            .saturating_mul(MAX_BATCH)
            .saturating_mul(self.products_of_tile())
    }

    /// The products that are computed for the same rows.
    fn products_of_tile(&self) -> usize {
        match self.results {
            Results::Each(_) => 1,
            Results::Gated(_) => 2,
        }
    }

    /// The experts of a tile: so many that a tile mostly has some columns of a few members.
    fn experts_of_tile(&self) -> usize {
        let selected = self.columns.used.max(1).saturating_mul(4);
        (self.columns.experts / selected).clamp(1, MAX_EXPERTS)
    }

    /// Adds the columns of this plan to `all`, or none.
    ///
    /// # Errors
    /// [`Fault::Index`] if an id is wrong.
    ///
    /// # Safety
    /// The kernels of [`prepare`](super::ExpertColumns::prepare) ran before the last barrier.
    unsafe fn add_column_tiles<'a>(
        &'a self,
        w: &'a Worker<'a>,
        all: &mut Vec<MemberTile<'a>>,
    ) -> Result<(), Fault> {
        let before = all.len();
        // SAFETY: the caller guarantees the kernels of `prepare`.
        for at in 0..unsafe { self.columns.tiles(w) } {
            // SAFETY: the kernels of `prepare` ran, as the caller guarantees, and `at` is one of
            // their tiles.
            match unsafe { self.columns.tile(w, at) } {
                Ok(tile) => all.push(MemberTile { of: self, w, tile }),
                Err(fault) => {
                    all.truncate(before);
                    return Err(fault);
                }
            }
        }
        Ok(())
    }

    /// Computes rows of one expert for the columns of a table, which is empty afterwards.
    ///
    /// # Safety
    /// The table has converted columns of members that have this key, and their results for `rows`,
    /// which only this thread accesses. `factors` is writable for `batch_floats` of the product, if
    /// there is a GLU.
    unsafe fn compute_table(
        &self,
        (expert, product, rows): (usize, usize, &Range<usize>),
        table: &mut Table<'_>,
        factors: *mut f32,
    ) {
        if table.columns.is_empty() {
            return;
        }
        let stride = self.products[product].batch_grain;
        // SAFETY: all members have the weights of this kernel, and `can_join` has required a kernel
        // that takes tables, few columns, and weights in its type. The caller guarantees columns,
        // results, and the memory of the factors.
        unsafe {
            self.products[product].multiply_table(expert, rows, &mut table.columns);
            if let Results::Gated(_) = self.results {
                for (i, column) in table.columns.iter_mut().enumerate() {
                    column.dst = factors.add(i * stride);
                }
                self.products[1].multiply_table(expert, rows, &mut table.columns);
            }
            for (i, &(MemberTile { of, w, .. }, pair)) in table.owners.iter().enumerate() {
                let to = of.result(w, product, pair).add(rows.start);
                of.products[product].add_bias(expert, rows, to);
                if let Results::Gated(unit) = &of.results {
                    let factors = factors.add(i * stride);
                    of.products[1].add_bias(expert, rows, factors);
                    unit.apply(to, [to, factors], rows.len());
                }
            }
        }
        table.columns.clear();
        table.owners.clear();
    }
}

impl ExpertProduct {
    /// Multiplies rows of an expert with the columns of a table.
    ///
    /// # Safety
    /// As for [`ExpertProducts::compute_table`].
    unsafe fn multiply_table(&self, expert: usize, rows: &Range<usize>, columns: &mut [Column]) {
        // SAFETY: the weights have the expert and the rows. The caller guarantees the columns of
        // the table, and a kernel that takes one.
        unsafe {
            let w = self.weights_of(expert, rows);
            let size = (self.weight.ne[0], rows.len());
            (self.kernel.gemm)(&GemmArgs::with_table((w, self.weight.nb[1]), size, columns));
        }
    }
}

/// Columns of one member that have the same expert.
struct MemberTile<'a> {
    of: &'a ExpertProducts,
    w: &'a Worker<'a>,
    tile: ColumnTile<'a>,
}

impl MemberTile<'_> {
    /// Whether the member alone multiplies these columns with panels, which have another order of
    /// sums than a table. Only a token that selects an expert twice has so many columns.
    fn has_panels(&self) -> bool {
        let kernel = &self.of.columns.activations.kernel;
        !kernel.one_order && self.tile.pairs().len() >= kernel.panel_cols
    }
}

/// Columns that are multiplied at once, and whose they are: their member and their pair.
struct Table<'a> {
    columns: Vec<Column>,
    owners: Vec<(&'a MemberTile<'a>, usize)>,
}

impl JointKernel for ExpertProducts {
    fn key(&self) -> Vec<u64> {
        // The keys of dense products begin with 0 or 1.
        let mut key = vec![
            1 + self.products_of_tile() as u64,
            self.products.len() as u64,
            self.columns.experts as u64,
            self.experts_of_tile() as u64,
        ];
        for product in &self.products {
            let weight = &product.weight;
            key.extend([
                weight.ptr() as u64,
                weight.ty as u64,
                weight.ne[0] as u64,
                weight.ne[1] as u64,
                weight.nb[1] as u64,
                weight.nb[2] as u64,
                product.batch_grain as u64,
                product.kernel.gemm as usize as u64,
            ]);
        }
        key
    }

    fn tiles(&self) -> usize {
        let groups = self.columns.experts.div_ceil(self.experts_of_tile());
        self.row_tiles(|product| product.batch_grain) * groups
    }

    /// Alone, tiles are those of the experts that are selected. A guest may write other ids
    /// meanwhile, so these tiles need not be the same on all threads: the other members would miss
    /// theirs.
    fn has_tiles_alone(&self) -> bool {
        false
    }

    unsafe fn run(&self, members: &[JointMember<'_>], tiles: &mut dyn Iterator<Item = usize>) {
        let pairs = |member: &JointMember<'_>| member.kernel::<ExpertProducts>().columns.pairs;
        let mut all = Vec::with_capacity(members.iter().map(pairs).sum());
        for member in members {
            let kernel = member.kernel::<ExpertProducts>();
            // SAFETY: the caller guarantees that the earlier kernels of each member have succeeded.
            if let Err(fault) = unsafe { kernel.add_column_tiles(member.worker, &mut all) } {
                drop(member.fault.set(fault));
            }
        }
        let Some(first) = members.first() else {
            return;
        };
        // In place. The order of columns changes no bit of a result.
        all.sort_unstable_by_key(|of| of.tile.expert);
        let mut table = Table {
            columns: Vec::with_capacity(MAX_COLUMNS),
            owners: Vec::with_capacity(MAX_COLUMNS),
        };
        // The scratch memory of the first member has a tile for each of its workers at `factors`,
        // if there is a GLU.
        let factors = { first.worker.scratch() }
            .wrapping_add(first.kernel::<ExpertProducts>().factors)
            .cast::<f32>()
            .wrapping_add(first.worker.index() * self.products[0].batch_floats());
        let (each, grain) = (self.experts_of_tile(), |product: &ExpertProduct| {
            product.batch_grain
        });
        let groups = self.columns.experts.div_ceil(each);
        for tile in tiles {
            let (product, rows) = self.rows_of(tile / groups, grain);
            let experts = tile % groups * each..(tile % groups + 1) * each;
            let begin = all.partition_point(|of| of.tile.expert < experts.start);
            let end = all.partition_point(|of| of.tile.expert < experts.end);
            for of in all[begin..end].chunk_by(|a, b| a.tile.expert == b.tile.expert) {
                let which = (of[0].tile.expert, product, &rows);
                for of in of {
                    if of.has_panels() {
                        // SAFETY: the columns and results of a member are its own, this thread has
                        // the tile, and all products of the member have the columns.
                        unsafe { of.of.compute(of.w, &of.tile, product, &rows) };
                        continue;
                    }
                    for (i, &pair) in of.tile.pairs().iter().enumerate() {
                        if table.columns.len() == MAX_COLUMNS {
                            // SAFETY: the columns and results in the table are of members of this
                            // tile, which only this thread has.
                            unsafe { self.compute_table(which, &mut table, factors) };
                        }
                        let bytes = self.products[product].column_bytes;
                        table.columns.push(Column {
                            x: of.tile.columns.wrapping_add(i * bytes),
                            dst: of.of.result(of.w, product, pair).wrapping_add(rows.start),
                        });
                        table.owners.push((of, pair));
                    }
                }
                // SAFETY: the members have the key of this kernel. The columns are converted, the
                // results are those of a tile that only this thread has, of pairs that differ, and
                // `factors` is memory of this thread, if there is a GLU. If a guest writes other
                // ids meanwhile, two threads can find one pair of this guest in two tiles, and
                // write the same results: those of memory that this guest may write at any time.
                unsafe { self.compute_table(which, &mut table, factors) };
            }
        }
    }
}
