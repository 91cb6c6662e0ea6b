//! How an attention is divided (blocks of rows, spans of keys), and the working memory of threads.

use vgpu_transport::ir::Op;

use super::super::scratch::{Output, ScratchLayout};
use super::super::softmax::Slopes;
use super::rows::Rows;
use crate::gemm::{Level, MAX_WEIGHTED_ROWS, MatmulKernel, WeightedRows, weighted_rows};
use crate::operands::{Operands, parameters};
use crate::view::View;

/// The most rows in a block whose scores are stored by row.
pub(super) const BLOCK_ROWS: usize = 64;
/// The most rows in a block whose scores are stored by key.
pub(super) const BLOCK_ROWS_BY_KEY: usize = 96;

/// Keys in a tile.
pub(super) const TILE_KEYS: usize = 64;

const _: () = assert!(TILE_KEYS <= MAX_WEIGHTED_ROWS);

/// From this many rows on, scores of keys that are not quantised are stored by key, and keys and
/// values are not prefetched. With AVX2, quantised ones then have the kernels of many columns.
pub(super) const MANY_ROWS: usize = 16;

/// Floats of a cache line, a multiple of the lanes of every vector.
pub(super) const LINE_FLOATS: usize = 16;

/// The least number of units of work that keys are divided into spans for, for any number of
/// threads.
pub(super) const UNITS: usize = 64;

/// The most keys in a span.
const MAX_SPAN_KEYS: usize = 1 << 14;

/// The most products in a span of more than a tile of keys, which bounds the time of a unit of
/// work.
const MAX_SPAN_PRODUCTS: usize = 1 << 29;

/// The same with values in blocks, whose products take three to four times as long.
const MAX_SPAN_BLOCK_PRODUCTS: usize = MAX_SPAN_PRODUCTS / 4;

/// The fewest keys in a span.
pub(super) const SPAN_KEYS: usize = 4 * TILE_KEYS;

/// An attention whose operands have passed the check of FLASH_ATTN_EXT: queries, keys, values and
/// the mask have dense rows; a key is as long as a query; there are as many values as keys; the
/// heads and sequences of keys, values and mask repeat into those of the queries; the mask has an
/// F16 for each token and key; the sinks are one f32 for each head; the destination has one row of
/// the length of a value for each query.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    pub(super) q: View,
    pub(super) k: View,
    pub(super) v: View,
    pub(super) mask: Option<View>,
    pub(super) sinks: Option<View>,
    pub(super) output: Output,
    /// Multiplies keys with queries, if scores are stored by row.
    pub(super) kernel: MatmulKernel,
    /// Adds values to sums, if the values are blocks and scores are stored by row.
    pub(super) weighted_rows: Option<WeightedRows>,
    pub(super) keys: Rows,
    pub(super) values: Rows,
    /// The factor of the scores.
    pub(super) scale: f32,
    /// If not 0, scores are limited to -cap .. cap (logit softcap).
    pub(super) cap: f32,
    pub(super) slopes: Slopes,
    /// Heads that share keys and values.
    pub(super) group: usize,
    pub(super) cut: Cut,
    /// Spans of the keys.
    pub(super) spans: usize,
    /// Keys in a span.
    pub(super) span_keys: usize,
    /// Whether scores are stored by key.
    pub(super) by_key: bool,
    /// Bytes from one query to the next in the type that keys are multiplied with.
    pub(super) query_bytes: usize,
    /// Floats of a row of values or results, padded to a cache line.
    pub(super) width: usize,
    /// Offsets of the working memory of the threads in the scratch memory.
    pub(super) queries: usize,
    pub(super) scores: usize,
    pub(super) masks: usize,
    pub(super) biases: usize,
    pub(super) row_slopes: usize,
    pub(super) key_tile: usize,
    pub(super) value_tile: usize,
    /// Offset of the sums in the scratch memory: of each thread, or of each unit if there are
    /// spans.
    pub(super) sums: usize,
}

/// The tokens, and the heads of a group, in a block.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub(super) tokens: usize,
    pub(super) heads: usize,
}

