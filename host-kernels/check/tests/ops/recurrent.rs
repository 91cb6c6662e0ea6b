//! SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET, SOLVE_TRI.
#![allow(clippy::needless_range_loop)] // the formulas are written with indices

use vgpu_engine::{Engine, RunError};
use vgpu_transport::ir::{Op, Type};

use crate::common::*;

/// Sums in f32 over several tokens.
const TOLERANCE: f64 = 1e-5;

fn dense(ne: [u64; 4], random: &mut Random) -> Data {
    Data::dense(Type::F32, ne).fill(|| random.between(-1.0, 1.0))
}

/// A random layout with dense rows.
fn rows(ne: [u64; 4], random: &mut Random) -> Data {
    Data::random_rows(Type::F32, ne, true, random).fill(|| random.between(-1.0, 1.0))
}

/// Compares a dense result with its elements in order.
fn compare_all(what: &str, got: &Data, want: &[f64]) {
    let got = got.values();
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= TOLERANCE * (1.0 + want.abs()),
            "{what}: element {i} is {got:e}, not {want:e}"
        );
    }
}

pub(crate) fn ssm_conv(engine: &dyn Engine) {
    property(80, |random| {
        let [channels, seqs, taps] = [random.below(20), random.below(4), 1 + random.below(4)];
        let tokens = random.pick(&[0, 1, 2, 15, 40, 300]);
        let x = Data::random(Type::F32, [tokens + taps - 1, channels, seqs, 1], random)
            .fill(|| random.between(-1.0, 1.0));
        let kernel = Data::random(
            random.pick(&[Type::F32, Type::F16]),
            [taps, channels, 1, 1],
            random,
        )
        .fill(|| random.between(-1.0, 1.0));
        let dst = Data::random(Type::F32, [channels, tokens, seqs, 1], random);
        let got = run(engine, Op::SsmConv {}, &dst, &[Some(&x), Some(&kernel)]);
        compare("SSM_CONV", &got, TOLERANCE, |[c, t, s, _]| {
            (0..taps)
                .map(|i| x.get([t + i, c, s, 0]) * kernel.get([i, c, 0, 0]))
                .sum()
        });
    });
}

pub(crate) fn ssm_scan(engine: &dyn Engine) {
    property(80, |random| {
        let n = random.pick(&[1, 7, 16, 33]);
        let [rows_n, groups, tokens, seqs] = [
            1 + random.below(4),
            1 + random.below(3),
            1 + random.below(4),
            1 + random.below(3),
        ];
        let heads = groups * (1 + random.below(3));
        let per_head = random.chance(2);
        let snapshots = if per_head { 1 + random.below(4) } else { 1 };
        let stored = seqs + random.below(3);
        let s = dense([n, rows_n, heads, stored], random);
        let x = rows([rows_n, heads, tokens, seqs], random);
        let dt = dense([heads, tokens, seqs, 1], random);
        let a = dense([if per_head { 1 } else { n }, heads, 1, 1], random);
        let b = rows([n, groups, tokens, seqs], random);
        let c = rows([n, groups, tokens, seqs], random);
        let ids =
            Data::random(Type::I32, [seqs, 1, 1, 1], random).fill(|| random.below(stored) as f64);
        let states = n * rows_n * heads * seqs;
        let total = rows_n * heads * tokens * seqs + snapshots * states;
        let dst = Data::dense(Type::F32, [total, 1, 1, 1]).fill(|| 7.0);
        let src = [&s, &x, &dt, &a, &b, &c, &ids].map(Some);
        let op = Op::SsmScan {
            snapshots: snapshots as u32,
        };
        let got = run(engine, op, &dst, &src);

        let results = (total - snapshots * states) as usize;
        let mut want = dst.values();
        for seq in 0..seqs {
            for h in 0..heads {
                let g = h / (heads / groups);
                for row in 0..rows_n {
                    let id = ids.get([seq, 0, 0, 0]) as u64;
                    let mut state: Vec<f64> = (0..n).map(|i| s.get([i, row, h, id])).collect();
                    for t in 0..tokens {
                        let step = dt.get([h, t, seq, 0]).exp().ln_1p();
                        let mut y = 0.0;
                        for i in 0..n {
                            let decay = a.get([if per_head { 0 } else { i }, h, 0, 0]);
                            let input = b.get([i, g, t, seq]) * x.get([row, h, t, seq]) * step;
                            let value = &mut state[i as usize];
                            *value = *value * (step * decay).exp() + input;
                            y += *value * c.get([i, g, t, seq]);
                        }
                        want[(((seq * tokens + t) * heads + h) * rows_n + row) as usize] = y;
                        let slot = tokens - 1 - t;
                        if slot < snapshots {
                            let at = ((slot * seqs + seq) * heads + h) * rows_n + row;
                            let at = results + (at * n) as usize;
                            want[at..at + n as usize].copy_from_slice(&state);
                        }
                    }
                }
            }
        }
        compare_all("SSM_SCAN", &got, &want);
    });
}

