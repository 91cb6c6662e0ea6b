//! FLASH_ATTN_EXT: attention in tiles, without the matrix of all scores in memory.
//!
//! A *row* is a query: one head of one token. Rows that see the same keys and values (the heads of a
//! group, the tokens of a sequence) make blocks, so that what is read of keys and values serves all of
//! them. A thread goes with a block along the keys, a tile at a time: scores are products of keys and
//! queries, their exponentials the weights of the values. The exponentials are relative to the largest
//! score so far; when it grows, what has been summed up shrinks.
//!
//! Scores lie *by row* where there are few rows ([`by_row`]), *by key* where there are many of plain keys ([`by_key`]).
//!
//! Few blocks (a decode step) are cut along the keys, too, into *spans*, whose sums are merged in a
//! second step. How depends on the shapes alone: results are the same for any number of threads.

mod by_key;
mod by_row;
mod mask;

use half::{bf16, f16};
use vgpu_transport::ir::{Op, OpKind, Rule, Type, TypeSet};

use super::gather::real_types;
use super::softmax::Slopes;
use super::staging::{Layout, Output};
use crate::gemm::MatmulKernel;
use crate::mix::{Mix, TILE_RESULTS};
use crate::plan::{Compiled, Kernel, Operands};
use crate::view::View;
use by_key::Rows;
use vgpu_engine::EngineError;

/// Most rows in a block whose scores lie by row, and by key.
const BLOCK_ROWS: usize = 64;
const BLOCK_ROWS_BY_KEY: usize = 96;

/// Keys in a tile.
const TILE_KEYS: usize = 64;

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
    keys: Rows,
    values: Rows,
    /// Scores are multiplied with this, then, if `cap` is not 0, brought between -cap and cap.
    scale: f32,
    cap: f32,
    slopes: Slopes,
    /// Heads that share keys and values.
    group: usize,
    cut: Cut,
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
    row_slopes: usize,
    key_tile: usize,
    value_tile: usize,
    /// Offset in scratch of the sums: of each thread, or of each unit if they are to be merged.
    sums: usize,
}

/// How many tokens, and how many heads of a group, make a block.
#[derive(Clone, Copy)]
struct Cut {
    tokens: usize,
    heads: usize,
}

impl Cut {
    fn new(tokens: usize, group: usize, by_key: bool) -> Cut {
        let (most, tokens) = match by_key {
            // A vector of rows holds tokens of one head, or the same tokens of several.
            true if tokens >= LINE_FLOATS => {
                let fit = BLOCK_ROWS_BY_KEY / group / LINE_FLOATS * LINE_FLOATS;
                let fit = fit.clamp(LINE_FLOATS, TILE_KEYS);
                let tokens = fit.min(tokens.next_multiple_of(LINE_FLOATS));
                (BLOCK_ROWS_BY_KEY, tokens)
            }
            true => (BLOCK_ROWS_BY_KEY, tokens.next_power_of_two()),
            false => (BLOCK_ROWS, tokens.min((BLOCK_ROWS / group).max(1))),
        };
        // As equal parts of a group as possible.
        let parts = group.div_ceil((most / tokens).max(1));
        Cut {
            tokens,
            heads: group.div_ceil(parts),
        }
    }
}

/// The rows of a block: some neighbours out of the tokens and heads of a group, tokens innermost.
#[derive(Clone, Copy)]
struct Block {
    first_token: usize,
    tokens: usize,
    /// Rows from one head to the next: by key, the tokens of a full block.
    pitch: usize,
    first_head: usize,
    heads: usize,
    sequence: usize,
}

impl Block {
    /// Rows, with those that pad a head.
    fn rows(self) -> usize {
        self.heads * self.pitch
    }

    /// Each row that is a query, with its token and head.
    fn queries(self) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..self.heads * self.tokens).map(move |i| {
            let (head, token) = (i / self.tokens, i % self.tokens);
            let row = head * self.pitch + token;
            (row, self.first_token + token, self.first_head + head)
        })
    }
}