impl Cut {
    pub(super) fn new(tokens: usize, group: usize, by_key: bool) -> Cut {
        let (most, tokens) = match by_key {
            // A vector of rows has tokens of one head, or the same tokens of several heads.
            true if tokens >= LINE_FLOATS => {
                let fit = BLOCK_ROWS_BY_KEY / group / LINE_FLOATS * LINE_FLOATS;
                let fit = fit.clamp(LINE_FLOATS, TILE_KEYS);
                let tokens = fit.min(tokens.next_multiple_of(LINE_FLOATS));
                (BLOCK_ROWS_BY_KEY, tokens)
            }
            true => (BLOCK_ROWS_BY_KEY, tokens.next_power_of_two()),
            false => (BLOCK_ROWS, tokens.min((BLOCK_ROWS / group).max(1))),
        };
        // The parts of a group are as equal as possible.
        let parts = group.div_ceil((most / tokens).max(1));
        Cut {
            tokens,
            heads: group.div_ceil(parts),
        }
    }
}

/// The rows of a block: adjacent tokens of adjacent heads of a group, tokens innermost.
#[derive(Clone, Copy)]
pub(super) struct QueryBlock {
    pub(super) first_token: usize,
    pub(super) tokens: usize,
    /// Rows from one head to the next: by key, the tokens of a full block.
    pub(super) pitch: usize,
    pub(super) first_head: usize,
    pub(super) heads: usize,
    pub(super) sequence: usize,
}

impl QueryBlock {
    /// Rows, including rows that pad a head.
    pub(super) fn rows(self) -> usize {
        self.heads * self.pitch
    }

    /// Each row that is a query, with its token and head.
    pub(super) fn queries(self) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..self.heads * self.tokens).map(move |i| {
            let (head, token) = (i / self.tokens, i % self.tokens);
            let row = head * self.pitch + token;
            (row, self.first_token + token, self.first_head + head)
        })
    }
}

/// The working memory of a thread.
pub(super) struct Workspace {
    /// By row: the converted queries. By key: floats, element after element, each for all rows.
    pub(super) queries: *mut u8,
    /// By row: the keys of the tile, for each row. By key: the rows, for each key.
    pub(super) scores: *mut f32,
    /// The mask of the tile as floats, by row.
    pub(super) masks: *mut f32,
    /// The mask of the tile as floats, by key.
    pub(super) biases: *mut f32,
    /// By key: the factor of the mask of each row.
    pub(super) slopes: *mut f32,
    /// The keys of the tile as floats.
    pub(super) key_tile: *mut f32,
    /// The values of the tile as floats.
    pub(super) value_tile: *mut f32,
}