pub(crate) fn scan_ids_are_checked(engine: &dyn Engine) {
    let one = |ne| Data::dense(Type::F32, ne).fill(|| 0.5);
    for id in [-1.0, 2.0, f64::from(i32::MAX)] {
        let (s, x) = (one([4, 2, 1, 2]), one([2, 1, 1, 1]));
        let (dt, a) = (one([1, 1, 1, 1]), one([1, 1, 1, 1]));
        let (b, c) = (one([4, 1, 1, 1]), one([4, 1, 1, 1]));
        let ids = Data::dense(Type::I32, [1, 1, 1, 1]).fill(|| id);
        let dst = one([10, 1, 1, 1]);
        let src = [&s, &x, &dt, &a, &b, &c, &ids].map(Some);
        let failure = try_run(engine, Op::SsmScan { snapshots: 1 }, &dst, &src).map(|_| ());
        let Err(Failure::Run(error)) = failure else {
            panic!("state {id} was used");
        };
        assert_eq!(
            error,
            RunError::Index {
                node: 0,
                op: "SSM_SCAN",
                index: id as i64,
                count: 2
            }
        );
    }
}

/// Lengths of a linear attention: size, heads, tokens in each sequence, sequences.
fn attention(random: &mut Random) -> [u64; 4] {
    [
        random.pick(&[1, 5, 16, 40]),
        1 + random.below(3),
        1 + random.below(4),
        1 + random.below(3),
    ]
}

/// Steps through the tokens of all heads. `step` gets the head, the token and the state [i][j], and
/// returns the results. Returns results and states in the layout of the operators.
fn recur(
    [size, heads, tokens, seqs]: [u64; 4],
    state: &Data,
    step: impl Fn(u64, u64, &mut Vec<Vec<f64>>) -> Vec<f64>,
) -> Vec<f64> {
    let (n, all) = (size as usize, (tokens * seqs) as usize);
    let row = n * heads as usize;
    let initial = state.values();
    let mut out = vec![0.0; row * all + initial.len()];
    for seq in 0..seqs {
        for h in 0..heads {
            let at = (seq * heads + h) as usize * n * n;
            let mut state: Vec<Vec<f64>> = initial[at..at + n * n]
                .chunks(n)
                .map(<[f64]>::to_vec)
                .collect();
            for t in seq * tokens..(seq + 1) * tokens {
                let y = step(h, t, &mut state);
                let to = t as usize * row + h as usize * n;
                out[to..to + n].copy_from_slice(&y);
            }
            let flat: Vec<f64> = state.into_iter().flatten().collect();
            out[row * all + at..][..n * n].copy_from_slice(&flat);
        }
    }
    out
}

