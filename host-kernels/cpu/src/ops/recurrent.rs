//! SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET, SOLVE_TRI:
//! operators that process tokens (or rows) in order.
//!
//! Heads and sequences are independent. Each head of a sequence is one unit of work, and one call
//! of a SIMD kernel processes all of its tokens. States are updated in place in the destination.

use vgpu_transport::ir::{Op, OpKind, Rule, Type};

use super::f32_rows::{Access, STAGE, Weighted, apply};
use crate::kernel::{Compiled, Kernel, check_index};
use crate::operands::Operands;
use crate::simd::{Lanes, PtrTask, Simd, chunks, dispatch_ptr};
use crate::view::View;
use vgpu_engine::types::{F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    let all = |op, sources| Rule::new(op, F32, &vec![F32; sources]);
    vec![
        Rule::new(OpKind::SsmConv, F32, &[FLOATS, FLOATS]),
        all(OpKind::SsmScan, 6),
        all(OpKind::RwkvWkv6, 6),
        all(OpKind::RwkvWkv7, 7),
        all(OpKind::GatedLinearAttn, 5),
        all(OpKind::GatedDeltaNet, 6),
        all(OpKind::SolveTri, 2),
    ]
}

pub(super) fn compile(op: &Op, o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    Some(match *op {
        Op::SsmConv {} => ssm_conv(dst, o.src(0), o.src(1)),
        Op::SsmScan { snapshots } => {
            let sources = std::array::from_fn(|i| o.src(i));
            ssm_scan(dst, sources, snapshots as usize)
        }
        Op::RwkvWkv6 {} => {
            let (r, bonus, decay) = (o.src(2), o.src(3), o.src(4));
            linear_attention(dst, [o.src(0), o.src(1)], o.src(5), move |head| Wkv6 {
                r: head.of(&r),
                bonus: head.shared(&bonus),
                decay: head.of(&decay),
            })
        }
        Op::GatedLinearAttn { scale } => {
            let (q, gate) = (o.src(2), o.src(3));
            linear_attention(dst, [o.src(0), o.src(1)], o.src(4), move |head| Gated {
                q: head.of(&q),
                gate: head.of(&gate),
                scale,
            })
        }
        Op::RwkvWkv7 {} => rwkv_wkv7(dst, std::array::from_fn(|i| o.src(i))),
        Op::GatedDeltaNet { snapshots } => {
            let sources = std::array::from_fn(|i| o.src(i));
            gated_delta_net(dst, sources, snapshots as usize, o.workers())
        }
        Op::SolveTri {} => solve_tri(dst, o.src(0), o.src(1)),
        _ => return None,
    })
}

/// The vector of floats at `ptr`.
///
/// # Safety
/// `ptr` is readable for `n <= LANES` floats.
#[inline(always)]
unsafe fn load<S: Simd>(simd: S, ptr: *const f32, n: usize) -> Lanes<S> {
    // SAFETY: the caller's contract is that of the callee.
    unsafe { simd.load_ptr(ptr, n) }
}

/// Tokens for which it pays to go along the tokens instead of the channels.
const MANY_TOKENS: usize = 16;

