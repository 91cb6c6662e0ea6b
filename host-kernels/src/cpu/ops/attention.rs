//! FLASH_ATTN_EXT: attention in tiles, without the matrix of all scores in memory.
//!
//! A *row* is a query: one head of one token. Rows that see the same keys and values (the heads of a
//! group, the tokens of a sequence) make blocks, so that what is read of keys and values serves all of
//! them. A thread goes with a block along the keys, a tile at a time: scores are products of keys and
//! queries, their exponentials the weights of the values. The exponentials are relative to the largest
//! score so far; when it grows, what has been summed up shrinks.
//!
//! Scores lie *by row* where there are few rows: keys are multiplied in the type they have. Plain keys
//! and many rows make scores that lie *by key*: a vector holds one key's scores of as many rows, so that
//! nothing is summed or compared across the lanes of a vector.
//!
//! Few blocks (a decode step) are cut along the keys, too, into *spans*, whose sums are merged in a
//! second step. How depends on the shapes alone: results are the same for any number of threads.

use half::{bf16, f16};
use vgpu_transport::ir::{Op, OpKind, Rule, Type, TypeSet};

use super::gather::{RowReader, real_types};
use super::softmax::Slopes;
use super::staging::{Layout, Output};
use crate::cpu::formats::Format;
use crate::cpu::gemm::MatmulKernel;
use crate::cpu::mix::{Mix, TILE_RESULTS};
use crate::cpu::plan::{Compiled, Kernel, Operands};
use crate::cpu::simd::{Simd, Task, chunks, dispatch};
use crate::cpu::view::View;
use crate::engine::EngineError;

/// Most rows in a block.
const BLOCK_ROWS: usize = 64;

/// Keys in a tile.
const TILE_KEYS: usize = 64;
const _: () = assert!(
    TILE_KEYS == u64::BITS as usize,
    "the keys of a tile are bits of a word"
);

/// From this many rows on, scores of plain keys lie by key.
const MANY_ROWS: usize = 16;

/// Floats of a cache line, a multiple of those of a vector.
const LINE_FLOATS: usize = 16;

/// Keys are cut into spans until there is this much work to deal out, however many threads there are.
const UNITS: usize = 64;

/// The fewest keys in a span.
const SPAN_KEYS: usize = 4 * TILE_KEYS;

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
    let mut scratch = Layout::default();
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

#[derive(Clone, Copy)]
struct Attention {
    q: View,
    k: View,
    v: View,
    mask: Option<View>,
    sinks: Option<View>,
    output: Output,
    /// Multiplies keys with queries, if scores lie by row.
    kernel: MatmulKernel,
    keys: RowReader,
    values: RowReader,
    /// Scores are multiplied with this, then, if `cap` is not 0, brought between -cap and cap.
    scale: f32,
    cap: f32,
    slopes: Slopes,
    /// Heads that share keys and values.
    group: usize,
    /// Spans of the keys, and keys in each.
    spans: usize,
    span_keys: usize,
    /// Whether scores lie by key.
    by_key: bool,
    /// Bytes from one query to the next in the type that keys are multiplied with.
    query_bytes: usize,
    /// Floats of a row of values or results, padded to a cache line.
    width: usize,
    /// Offsets in scratch of each thread's working memory.
    queries: usize,
    scores: usize,
    masks: usize,
    biases: usize,
    key_tile: usize,
    value_tile: usize,
    /// Offset in scratch of the sums: of each thread, or of each unit if they are to be merged.
    sums: usize,
}

/// The rows of a block: some neighbours out of the tokens and heads of a group, heads innermost.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    rows: usize,
    first_head: usize,
    sequence: usize,
}

/// What a thread works in.
struct Workspace {
    /// By row: a query after the other. By key: floats, an element of all rows after the other.
    queries: *mut u8,
    /// By row: a tile of keys for each row. By key: all rows for each key.
    scores: *mut f32,
    /// The mask of the tile as floats, each distinct row once.
    masks: *mut f32,
    /// By key: what is added to the scores.
    biases: *mut f32,
    /// Keys and values of the tile as floats.
    key_tile: *mut f32,
    value_tile: *mut f32,
}

/// What a mask says of a tile of keys.
#[derive(Clone, Copy)]
struct Visible {
    /// The keys that any row sees, one bit each.
    live: u64,
    /// All rows see all keys as they are.
    plain: bool,
}