pub(crate) fn rwkv6_and_gated(engine: &dyn Engine) {
    property(60, |random| {
        let lengths @ [size, heads, tokens, seqs] = attention(random);
        let n = size as usize;
        let ne = [size, heads, tokens * seqs, 1];
        let (k, v, r) = (dense(ne, random), dense(ne, random), dense(ne, random));
        let (decay, bonus) = (dense(ne, random), dense([size, heads, 1, 1], random));
        let state = dense([size * size * heads, seqs, 1, 1], random);
        let dst = Data::dense(Type::F32, [size * heads, tokens * seqs + size * seqs, 1, 1]);

        let src = [&k, &v, &r, &bonus, &decay, &state].map(Some);
        let got = run(engine, Op::RwkvWkv6 {}, &dst, &src);
        let want = recur(lengths, &state, |h, t, state| {
            let at = |x: &Data, i: usize| x.get([i as u64, h, t, 0]);
            let mut y = vec![0.0; n];
            for i in 0..n {
                for j in 0..n {
                    let kv = at(&k, i) * at(&v, j);
                    y[j] += at(&r, i) * (bonus.get([i as u64, h, 0, 0]) * kv + state[i][j]);
                    state[i][j] = at(&decay, i) * state[i][j] + kv;
                }
            }
            y
        });
        compare_all("RWKV_WKV6", &got, &want);

        let src = [&k, &v, &r, &decay, &state].map(Some);
        let got = run(engine, Op::GatedLinearAttn { scale: 0.25 }, &dst, &src);
        let want = recur(lengths, &state, |h, t, state| {
            let at = |x: &Data, i: usize| x.get([i as u64, h, t, 0]);
            let mut y = vec![0.0; n];
            for i in 0..n {
                for j in 0..n {
                    state[i][j] = at(&decay, i) * state[i][j] + at(&k, i) * at(&v, j);
                    y[j] += 0.25 * at(&r, i) * state[i][j];
                }
            }
            y
        });
        compare_all("GATED_LINEAR_ATTN", &got, &want);
    });
}

pub(crate) fn rwkv7(engine: &dyn Engine) {
    property(60, |random| {
        let lengths @ [size, heads, tokens, seqs] = attention(random);
        let n = size as usize;
        let ne = [size, heads, tokens * seqs, 1];
        // Small values: otherwise the state grows without bound.
        let small = |random: &mut Random| {
            Data::dense(Type::F32, ne).fill(|| random.between(-1.0, 1.0) / (n as f64).sqrt())
        };
        let [r, w, k, v, a, b] = std::array::from_fn(|_| small(random));
        let state = dense([size * size * heads, seqs, 1, 1], random);
        let dst = Data::dense(Type::F32, [size * heads, tokens * seqs + size * seqs, 1, 1]);
        let src = [&r, &w, &k, &v, &a, &b, &state].map(Some);
        let got = run(engine, Op::RwkvWkv7 {}, &dst, &src);
        let want = recur(lengths, &state, |h, t, state| {
            let at = |x: &Data, i: usize| x.get([i as u64, h, t, 0]);
            let mut y = vec![0.0; n];
            for i in 0..n {
                let removed: f64 = (0..n).map(|j| at(&a, j) * state[i][j]).sum();
                for j in 0..n {
                    state[i][j] =
                        state[i][j] * at(&w, j) + at(&v, i) * at(&k, j) + removed * at(&b, j);
                    y[i] += state[i][j] * at(&r, j);
                }
            }
            y
        });
        compare_all("RWKV_WKV7", &got, &want);
    });
}