impl Attention {
    pub(super) fn new(operands: &Operands<'_>, scratch: &mut ScratchLayout) -> Attention {
        parameters!(
            operands,
            Op::FlashAttnExt {
                scale,
                max_bias,
                logit_softcap: cap,
                ..
            }
        );
        let (q, k, v) = (operands.src(0), operands.src(1), operands.src(2));
        let (mask, sinks) = (operands.optional(3), operands.optional(4));
        let any = MatmulKernel::of(k.ty).expect("the rules claim no other keys");
        let sources: Vec<View> = [Some(q), Some(k), Some(v), mask, sinks]
            .into_iter()
            .flatten()
            .collect();
        let group = greatest_common_divisor(q.ne[2] / k.ne[2], q.ne[2] / v.ne[2]);
        let many_rows = q.ne[1] * group >= MANY_ROWS;
        let by_key = !k.ty.is_quantized() && many_rows;
        let level = Level::best();
        // With AVX2, many rows are faster with panels of keys, and with values as floats.
        let (short_rows, weighted_rows) = match many_rows && level < Level::Avx512 {
            true => (None, None),
            false => (
                MatmulKernel::of_short_rows(k.ty),
                weighted_rows(v.ty, level),
            ),
        };
        let kernel = short_rows.unwrap_or(any);
        let mut attention = Attention {
            q,
            k,
            v,
            mask,
            sinks,
            output: Output::new(operands.dst(), &sources, scratch),
            kernel,
            weighted_rows: weighted_rows.filter(|_| !by_key),
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
        let mut keys = k.ne[1];
        if blocks < UNITS {
            keys = keys.div_ceil(UNITS.div_ceil(blocks)).max(SPAN_KEYS);
        }
        let each = attention.block_rows() * (k.ne[0] + v.ne[0]);
        let most = match attention.weighted_rows {
            None => MAX_SPAN_PRODUCTS,
            Some(_) => MAX_SPAN_BLOCK_PRODUCTS,
        };
        let most = (most / each.max(1)).min(MAX_SPAN_KEYS);
        attention.span_keys = keys.min(most).max(1).next_multiple_of(TILE_KEYS);
        attention.spans = k.ne[1].div_ceil(attention.span_keys.max(1)).max(1);
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

    /// The capacity of a block in rows: whole cache lines of floats.
    pub(super) fn block_rows(&self) -> usize {
        (self.cut.tokens * self.cut.heads).next_multiple_of(LINE_FLOATS)
    }

    /// The numbers of blocks of tokens, blocks of heads of a group, groups, and sequences.
    pub(super) fn lengths(&self) -> [usize; 4] {
        [
            self.q.ne[1].div_ceil(self.cut.tokens),
            self.group.div_ceil(self.cut.heads),
            self.q.ne[2] / self.group,
            self.q.ne[3],
        ]
    }

    /// The number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.lengths().into_iter().product()
    }

    pub(super) fn block(&self, index: usize) -> QueryBlock {
        let [of_tokens, of_heads, groups, sequences] = self.lengths();
        let (others, head) = (index / of_heads, index % of_heads * self.cut.heads);
        // With a causal mask, the last tokens see the most keys. The blocks of the last tokens come
        // first, so that the last blocks are short and threads finish at about the same time.
        let token = (of_tokens - 1 - others / groups / sequences) * self.cut.tokens;
        let tokens = self.cut.tokens.min(self.q.ne[1] - token);
        QueryBlock {
            first_token: token,
            tokens,
            pitch: if self.by_key { self.cut.tokens } else { tokens },
            first_head: others % groups * self.group + head,
            heads: self.cut.heads.min(self.group - head),
            sequence: others / groups % sequences,
        }
    }

    /// Floats of the queries of a block.
    pub(super) fn query_floats(&self) -> usize {
        self.block_rows()
            * match self.by_key {
                true => self.k.ne[0].next_multiple_of(LINE_FLOATS),
                false => self.query_bytes / size_of::<f32>(),
            }
    }

    /// Floats of a tile of keys, or of queries before they are transposed.
    pub(super) fn key_floats(&self) -> usize {
        TILE_KEYS * self.k.ne[0].next_multiple_of(LINE_FLOATS)
    }

    /// Floats of the sums of a block: the values of the rows, their largest scores, and the sums of
    /// their weights.
    pub(super) fn state_floats(&self) -> usize {
        self.block_rows() * (self.width + 2)
    }

    /// The working memory of a thread.
    ///
    /// # Safety
    /// `scratch` is the scratch memory of this operator, and `worker` is below its number of
    /// workers.
    pub(super) unsafe fn workspace(&self, scratch: *mut u8, worker: usize) -> Workspace {
        let rows = self.block_rows();
        // SAFETY: `offset` is inside the scratch memory. `new` has reserved `floats` floats for
        // each worker there, except for buffers that scores by row do not use.
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
    /// `scratch` is the scratch memory of this operator, and has the state. No one else uses the
    /// state while the result exists.
    pub(super) unsafe fn sums<'a>(&self, scratch: *mut u8, index: usize) -> Sums<'a> {
        let rows = self.block_rows();
        // SAFETY: `new` has reserved `state_floats()` floats for the state, which are the three
        // parts. Any bytes are valid floats. The caller guarantees that no one else uses the state.
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
    pub(super) fn shared(&self, block: QueryBlock, x: &View) -> [usize; 2] {
        [
            block.first_head / (self.q.ne[2] / x.ne[2]),
            block.sequence / (self.q.ne[3] / x.ne[3]),
        ]
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// The sums of a block over the keys so far.
pub(super) struct Sums<'a> {
    /// Floats from one row of values to the next.
    pub(super) width: usize,
    /// The sums of the values, times their weights.
    pub(super) values: &'a mut [f32],
    /// The largest score of each row: weights are divided by its exponential.
    pub(super) largest: &'a mut [f32],
    /// The sum of the weights of each row.
    pub(super) weights: &'a mut [f32],
}

impl Sums<'_> {
    pub(super) fn clear(&mut self) {
        self.values.fill(0.0);
        self.largest.fill(f32::NEG_INFINITY);
        self.weights.fill(0.0);
    }

    /// Raises the largest score of a row to `score` if it is smaller, and rescales the sums of the
    /// row. Returns the weight of `score`.
    #[inline(always)]
    pub(super) fn raise_largest(&mut self, row: usize, score: f32) -> f32 {
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