/// What a thread works in.
struct Workspace {
    /// By row: a query after the other. By key: floats, an element of all rows after the other.
    queries: *mut u8,
    /// By row: a tile of keys for each row. By key: all rows for each key.
    scores: *mut f32,
    /// The mask of the tile as floats, each distinct row once; and by key.
    masks: *mut f32,
    biases: *mut f32,
    /// By key: what the mask of each row is multiplied with.
    slopes: *mut f32,
    /// Keys and values of the tile as floats.
    key_tile: *mut f32,
    value_tile: *mut f32,
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
        let sources: Vec<View> = [Some(q), Some(k), Some(v), mask, sinks]
            .into_iter()
            .flatten()
            .collect();
        let group = greatest_common_divisor(q.ne[2] / k.ne[2], q.ne[2] / v.ne[2]);
        let by_key = !k.ty.is_quantized() && q.ne[1] * group >= MANY_ROWS;
        let mut attention = Attention {
            q,
            k,
            v,
            mask,
            sinks,
            output: Output::new(operands.dst(), &sources, scratch),
            kernel,
            keys: Rows::new(k),
            values: Rows::new(v),
            scale: if cap == 0.0 { scale } else { scale / cap },
            cap,
            slopes: Slopes::new(max_bias, q.ne[2]),
            group,
            cut: Cut::new(q.ne[1], group, by_key),
            spans: 1,
            span_keys: k.ne[1],
            by_key,
            query_bytes: kernel.activation.column_bytes(k.ne[0]).next_multiple_of(64),
            width: v.ne[0].next_multiple_of(LINE_FLOATS),
            queries: 0,
            scores: 0,
            masks: 0,
            biases: 0,
            row_slopes: 0,
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
        let workers = operands.workers();
        let mut room = |count: usize, floats: usize| scratch.room(count, floats * size_of::<f32>());
        let rows = attention.block_rows();
        attention.queries = room(workers, attention.query_floats());
        attention.scores = room(workers, rows * TILE_KEYS);
        attention.masks = room(workers, rows * TILE_KEYS);
        attention.biases = room(if by_key { workers } else { 0 }, rows * TILE_KEYS);
        attention.row_slopes = room(if by_key { workers } else { 0 }, rows);
        attention.key_tile = room(if by_key { workers } else { 0 }, attention.key_floats());
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
        (self.cut.tokens * self.cut.heads).next_multiple_of(LINE_FLOATS)
    }

    /// Blocks of tokens, of heads of a group, groups and sequences.
    fn extents(&self) -> [usize; 4] {
        [
            self.q.ne[1].div_ceil(self.cut.tokens),
            self.group.div_ceil(self.cut.heads),
            self.q.ne[2] / self.group,
            self.q.ne[3],
        ]
    }

    /// How many blocks there are.
    fn blocks(&self) -> usize {
        self.extents().into_iter().product()
    }

    fn block(&self, index: usize) -> Block {
        let [of_tokens, of_heads, groups, sequences] = self.extents();
        let (others, head) = (index / of_heads, index % of_heads * self.cut.heads);
        // Late tokens see the most keys: they come first, so that no thread begins with much when the others end.
        let token = (of_tokens - 1 - others / groups / sequences) * self.cut.tokens;
        let tokens = self.cut.tokens.min(self.q.ne[1] - token);
        Block {
            first_token: token,
            tokens,
            pitch: if self.by_key { self.cut.tokens } else { tokens },
            first_head: others % groups * self.group + head,
            heads: self.cut.heads.min(self.group - head),
            sequence: others / groups % sequences,
        }
    }

    /// Floats of the queries of a block.
    fn query_floats(&self) -> usize {
        self.block_rows()
            * match self.by_key {
                true => self.k.ne[0].next_multiple_of(LINE_FLOATS),
                false => self.query_bytes / size_of::<f32>(),
            }
    }

    /// Floats of a tile of keys, or of a line of queries before they are turned.
    fn key_floats(&self) -> usize {
        TILE_KEYS * self.k.ne[0].next_multiple_of(LINE_FLOATS)
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
            slopes: part(self.row_slopes, rows),
            key_tile: part(self.key_tile, self.key_floats()),
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
        let mix = Mix {
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
        // SAFETY: the caller's promise; rows of values are dense, their strides whole elements; the
        // workspace has room for a tile of them.
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
    /// The scratch is that of this operation; all spans have been run; nobody else has the block.
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
