//! DSV4_HC_COMB, DSV4_HC_PRE, DSV4_HC_POST, LIGHTNING_INDEXER: operators of DeepSeek models.

use vgpu_transport::ir::{Op, OpKind, Rule, Type};

use super::elementwise::{Add, Scale};
use super::f32_rows::{Access, Map, STAGE, Weighted, apply, maps};
use super::gather::real_types;
use super::scratch::ScratchLayout;
use crate::gemm::{Activation, GemmArgs, MatmulKernel};
use crate::kernel::{Compiled, Kernel};
use crate::operands::{Operands, parameters};
use crate::simd::{Lanes, Simd};
use crate::view::View;
use vgpu_engine::types::{F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        Rule::new(OpKind::Dsv4HcComb, F32, &[F32; 3]),
        Rule::new(OpKind::Dsv4HcPre, F32, &[F32; 2]),
        Rule::new(OpKind::Dsv4HcPost, F32, &[F32; 4]),
        Rule::new(
            OpKind::LightningIndexer,
            F32,
            &[F32, real_types(), F32, FLOATS],
        ),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    Some(match o.op() {
        Op::Dsv4HcComb { .. } => hc_comb(o),
        Op::Dsv4HcPre { .. } => hc_pre(o),
        Op::Dsv4HcPost {} => hc_post(o),
        Op::LightningIndexer {} => lightning_indexer(o),
        _ => return None,
    })
}

maps! {
    /// `sum + sigmoid(gate) * x`
    SigmoidGated |x, gate, sum| x.mul_add(gate.sigmoid(), sum);
    /// `sum + weight * max(0, x)`
    WeightedRelu { weight } |x, sum| x.max(x.splat(0.0)).mul_add(x.splat(weight), sum);
}

/// An element of a tensor of f32.
///
/// # Safety
/// Each index is below the length of its dimension. The view is of f32.
unsafe fn float(view: &View, [i0, i1, i2, i3]: [usize; 4]) -> f32 {
    let element = view.row_ptr([i1, i2, i3]).wrapping_add(i0 * view.nb[0]);
    // SAFETY: the caller guarantees the element, which is an f32, and a view is aligned.
    unsafe { element.cast::<f32>().read() }
}

/// The streams of the hyper-connections.
const STREAMS: usize = 4;

/// A matrix `[to][from]` of mixing factors: softmax of each row, then columns and rows are
/// alternately divided by their sums (Sinkhorn-Knopp).
fn hc_comb(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::Dsv4HcComb { eps, n_iter });
    let (dst, [mixes, scale, base]) = (o.dst(), o.sources());
    Compiled::one(move |w| {
        for t in w.range_of(dst.ne[2]) {
            // SAFETY: `o` has passed the check of DSV4_HC_COMB: `mixes` has
            // `2 * STREAMS + STREAMS^2` elements for each token, `base` has as many, and `scale`
            // has three. All are f32 by the rule.
            let (scale, mix) = unsafe {
                let value = |i: usize| (float(&mixes, [i, t, 0, 0]), float(&base, [i, 0, 0, 0]));
                (float(&scale, [2, 0, 0, 0]), move |i: usize| {
                    value(2 * STREAMS + i)
                })
            };
            let mut comb = [[0.0; STREAMS]; STREAMS];
            for (i, row) in comb.iter_mut().enumerate() {
                for (j, value) in row.iter_mut().enumerate() {
                    let (mix, base) = mix(i * STREAMS + j);
                    *value = mix * scale + base;
                }
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                row.iter_mut().for_each(|v| *v = (*v - largest).exp());
                let sum: f32 = row.iter().sum();
                row.iter_mut().for_each(|v| *v = *v / sum + eps);
            }
            for i in 0..n_iter {
                if i > 0 {
                    for row in &mut comb {
                        let sum = eps + row.iter().sum::<f32>();
                        row.iter_mut().for_each(|v| *v /= sum);
                    }
                }
                for j in 0..STREAMS {
                    let sum = eps + comb.iter().map(|row| row[j]).sum::<f32>();
                    comb.iter_mut().for_each(|row| row[j] /= sum);
                }
            }
            for (i, row) in comb.iter().enumerate() {
                for (j, value) in row.iter().enumerate() {
                    let element = dst.row_ptr([i, t, 0]).wrapping_add(j * dst.nb[0]);
                    // SAFETY: the destination is f32 by the rule and has `STREAMS` rows of
                    // `STREAMS` elements for each token by the check. `i` and `j` are below
                    // `STREAMS`, and `t < dst.ne[2]`.
                    unsafe { element.cast::<f32>().write(*value) };
                }
            }
        }
        Ok(())
    })
}