/// `dst[c, t, s] = sum_i x[t + i, c, s] * kernel[i, c]`
fn ssm_conv(dst: View, x: View, kernel: View) -> Compiled {
    let [channels, tokens, seqs, _] = dst.ne;
    let taps = kernel.ne[0];
    let values = Access::new(x.ty, x.nb[0]);
    let weights = Access::new(kernel.ty, kernel.nb[0]);
    let direct = Access::direct();
    // Down a channel the destination is strided.
    let out = Access::new(Type::F32, dst.nb[1]);
    Compiled::one(move |w| {
        let mut sums = [0.0; STAGE];
        for unit in w.share(channels * seqs) {
            let (c, s) = (unit % channels, unit / channels);
            let row = x.row_ptr([c, s, 0]).cast_const();
            let weight = |i: usize| {
                let mut value = 0.0;
                // SAFETY: tap i is inside the kernel's row.
                unsafe { weights.load(weights.at(kernel.row_ptr([c, 0, 0]), i), 1, &mut value) };
                value
            };
            let to = dst.ptr().wrapping_add(c * dst.nb[0] + s * dst.nb[2]);
            for start in (0..tokens).step_by(STAGE) {
                let n = STAGE.min(tokens - start);
                sums[..n].fill(0.0);
                for i in 0..taps {
                    let (weight, from) = (weight(i), values.at(row, start + i));
                    // SAFETY: the row has `tokens + taps - 1` elements, the sums a place for each
                    // token.
                    unsafe {
                        if n < MANY_TOKENS {
                            for (t, sum) in sums[..n].iter_mut().enumerate() {
                                let mut value = 0.0;
                                values.load(values.at(from, t), 1, &mut value);
                                *sum += value * weight;
                            }
                        } else {
                            let sums = sums.as_mut_ptr();
                            let src = [(values, from), (direct, sums.cast_const().cast())];
                            apply(Weighted { weight }, (direct, sums.cast()), src, n);
                        }
                    }
                }
                // SAFETY: the destination has a place for each token of the channel.
                unsafe { out.store(sums.as_ptr(), n, out.at(to, start).cast_mut()) };
            }
        }
        Ok(())
    })
}

/// The sum of two vectors' products.
///
/// # Safety
/// Both are readable for `n` floats.
#[inline(always)]
unsafe fn dot<S: Simd>(simd: S, a: *const f32, b: *const f32, n: usize) -> f32 {
    let mut sum = simd.splat(0.0);
    chunks::<S>(n, |i, len| {
        // SAFETY: the caller guarantees `n` floats; lanes beyond the last are 0.
        sum = unsafe { load(simd, a.add(i), len).mul_add(load(simd, b.add(i), len), sum) };
    });
    sum.sum()
}

/// Tokens of one head: where the first is, and how many bytes apart the others are.
#[derive(Clone, Copy)]
struct Tokens {
    first: *const u8,
    step: usize,
}

impl Tokens {
    /// A head of a sequence, in a view of [size, heads, tokens, sequences].
    fn new(view: &View, head: usize, seq: usize) -> Tokens {
        let first = view
            .ptr()
            .wrapping_add(head * view.nb[1] + seq * view.nb[3]);
        Tokens {
            first,
            step: view.nb[2],
        }
    }

    #[inline(always)]
    fn at_token(self, t: usize) -> *const f32 {
        self.first.wrapping_add(t * self.step).cast()
    }
}

/// One head of a selective scan (Mamba, arXiv:2312.00752).
///
/// Contract: all pointers refer to as many floats as the fields say, and no other thread writes
/// them.
struct Scan {
    /// `rows` states of `n` floats, updated in place, from `before`.
    state: *mut f32,
    before: *const f32,
    rows: usize,
    n: usize,
    tokens: usize,
    x: Tokens,
    dt: Tokens,
    /// A decay for each element of the state, or one for all.
    a: *const f32,
    decays: usize,
    b: Tokens,
    c: Tokens,
    y: *mut f32,
    y_step: usize,
    /// Where the state after the last token but `i` goes, for `i` from 1 below `snapshots`.
    snapshot_step: usize,
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
            ..
        } = self;
        // SAFETY: the contract of `Scan` guarantees states of `rows * n` floats, and for as many
        // vectors of `n` (B, C, A) or `rows` (x, y) floats as there are tokens.
        unsafe {
            for t in 0..tokens {
                let dt = self.dt.at_token(t).read();
                let dt = if dt > 20.0 { dt } else { dt.exp().ln_1p() };
                let (x, b, c) = (self.x.at_token(t), self.b.at_token(t), self.c.at_token(t));
                let y = self.y.wrapping_add(t * self.y_step);
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
                            (load(simd, self.a.add(i), len) * dt).exp()
                        };
                        let input = load(simd, b.add(i), len) * input;
                        let new = load(simd, from.add(i), len).mul_add(decay, input);
                        new.store_ptr(to.add(i), len);
                        sum = new.mul_add(load(simd, c.add(i), len), sum);
                    });
                    y.add(row).write(sum.sum());
                }
                let slot = tokens - 1 - t;
                if slot > 0 && slot < self.snapshots {
                    let snapshot = state.wrapping_add(slot * self.snapshot_step);
                    std::ptr::copy(state, snapshot, rows * n);
                }
            }
        }
    }
}

