//! FLASH_ATTN_EXT: attention in tiles, without the matrix of all scores in memory (Dao et al.,
//! "FlashAttention", arXiv:2205.14135).
//!
//! A *row* is a query: one head of one token. Rows that attend to the same keys and values (the
//! heads of a group, the tokens of a sequence) form blocks, so that keys and values are read once
//! per block. A thread processes the keys of a block one tile at a time: it computes scores, their
//! exponentials, and adds the values weighted by these. Exponentials are relative to the largest
//! score so far. When the largest score grows, the sums are rescaled (online softmax).
//!
//! Scores are stored *by row* (`by_row`) for few rows, *by key* (`by_key`) for many rows of plain
//! keys.
//!
//! If there are few blocks (a decode step), the keys are also divided into *spans*, whose sums are
//! merged in a second kernel (flash decoding). The division depends only on the shapes, so results
//! are the same for any number of threads.

mod by_key;
mod by_row;
mod mask;
mod rows;
mod state;

use half::{bf16, f16};
use vgpu_transport::ir::{OpKind, Rule, Type, TypeSet};

use super::gather::real_types;
use super::scratch::ScratchLayout;
use crate::gemm::{MatmulKernel, WeightedRowsArgs};
use crate::gemm_rows::{GemmRows, TILE_RESULTS};
use crate::kernel::{Compiled, Estimate, Kernel};
use crate::operands::Operands;
use state::{Attention, MANY_ROWS, QueryBlock, Sums, TILE_KEYS, Workspace};
use vgpu_engine::EngineError;

/// The type combinations that this family runs.
pub(super) fn rules() -> Vec<Rule> {
    let f32 = TypeSet::of(&[Type::F32]);
    let keys: Vec<Type> = Type::ALL
        .iter()
        .copied()
        .filter(|&ty| MatmulKernel::exists(ty))
        .collect();
    vec![Rule::new(
        OpKind::FlashAttnExt,
        f32,
        &[f32, TypeSet::of(&keys), real_types()],
    )]
}

