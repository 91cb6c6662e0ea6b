//! The geometry of an attention: blocks of rows, spans of keys, and the working memory of threads.

use vgpu_transport::ir::Op;

use super::super::scratch::{Output, ScratchLayout};
use super::super::softmax::Slopes;
use super::rows::Rows;
use crate::gemm::MatmulKernel;
use crate::operands::Operands;
use crate::view::View;

/// Maximum number of rows in a block whose scores lie by row, and by key.
pub(super) const BLOCK_ROWS: usize = 64;
pub(super) const BLOCK_ROWS_BY_KEY: usize = 96;

/// Keys in a tile.
pub(super) const TILE_KEYS: usize = 64;

/// From this many rows on, scores of plain keys lie by key.
pub(super) const MANY_ROWS: usize = 16;

/// Floats of a cache line, a multiple of those of a vector.
pub(super) const LINE_FLOATS: usize = 16;

/// Keys are cut into spans until there is this much work to deal out, however many threads there
/// are.
pub(super) const UNITS: usize = 64;

/// The fewest keys in a span.
pub(super) const SPAN_KEYS: usize = 4 * TILE_KEYS;

#[derive(Clone, Copy)]
pub(super) struct Attention {
    pub(super) q: View,
    pub(super) k: View,
    pub(super) v: View,
    pub(super) mask: Option<View>,
    pub(super) sinks: Option<View>,
    pub(super) output: Output,
    /// Multiplies keys with queries, if scores lie by row.
    pub(super) kernel: MatmulKernel,
    pub(super) keys: Rows,
    pub(super) values: Rows,
    /// Scores are multiplied with this, then, if `cap` is not 0, brought between -cap and cap.
    pub(super) scale: f32,
    pub(super) cap: f32,
    pub(super) slopes: Slopes,
    /// Heads that share keys and values.
    pub(super) group: usize,
    pub(super) cut: Cut,
    /// Spans of the keys, and keys in each.
    pub(super) spans: usize,
    pub(super) span_keys: usize,
    /// Whether scores lie by key.
    pub(super) by_key: bool,
    /// Bytes from one query to the next in the type that keys are multiplied with.
    pub(super) query_bytes: usize,
    /// Floats of a row of values or results, padded to a cache line.
    pub(super) width: usize,
    /// Offsets in scratch of each thread's working memory.
    pub(super) queries: usize,
    pub(super) scores: usize,
    pub(super) masks: usize,
    pub(super) biases: usize,
    pub(super) row_slopes: usize,
    pub(super) key_tile: usize,
    pub(super) value_tile: usize,
    /// Offset in scratch of the sums: of each thread, or of each unit if they are to be merged.
    pub(super) sums: usize,
}

/// How many tokens, and how many heads of a group, make a block.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub(super) tokens: usize,
    pub(super) heads: usize,
}

impl Cut {
    pub(super) fn new(tokens: usize, group: usize, by_key: bool) -> Cut {
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
pub(super) struct Block {
    pub(super) first_token: usize,
    pub(super) tokens: usize,
    /// Rows from one head to the next: by key, the tokens of a full block.
    pub(super) pitch: usize,
    pub(super) first_head: usize,
    pub(super) heads: usize,
    pub(super) sequence: usize,
}

impl Block {
    /// Rows, with those that pad a head.
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

/// What a thread works in.
pub(super) struct Workspace {
    /// By row: a query after the other. By key: floats, an element of all rows after the other.
    pub(super) queries: *mut u8,
    /// By row: a tile of keys for each row. By key: all rows for each key.
    pub(super) scores: *mut f32,
    /// The mask of the tile as floats, each distinct row once; and by key.
    pub(super) masks: *mut f32,
    pub(super) biases: *mut f32,
    /// By key: what the mask of each row is multiplied with.
    pub(super) slopes: *mut f32,
    /// Keys and values of the tile as floats.
    pub(super) key_tile: *mut f32,
    pub(super) value_tile: *mut f32,
}

impl Attention {
    pub(super) fn new(operands: &Operands<'_>, scratch: &mut ScratchLayout) -> Attention {
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
    pub(super) fn block_rows(&self) -> usize {
        (self.cut.tokens * self.cut.heads).next_multiple_of(LINE_FLOATS)
    }

    /// Blocks of tokens, of heads of a group, groups and sequences.
    pub(super) fn extents(&self) -> [usize; 4] {
        [
            self.q.ne[1].div_ceil(self.cut.tokens),
            self.group.div_ceil(self.cut.heads),
            self.q.ne[2] / self.group,
            self.q.ne[3],
        ]
    }

    /// How many blocks there are.
    pub(super) fn blocks(&self) -> usize {
        self.extents().into_iter().product()
    }

    pub(super) fn block(&self, index: usize) -> Block {
        let [of_tokens, of_heads, groups, sequences] = self.extents();
        let (others, head) = (index / of_heads, index % of_heads * self.cut.heads);
        // Late tokens see the most keys: they come first, so that no thread begins with much when
        // the others end.
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
    pub(super) fn query_floats(&self) -> usize {
        self.block_rows()
            * match self.by_key {
                true => self.k.ne[0].next_multiple_of(LINE_FLOATS),
                false => self.query_bytes / size_of::<f32>(),
            }
    }

    /// Floats of a tile of keys, or of a line of queries before they are turned.
    pub(super) fn key_floats(&self) -> usize {
        TILE_KEYS * self.k.ne[0].next_multiple_of(LINE_FLOATS)
    }

    /// Floats of the sums of a block: the rows, then the largest score of each and the sum of its
    /// weights.
    pub(super) fn state_floats(&self) -> usize {
        self.block_rows() * (self.width + 2)
    }

    /// The working memory of a thread.
    ///
    /// # Safety
    /// The scratch is that of this operation.
    pub(super) unsafe fn workspace(&self, scratch: *mut u8, worker: usize) -> Workspace {
        let rows = self.block_rows();
        // SAFETY: `new` has asked for as much for each thread; what scores by row have no need of
        // is not used.
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
    /// The scratch is that of this operation; no other thread uses the state for as long as the result
    /// lives.
    pub(super) unsafe fn sums<'a>(&self, scratch: *mut u8, index: usize) -> Sums<'a> {
        let rows = self.block_rows();
        // SAFETY: `new` has asked for as many states; they hold floats, for which any bytes are
        // valid.
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
    pub(super) fn shared(&self, block: Block, x: &View) -> [usize; 2] {
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

/// What a block has summed up so far.
pub(super) struct Sums<'a> {
    /// Floats from row to row.
    pub(super) width: usize,
    /// Values, weighted.
    pub(super) values: &'a mut [f32],
    /// The largest score of each row: weights are relative to its exponential.
    pub(super) largest: &'a mut [f32],
    /// The sum of each row's weights.
    pub(super) weights: &'a mut [f32],
}

impl Sums<'_> {
    pub(super) fn clear(&mut self) {
        self.values.fill(0.0);
        self.largest.fill(f32::NEG_INFINITY);
        self.weights.fill(0.0);
    }

    /// Makes sure that the largest score of a row is not less than `score`, and returns the weight
    /// of `score`.
    #[inline(always)]
    pub(super) fn rise(&mut self, row: usize, score: f32) -> f32 {
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
