//! The rows of a source that belong to one head of one sequence, one row per token.

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
