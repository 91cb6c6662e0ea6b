//! FLASH_ATTN_EXT: attention in tiles, without the matrix of all scores in memory.
//!
//! A *row* is a query: one head of one token. Rows that see the same keys and values (the heads of a
//! group, the tokens of a sequence) make blocks, so that what is read of keys and values serves all of
//! them. A thread goes with a block along the keys, a tile at a time: scores are products of keys and
//! queries, their exponentials the weights of the values. The exponentials are relative to the largest
//! score so far; when it grows, what has been summed up shrinks.
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
    /// Multiplies keys with queries.
    kernel: MatmulKernel,
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
    /// Bytes of a query in the type that keys are multiplied with.
    query_bytes: usize,
    /// Floats of a row of values or results, padded to a cache line.
    width: usize,
    /// Offsets in scratch: each thread's converted queries, scores, mask and values; and the sums of
    /// each thread, or of each unit if they are to be merged.
    queries: usize,
    scores: usize,
    masks: usize,
    tiles: usize,
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
        let mut attention = Attention {
            q,
            k,
            v,
            mask,
            sinks,
            output: Output::new(operands.dst(), &sources, scratch),
            kernel,
            values: RowReader::new(&v),
            scale: if cap == 0.0 { scale } else { scale / cap },
            cap,
            slopes: Slopes::new(max_bias, q.ne[2]),
            group: greatest_common_divisor(q.ne[2] / k.ne[2], q.ne[2] / v.ne[2]),
            spans: 1,
            span_keys: k.ne[1],
            query_bytes: activation.row_bytes(k.ne[0]),
            width: v.ne[0].next_multiple_of(16),
            queries: 0,
            scores: 0,
            masks: 0,
            tiles: 0,
            sums: 0,
        };
        let blocks = attention.blocks();
        if blocks < UNITS {
            let keys = k.ne[1].div_ceil(UNITS.div_ceil(blocks)).max(SPAN_KEYS);
            attention.span_keys = keys.next_multiple_of(TILE_KEYS);
            attention.spans = k.ne[1].div_ceil(attention.span_keys).max(1);
        }
        let workers = operands.workers();
        let rows = attention.block_rows();
        let floats = size_of::<f32>();
        attention.queries =
            scratch.room(workers, rows * attention.query_bytes.next_multiple_of(64));
        attention.scores = scratch.room(workers, rows * TILE_KEYS * floats);
        attention.masks = scratch.room(workers, rows * TILE_KEYS * floats);
        attention.tiles = scratch.room(workers, TILE_KEYS * attention.width * floats);
        let states = if attention.spans == 1 {
            workers
        } else {
            blocks * attention.spans
        };
        attention.sums = scratch.room(states, attention.state_floats() * floats);
        attention
    }

    /// Rows of the largest block.
    fn block_rows(&self) -> usize {
        (self.q.ne[1] * self.group).min(BLOCK_ROWS)
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

    /// Floats of the sums of a block: the rows, then the largest score of each and the sum of its
    /// weights.
    fn state_floats(&self) -> usize {
        (self.block_rows() * (self.width + 2)).next_multiple_of(16)
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
            let start = scratch
                .add(self.sums)
                .cast::<f32>()
                .add(index * self.state_floats());
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

        let rows = self.block_rows();
        let query_stride = self.query_bytes.next_multiple_of(64);
        // SAFETY: the parts of scratch that are this thread's.
        let (queries, scores, masks, tile) = unsafe {
            let floats = |offset, n| scratch.add(offset).cast::<f32>().add(worker * n);
            (
                scratch.add(self.queries + worker * rows * query_stride),
                floats(self.scores, rows * TILE_KEYS),
                floats(self.masks, rows * TILE_KEYS),
                floats(self.tiles, TILE_KEYS * self.width),
            )
        };
        for r in 0..block.rows {
            let (token, head) = self.row(block, r);
            let query = self.q.row_ptr([token, head, block.sequence]);
            // SAFETY: a row of queries, which are dense f32; the blocks of the keys divide it.
            unsafe {
                let to = queries.add(r * query_stride);
                (self.kernel.quantize_activation)(query.cast(), to, self.k.ne[0]);
            }
        }
        let shared = |x: &View| {
            let head = block.first_head / (self.q.ne[2] / x.ne[2]);
            [head, block.sequence / (self.q.ne[3] / x.ne[3])]
        };
        let ([k2, k3], [v2, v3]) = (shared(&self.k), shared(&self.v));
        let end = self.k.ne[1].min((span + 1) * self.span_keys);
        for first in (span * self.span_keys..end).step_by(TILE_KEYS) {
            let keys = TILE_KEYS.min(end - first);
            // SAFETY: keys, values and mask have `keys` rows or elements from `first` on; the buffers
            // have room for as many.
            unsafe {
                let masks = std::slice::from_raw_parts_mut(masks, rows * TILE_KEYS);
                let Some(live) = self.mask(block, first, keys, masks) else {
                    continue; // nobody sees any of them
                };
                // What is read only once must be on its way before it is needed.
                let streaming = block.rows <= TILE_RESULTS;
                if streaming {
                    self.v.prefetch_rows([first, v2, v3], keys);
                }
                (self.kernel.gemm)(
                    self.k.ne[0],
                    self.k.row_ptr([first, k2, k3]),
                    self.k.nb[1],
                    keys,
                    queries,
                    query_stride,
                    block.rows,
                    scores,
                    TILE_KEYS,
                );
                dispatch(Weigh {
                    attention: self,
                    block,
                    keys,
                    scores: std::slice::from_raw_parts_mut(scores, rows * TILE_KEYS),
                    masks,
                    sums: &mut sums,
                });
                let mix = Mix {
                    results: block.rows,
                    terms: keys,
                    n: self.v.ne[0],
                    weights: scores,
                    weights_stride: TILE_KEYS,
                    rows: tile.cast_const(),
                    rows_stride: self.width,
                    out: sums.values.as_mut_ptr(),
                    out_stride: self.width,
                };
                if streaming && first + TILE_KEYS < end {
                    let next = first + TILE_KEYS;
                    self.k
                        .prefetch_rows([next, k2, k3], TILE_KEYS.min(end - next));
                }
                let all_live = live == u64::MAX >> (64 - keys);
                let values = self.v.row_ptr([first, v2, v3]).cast_const();
                match self.v.ty {
                    Type::F32 if all_live => mix.add_rows::<f32>(values, self.v.nb[1]),
                    // Values that are mixed once need not be converted first.
                    Type::F16 if all_live && streaming => {
                        mix.add_rows::<f16>(values, self.v.nb[1]);
                    }
                    Type::Bf16 if all_live && streaming => {
                        mix.add_rows::<bf16>(values, self.v.nb[1]);
                    }
                    _ => {
                        for i in 0..keys {
                            let to = tile.add(i * self.width);
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
        if self.spans == 1 {
            self.finish(scratch, block, &mut sums);
        }
    }

    /// Reads the mask for `keys` keys from `first` on, as floats, one row for each distinct one (see
    /// [`Attention::mask_row`]). Returns which keys any row of the block sees, one bit each; `None` if
    /// that is none of them.
    ///
    /// # Safety
    /// The mask has as many elements.
    unsafe fn mask(&self, block: Block, first: usize, keys: usize, out: &mut [f32]) -> Option<u64> {
        let all = u64::MAX >> (64 - keys);
        let Some(mask) = self.mask else {
            return Some(all);
        };
        let halves_to_floats = Format::of(Type::F16)
            .expect("halves are a format")
            .dequantize_row;
        let mut live = 0;
        let mut row = 0;
        while row < block.rows {
            let (token, head) = self.row(block, row);
            let from = mask.row_ptr([token, head % mask.ne[2], block.sequence % mask.ne[3]]);
            let mut halves = [0u16; TILE_KEYS];
            // SAFETY: the caller's promise; the rows of a mask are dense halves.
            unsafe {
                let from = from.cast::<u16>().add(first);
                halves.as_mut_ptr().copy_from_nonoverlapping(from, keys);
            }
            let out = &mut out[self.mask_row(block, row) * TILE_KEYS..][..TILE_KEYS];
            // SAFETY: both hold a tile's keys.
            unsafe { (halves_to_floats)(halves.as_ptr().cast(), out.as_mut_ptr(), TILE_KEYS) };
            for (i, half) in halves.into_iter().enumerate() {
                live |= u64::from(half != MINUS_INFINITY) << i;
            }
            // The heads of a token share its row if they share all.
            row += if mask.ne[2] == 1 {
                self.group - (block.first + row) % self.group
            } else {
                1
            };
        }
        Some(live & all).filter(|&live| live != 0)
    }

    /// Which row of the converted mask is that of a row of a block.
    fn mask_row(&self, block: Block, row: usize) -> usize {
        match self.mask {
            Some(mask) if mask.ne[2] == 1 => self.row(block, row).0 - self.row(block, 0).0,
            _ => row,
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

/// Turns the scores of a tile into weights.
struct Weigh<'a, 'b> {
    attention: &'a Attention,
    block: Block,
    keys: usize,
    scores: &'a mut [f32],
    masks: &'a [f32],
    sums: &'a mut Sums<'b>,
}

impl Task for Weigh<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Weigh {
            attention,
            block,
            keys,
            ..
        } = self;
        let Attention { scale, cap, .. } = *attention;
        let minus_infinity = simd.splat(f32::NEG_INFINITY);
        for r in 0..block.rows {
            let scores = &mut self.scores[r * TILE_KEYS..][..keys];
            let mask = attention.mask.map(|_| {
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