pub(crate) fn delta_net(engine: &dyn Engine) {
    property(60, |random| {
        let [size, heads, tokens, seqs] = attention(random);
        let n = size as usize;
        let snapshots = 1 + random.below(4);
        let (shared_heads, shared_seqs) = (
            1 + random.below(heads),
            if random.chance(2) { seqs } else { 1 },
        );
        let scale = 1.0 / (n as f64).sqrt();
        let mut unit = |ne| {
            Data::random_rows(Type::F32, ne, true, random)
                .fill(|| random.between(-1.0, 1.0) * scale)
        };
        let (q, k) = (
            unit([size, shared_heads, tokens, shared_seqs]),
            unit([size, shared_heads, tokens, shared_seqs]),
        );
        let v = rows([size, heads, tokens, seqs], random);
        let gates = if random.chance(2) { 1 } else { size };
        let g = dense([gates, heads, tokens, seqs], random);
        let beta = dense([1, heads, tokens, seqs], random);
        let state = dense([size, size, heads, seqs], random);
        let per_snapshot = size * seqs;
        let dst = Data::dense(
            Type::F32,
            [size * heads, tokens * seqs + snapshots * per_snapshot, 1, 1],
        );
        let dst = dst.fill(|| 7.0);
        let src = [&q, &k, &v, &g, &beta, &state].map(Some);
        let got = run(
            engine,
            Op::GatedDeltaNet {
                snapshots: snapshots as u32,
            },
            &dst,
            &src,
        );

        let mut want = dst.values();
        let results = (size * heads * tokens * seqs) as usize;
        for seq in 0..seqs {
            for h in 0..heads {
                let at = |x: &Data, i: usize, t: u64| {
                    let seq = if x.shape.ne[3] == 1 { 0 } else { seq };
                    x.get([i as u64 % x.shape.ne[0], h % x.shape.ne[1], t, seq])
                };
                // S[i][j], transposed in memory.
                let mut s: Vec<Vec<f64>> = (0..size)
                    .map(|i| (0..size).map(|j| state.get([i, j, h, seq])).collect())
                    .collect();
                for t in 0..tokens {
                    for j in 0..n {
                        (0..n).for_each(|i| s[i][j] *= at(&g, i, t).exp());
                        let known: f64 = (0..n).map(|i| s[i][j] * at(&k, i, t)).sum();
                        let delta = (at(&v, j, t) - known) * at(&beta, 0, t);
                        (0..n).for_each(|i| s[i][j] += at(&k, i, t) * delta);
                        let y: f64 = (0..n).map(|i| s[i][j] * at(&q, i, t)).sum();
                        want[((seq * tokens + t) * heads + h) as usize * n + j] = y * scale;
                    }
                    let slot = tokens - 1 - t;
                    if slot < snapshots {
                        let unit = ((slot * seqs + seq) * heads + h) as usize;
                        for i in 0..n {
                            for j in 0..n {
                                want[results + (unit * n + j) * n + i] = s[i][j];
                            }
                        }
                    }
                }
            }
        }
        compare_all("GATED_DELTA_NET", &got, &want);
    });
}

pub(crate) fn triangular(engine: &dyn Engine) {
    property(80, |random| {
        let [n, columns, b2, b3] = [
            random.below(20),
            random.pick(&[0, 1, 5, 40, 70]),
            random.below(4),
            1 + random.below(2),
        ];
        let size = n.max(1) as f64;
        let mut a = Data::random_rows(Type::F32, [n, n, b2, b3], true, random)
            .fill(|| random.between(-1.0, 1.0) / size);
        for i in a.indices().filter(|i| i[0] == i[1]).collect::<Vec<_>>() {
            a.set(i, random.between(0.5, 2.0));
        }
        let b = rows([columns, n, b2, b3], random);
        let dst = Data::random_rows(Type::F32, [columns, n, b2, b3], true, random);
        let x = run(engine, Op::SolveTri {}, &dst, &[Some(&a), Some(&b)]);
        // Elements above the diagonal do not count. The product is the right-hand side again.
        for i in b.indices() {
            let [c, row, i2, i3] = i;
            let sum: f64 = (0..=row)
                .map(|t| a.get([t, row, i2, i3]) * x.get([c, t, i2, i3]))
                .sum();
            assert!(
                (sum - b.get(i)).abs() <= TOLERANCE * 2.0,
                "{i:?}: {sum} is not {}",
                b.get(i)
            );
        }
    });
}