/// See the rules in the IR for what the sources are.
fn ssm_scan(dst: View, sources: [View; 7], snapshots: usize) -> Compiled {
    let [s, x, dt, a, b, c, ids] = sources;
    let [rows, heads, tokens, seqs] = x.ne;
    let n = s.ne[0];
    let per_seq = n * rows * heads;
    let states = rows * heads * tokens * seqs;
    let per_group = heads / b.ne[1];
    Compiled::one(move |w| {
        for unit in w.share(heads * seqs) {
            let (h, seq) = (unit % heads, unit / heads);
            let id = ids.ptr().wrapping_add(seq * ids.nb[0]).cast::<i32>();
            // SAFETY: there is an id for each sequence. Volatile: what is checked is what is used.
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
                x: Tokens::new(&x, h, seq),
                dt: Tokens {
                    first: dt
                        .ptr()
                        .wrapping_add((seq * tokens * heads + h) * size_of::<f32>()),
                    step: heads * size_of::<f32>(),
                },
                a: a.ptr().cast::<f32>().wrapping_add(h * a.ne[0]),
                decays: a.ne[0],
                b: Tokens::new(&b, group, seq),
                c: Tokens::new(&c, group, seq),
                y: out.wrapping_add((seq * tokens * heads + h) * rows),
                y_step: heads * rows,
                snapshot_step: per_seq * seqs,
                snapshots,
            };
            // SAFETY: the rules of the operator require sources and a destination of these shapes,
            // and every view lies inside memory of the plan. Each unit is the work of one thread
            // and writes only its own part of the destination.
            unsafe { dispatch_ptr(scan) };
        }
        Ok(())
    })
}

/// A head of a sequence, in contiguous sources of [size, heads, tokens].
#[derive(Clone, Copy)]
struct Head {
    size: usize,
    heads: usize,
    head: usize,
    first_token: usize,
}

impl Head {
    /// The head's tokens in a source.
    fn of(&self, source: &View) -> Tokens {
        let step = self.heads * self.size * size_of::<f32>();
        let first = self
            .shared(source)
            .cast::<u8>()
            .wrapping_add(self.first_token * step);
        Tokens { first, step }
    }

    /// The head in a source that all tokens share.
    fn shared(&self, source: &View) -> *const f32 {
        source
            .ptr()
            .cast::<f32>()
            .cast_const()
            .wrapping_add(self.head * self.size)
    }
}

/// How a linear attention updates a state: element (i, j) of it with `kv = k[i] * v[j]`.
trait Cell: Copy {
    /// What element (i, j) adds to result j, and the new element. Implementations are
    /// `#[inline(always)]`.
    ///
    /// # Safety
    /// The cell has factors for token `t`, and they for `i`.
    unsafe fn step<S: Simd>(
        self,
        t: usize,
        i: usize,
        kv: Lanes<S>,
        state: Lanes<S>,
    ) -> (Lanes<S>, Lanes<S>);
}

/// The result sees `kv` times a bonus, and the state that was.
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
        // SAFETY: the caller guarantees t and i.
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

/// The result sees the state that is.
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
        // SAFETY: the caller guarantees t and i.
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

/// One head of a linear attention. Contract: as [`Scan`].
struct Attention<C> {
    cell: C,
    k: Tokens,
    v: Tokens,
    size: usize,
    tokens: usize,
    state: *mut f32,
    before: *const f32,
    y: *mut f32,
    y_step: usize,
}

