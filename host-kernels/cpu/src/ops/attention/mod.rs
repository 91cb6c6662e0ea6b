//! FLASH_ATTN_EXT: attention in tiles, without the matrix of all scores in memory (Dao et al.,
//! "FlashAttention", arXiv:2205.14135).
//!
//! A *row* is a query: one head of one token. Rows that see the same keys and values (the heads of
//! a group, the tokens of a sequence) form blocks, so that keys and values are read once per block.
//! A thread processes the keys of a block one tile at a time: it computes scores, their
//! exponentials, and adds the values weighted by these. Exponentials are relative to the largest
//! score so far; when that grows, the sums are rescaled (online softmax).
//!
//! Scores are stored *by row* (`by_row`) for few rows, *by key* (`by_key`) for many rows of plain
//! keys.
//!
//! Few blocks (a decode step) are also cut along the keys, into *spans*, whose sums are merged in a
//! second kernel (flash decoding). The cuts depend only on the shapes, so results are the same for
//! any number of threads.

mod by_key;
mod by_row;
mod mask;
mod rows;
mod state;

use half::{bf16, f16};
use vgpu_transport::ir::{OpKind, Rule, Type, TypeSet};

use super::gather::real_types;
use super::scratch::ScratchLayout;
use crate::gemm::MatmulKernel;
use crate::gemm_rows::{GemmRows, TILE_RESULTS};
use crate::kernel::{Compiled, Kernel};
use crate::operands::Operands;
use state::{Attention, Block, Sums, TILE_KEYS, Workspace};
use vgpu_engine::EngineError;