/// `dst[:, t] = scale * sum_h x[:, h, t] * w[h, t]`, or with the sigmoid of a gate for each
/// element.
fn hc_pre(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::Dsv4HcPre { scale, gated });
    let (dst, [x, w]) = (o.dst(), o.sources());
    let (out, values) = (Access::rows(&dst), Access::rows(&x));
    let gates = Access::rows(&w);
    let [n, streams, ..] = x.ne;
    let strips = n.div_ceil(STAGE);
    Compiled::one(move |worker| {
        let mut sums = [0.0; STAGE];
        for unit in worker.range_of(strips * dst.ne[1]) {
            let (start, t) = (unit % strips * STAGE, unit / strips);
            let len = STAGE.min(n - start);
            sums.fill(0.0);
            let sums_ptr = sums.as_mut_ptr();
            let sum = (Access::direct(), sums_ptr.cast_const().cast());
            let to = (Access::direct(), sums_ptr.cast());
            // SAFETY: `o` has passed the check of DSV4_HC_PRE: rows of `x` and `dst` have
            // `n >= start + len` elements, and so have gates; `x` and `w` have each stream `h` of
            // each token `t` of `dst`. All are f32 by the rule. `len <= STAGE`, the length of
            // `sums`.
            unsafe {
                for h in 0..streams {
                    let value = (values, values.at(x.row_ptr([h, t, 0]), start));
                    if gated {
                        let gate = (gates, gates.at(w.row_ptr([h, t, 0]), start));
                        apply(SigmoidGated {}, to, [value, gate, sum], len);
                    } else {
                        let weight = float(&w, [h, t, 0, 0]);
                        apply(Weighted { weight }, to, [value, sum], len);
                    }
                }
                let to = out.at(dst.row_ptr([t, 0, 0]), start).cast_mut();
                apply(Scale { scale, bias: 0.0 }, (out, to), [sum], len);
            }
        }
        Ok(())
    })
}

/// `dst[:, d, t] = x[:, t] * post[d, t] + sum_s residual[:, s, t] * comb[d, s, t]`; without comb,
/// each stream keeps its own residual.
fn hc_post(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::Dsv4HcPost {});
    let (dst, [x, residual, post], comb) = (o.dst(), o.sources(), o.optional(3));
    let (out, values, old) = (
        Access::rows(&dst),
        Access::rows(&x),
        Access::rows(&residual),
    );
    let [n, streams, tokens, _] = dst.ne;
    let strips = n.div_ceil(STAGE);
    Compiled::one(move |worker| {
        let mut sums = [0.0; STAGE];
        for unit in worker.range_of(strips * streams * tokens) {
            let (start, rest) = (unit % strips * STAGE, unit / strips);
            let (d, t) = (rest % streams, rest / streams);
            let len = STAGE.min(n - start);
            sums.fill(0.0);
            let sums_ptr = sums.as_mut_ptr();
            let sum = (Access::direct(), sums_ptr.cast_const().cast());
            let to = (Access::direct(), sums_ptr.cast());
            // SAFETY: `o` has passed the check of DSV4_HC_POST: the rows of `x`, `residual` and
            // `dst` have `n >= start + len` elements; all tensors have the tokens and, except `x`,
            // the streams of `dst`, below whose numbers `t`, `d` and `s` are. All are f32 by the
            // rule, `comb` also by the check. `len <= STAGE`, the length of `sums`.
            unsafe {
                let value = (values, values.at(x.row_ptr([t, 0, 0]), start));
                let weight = float(&post, [d, t, 0, 0]);
                apply(Weighted { weight }, to, [value, sum], len);
                for s in 0..streams {
                    let weight = match &comb {
                        Some(comb) => float(comb, [d, s, t, 0]),
                        None if s == d => 1.0,
                        None => continue,
                    };
                    let value = (old, old.at(residual.row_ptr([s, t, 0]), start));
                    apply(Weighted { weight }, to, [value, sum], len);
                }
                let to = out.at(dst.row_ptr([d, t, 0]), start).cast_mut();
                out.store(sums.as_ptr(), len, to);
            }
        }
        Ok(())
    })
}