impl Attention {
    fn new(operands: &Operands<'_>, scratch: &mut Layout) -> Attention {
        let &Op::FlashAttnExt {
            scale,
            max_bias,
            logit_softcap: cap,
            ..
        } = operands.op()
        else {
            unreachable!("this family has one operator")
        };
        let (q, k, v) = (operands.src(0), operands.src(1), operands.src(2));
        let (mask, sinks) = (operands.optional(3), operands.optional(4));
        let kernel = MatmulKernel::of(k.ty).expect("the rules claim no other keys");
        let activation = Format::of(kernel.activation).expect("every weight's activation is one");
        let sources: Vec<View> = [Some(q), Some(k), Some(v), mask, sinks]
            .into_iter()
            .flatten()
            .collect();
        let group = greatest_common_divisor(q.ne[2] / k.ne[2], q.ne[2] / v.ne[2]);
        let mut attention = Attention {
            q,
            k,
            v,
            mask,
            sinks,
            output: Output::new(operands.dst(), &sources, scratch),
            kernel,
            keys: RowReader::new(&k),
            values: RowReader::new(&v),
            scale: if cap == 0.0 { scale } else { scale / cap },
            cap,
            slopes: Slopes::new(max_bias, q.ne[2]),
            group,
            spans: 1,
            span_keys: k.ne[1],
            by_key: !k.ty.is_quantized() && q.ne[1] * group >= MANY_ROWS,
            query_bytes: activation.row_bytes(k.ne[0]).next_multiple_of(64),
            width: v.ne[0].next_multiple_of(LINE_FLOATS),
            queries: 0,
            scores: 0,
            masks: 0,
            biases: 0,
            key_tile: 0,
            value_tile: 0,
            sums: 0,
        };
        let blocks = attention.blocks();
        if blocks < UNITS {
            let keys = k.ne[1].div_ceil(UNITS.div_ceil(blocks)).max(SPAN_KEYS);
            attention.span_keys = keys.next_multiple_of(TILE_KEYS);
            attention.spans = k.ne[1].div_ceil(attention.span_keys).max(1);
        }
        let (workers, by_key) = (operands.workers(), attention.by_key);
        let mut room = |count: usize, floats: usize| scratch.room(count, floats * size_of::<f32>());
        let rows = attention.block_rows();
        attention.queries = room(workers, attention.query_floats());
        attention.scores = room(workers, rows * TILE_KEYS);
        attention.masks = room(workers, rows * TILE_KEYS);
        attention.biases = room(if by_key { workers } else { 0 }, rows * TILE_KEYS);
        attention.key_tile = room(if by_key { workers } else { 0 }, TILE_KEYS * k.ne[0]);
        attention.value_tile = room(workers, TILE_KEYS * attention.width);
        let states = match attention.spans {
            1 => workers,
            spans => blocks * spans,
        };
        attention.sums = room(states, attention.state_floats());
        attention
    }

    /// Rows there is room for in a block: whole cache lines of floats.
    fn block_rows(&self) -> usize {
        (self.q.ne[1] * self.group)
            .min(BLOCK_ROWS)
            .next_multiple_of(LINE_FLOATS)
    }

    fn blocks_in_group(&self) -> usize {
        (self.q.ne[1] * self.group).div_ceil(BLOCK_ROWS)
    }

    /// How many blocks there are.
    fn blocks(&self) -> usize {
        self.blocks_in_group() * (self.q.ne[2] / self.group) * self.q.ne[3]
    }

    fn block(&self, index: usize) -> Block {
        let in_group = self.blocks_in_group();
        let groups = self.q.ne[2] / self.group;
        let first = index % in_group * BLOCK_ROWS;
        Block {
            first,
            rows: BLOCK_ROWS.min(self.q.ne[1] * self.group - first),
            first_head: index / in_group % groups * self.group,
            sequence: index / in_group / groups,
        }
    }

    /// Floats of the queries of a block.
    fn query_floats(&self) -> usize {
        self.block_rows()
            * match self.by_key {
                true => self.k.ne[0],
                false => self.query_bytes / size_of::<f32>(),
            }
    }

    /// Floats of the sums of a block: the rows, then the largest score of each and the sum of its
    /// weights.
    fn state_floats(&self) -> usize {
        self.block_rows() * (self.width + 2)
    }