/// What this file runs.
pub(super) fn rules() -> Vec<Rule> {
    let f32 = TypeSet::of(&[Type::F32]);
    let keys: Vec<Type> = Type::ALL
        .iter()
        .copied()
        .filter(|&ty| MatmulKernel::of(ty).is_some())
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
            // SAFETY: the scratch is what was asked for, the units are dealt out once each.
            unsafe { attention.run(w.scratch(), w.index(), unit) };
        }
        Ok(())
    }));
    if spans > 1 {
        kernels.push(Box::new(move |w| {
            for block in w.share(attention.blocks()) {
                // SAFETY: all spans have been run, a barrier ago; blocks are shared out once each.
                unsafe { attention.merge(w.scratch(), block) };
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
    /// Runs a unit: a span of a block.
    ///
    /// # Safety
    /// The scratch is that of this operation; no two threads have the same index, and none other runs
    /// the same unit.
    unsafe fn run(&self, scratch: *mut u8, worker: usize, unit: usize) {
        let (index, span) = (unit / self.spans, unit % self.spans);
        let block = self.block(index);
        let state = if self.spans == 1 { worker } else { unit };
        // SAFETY: the state is this thread's, by index or by unit.
        let mut sums = unsafe { self.sums(scratch, state) };
        sums.clear();
        // SAFETY: the caller's contract covers these accesses.
        let space = unsafe { self.workspace(scratch, worker) };
        // SAFETY: the workspace is this thread's.
        unsafe {
            match self.by_key {
                true => self.read_queries_by_key(block, &space),
                false => self.read_queries_by_row(block, &space),
            }
        }
        let end = self.k.ne[1].min((span + 1) * self.span_keys);
        for first in (span * self.span_keys..end).step_by(TILE_KEYS) {
            let keys = TILE_KEYS.min(end - first);
            // SAFETY: there are `keys` keys from `first` on; the workspace is this thread's.
            unsafe {
                let visible = self.look(block, first, keys);
                if visible.live == 0 {
                    continue;
                }
                let keys = visible.keys();
                // What is read only once must be on its way before it is needed.
                let streaming = block.rows() <= TILE_RESULTS;
                let [v2, v3] = self.shared(block, &self.v);
                if streaming {
                    self.v.prefetch_rows([first, v2, v3], keys);
                }
                if self.by_key {
                    self.weigh_by_key(block, first, keys, visible, &space, &mut sums);
                } else {
                    self.weigh_by_row(block, first, keys, visible, &space, &mut sums);
                }
                if streaming && first + TILE_KEYS < end {
                    let (next, [k2, k3]) = (first + TILE_KEYS, self.shared(block, &self.k));
                    let keys = TILE_KEYS.min(end - next);
                    self.k.prefetch_rows([next, k2, k3], keys);
                }
                self.mix(block, first, keys, visible.live, &space, &mut sums);
            }
        }
        if self.spans == 1 {
            self.finish(scratch, block, &mut sums);
        }
    }

    /// Adds the weighted values of a tile of keys to the sums.
    ///
    /// # Safety
    /// There are so many keys; the workspace is of this operation and this thread, with the weights.
    unsafe fn mix(
        &self,
        block: Block,
        first: usize,
        keys: usize,
        live: u64,
        space: &Workspace,
        sums: &mut Sums<'_>,
    ) {
        let [v2, v3] = self.shared(block, &self.v);
        let (stride, step) = match self.by_key {
            true => (1, self.block_rows()),
            false => (TILE_KEYS, 1),
        };
        let mix = GemmRows {
            results: block.rows(),
            terms: keys,
            n: self.v.ne[0],
            weights: space.scores.cast_const(),
            weights_stride: stride,
            weights_step: step,
            rows: space.value_tile.cast_const(),
            rows_stride: self.width,
            out: sums.values.as_mut_ptr(),
            out_stride: self.width,
        };
        let all_live = live == u64::MAX >> (64 - keys);
        // Values that are mixed once need not be converted first.
        let once = block.rows() <= TILE_RESULTS;
        let values = self.v.row_ptr([first, v2, v3]).cast_const();
        let stride = self.v.nb[1];
        // SAFETY: by the caller's contract; rows of values are dense, their strides whole elements;
        // the workspace has room for a tile of them.
        unsafe {
            match self.v.ty {
                Type::F32 if all_live => mix.add_rows::<f32>(values, stride),
                Type::F16 if all_live && once => mix.add_rows::<f16>(values, stride),
                Type::Bf16 if all_live && once => mix.add_rows::<bf16>(values, stride),
                _ => {
                    self.values
                        .read([first, v2, v3], keys, live, space.value_tile, self.width);
                    mix.add();
                }
            }
        }
    }

    /// Merges the spans of a block into the first and writes the results.
    ///
    /// # Safety
    /// The scratch is that of this operation; all spans have been run; no other thread has the block.
    unsafe fn merge(&self, scratch: *mut u8, index: usize) {
        let block = self.block(index);
        // SAFETY: the states of the block's units are this thread's now, and distinct.
        let mut sums = unsafe { self.sums(scratch, index * self.spans) };
        for span in 1..self.spans {
            // SAFETY: as above.
            let other = unsafe { self.sums(scratch, index * self.spans + span) };
            for (r, ..) in block.queries() {
                if other.weights[r] == 0.0 {
                    continue;
                }
                let share = sums.rise(r, other.largest[r]);
                sums.weights[r] += other.weights[r] * share;
                let at = r * self.width..(r + 1) * self.width;
                for (sum, value) in sums.values[at.clone()].iter_mut().zip(&other.values[at]) {
                    *sum += value * share;
                }
            }
        }
        self.finish(scratch, block, &mut sums);
    }

    /// Adds the sinks, divides by the sums of the weights and writes the results.
    fn finish(&self, scratch: *mut u8, block: Block, sums: &mut Sums<'_>) {
        let strides = self.output.strides();
        for (r, token, head) in block.queries() {
            if let Some(sinks) = self.sinks {
                // SAFETY: sinks are contiguous floats, one for each head.
                let sink = unsafe { sinks.ptr().cast::<f32>().add(head).read() };
                let share = sums.rise(r, sink);
                sums.weights[r] += share;
            }
            // Rows that see nothing are 0.
            let weight = sums.weights[r];
            let inverse = if weight == 0.0 { 0.0 } else { 1.0 / weight };
            let values = &mut sums.values[r * self.width..][..self.v.ne[0]];
            values.iter_mut().for_each(|value| *value *= inverse);
            let to = head * strides[0] + token * strides[1] + block.sequence * strides[2];
            // SAFETY: a row of the destination, or of scratch in its place.
            unsafe {
                let to = self.output.base(scratch).add(to).cast::<f32>();
                to.copy_from_nonoverlapping(values.as_ptr(), values.len());
            }
        }
    }
}
