//! DSV4_HC_COMB, DSV4_HC_PRE, DSV4_HC_POST, LIGHTNING_INDEXER.

use vgpu_cpu::formats::Format;
use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Type};

use crate::common::*;
use crate::unary::sigmoid;

/// Sums of products in f32.
const TOLERANCE: f64 = 1e-5;

fn tensor(ne: [u64; 4], random: &mut Random) -> Data {
    Data::random(Type::F32, ne, random).fill(|| random.between(-1.0, 1.0))
}

pub(crate) fn mixing_factors(engine: &dyn Engine) {
    property(60, |random| {
        let tokens = random.below(9);
        let (mixes, base) = (
            tensor([24, tokens, 1, 1], random),
            tensor([24, 1, 1, 1], random),
        );
        let scale = tensor([3, 1, 1, 1], random);
        let dst = Data::random(Type::F32, [4, 4, tokens, 1], random);
        let (eps, n_iter) = (1e-3, 1 + random.below(20) as u32);
        let src = [&mixes, &scale, &base].map(Some);
        let got = run(engine, Op::Dsv4HcComb { eps, n_iter }, &dst, &src);
        let eps = f64::from(eps);
        let comb = |t: u64| {
            let mut m = [[0.0; 4]; 4];
            for (i, row) in m.iter_mut().enumerate() {
                for (j, v) in row.iter_mut().enumerate() {
                    let at = (8 + i * 4 + j) as u64;
                    let x = mixes.get([at, t, 0, 0]) * scale.get([2, 0, 0, 0]);
                    *v = (x + base.get([at, 0, 0, 0])).exp();
                }
                let sum: f64 = row.iter().sum();
                row.iter_mut().for_each(|v| *v = *v / sum + eps);
            }
            for i in 0..2 * n_iter - 1 {
                for line in 0..4 {
                    let cells: [(usize, usize); 4] =
                        std::array::from_fn(|k| if i % 2 == 0 { (k, line) } else { (line, k) });
                    let sum = eps + cells.iter().map(|&(a, b)| m[a][b]).sum::<f64>();
                    cells.iter().for_each(|&(a, b)| m[a][b] /= sum);
                }
            }
            m
        };
        compare("DSV4_HC_COMB", &got, TOLERANCE, |[j, i, t, _]| {
            comb(t)[i as usize][j as usize]
        });
    });
}

pub(crate) fn mixing(engine: &dyn Engine) {
    property(80, |random| {
        let [streams, tokens] = [1 + random.below(5), random.below(5)];
        let n = random.pick(&[0, 1, 17, 300]);
        let x = tensor([n, streams, tokens, 1], random);
        let (weights, gates) = (
            tensor([streams, tokens, 1, 1], random),
            tensor([n, streams, tokens, 1], random),
        );
        let dst = Data::random(Type::F32, [n, tokens, 1, 1], random);
        for gated in [false, true] {
            let w = if gated { &gates } else { &weights };
            let op = Op::Dsv4HcPre { scale: 0.5, gated };
            let got = run(engine, op, &dst, &[Some(&x), Some(w)]);
            compare("DSV4_HC_PRE", &got, TOLERANCE, |[i, t, ..]| {
                let weight = |h| {
                    if gated {
                        sigmoid(gates.get([i, h, t, 0]))
                    } else {
                        weights.get([h, t, 0, 0])
                    }
                };
                0.5 * (0..streams)
                    .map(|h| x.get([i, h, t, 0]) * weight(h))
                    .sum::<f64>()
            });
        }

        let input = tensor([n, tokens, 1, 1], random);
        let (post, comb) = (
            tensor([streams, tokens, 1, 1], random),
            tensor([streams, streams, tokens, 1], random),
        );
        let dst = Data::random(Type::F32, [n, streams, tokens, 1], random);
        for comb in [None, Some(&comb)] {
            let src = [Some(&input), Some(&x), Some(&post), comb];
            let got = run(engine, Op::Dsv4HcPost {}, &dst, &src);
            compare("DSV4_HC_POST", &got, TOLERANCE, |[i, d, t, _]| {
                let kept: f64 = match comb {
                    None => x.get([i, d, t, 0]),
                    Some(comb) => (0..streams)
                        .map(|s| x.get([i, s, t, 0]) * comb.get([d, s, t, 0]))
                        .sum(),
                };
                input.get([i, t, 0, 0]) * post.get([d, t, 0, 0]) + kept
            });
        }
    });
}

pub(crate) fn indexer(engine: &dyn Engine) {
    let types: Vec<Type> = Type::ALL
        .iter()
        .copied()
        .filter(|&t| Format::of(t).is_some())
        .collect();
    for ty in types {
        property(8, |random| {
            let n = random.pick(&[1, 2])
                * if ty.is_quantized() {
                    ty.block_elements()
                } else {
                    24
                };
            let [heads, tokens, streams] =
                [1 + random.below(9), random.below(4), 1 + random.below(3)];
            let keys = random.pick(&[0, 1, 20, 150]);
            let q = Data::random_rows(Type::F32, [n, heads, tokens, streams], true, random)
                .fill(|| random.between(-1.0, 1.0));
            let k = Data::random_rows(ty, [n, 1, keys, streams], true, random)
                .fill(|| random.between(-1.0, 1.0));
            let w = tensor([heads, tokens, 1, streams], random);
            let masks = if random.chance(2) { streams } else { 1 };
            let mask = Data::random(Type::F16, [keys, tokens, 1, masks], random).fill(|| {
                if random.chance(3) {
                    f64::NEG_INFINITY
                } else {
                    0.0
                }
            });
            let dst = Data::random(Type::F32, [keys, tokens, 1, streams], random);
            let src = [&q, &k, &w, &mask].map(Some);
            let got = run(engine, Op::LightningIndexer {}, &dst, &src);
            compare(
                "LIGHTNING_INDEXER",
                &got,
                10.0 * TOLERANCE,
                |[i, t, _, s]| {
                    let score = |h: u64| {
                        let dot: f64 = (0..n)
                            .map(|e| q.get([e, h, t, s]) * k.get([e, 0, i, s]))
                            .sum();
                        dot.max(0.0) * w.get([h, t, 0, s])
                    };
                    (0..heads).map(score).sum::<f64>() + mask.get([i, t, 0, s % masks])
                },
            );
        });
    }
}