    /// The working memory of a thread.
    ///
    /// # Safety
    /// The scratch is that of this operation.
    unsafe fn workspace(&self, scratch: *mut u8, worker: usize) -> Workspace {
        let rows = self.block_rows();
        // SAFETY: `new` has asked for as much for each thread; what scores by row have no need of is
        // not used.
        let part = |offset, floats| unsafe {
            scratch
                .add(offset)
                .cast::<f32>()
                .wrapping_add(worker * floats)
        };
        Workspace {
            queries: part(self.queries, self.query_floats()).cast(),
            scores: part(self.scores, rows * TILE_KEYS),
            masks: part(self.masks, rows * TILE_KEYS),
            biases: part(self.biases, rows * TILE_KEYS),
            key_tile: part(self.key_tile, TILE_KEYS * self.k.ne[0]),
            value_tile: part(self.value_tile, TILE_KEYS * self.width),
        }
    }

    /// The sums in state `index`.
    ///
    /// # Safety
    /// The scratch is that of this operation; nobody else uses the state for as long as the result
    /// lives.
    unsafe fn sums<'a>(&self, scratch: *mut u8, index: usize) -> Sums<'a> {
        let rows = self.block_rows();
        // SAFETY: `new` has asked for as many states; they hold floats, for which any bytes are valid.
        unsafe {
            let start = scratch.add(self.sums).cast::<f32>();
            let start = start.add(index * self.state_floats());
            let part = |at, n| std::slice::from_raw_parts_mut(start.add(at), n);
            Sums {
                width: self.width,
                values: part(0, rows * self.width),
                largest: part(rows * self.width, rows),
                weights: part(rows * (self.width + 1), rows),
            }
        }
    }

    /// The token and the head of a row of a block.
    fn row(&self, block: Block, row: usize) -> (usize, usize) {
        let row = block.first + row;
        (row / self.group, block.first_head + row % self.group)
    }