/// Keys of a unit of work.
const KEYS: usize = 128;

/// `dst[i, t, s] = sum_h max(0, q[:, h, t, s] * k[:, i, s]) * w[h, t, s] + mask[i, t, s]`
fn lightning_indexer(o: &Operands<'_>) -> Compiled {
    parameters!(o, Op::LightningIndexer {});
    let (dst, [q, k, weights, mask]) = (o.dst(), o.sources());
    let [n, heads, tokens, streams] = q.ne;
    let keys = k.ne[2];
    let product = MatmulKernel::of(Type::F32).expect("floats are weights");
    debug_assert_eq!(product.activation, Activation::Typed(Type::F32));
    let (out, key_rows) = (
        Access::rows(&dst),
        Access::new(k.ty, k.ty.block_bytes() as usize),
    );
    let masks = Access::rows(&mask);
    let row_bytes = n * size_of::<f32>();
    let tiles = keys.div_ceil(KEYS);
    let busy = o.workers().min(tiles * streams);
    let mut layout = ScratchLayout::default();
    let tile_at = layout.room(busy, KEYS * row_bytes);
    let scores_at = layout.room(busy, heads * KEYS * size_of::<f32>());
    let kernel: Kernel = Box::new(move |w| {
        let part = |at: usize, bytes: usize| {
            w.scratch()
                .wrapping_add(at + w.index() * bytes)
                .cast::<f32>()
        };
        for unit in w.range_of_groups(tiles * streams, tokens) {
            let (t, unit) = (unit % tokens, unit / tokens);
            let (start, s) = (unit % tiles * KEYS, unit / tiles);
            let count = KEYS.min(keys - start);
            let tile = part(tile_at, KEYS * row_bytes);
            let scores = part(scores_at, heads * KEYS * size_of::<f32>());
            // SAFETY: the first `busy` workers have units, and each has `KEYS >= count` rows of `n`
            // floats and `heads * KEYS` scores in the scratch memory. `o` has passed the check of
            // LIGHTNING_INDEXER: rows of q and k have `n` dense elements; every tensor has the
            // tokens (except k), the heads (q and the weights) and the streams (which those of the
            // mask divide) below whose numbers `t`, `h` and `s` are; rows of the mask and of the
            // destination have `keys >= start + count` elements. q, the weights and the destination
            // are f32 by the rule.
            unsafe {
                if t == 0 {
                    for i in 0..count {
                        let key = k.row_ptr([0, start + i, s]);
                        key_rows.load(key, n, tile.add(i * n));
                    }
                }
                (product.gemm)(&GemmArgs {
                    k: n,
                    w: tile.cast_const().cast(),
                    w_stride: row_bytes,
                    rows: count,
                    x: q.row_ptr([0, t, s]),
                    x_stride: q.nb[1],
                    cols: heads,
                    dst: scores,
                    dst_stride: KEYS,
                    table: None,
                });
                let mut sums = [0.0; KEYS];
                let sums_ptr = sums.as_mut_ptr();
                let sum = (Access::direct(), sums_ptr.cast_const().cast());
                for h in 0..heads {
                    let score = (Access::direct(), scores.add(h * KEYS).cast_const().cast());
                    let weight = float(&weights, [h, t, 0, s]);
                    apply(
                        WeightedRelu { weight },
                        (Access::direct(), sums_ptr.cast()),
                        [score, sum],
                        count,
                    );
                }
                let row = mask.row_ptr([t, 0, s % mask.ne[3]]);
                let masked = (masks, masks.at(row, start));
                let to = out.at(dst.row_ptr([t, 0, s]), start).cast_mut();
                apply(Add {}, (out, to), [sum, masked], count);
            }
        }
        Ok(())
    });
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: layout.bytes(),
    }
}
