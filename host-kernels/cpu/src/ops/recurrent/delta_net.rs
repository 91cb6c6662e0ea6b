//! GATED_DELTA_NET: the gated delta rule (arXiv:2412.06464).

use std::ops::Range;

use vgpu_transport::ir::Op;

use super::tokens::{TokenCut, Tokens};
use crate::kernel::{Compiled, Kernel};
use crate::operands::{Operands, parameters};
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};
use crate::view::View;

/// One head of one sequence. The state is stored transposed: row j of the state yields element j of
/// the result.
///
/// Contract: `state`, `before` and each snapshot have `size * size` floats; `decay` has `size`
/// floats; for each token `q`, `k`, `v` and `y` have `size` floats, `gate` has `gates`, `beta` has
/// one. No other thread writes them.
struct DeltaNet {
    q: Tokens,
    k: Tokens,
    v: Tokens,
    gate: Tokens,
    /// One gate for each element of a key, or one for all.
    gates: usize,
    beta: Tokens,
    /// Scratch memory.
    decay: *mut f32,
    size: usize,
    /// All tokens of the sequence, and those of this call. The calls are in order.
    tokens: usize,
    now: Range<usize>,
    state: *mut f32,
    before: *const f32,
    y: *mut f32,
    y_stride: usize,
    /// The state after the last token but `i` is copied to `state + i * snapshot_stride`, for `i`
    /// from 1 below `snapshots`.
    snapshot_stride: usize,
    snapshots: usize,
}

impl PtrTask for DeltaNet {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let DeltaNet {
            size,
            tokens,
            state,
            decay,
            ..
        } = self;
        let scale = 1.0 / (size as f32).sqrt();
        // SAFETY: the contract of `DeltaNet` guarantees `size * size` floats at `state`, `before`
        // and each snapshot, `size` floats at `decay`, and the rows of each token. `i + len` and
        // `j` are at most `size`.
        unsafe {
            if self.now.start == 0 {
                std::ptr::copy(self.before, state, size * size);
            }
            for t in self.now {
                let (q, k, v) = (self.q.at_token(t), self.k.at_token(t), self.v.at_token(t));
                let (gate, beta) = (self.gate.at_token(t), self.beta.at_token(t).read());
                let y = self.y.wrapping_add(t * self.y_stride);
                chunks::<S>(size, |i, len| {
                    let gate = if self.gates == 1 {
                        simd.splat(gate.read())
                    } else {
                        simd.load_ptr(gate.add(i), len)
                    };
                    gate.exp().store_ptr(decay.add(i), len);
                });
                for j in 0..size {
                    let row = state.add(j * size);
                    let mut known = simd.splat(0.0);
                    chunks::<S>(size, |i, len| {
                        let new = simd.load_ptr(row.add(i), len) * simd.load_ptr(decay.add(i), len);
                        new.store_ptr(row.add(i), len);
                        known = new.mul_add(simd.load_ptr(k.add(i), len), known);
                    });
                    let delta = simd.splat((v.add(j).read() - known.sum()) * beta);
                    let mut sum = simd.splat(0.0);
                    chunks::<S>(size, |i, len| {
                        let old = simd.load_ptr(row.add(i), len);
                        let new = simd.load_ptr(k.add(i), len).mul_add(delta, old);
                        new.store_ptr(row.add(i), len);
                        sum = new.mul_add(simd.load_ptr(q.add(i), len), sum);
                    });
                    y.add(j).write(sum.sum() * scale);
                }
                let slot = tokens - 1 - t;
                if slot > 0 && slot < self.snapshots {
                    let snapshot = state.wrapping_add(slot * self.snapshot_stride);
                    std::ptr::copy(state, snapshot, size * size);
                }
            }
        }
    }
}

/// Sources: q, k, v, gate, beta, state. The destination holds the results, then the states.
pub(super) fn gated_delta_net(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::GatedDeltaNet { snapshots });
    let (dst, [q, k, v, g, beta, state]) = (o.dst(), o.sources());
    let snapshots = snapshots as usize;
    let [size, heads, tokens, seqs] = v.ne;
    let units = heads * seqs;
    let busy = o.workers().min(units);
    let cut = TokenCut::new(tokens, size * size);
    let kernel: Kernel = Box::new(move |w| {
        for unit in w.range_of_groups(units, cut.steps) {
            let (step, unit) = (unit % cut.steps, unit / cut.steps);
            let (h, seq) = (unit % heads, unit / heads);
            let shared =
                |source: &View| Tokens::new(source, h % source.ne[1], seq / (seqs / source.ne[3]));
            let at = unit * size * size;
            let out = dst.ptr().cast::<f32>();
            // SAFETY: `o` has passed the check of GATED_DELTA_NET, which requires dense rows of
            // `size` floats (of 1 or `size` for the gate, of 1 for beta) for each token and head
            // (for q and k, for heads and sequences that repeat into those of v), a state of
            // `size * size` floats for each unit, and a destination of contiguous results and then
            // `snapshots` states for each unit. A unit is run by one thread and writes only its
            // rows of the results, its states and its row of the scratch memory.
            unsafe {
                dispatch_ptr(DeltaNet {
                    q: shared(&q),
                    k: shared(&k),
                    v: Tokens::new(&v, h, seq),
                    gate: Tokens::new(&g, h, seq),
                    gates: g.ne[0],
                    beta: Tokens::new(&beta, h, seq),
                    // Only the first `busy` workers have units, and `decay` has a row for each.
                    decay: w.scratch().cast::<f32>().wrapping_add(w.index() * size),
                    size,
                    tokens,
                    now: cut.tokens(step),
                    state: out.wrapping_add(size * heads * tokens * seqs + at),
                    before: state.ptr().cast::<f32>().cast_const().wrapping_add(at),
                    y: out.wrapping_add((seq * tokens * heads + h) * size),
                    y_stride: heads * size,
                    snapshot_stride: size * size * units,
                    snapshots,
                })
            };
        }
        Ok(())
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: busy * size * size_of::<f32>(),
    }
}