impl<C: Cell> PtrTask for Attention<C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Attention {
            cell,
            size,
            tokens,
            state,
            before,
            ..
        } = self;
        // SAFETY: the contract of `Attention` guarantees states of `size * size` floats and vectors
        // of `size` for each token.
        unsafe {
            for t in 0..tokens {
                let (k, v) = (self.k.at_token(t), self.v.at_token(t));
                let y = self.y.wrapping_add(t * self.y_step);
                let from = if t == 0 { before } else { state.cast_const() };
                chunks::<S>(size, |j, len| {
                    let v = load(simd, v.add(j), len);
                    let mut sum = simd.splat(0.0);
                    for i in 0..size {
                        let kv = v * k.add(i).read();
                        let at = i * size + j;
                        let (result, new) = cell.step(t, i, kv, load(simd, from.add(at), len));
                        new.store_ptr(state.add(at), len);
                        sum = sum + result;
                    }
                    sum.store_ptr(y.add(j), len);
                });
            }
        }
    }
}

/// Tokens of sequences follow each other, in the sources as in the destination, whose end holds the
/// states.
fn linear_attention<C: Cell + 'static>(
    dst: View,
    [k, v]: [View; 2],
    state: View,
    cell: impl Fn(Head) -> C + Send + Sync + 'static,
) -> Compiled {
    let [size, heads, tokens, _] = k.ne;
    let seqs = state.ne[1];
    let tokens = tokens.checked_div(seqs).unwrap_or(0);
    Compiled::one(move |w| {
        for unit in w.share(heads * seqs) {
            let (h, seq) = (unit % heads, unit / heads);
            let head = Head {
                size,
                heads,
                head: h,
                first_token: seq * tokens,
            };
            let at = (seq * heads + h) * size * size;
            let out = dst.ptr().cast::<f32>();
            // SAFETY: the rules of the operator require sources and a destination of these shapes,
            // and every view lies inside memory of the plan. Each unit is the work of one thread
            // and writes only its own part of the destination.
            unsafe {
                dispatch_ptr(Attention {
                    cell: cell(head),
                    k: head.of(&k),
                    v: head.of(&v),
                    size,
                    tokens,
                    state: out.wrapping_add(size * heads * tokens * seqs + at),
                    before: state.ptr().cast::<f32>().cast_const().wrapping_add(at),
                    y: out.wrapping_add((seq * tokens * heads + h) * size),
                    y_step: heads * size,
                })
            };
        }
        Ok(())
    })
}

/// One head of RWKV 7. Contract: as [`Scan`].
struct Wkv7 {
    /// r, w, k, v, a, b
    inputs: [Tokens; 6],
    size: usize,
    tokens: usize,
    state: *mut f32,
    before: *const f32,
    y: *mut f32,
    y_step: usize,
}

impl PtrTask for Wkv7 {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Wkv7 {
            size,
            tokens,
            state,
            before,
            ..
        } = self;
        // SAFETY: the contract of `Wkv7` guarantees states of `size * size` floats and vectors of
        // `size` for each token.
        unsafe {
            for t in 0..tokens {
                let [r, w, k, v, a, b] = self.inputs.map(|input| input.at_token(t));
                let y = self.y.wrapping_add(t * self.y_step);
                let from = if t == 0 { before } else { state.cast_const() };
                for i in 0..size {
                    let (from, to) = (from.add(i * size), state.add(i * size));
                    let removed = dot(simd, a, from, size);
                    let v = v.add(i).read();
                    let mut sum = simd.splat(0.0);
                    chunks::<S>(size, |j, len| {
                        let kv = load(simd, k.add(j), len) * v;
                        let new =
                            load(simd, from.add(j), len).mul_add(load(simd, w.add(j), len), kv);
                        let new = load(simd, b.add(j), len).mul_add(simd.splat(removed), new);
                        new.store_ptr(to.add(j), len);
                        sum = new.mul_add(load(simd, r.add(j), len), sum);
                    });
                    y.add(i).write(sum.sum());
                }
            }
        }
    }
}