/// FLASH_ATTN_EXT.
pub(super) fn flash_attn_ext(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    let mut kernels: Vec<Kernel> = Vec::new();
    if operands.dst().elements() == 0 {
        return Ok(Compiled {
            kernels,
            scratch_bytes: 0,
        });
    }
    let mut scratch = ScratchLayout::default();
    let attention = Attention::new(operands, &mut scratch);
    let Attention { spans, output, .. } = attention;
    kernels.push(Box::new(move |w| {
        for unit in w.chunks(attention.blocks() * spans, 1).flatten() {
            // SAFETY: the kernel has the scratch memory that `Attention::new` has reserved. A
            // worker has its own index, and `chunks` returns each unit to one worker.
            unsafe { attention.run(w.scratch(), w.index(), unit) };
        }
        Ok(())
    }));
    if spans > 1 {
        let most = Estimate::steps(attention.block_rows() * attention.width);
        kernels.push(Box::new(move |w| {
            for unit in w.range_of_groups(attention.blocks(), spans - 1).each(most) {
                let (block, span) = (unit / (spans - 1), unit % (spans - 1) + 1);
                // SAFETY: the kernel has the scratch memory that `Attention::new` has reserved. All
                // spans were computed before the barrier between the two kernels. `range_of_groups`
                // returns the spans of a block to one worker, in order.
                unsafe { attention.merge(w.scratch(), block, span) };
            }
            Ok(())
        }));
    }
    output.finish(&mut kernels);
    Ok(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

impl Attention {
    /// Computes a unit: a span of a block.
    ///
    /// # Safety
    /// `scratch` is the scratch memory of this operator. No other thread has the index `worker`,
    /// and no other thread computes `unit`.
    unsafe fn run(&self, scratch: *mut u8, worker: usize, unit: usize) {
        // Blocks of the same span are adjacent: the keys and values of a position are side by side,
        // and heads of quantised caches share cache lines.
        let (index, span) = (unit % self.blocks(), unit / self.blocks());
        let block = self.block(index);
        let state = match self.spans {
            1 => worker,
            spans => index * spans + span,
        };
        // SAFETY: the state has the index of this worker, or is that of this unit. The caller
        // guarantees that no other thread uses it.
        let mut sums = unsafe { self.sums(scratch, state) };
        sums.clear();
        // SAFETY: the caller guarantees the scratch memory of this operator and that no other
        // thread has the index `worker`.
        let space = unsafe { self.workspace(scratch, worker) };
        // SAFETY: the workspace belongs to this worker.
        unsafe {
            match self.by_key {
                true => self.read_queries_by_key(block, &space),
                false => self.read_queries_by_row(block, &space),
            }
        }
        let end = self.k.ne[1].min((span + 1) * self.span_keys);
        if block.rows() < MANY_ROWS {
            let (first, [v2, v3]) = (span * self.span_keys, self.shared(block, &self.v));
            self.v
                .prefetch_rows([first, v2, v3], TILE_KEYS.min(end - first));
        }
        for first in (span * self.span_keys..end).step_by(TILE_KEYS) {
            let keys = TILE_KEYS.min(end - first);
            // SAFETY: `first + keys <= end <= k.ne[1]`. The workspace belongs to this worker and
            // has the queries of the block.
            unsafe {
                let visible = self.visible(block, first, keys);
                if visible.live == 0 {
                    continue;
                }
                let keys = visible.keys();
                // Keys and values that few rows read are prefetched a tile before: those of keys
                // have the time of this tile, and so have those of values.
                let next = first + TILE_KEYS;
                let next_keys = match block.rows() < MANY_ROWS {
                    true => TILE_KEYS.min(end.saturating_sub(next)),
                    false => 0,
                };
                let ([k2, k3], [v2, v3]) =
                    (self.shared(block, &self.k), self.shared(block, &self.v));
                self.k.prefetch_rows([next, k2, k3], next_keys);
                if self.by_key {
                    self.weights_by_key(block, first, keys, visible, &space, &mut sums);
                } else {
                    self.weights_by_row(block, first, keys, visible, &space, &mut sums);
                }
                self.v.prefetch_rows([next, v2, v3], next_keys);
                self.add_values(block, first, keys, visible.live, &space, &mut sums);
            }
        }
        if self.spans == 1 {
            // SAFETY: the caller guarantees what `finish` requires.
            unsafe { self.finish(scratch, block, &mut sums) };
        }
    }

    /// Adds the weighted values of a tile of keys to the sums.
    ///
    /// # Safety
    /// `first + keys` is at most the number of keys. `space` is the workspace of this worker, with
    /// the weights of these keys.
    unsafe fn add_values(
        &self,
        block: QueryBlock,
        first: usize,
        keys: usize,
        live: u64,
        space: &Workspace,
        sums: &mut Sums<'_>,
    ) {
        let [v2, v3] = self.shared(block, &self.v);
        if let Some(weighted_rows) = self.weighted_rows {
            // SAFETY: the caller guarantees `keys <= TILE_KEYS` rows of values from `first` on, and
            // weights for them, by row. Rows of values are dense, by the check of FLASH_ATTN_EXT.
            // The sums belong to this worker.
            unsafe {
                weighted_rows(&WeightedRowsArgs {
                    results: block.rows(),
                    terms: keys,
                    live,
                    n: self.v.ne[0],
                    weights: space.scores.cast_const(),
                    weights_stride: TILE_KEYS,
                    totals: sums.weights.as_ptr(),
                    rows: self.v.row_ptr([first, v2, v3]).cast_const(),
                    rows_stride: self.v.nb[1],
                    out: sums.values.as_mut_ptr(),
                    out_stride: self.width,
                });
            }
            return;
        }
        let (weights_stride, weights_step) = match self.by_key {
            true => (1, self.block_rows()),
            false => (TILE_KEYS, 1),
        };
        let product = GemmRows {
            results: block.rows(),
            terms: keys,
            n: self.v.ne[0],
            weights: space.scores.cast_const(),
            weights_stride,
            weights_step,
            rows: space.value_tile.cast_const(),
            rows_stride: self.width,
            out: sums.values.as_mut_ptr(),
            out_stride: self.width,
        };
        let all_live = live == u64::MAX >> (64 - keys);
        // Values that are used once are converted while they are added.
        let once = block.rows() <= TILE_RESULTS;
        let values = self.v.row_ptr([first, v2, v3]).cast_const();
        let stride = self.v.nb[1];
        // SAFETY: the caller guarantees `keys` rows of values from `first` on, and weights for
        // them. Rows of values are dense, by the check of FLASH_ATTN_EXT, and their strides are
        // multiples of an element.
        // `value_tile` has `TILE_KEYS >= keys` rows of `width` floats. The sums belong to this
        // worker.
        unsafe {
            match self.v.ty {
                Type::F32 if all_live => product.add_rows::<f32>(values, stride),
                Type::F16 if all_live && once => product.add_rows::<f16>(values, stride),
                Type::Bf16 if all_live && once => product.add_rows::<bf16>(values, stride),
                _ => {
                    self.values
                        .read([first, v2, v3], keys, live, space.value_tile, self.width);
                    product.add();
                }
            }
        }
    }

    /// Merges span `span` of a block into the first. After the last span, writes the results.
    ///
    /// # Safety
    /// `scratch` is the scratch memory of this operator. All spans have been computed, and those
    /// before `span` are merged. No other thread accesses the states of the block.
    unsafe fn merge(&self, scratch: *mut u8, index: usize, span: usize) {
        let block = self.block(index);
        // SAFETY: the caller guarantees the states of the block. `sums` is the state of its first
        // span.
        let mut sums = unsafe { self.sums(scratch, index * self.spans) };
        // SAFETY: the caller guarantees the states of the block. `span > 0`, so this state is not
        // the state of `sums`.
        let other = unsafe { self.sums(scratch, index * self.spans + span) };
        for (r, ..) in block.queries() {
            if other.weights[r] == 0.0 {
                continue;
            }
            let share = sums.raise_largest(r, other.largest[r]);
            sums.weights[r] += other.weights[r] * share;
            let at = r * self.width..(r + 1) * self.width;
            for (sum, value) in sums.values[at.clone()].iter_mut().zip(&other.values[at]) {
                *sum += value * share;
            }
        }
        if span == self.spans - 1 {
            // SAFETY: the caller guarantees what `finish` requires.
            unsafe { self.finish(scratch, block, &mut sums) };
        }
    }

    /// Adds the sinks, divides by the sums of the weights and writes the results.
    ///
    /// # Safety
    /// `scratch` must be the scratch memory of this operator, and no other thread may compute
    /// `block` meanwhile.
    unsafe fn finish(&self, scratch: *mut u8, block: QueryBlock, sums: &mut Sums<'_>) {
        let strides = self.output.strides();
        for (r, token, head) in block.queries() {
            if let Some(sinks) = self.sinks {
                // SAFETY: `sinks` is contiguous, with one float for each head, by the check of
                // FLASH_ATTN_EXT.
                let sink = unsafe { sinks.ptr().cast::<f32>().add(head).read() };
                let share = sums.raise_largest(r, sink);
                sums.weights[r] += share;
            }
            // A row that sees no key is 0.
            let weight = sums.weights[r];
            let inverse = if weight == 0.0 { 0.0 } else { 1.0 / weight };
            let values = &mut sums.values[r * self.width..][..self.v.ne[0]];
            values.iter_mut().for_each(|value| *value *= inverse);
            let to = head * strides[0] + token * strides[1] + block.sequence * strides[2];
            // SAFETY: `to` is a row of the destination, or of the scratch memory that replaces it,
            // with `v.ne[0]` floats. No other block has this row, and no other thread has this
            // block (this function's contract).
            unsafe {
                let to = self.output.base(scratch).add(to).cast::<f32>();
                to.copy_from_nonoverlapping(values.as_ptr(), values.len());
            }
        }
    }
}
