//! SSM_SCAN: the selective scan of Mamba (arXiv:2312.00752).

use std::ops::Range;

use vgpu_transport::ir::Op;

use super::tokens::{TokenCut, Tokens};
use crate::kernel::{Compiled, check_index};
use crate::operands::{Operands, parameters};
use crate::simd::{PtrTask, Simd, chunks, dispatch_ptr};

/// One head of one sequence.
///
/// Contract: all pointers refer to as many floats as the fields say, and no other thread writes
/// them.
struct Scan {
    /// `rows` states of `n` floats: `before` the first token, and updated in place after it.
    state: *mut f32,
    before: *const f32,
    rows: usize,
    n: usize,
    /// All tokens of the sequence, and those of this call. The calls are in order.
    tokens: usize,
    now: Range<usize>,
    x: Tokens,
    dt: Tokens,
    /// `decays` values: one for each of the `n` elements of a state, or one for all.
    a: *const f32,
    decays: usize,
    b: Tokens,
    c: Tokens,
    y: *mut f32,
    y_stride: usize,
    /// The state after the last token but `i` is copied to `state + i * snapshot_stride`, for `i`
    /// from 1 below `snapshots`.
    snapshot_stride: usize,
    snapshots: usize,
}

impl PtrTask for Scan {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Scan {
            state,
            before,
            rows,
            n,
            tokens,
            now,
            ..
        } = self;
        // SAFETY: the contract of `Scan` guarantees `rows * n` floats at `state`, at `before` and
        // at each snapshot, `decays` floats at `a`, and for each token a float at `dt`, `n` floats
        // at `b` and `c`, `rows` floats at `x` and `y`.
        unsafe {
            for t in now {
                let dt = self.dt.at_token(t).read();
                let dt = if dt > 20.0 { dt } else { dt.exp().ln_1p() };
                let (x, b, c) = (self.x.at_token(t), self.b.at_token(t), self.c.at_token(t));
                let y = self.y.wrapping_add(t * self.y_stride);
                let decay = simd.splat((dt * self.a.read()).exp());
                let from = if t == 0 { before } else { state.cast_const() };
                for row in 0..rows {
                    let input = simd.splat(x.add(row).read() * dt);
                    let (from, to) = (from.add(row * n), state.add(row * n));
                    let mut sum = simd.splat(0.0);
                    chunks::<S>(n, |i, len| {
                        let decay = if self.decays == 1 {
                            decay
                        } else {
                            (simd.load_ptr(self.a.add(i), len) * dt).exp()
                        };
                        let input = simd.load_ptr(b.add(i), len) * input;
                        let new = simd.load_ptr(from.add(i), len).mul_add(decay, input);
                        new.store_ptr(to.add(i), len);
                        sum = new.mul_add(simd.load_ptr(c.add(i), len), sum);
                    });
                    y.add(row).write(sum.sum());
                }
                let slot = tokens - 1 - t;
                if slot > 0 && slot < self.snapshots {
                    let snapshot = state.wrapping_add(slot * self.snapshot_stride);
                    std::ptr::copy(state, snapshot, rows * n);
                }
            }
        }
    }
}

/// Sources: state, x, dt, A, B, C, ids. The destination holds y of all tokens, then the states.
pub(super) fn ssm_scan(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::SsmScan { snapshots });
    let (dst, [s, x, dt, a, b, c, ids]) = (o.dst(), o.sources());
    let snapshots = snapshots as usize;
    let [rows, heads, tokens, seqs] = x.ne;
    let n = s.ne[0];
    let per_seq = n * rows * heads;
    let states = rows * heads * tokens * seqs;
    let per_group = heads / b.ne[1];
    let cut = TokenCut::new(tokens, rows * n);
    Compiled::one(move |w| {
        for unit in w.range_of_groups(heads * seqs, cut.steps) {
            let (step, unit) = (unit % cut.steps, unit / cut.steps);
            let (h, seq) = (unit % heads, unit / heads);
            let id = ids.ptr().wrapping_add(seq * ids.nb[0]).cast::<i32>();
            // SAFETY: `o` has passed the check of SSM_SCAN, which requires one i32 in `ids` for
            // each sequence. The read is volatile: the value that is checked is the value that is
            // used.
            let id = check_index(unsafe { id.read_volatile() }.into(), s.ne[3])?;
            let out = dst.ptr().cast::<f32>();
            let head = h * rows * n;
            let group = h / per_group;
            let scan = Scan {
                state: out.wrapping_add(states + seq * per_seq + head),
                before: s
                    .ptr()
                    .cast::<f32>()
                    .cast_const()
                    .wrapping_add(id * per_seq + head),
                rows,
                n,
                tokens,
                now: cut.tokens(step),
                x: Tokens::new(&x, h, seq),
                dt: Tokens {
                    first: dt
                        .ptr()
                        .wrapping_add((seq * tokens * heads + h) * size_of::<f32>()),
                    stride: heads * size_of::<f32>(),
                },
                a: a.ptr().cast::<f32>().wrapping_add(h * a.ne[0]),
                decays: a.ne[0],
                b: Tokens::new(&b, group, seq),
                c: Tokens::new(&c, group, seq),
                y: out.wrapping_add((seq * tokens * heads + h) * rows),
                y_stride: heads * rows,
                snapshot_stride: per_seq * seqs,
                snapshots,
            };
            // SAFETY: `o` has passed the check of SSM_SCAN: states of `n` floats, contiguous, for
            // each row of each head; dense rows of x, and of B and C for groups that divide the
            // heads, for each token; contiguous steps, one for each head of each token; 1 or `n`
            // decays for each head; a destination of contiguous results and then `snapshots` states
            // for each sequence. `id` is below the number of states. A unit is run by one thread
            // and writes only its rows of y and its states.
            unsafe { dispatch_ptr(scan) };
        }
        Ok(())
    })
}