fn rwkv_wkv7(dst: View, sources: [View; 7]) -> Compiled {
    let [r, w, k, v, a, b, state] = sources;
    let inputs = [r, w, k, v, a, b];
    let [size, heads, tokens, _] = r.ne;
    let seqs = state.ne[1];
    let tokens = tokens.checked_div(seqs).unwrap_or(0);
    Compiled::one(move |w| {
        for unit in w.share(heads * seqs) {
            let (h, seq) = (unit % heads, unit / heads);
            let head = Head {
                size,
                heads,
                head: h,
                first_token: seq * tokens,
            };
            let at = (seq * heads + h) * size * size;
            let out = dst.ptr().cast::<f32>();
            // SAFETY: the rules of the operator require sources and a destination of these shapes,
            // and every view lies inside memory of the plan. Each unit is the work of one thread
            // and writes only its own part of the destination.
            unsafe {
                dispatch_ptr(Wkv7 {
                    inputs: inputs.map(|input| head.of(&input)),
                    size,
                    tokens,
                    state: out.wrapping_add(size * heads * tokens * seqs + at),
                    before: state.ptr().cast::<f32>().cast_const().wrapping_add(at),
                    y: out.wrapping_add((seq * tokens * heads + h) * size),
                    y_step: heads * size,
                })
            };
        }
        Ok(())
    })
}

/// One head of a gated delta net (arXiv:2412.06464). The state is stored transposed: row j makes
/// value j. Contract: as [`Scan`].
struct DeltaNet {
    q: Tokens,
    k: Tokens,
    v: Tokens,
    gate: Tokens,
    /// One gate for each element of a key, or one for all.
    gates: usize,
    beta: Tokens,
    /// Room for `size` floats.
    decay: *mut f32,
    size: usize,
    tokens: usize,
    state: *mut f32,
    before: *const f32,
    y: *mut f32,
    y_step: usize,
    snapshot_step: usize,
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
        // SAFETY: the contract of `DeltaNet` guarantees states of `size * size` floats and vectors
        // of `size` for each token.
        unsafe {
            std::ptr::copy(self.before, state, size * size);
            for t in 0..tokens {
                let (q, k, v) = (self.q.at_token(t), self.k.at_token(t), self.v.at_token(t));
                let (gate, beta) = (self.gate.at_token(t), self.beta.at_token(t).read());
                let y = self.y.wrapping_add(t * self.y_step);
                chunks::<S>(size, |i, len| {
                    let gate = if self.gates == 1 {
                        simd.splat(gate.read())
                    } else {
                        load(simd, gate.add(i), len)
                    };
                    gate.exp().store_ptr(decay.add(i), len);
                });
                for j in 0..size {
                    let row = state.add(j * size);
                    let mut known = simd.splat(0.0);
                    chunks::<S>(size, |i, len| {
                        let new = load(simd, row.add(i), len) * load(simd, decay.add(i), len);
                        new.store_ptr(row.add(i), len);
                        known = new.mul_add(load(simd, k.add(i), len), known);
                    });
                    let delta = simd.splat((v.add(j).read() - known.sum()) * beta);
                    let mut sum = simd.splat(0.0);
                    chunks::<S>(size, |i, len| {
                        let old = load(simd, row.add(i), len);
                        let new = load(simd, k.add(i), len).mul_add(delta, old);
                        new.store_ptr(row.add(i), len);
                        sum = new.mul_add(load(simd, q.add(i), len), sum);
                    });
                    y.add(j).write(sum.sum() * scale);
                }
                let slot = tokens - 1 - t;
                if slot > 0 && slot < self.snapshots {
                    let snapshot = state.wrapping_add(slot * self.snapshot_step);
                    std::ptr::copy(state, snapshot, size * size);
                }
            }
        }
    }
}

