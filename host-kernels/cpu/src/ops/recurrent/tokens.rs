//! The rows of a source that belong to one head of one sequence, one row per token.

use std::ops::Range;

use crate::kernel::Compiled;
use crate::view::View;

/// The rows of one head, one per token.
#[derive(Clone, Copy)]
pub(super) struct Tokens {
    /// The row of the first token.
    pub(super) first: *const u8,
    /// Bytes from the row of one token to the row of the next.
    pub(super) stride: usize,
}

impl Tokens {
    /// A head of a sequence, in a view of [size, heads, tokens, sequences].
    pub(super) fn new(view: &View, head: usize, seq: usize) -> Tokens {
        let first = view
            .ptr()
            .wrapping_add(head * view.nb[1] + seq * view.nb[3]);
        Tokens {
            first,
            stride: view.nb[2],
        }
    }

    /// The row of token `t`.
    #[inline(always)]
    pub(super) fn at_token(self, t: usize) -> *const f32 {
        self.first.wrapping_add(t * self.stride).cast()
    }
}

/// One head of one sequence, in contiguous sources of [size, heads, tokens] whose sequences follow
/// each other.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// Floats of a row.
    pub(super) size: usize,
    /// The heads of a token.
    pub(super) heads: usize,
    /// The index of the head.
    pub(super) head: usize,
    /// The index of the first token of the sequence.
    pub(super) first_token: usize,
}

impl Head {
    /// The rows of the head in a source.
    pub(super) fn of(&self, source: &View) -> Tokens {
        let stride = self.heads * self.size * size_of::<f32>();
        let first = self
            .shared(source)
            .cast::<u8>()
            .wrapping_add(self.first_token * stride);
        Tokens { first, stride }
    }

    /// The row of the head in a source with one row per head, which all tokens share.
    pub(super) fn shared(&self, source: &View) -> *const f32 {
        source
            .ptr()
            .cast::<f32>()
            .cast_const()
            .wrapping_add(self.head * self.size)
    }
}

/// What one head of one sequence writes, and the state that it starts from.
#[derive(Clone)]
pub(super) struct HeadOutput {
    /// The tokens of this call. The calls for a head are in order.
    pub(super) tokens: Range<usize>,
    /// The new state, `size * size` floats of the destination.
    pub(super) state: *mut f32,
    /// The state before the first token, `size * size` floats of a source.
    pub(super) before: *const f32,
    /// The result of the first token, `size` floats of the destination.
    pub(super) y: *mut f32,
    /// Floats from the result of one token to that of the next.
    pub(super) y_stride: usize,
}

/// Elements of a state that a unit of work updates, about.
const UNIT_UPDATES: usize = 1 << 20;

/// How the tokens of a sequence are divided into units of work, which one thread does in order.
#[derive(Clone, Copy)]
pub(super) struct TokenCut {
    tokens: usize,
    grain: usize,
    /// The number of units.
    pub(super) steps: usize,
}

impl TokenCut {
    /// A sequence of `tokens` tokens, each of which updates a state of `elements` elements. There
    /// is at least one unit.
    pub(super) fn new(tokens: usize, elements: usize) -> TokenCut {
        let grain = (UNIT_UPDATES / elements.max(1)).max(1);
        TokenCut {
            tokens,
            grain,
            steps: tokens.div_ceil(grain).max(1),
        }
    }

    /// The tokens of a unit.
    pub(super) fn tokens(&self, step: usize) -> Range<usize> {
        let start = step * self.grain;
        start.min(self.tokens)..self.tokens.min(start + self.grain)
    }
}

/// Calls `run` for each head of each sequence. `source` is a view of [size, heads, tokens of all
/// sequences], `state` one of [size * size * heads, sequences]; the destination holds the results
/// of all tokens, then the states. A head is run by one thread.
pub(super) fn each_head(
    dst: View,
    source: View,
    state: View,
    run: impl Fn(Head, HeadOutput) + Send + Sync + 'static,
) -> Compiled {
    let [size, heads, tokens, _] = source.ne;
    let seqs = state.ne[1];
    let tokens = tokens.checked_div(seqs).unwrap_or(0);
    let cut = TokenCut::new(tokens, size * size);
    Compiled::one(move |w| {
        for unit in w.range_of_groups(heads * seqs, cut.steps) {
            let (step, unit) = (unit % cut.steps, unit / cut.steps);
            let (head, seq) = (unit % heads, unit / heads);
            let at = unit * size * size;
            let out = dst.ptr().cast::<f32>();
            run(
                Head {
                    size,
                    heads,
                    head,
                    first_token: seq * tokens,
                },
                HeadOutput {
                    tokens: cut.tokens(step),
                    state: out.wrapping_add(size * heads * tokens * seqs + at),
                    before: state.ptr().cast::<f32>().cast_const().wrapping_add(at),
                    y: out.wrapping_add((seq * tokens * heads + head) * size),
                    y_stride: heads * size,
                },
            );
        }
        Ok(())
    })
}
