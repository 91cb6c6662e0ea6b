//! RWKV_WKV6 and GATED_LINEAR_ATTN: linear attention with a state of `size * size` floats per head.

use vgpu_transport::ir::Op;

use super::tokens::{Head, HeadOutput, Tokens, each_head};
use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use crate::simd::{Lanes, PtrTask, Simd, chunks, dispatch_ptr};
use crate::view::View;

/// RWKV_WKV6.
pub(super) fn rwkv_wkv6(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::RwkvWkv6 {});
    let [k, v, r, bonus, decay, state] = o.sources();
    let cell = move |head: Head| Wkv6 {
        r: head.of(&r),
        bonus: head.shared(&bonus),
        decay: head.of(&decay),
    };
    // SAFETY: `o` has passed the check of RWKV_WKV6, which requires the lengths that
    // `linear_attention` does: k, v, r and decay have the same, and the bonus has a row for each
    // head.
    unsafe { linear_attention(o.dst(), [k, v], state, cell) }
}

/// GATED_LINEAR_ATTN.
pub(super) fn gated_linear_attn(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::GatedLinearAttn { scale });
    let [k, v, q, gate, state] = o.sources();
    let cell = move |head: Head| Gated {
        q: head.of(&q),
        gate: head.of(&gate),
        scale,
    };
    // SAFETY: `o` has passed the check of GATED_LINEAR_ATTN, which requires the lengths that
    // `linear_attention` does: k, v, q and gate have the same.
    unsafe { linear_attention(o.dst(), [k, v], state, cell) }
}

/// How element (i, j) of a state is updated with `kv = k[i] * v[j]`.
trait Cell: Copy {
    /// What element (i, j) adds to result j, and the new element. Implementations are
    /// `#[inline(always)]`.
    ///
    /// # Safety
    /// The factors of the cell are readable for token `t` and for index `i`.
    unsafe fn step<S: Simd>(
        self,
        t: usize,
        i: usize,
        kv: Lanes<S>,
        state: Lanes<S>,
    ) -> (Lanes<S>, Lanes<S>);
}

/// RWKV 6: the result is computed from the old state and from `kv` times a bonus.
#[derive(Clone, Copy)]
struct Wkv6 {
    r: Tokens,
    bonus: *const f32,
    decay: Tokens,
}

impl Cell for Wkv6 {
    #[inline(always)]
    unsafe fn step<S: Simd>(
        self,
        t: usize,
        i: usize,
        kv: Lanes<S>,
        state: Lanes<S>,
    ) -> (Lanes<S>, Lanes<S>) {
        // SAFETY: the caller guarantees that each factor has a row for token `t`, longer than `i`.
        let (r, bonus, decay) = unsafe {
            (
                self.r.at_token(t).add(i).read(),
                self.bonus.add(i).read(),
                self.decay.at_token(t).add(i).read(),
            )
        };
        ((kv * bonus + state) * r, state * decay + kv)
    }
}

/// Gated linear attention: the result is computed from the new state.
#[derive(Clone, Copy)]
struct Gated {
    q: Tokens,
    gate: Tokens,
    scale: f32,
}

impl Cell for Gated {
    #[inline(always)]
    unsafe fn step<S: Simd>(
        self,
        t: usize,
        i: usize,
        kv: Lanes<S>,
        state: Lanes<S>,
    ) -> (Lanes<S>, Lanes<S>) {
        // SAFETY: the caller guarantees that each factor has a row for token `t`, longer than `i`.
        let (q, gate) = unsafe {
            (
                self.q.at_token(t).add(i).read(),
                self.gate.at_token(t).add(i).read(),
            )
        };
        let new = state * gate + kv;
        (new * (q * self.scale), new)
    }
}

/// One head of one sequence.
///
/// Contract: `out.state` and `out.before` have `size * size` floats; `k`, `v`, `out.y` and the
/// factors of `cell` have `size` floats for each token; no other thread writes them.
struct LinearAttention<C> {
    cell: C,
    k: Tokens,
    v: Tokens,
    size: usize,
    out: HeadOutput,
}

impl<C: Cell> PtrTask for LinearAttention<C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let LinearAttention {
            cell, size, out, ..
        } = self;
        let HeadOutput {
            tokens,
            state,
            before,
            ..
        } = out;
        // SAFETY: the contract of `LinearAttention` guarantees `size * size` floats at `state` and
        // `before`, and `size` floats at `k`, `v`, `y` and the factors for each token. `i` and
        // `j + len` are at most `size`.
        unsafe {
            for t in tokens {
                let (k, v) = (self.k.at_token(t), self.v.at_token(t));
                let y = out.y.wrapping_add(t * out.y_stride);
                let from = if t == 0 { before } else { state.cast_const() };
                chunks::<S>(size, |j, len| {
                    let v = simd.load_ptr(v.add(j), len);
                    let mut sum = simd.splat(0.0);
                    for i in 0..size {
                        let kv = v * k.add(i).read();
                        let at = i * size + j;
                        let (result, new) = cell.step(t, i, kv, simd.load_ptr(from.add(at), len));
                        new.store_ptr(state.add(at), len);
                        sum = sum + result;
                    }
                    sum.store_ptr(y.add(j), len);
                });
            }
        }
    }
}

/// Computes all heads of all sequences. The tokens of the sequences follow each other in the
/// sources and in the destination. The destination holds the results, then the states.
///
/// # Safety
/// `k`, `v` and the sources of `cell` are contiguous floats, with a row of `size` for each head of
/// each token, or of each head if all tokens share the row. `state` has `size * size` contiguous
/// floats for each head of each of its sequences, which divide the tokens. The destination has the
/// floats of `v`, then those of `state`.
unsafe fn linear_attention<C: Cell + 'static>(
    dst: View,
    [k, v]: [View; 2],
    state: View,
    cell: impl Fn(Head) -> C + Send + Sync + 'static,
) -> Compiled {
    each_head(dst, k, state, move |head, out| {
        // SAFETY: `each_head` returns heads of sequences that `k` and `state` have, and the caller
        // guarantees their rows in every source, their states, and a destination that holds the
        // results and the states. A head is run by one thread and writes only its rows of the
        // results and its state.
        unsafe {
            dispatch_ptr(LinearAttention {
                cell: cell(head),
                k: head.of(&k),
                v: head.of(&v),
                size: head.size,
                out,
            })
        };
    })
}