/// See the rules in the IR for what the sources are.
fn gated_delta_net(dst: View, sources: [View; 6], snapshots: usize, workers: usize) -> Compiled {
    let [q, k, v, g, beta, state] = sources;
    let [size, heads, tokens, seqs] = v.ne;
    let units = heads * seqs;
    let busy = workers.min(units);
    let kernel: Kernel = Box::new(move |w| {
        for unit in w.share(units) {
            let (h, seq) = (unit % heads, unit / heads);
            let shared =
                |source: &View| Tokens::new(source, h % source.ne[1], seq / (seqs / source.ne[3]));
            let at = unit * size * size;
            let out = dst.ptr().cast::<f32>();
            // SAFETY: the rules of the operator require sources and a destination of these shapes,
            // and every view lies inside memory of the plan. Each unit is the work of one thread
            // and writes only its own part of the destination.
            unsafe {
                dispatch_ptr(DeltaNet {
                    q: shared(&q),
                    k: shared(&k),
                    v: Tokens::new(&v, h, seq),
                    gate: Tokens::new(&g, h, seq),
                    gates: g.ne[0],
                    beta: Tokens::new(&beta, h, seq),
                    // Units are only dealt to the workers that there is room for.
                    decay: w.scratch().cast::<f32>().wrapping_add(w.index() * size),
                    size,
                    tokens,
                    state: out.wrapping_add(size * heads * tokens * seqs + at),
                    before: state.ptr().cast::<f32>().cast_const().wrapping_add(at),
                    y: out.wrapping_add((seq * tokens * heads + h) * size),
                    y_step: heads * size,
                    snapshot_step: size * size * units,
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

/// Some columns of a system of equations. Contract: the views are valid, and no other thread writes
/// these columns.
struct Solve {
    a: View,
    b: View,
    x: View,
    /// Indices of the matrix.
    matrix: [usize; 2],
    first: usize,
    columns: usize,
}

impl PtrTask for Solve {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self, simd: S) {
        let Solve {
            a,
            b,
            x,
            matrix: [i2, i3],
            first,
            columns,
        } = self;
        // SAFETY: the contract of `Solve` guarantees the matrix and for its columns from `first`
        // on; all rows are dense.
        unsafe {
            chunks::<S>(columns, |j, len| {
                let row = |view: &View, i: usize| {
                    view.row_ptr([i, i2, i3])
                        .cast::<f32>()
                        .wrapping_add(first + j)
                };
                for i in 0..a.ne[1] {
                    let factors = a.row_ptr([i, i2, i3]).cast::<f32>();
                    let mut sum = load(simd, row(&b, i), len);
                    for t in 0..i {
                        let known = load(simd, row(&x, t), len);
                        sum = known.mul_add(simd.splat(-factors.add(t).read()), sum);
                    }
                    (sum / factors.add(i).read()).store_ptr(row(&x, i), len);
                }
            });
        }
    }
}

/// Columns that a thread solves at a time: several vectors of any instruction set.
const SOLVE_COLUMNS: usize = 32;

/// `a * dst = b`, a being lower triangular. Columns are solved independently.
fn solve_tri(dst: View, a: View, b: View) -> Compiled {
    let columns = b.ne[0];
    let pieces = columns.div_ceil(SOLVE_COLUMNS);
    Compiled::one(move |w| {
        for unit in w.share(pieces * b.ne[2] * b.ne[3]) {
            let (piece, matrix) = (unit % pieces, unit / pieces);
            let first = piece * SOLVE_COLUMNS;
            // SAFETY: the rules of the operator require sources and a destination of these shapes,
            // and every view lies inside memory of the plan. Each unit is the work of one thread
            // and writes only its own part of the destination.
            unsafe {
                dispatch_ptr(Solve {
                    a,
                    b,
                    x: dst,
                    matrix: [matrix % b.ne[2], matrix / b.ne[2]],
                    first,
                    columns: SOLVE_COLUMNS.min(columns - first),
                })
            };
        }
        Ok(())
    })
}