    /// The indices in dimensions 2 and 3 of the keys (or values) that a block sees.
    fn shared(&self, block: Block, x: &View) -> [usize; 2] {
        [
            block.first_head / (self.q.ne[2] / x.ne[2]),
            block.sequence / (self.q.ne[3] / x.ne[3]),
        ]
    }

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
        // SAFETY: the caller's promise.
        let space = unsafe { self.workspace(scratch, worker) };
        // SAFETY: the workspace is this thread's.
        unsafe { self.read_queries(block, &space) };
        let end = self.k.ne[1].min((span + 1) * self.span_keys);
        for first in (span * self.span_keys..end).step_by(TILE_KEYS) {
            let keys = TILE_KEYS.min(end - first);
            // SAFETY: there are `keys` keys from `first` on; the workspace is this thread's.
            unsafe {
                let visible = self.read_mask(block, first, keys, &space);
                if visible.live == 0 {
                    continue;
                }
                // What is read only once must be on its way before it is needed.
                let streaming = block.rows <= TILE_RESULTS;
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

    /// Brings the queries of a block to the form that keys are multiplied with.
    ///
    /// # Safety
    /// The workspace is of this operation and this thread.
    unsafe fn read_queries(&self, block: Block, space: &Workspace) {
        let (n, rows) = (self.k.ne[0], self.block_rows());
        for r in 0..rows {
            let query = (r < block.rows).then(|| {
                let (token, head) = self.row(block, r);
                self.q
                    .row_ptr([token, head, block.sequence])
                    .cast::<f32>()
                    .cast_const()
            });
            // SAFETY: a query is a dense row of `n` floats, which the blocks of the keys divide; the
            // workspace has room for as many in either form.
            unsafe {
                if self.by_key {
                    let to = space.queries.cast::<f32>().add(r);
                    for i in 0..n {
                        let element = query.map_or(0.0, |query| query.add(i).read() * self.scale);
                        to.add(i * rows).write(element);
                    }
                } else if let Some(query) = query {
                    let to = space.queries.add(r * self.query_bytes);
                    (self.kernel.quantize_activation)(query, to, n);
                }
            }
        }
    }

    /// Reads the mask for `keys` keys from `first` on, as floats, one row for each distinct one (see
    /// [`Attention::mask_row`]).
    ///
    /// # Safety
    /// There are so many keys; the workspace is of this operation and this thread.
    unsafe fn read_mask(
        &self,
        block: Block,
        first: usize,
        keys: usize,
        space: &Workspace,
    ) -> Visible {
        let all = u64::MAX >> (64 - keys);
        let Some(mask) = self.mask else {
            return Visible {
                live: all,
                plain: true,
            };
        };
        let halves_to_floats = Format::of(Type::F16)
            .expect("halves are a format")
            .dequantize_row;
        let (mut live, mut any) = (0, 0);
        let mut row = 0;
        while row < block.rows {
            let (token, head) = self.row(block, row);
            let from = mask.row_ptr([token, head % mask.ne[2], block.sequence % mask.ne[3]]);
            let mut halves = [0u16; TILE_KEYS];
            // SAFETY: the rows of a mask are dense halves, one for each key; the workspace has room for
            // a tile of floats for each row.
            unsafe {
                let from = from.cast::<u16>().add(first);
                halves.as_mut_ptr().copy_from_nonoverlapping(from, keys);
                let to = space.masks.add(self.mask_row(block, row) * TILE_KEYS);
                (halves_to_floats)(halves.as_ptr().cast(), to, TILE_KEYS);
            }
            for (i, half) in halves.into_iter().enumerate() {
                live |= u64::from(half != MINUS_INFINITY) << i;
                any |= half << 1; // minus zero is zero
            }
            // The heads of a token share its row if they share all.
            row += if mask.ne[2] == 1 {
                self.group - (block.first + row) % self.group
            } else {
                1
            };
        }
        Visible {
            live: live & all,
            plain: any == 0,
        }
    }

    /// Which row of the converted mask is that of a row of a block.
    fn mask_row(&self, block: Block, row: usize) -> usize {
        match self.mask {
            Some(mask) if mask.ne[2] == 1 => self.row(block, row).0 - self.row(block, 0).0,
            _ => row,
        }
    }

    /// Computes the weights of a tile of keys, by row.
    ///
    /// # Safety
    /// There are so many keys; the workspace is of this operation and this thread, with queries and
    /// mask.
    unsafe fn weigh_by_row(
        &self,
        block: Block,
        first: usize,
        keys: usize,
        visible: Visible,
        space: &Workspace,
        sums: &mut Sums<'_>,
    ) {
        let [k2, k3] = self.shared(block, &self.k);
        let floats = block.rows * TILE_KEYS;
        // SAFETY: the caller's promise; the workspace has room for a tile of scores for each row.
        unsafe {
            (self.kernel.gemm)(
                self.k.ne[0],
                self.k.row_ptr([first, k2, k3]),
                self.k.nb[1],
                keys,
                space.queries,
                self.query_bytes,
                block.rows,
                space.scores,
                TILE_KEYS,
            );
            dispatch(WeighByRow {
                attention: self,
                block,
                keys,
                plain: visible.plain,
                scores: std::slice::from_raw_parts_mut(space.scores, floats),
                masks: std::slice::from_raw_parts(space.masks, floats),
                sums,
            });
        }
    }

    /// Computes the weights of a tile of keys, by key.
    ///
    /// # Safety
    /// As [`Attention::weigh_by_row`].
    unsafe fn weigh_by_key(
        &self,
        block: Block,
        first: usize,
        keys: usize,
        visible: Visible,
        space: &Workspace,
        sums: &mut Sums<'_>,
    ) {
        let (n, rows) = (self.k.ne[0], self.block_rows());
        let [k2, k3] = self.shared(block, &self.k);
        // SAFETY: the caller's promise; the workspace has room for a tile of keys and of scores.
        unsafe {
            let (tile, stride) = match self.keys.in_place(self.k.row_ptr([first, k2, k3])) {
                Some(keys) => (keys, self.k.nb[1] / size_of::<f32>()),
                None => {
                    for i in 0..keys {
                        let key = self.k.row_ptr([first + i, k2, k3]);
                        self.keys.read(key, 0, n, space.key_tile.add(i * n));
                    }
                    (space.key_tile.cast_const(), n)
                }
            };
            space.scores.write_bytes(0, keys * rows);
            let scores = Mix {
                results: keys,
                terms: n,
                n: rows,
                weights: tile,
                weights_stride: stride,
                weights_step: 1,
                rows: space.queries.cast::<f32>().cast_const(),
                rows_stride: rows,
                out: space.scores,
                out_stride: rows,
            };
            scores.add();
            if !visible.plain {
                self.biases(block, keys, space);
            }
            let floats = keys * rows;
            dispatch(WeighByKey {
                attention: self,
                block,
                keys,
                scores: std::slice::from_raw_parts_mut(space.scores, floats),
                biases: (!visible.plain)
                    .then(|| std::slice::from_raw_parts(space.biases.cast_const(), floats)),
                sums,
            });
        }
    }

    /// Turns the mask of a tile by key, multiplied with the slopes of the heads.
    ///
    /// # Safety
    /// The workspace is of this operation and this thread, with the mask.
    unsafe fn biases(&self, block: Block, keys: usize, space: &Workspace) {
        let rows = self.block_rows();
        for r in 0..block.rows {
            let slope = self.slopes.of(self.row(block, r).1);
            // SAFETY: the workspace has room for a tile for each row.
            unsafe {
                let from = space.masks.add(self.mask_row(block, r) * TILE_KEYS);
                for i in 0..keys {
                    let mask = from.add(i).read();
                    // What is hidden is hidden, however small the slope.
                    let hidden = mask == f32::NEG_INFINITY;
                    let bias = if hidden { mask } else { mask * slope };
                    space.biases.add(i * rows + r).write(bias);
                }
            }
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
        let mix = Mix {
            results: block.rows,
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
        let once = block.rows <= TILE_RESULTS;
        let values = self.v.row_ptr([first, v2, v3]).cast_const();
        let stride = self.v.nb[1];
        // SAFETY: the caller's promise; rows of values are dense, their strides whole elements; the
        // workspace has room for a tile of them.
        unsafe {
            match self.v.ty {
                Type::F32 if all_live => mix.add_rows::<f32>(values, stride),
                Type::F16 if all_live && once => mix.add_rows::<f16>(values, stride),
                Type::Bf16 if all_live && once => mix.add_rows::<bf16>(values, stride),
                _ => {
                    for i in 0..keys {
                        let to = space.value_tile.add(i * self.width);
                        if live >> i & 1 == 1 {
                            let row = self.v.row_ptr([first + i, v2, v3]);
                            self.values.read(row, 0, self.v.ne[0], to);
                        } else {
                            // What nobody sees may hold anything, and 0 times NaN is NaN.
                            to.write_bytes(0, self.v.ne[0]);
                        }
                    }
                    mix.add();
                }
            }
        }
    }

    /// Merges the spans of a block into the first and writes the results.
    ///
    /// # Safety
    /// The scratch is that of this operation; all spans have been run; nobody else has the block.
    unsafe fn merge(&self, scratch: *mut u8, index: usize) {
        let block = self.block(index);
        // SAFETY: the states of the block's units are this thread's now, and distinct.
        let mut sums = unsafe { self.sums(scratch, index * self.spans) };
        for span in 1..self.spans {
            // SAFETY: as above.
            let other = unsafe { self.sums(scratch, index * self.spans + span) };
            for r in 0..block.rows {
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
        for r in 0..block.rows {
            let (token, head) = self.row(block, r);
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

/// The half that hides a key.
const MINUS_INFINITY: u16 = 0xfc00;

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// What a block has summed up so far.
struct Sums<'a> {
    /// Floats from row to row.
    width: usize,
    /// Values, weighted.
    values: &'a mut [f32],
    /// The largest score of each row: weights are relative to its exponential.
    largest: &'a mut [f32],
    /// The sum of each row's weights.
    weights: &'a mut [f32],
}

impl Sums<'_> {
    fn clear(&mut self) {
        self.values.fill(0.0);
        self.largest.fill(f32::NEG_INFINITY);
        self.weights.fill(0.0);
    }

    /// Makes sure that the largest score of a row is not less than `score`, and returns the weight of
    /// `score`.
    #[inline(always)]
    fn rise(&mut self, row: usize, score: f32) -> f32 {
        let largest = self.largest[row];
        if score > largest {
            let shrink = (largest - score).exp();
            self.largest[row] = score;
            self.weights[row] *= shrink;
            let values = &mut self.values[row * self.width..][..self.width];
            values.iter_mut().for_each(|value| *value *= shrink);
            1.0
        } else {
            (score - largest).exp()
        }
    }
}

/// Turns the scores of a tile, by row, into weights.
struct WeighByRow<'a, 'b> {
    attention: &'a Attention,
    block: Block,
    keys: usize,
    plain: bool,
    scores: &'a mut [f32],
    masks: &'a [f32],
    sums: &'a mut Sums<'b>,
}

impl Task for WeighByRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WeighByRow {
            attention,
            block,
            keys,
            ..
        } = self;
        let Attention { scale, cap, .. } = *attention;
        let minus_infinity = simd.splat(f32::NEG_INFINITY);
        for r in 0..block.rows {
            let scores = &mut self.scores[r * TILE_KEYS..][..keys];
            let mask = (!self.plain).then(|| {
                let (_, head) = attention.row(block, r);
                let row = &self.masks[attention.mask_row(block, r) * TILE_KEYS..][..keys];
                (row, simd.splat(attention.slopes.of(head)))
            });
            let mut largest = minus_infinity;
            chunks::<S>(keys, |i, n| {
                let mut score = simd.load(&scores[i..i + n]) * scale;
                if cap != 0.0 {
                    score = score.tanh() * cap;
                }
                if let Some((mask, slope)) = mask {
                    let mask = simd.load(&mask[i..i + n]);
                    let hidden = mask.le(minus_infinity);
                    score = hidden.select(minus_infinity, mask.mul_add(slope, score));
                }
                score.store(&mut scores[i..i + n]);
                let score = if n == S::LANES {
                    score
                } else {
                    simd.splat(score.largest(n))
                };
                largest = score.max(largest);
            });
            let largest = largest.largest(S::LANES);
            if largest == f32::NEG_INFINITY {
                // Hidden altogether, unless what is not hidden is NaN.
                if scores.iter().any(|score| score.is_nan()) {
                    self.sums.weights[r] = f32::NAN;
                }
                scores.fill(0.0);
                continue;
            }
            self.sums.rise(r, largest);
            let largest = self.sums.largest[r];
            let mut sum = simd.splat(0.0);
            chunks::<S>(keys, |i, n| {
                (simd.load(&scores[i..i + n]) - largest)
                    .exp()
                    .store(&mut scores[i..i + n]);
                sum = sum + simd.load(&scores[i..i + n]); // lanes beyond the keys are 0
            });
            self.sums.weights[r] += sum.sum();
        }
    }
}

/// Turns the scores of a tile, by key and already scaled, into weights.
struct WeighByKey<'a, 'b> {
    attention: &'a Attention,
    block: Block,
    keys: usize,
    scores: &'a mut [f32],
    biases: Option<&'a [f32]>,
    sums: &'a mut Sums<'b>,
}

impl Task for WeighByKey<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let WeighByKey {
            attention,
            block,
            keys,
            scores,
            biases,
            sums,
        } = self;
        let (cap, rows) = (attention.cap, attention.block_rows());
        let minus_infinity = simd.splat(f32::NEG_INFINITY);
        // Rows are whole vectors: `LINE_FLOATS` divides their number, and `LANES` that.
        for first in (0..block.rows).step_by(S::LANES) {
            let old = simd.load(&sums.largest[first..]);
            let mut largest = old;
            for key in 0..keys {
                let at = key * rows + first;
                let mut score = simd.load(&scores[at..]);
                if cap != 0.0 {
                    score = score.tanh() * cap;
                }
                if let Some(biases) = biases {
                    let bias = simd.load(&biases[at..]);
                    let hidden = bias.le(minus_infinity);
                    score = hidden.select(minus_infinity, score + bias);
                }
                score.store(&mut scores[at..at + S::LANES]);
                largest = score.max(largest);
            }
            // Rows that see nothing yet: e^(-inf - 0) is 0, e^(-inf - -inf) would not be.
            let blind = largest.le(minus_infinity);
            let base = blind.select(simd.splat(0.0), largest);
            let mut sum = simd.splat(0.0);
            for key in 0..keys {
                let at = key * rows + first;
                let weight = (simd.load(&scores[at..]) - base).exp();
                weight.store(&mut scores[at..at + S::LANES]);
                sum = sum + weight;
            }
            let shrink = (old - base).exp();
            let weights = simd.load(&sums.weights[first..]);
            weights
                .mul_add(shrink, sum)
                .store(&mut sums.weights[first..first + S::LANES]);
            largest.store(&mut sums.largest[first..first + S::LANES]);
            let mut shrinks = [1.0; LINE_FLOATS];
            shrink.store(&mut shrinks[..S::LANES]);
            for (row, &shrink) in (first..block.rows).zip(&shrinks[..S::LANES]) {
                if shrink != 1.0 {
                    let values = &mut sums.values[row * sums.width..][..sums.width];
                    values.iter_mut().for_each(|value| *value *= shrink);
                }
            }
        }
    }
}
