//! Fused launches on the CPU, compared with their nodes one by one in f64.

use vgpu_transport::ir::Op;

use super::super::bench::{Bench, compare, product};
use super::super::mmv::{self, Product, Products};
use super::*;
use crate::activation_cache::ACTIVATION_CACHE_BYTES;

#[test]
fn norms() {
    let mut bench = Bench::new();
    // A later launch reads what an earlier one has left in scratch memory.
    let claim = bench
        .context
        .scratch
        .claim(ACTIVATION_CACHE_BYTES + (1 << 20));
    let _claim = claim.expect("little memory");
    for (n, rows, has_add, in_place) in [
        (64, 3, true, false),
        (4096, 1, true, true),
        (1056, 2, false, false),
    ] {
        let ne = [n, rows, 1, 1];
        let (a, a_values) = bench.randoms(ne);
        let (add, add_values) = bench.randoms(ne);
        let (w, w_values) = bench.randoms([n, 1, 1, 1]);
        let dst = bench.nothing(Type::F32, ne);
        let q8 = bench.alloc_q8(&dst);
        let sum = if in_place {
            a
        } else {
            bench.nothing(Type::F32, ne)
        };
        let it = Norm {
            dst,
            a,
            add: if has_add { add } else { VgView::default() },
            sum: if has_add { sum } else { VgView::default() },
            w,
            eps: 1e-5,
            q8: Some(q8),
        };
        assert!(bench.run(|b| norm(b, &it)));
        let x: Vec<f64> = { a_values.iter().zip(&add_values) }
            .map(|(a, add)| f64::from(*a) + if has_add { f64::from(*add) } else { 0.0 })
            .collect();
        let want: Vec<f64> = { x.chunks(n as usize) }
            .flat_map(|row| {
                let mean = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
                let scale = 1.0 / (mean + 1e-5).sqrt();
                row.iter()
                    .zip(&w_values)
                    .map(move |(x, w)| x * scale * f64::from(*w))
                    .collect::<Vec<_>>()
            })
            .collect();
        compare("norm", &bench.read(&dst), want, 1e-5);
        if has_add {
            compare("sum", &bench.read(&sum), x, 1e-6);
        }
        // The q8 result has exactly the bytes of `vg_quantize_q8`.
        let mut alone = q8;
        assert!(bench.run(|b| Some(mmv::quantize(b, dst).map(|r| alone = r))));
        assert_eq!(bench.blocks(&q8, &dst), bench.blocks(&alone, &dst));
    }
    let (a, _) = bench.randoms([30, 1, 1, 1]);
    let it = Norm {
        dst: a,
        a,
        ..Norm::default()
    };
    assert!(
        !bench.run(|b| norm(b, &it)),
        "rows of 30 are no whole 16 bytes"
    );
}

#[test]
fn products_of_the_same_activations() {
    let mut bench = Bench::new();
    for (ty, k, rows, columns) in [
        (Type::Q4K, 512, [10, 3, 7], 1),
        (Type::Q8_0, 1056, [33, 64, 1], 3),
        (Type::F16, 704, [5, 4, 6], 1),
        (Type::Bf16, 64, [9, 2, 2], 8),
        (Type::F32, 288, [17, 1, 1], 2),
    ] {
        let (x, x_values) = bench.randoms([k, columns, 1, 1]);
        // Quantised weights are multiplied with q8 activations.
        let tolerance = if ty.is_quantized() { 0.03 } else { 1e-5 } * (k as f64).sqrt();
        let mut all = Vec::new();
        let mut want = Vec::new();
        for (i, rows) in rows.into_iter().enumerate() {
            let (w, w_values) = bench.weights(ty, [k, rows, 1, 1]);
            let mut results = product(&w_values, &x_values, k as usize);
            // The second product has a bias row for all columns, the third a bias for each element.
            let add = match i {
                0 => VgView::default(),
                _ => {
                    let ne = [rows, if i == 1 { 1 } else { columns }, 1, 1];
                    let (add, values) = bench.randoms(ne);
                    for (j, result) in results.iter_mut().enumerate() {
                        *result += f64::from(values[j % values.len()]);
                    }
                    add
                }
            };
            let dst = bench.nothing(Type::F32, [rows, columns, 1, 1]);
            all.push(Product { dst, w, add });
            want.push(results);
        }
        for count in 1..=3 {
            let it = Products {
                x,
                q8: None,
                ids: VgView::default(),
                products: &all[3 - count..],
                unit: None,
            };
            assert!(bench.run(|b| mmv::products(b, &it)));
            for (product, want) in all.iter().zip(&want).skip(3 - count) {
                compare(
                    "product",
                    &bench.read(&product.dst),
                    want.iter().copied(),
                    tolerance,
                );
            }
        }
    }
}

#[test]
fn gated_units_of_experts() {
    let mut bench = Bench::new();
    let silu = |x: f64| x / (1.0 + (-x).exp());
    for (ty, k, rows, experts, used, tokens, unit) in [
        (Type::Q4_0, 64, 11, 1, 1, 1, VG_OP_SWIGLU),
        (Type::Q6K, 256, 6, 4, 2, 3, VG_OP_SWIGLU),
        (Type::F16, 96, 7, 3, 2, 2, VG_OP_SWIGLU_OAI),
        (Type::F32, 32, 5, 2, 1, 1, VG_OP_GEGLU),
        (Type::Bf16, 64, 5, 2, 1, 1, VG_OP_REGLU),
    ] {
        let (x, x_values) = bench.randoms([k, 1, tokens, 1]);
        let chosen: Vec<u64> = (0..used * tokens).map(|i| (i * 5 + 1) % experts).collect();
        let bytes: Vec<u8> = chosen
            .iter()
            .flat_map(|&id| (id as i32).to_le_bytes())
            .collect();
        let ids = bench.tensor(Type::I32, [used, tokens, 1, 1], &bytes);
        let dst = bench.nothing(Type::F32, [rows, used, tokens, 1]);
        let mut halves = Vec::new();
        let mut all = Vec::new();
        for _ in 0..2 {
            let (w, w_values) = bench.weights(ty, [k, rows, experts, 1]);
            let (add, adds) = bench.randoms([rows, experts, 1, 1]);
            all.push(Product { dst, w, add });
            let mut results = Vec::new();
            for (i, &expert) in chosen.iter().enumerate() {
                let [k, rows, expert] = [k, rows, expert].map(|n| n as usize);
                let w = &w_values[expert * rows * k..][..rows * k];
                let x = &x_values[i / used as usize * k..][..k];
                let adds = &adds[expert * rows..][..rows];
                let sums = product(w, x, k).into_iter().zip(adds);
                results.extend(sums.map(|(sum, add)| sum + f64::from(*add)));
            }
            halves.push(results);
        }
        let want = halves[0].iter().zip(&halves[1]).map(|(&a, &b)| match unit {
            VG_OP_SWIGLU => silu(a) * b,
            VG_OP_GEGLU => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (a + 0.044715 * a * a * a);
                0.5 * a * (1.0 + inner.tanh()) * b
            }
            VG_OP_REGLU => a.max(0.0) * b,
            _ => {
                let a = a.min(2.0);
                a / (1.0 + (-1.7 * a).exp()) * (1.0 + b.clamp(-2.0, 2.0))
            }
        });
        let it = Products {
            x,
            q8: None,
            ids,
            products: &all,
            unit: Some((unit, [1.7, 2.0])),
        };
        assert!(bench.run(|b| mmv::products(b, &it)));
        let tolerance = if ty.is_quantized() { 0.1 } else { 1e-4 };
        compare("unit", &bench.read(&dst), want, tolerance);
    }
}

#[test]
fn rotations_into_a_cache() {
    let mut bench = Bench::new();
    for (cache_type, neox) in [(Type::F16, true), (Type::F32, false), (Type::Bf16, true)] {
        let (heads, tokens, n) = (3, 4, 32);
        let (src, values) = bench.randoms([n, heads, tokens, 1]);
        let ints = |ids: &[i32]| {
            ids.iter()
                .flat_map(|x| x.to_le_bytes())
                .collect::<Vec<u8>>()
        };
        let positions = bench.tensor(Type::I32, [tokens, 1, 1, 1], &ints(&[7, 8, 100, 3]));
        let rows = [5i64, 0, 9, 2];
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        let ids = bench.tensor(Type::I64, [tokens, 1, 1, 1], &bytes);
        let cache = bench.nothing(cache_type, [n * heads, 10, 1, 1]);
        let op = Op::Rope {
            mode: if neox {
                vgpu_transport::ir::RopeMode::Neox
            } else {
                vgpu_transport::ir::RopeMode::Normal
            },
            backward: false,
            n_dims: 24,
            n_offs: 0,
            n_ctx_orig: 4096,
            freq_base: 10000.0,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            sections: [0; 4],
        };
        let rope =
            super::super::rope::params(&op, VgView::default(), [src, positions, VgView::default()]);
        let it = RopeRows {
            rope: rope.expect("ROPE"),
            cache,
            ids,
        };
        assert!(bench.run(|b| rope_rows(b, &it)));
        let format = vgpu_cpu::formats::Format::of(cache_type).expect("floats");
        let row_bytes = format.row_bytes((n * heads) as usize);
        let all = bench.bytes(cache.data, row_bytes * 10);
        for (token, position) in [7.0f64, 8.0, 100.0, 3.0].into_iter().enumerate() {
            let mut got = vec![0.0f32; (n * heads) as usize];
            // SAFETY: both buffers hold a row.
            unsafe {
                let from = all[rows[token] as usize * row_bytes..].as_ptr();
                (format.dequantize_row)(from, got.as_mut_ptr(), got.len());
            }
            let mut want = Vec::new();
            for head in 0..heads as usize {
                let x = &values[(token * heads as usize + head) * n as usize..][..n as usize];
                let mut turned: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
                for i in 0..12 {
                    let angle = position * 10000f64.powf(-2.0 * i as f64 / 24.0);
                    let (first, second) = if neox {
                        (i, i + 12)
                    } else {
                        (2 * i, 2 * i + 1)
                    };
                    let (a, b) = (f64::from(x[first]), f64::from(x[second]));
                    turned[first] = a * angle.cos() - b * angle.sin();
                    turned[second] = a * angle.sin() + b * angle.cos();
                }
                want.extend(turned);
            }
            let tolerance = match cache_type {
                Type::F32 => 1e-4,
                Type::F16 => 2e-3,
                _ => 1e-2,
            };
            compare("cache", &got, want, tolerance);
        }
    }
}

#[test]
fn routes() {
    let mut bench = Bench::new();
    for (experts, used, op, normalized, has_bias) in [
        (8, 2, VG_GATING_SOFT_MAX, None, false),
        (128, 8, VG_GATING_SOFT_MAX, Some(0.0), false),
        (256, 8, VG_GATING_SIGMOID, Some(1e-20), true),
        (32, 4, VG_GATING_LOGITS, None, false),
        (500, 32, VG_GATING_SOFT_MAX, Some(0.9), false),
        (3, 3, VG_GATING_SOFT_MAX, None, false),
    ] {
        let tokens = 5u64;
        let (logits, values) = bench.randoms([experts, tokens, 1, 1]);
        let (bias, biases) = bench.randoms([experts, 1, 1, 1]);
        let ids = bench.nothing(Type::I32, [experts, tokens, 1, 1]);
        let weights = bench.nothing(Type::F32, [1, used, tokens, 1]);
        let it = Route {
            logits,
            bias: if has_bias { bias } else { VgView::default() },
            ids,
            weights,
            op,
            normalized,
            scale: 2.5,
        };
        assert!(bench.run(|b| route(b, &it)));
        let (got_ids, got_weights) = (bench.read_ints(&ids), bench.read(&weights));
        let [experts, used] = [experts, used].map(|n| n as usize);
        for token in 0..tokens as usize {
            let row: Vec<f64> = values[token * experts..][..experts]
                .iter()
                .map(|&x| f64::from(x))
                .collect();
            let total: f64 = row.iter().map(|x| x.exp()).sum();
            let probability: Vec<f64> = { row.iter() }
                .map(|&x| match op {
                    VG_GATING_SOFT_MAX => x.exp() / total,
                    VG_GATING_SIGMOID => 1.0 / (1.0 + (-x).exp()),
                    _ => x,
                })
                .collect();
            let score =
                |i: usize| probability[i] + if has_bias { f64::from(biases[i]) } else { 0.0 };
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            let chosen = &got_ids[token * experts..][..used];
            assert!(
                chosen
                    .iter()
                    .zip(&order)
                    .all(|(&id, &want)| id as usize == want),
                "{chosen:?}"
            );
            // Experts that were not chosen are not written.
            assert!(
                got_ids[token * experts + used..][..experts - used]
                    .iter()
                    .all(|&id| id as u32 == 0xa5a5_a5a5)
            );
            let mut want: Vec<f64> = order[..used].iter().map(|&i| probability[i]).collect();
            if op == VG_GATING_LOGITS {
                let total: f64 = want.iter().map(|x| x.exp()).sum();
                want = want.iter().map(|x| x.exp() / total).collect();
            }
            if let Some(least) = normalized {
                let total = want.iter().sum::<f64>().max(f64::from(least));
                want = want.iter().map(|x| x / total).collect();
            }
            let got = &got_weights[token * used..][..used];
            compare("weights", got, want.iter().map(|x| x * 2.5), 1e-5);
        }
    }
}

#[test]
fn weighted_sums() {
    let mut bench = Bench::new();
    let (n, used, tokens) = (37, 6, 3);
    let (experts, values) = bench.randoms([n, used, tokens, 1]);
    let (weights, shares) = bench.randoms([1, used, tokens, 1]);
    let dst = bench.nothing(Type::F32, [n, tokens, 1, 1]);
    let it = WeightedSum {
        dst,
        experts,
        weights,
    };
    assert!(bench.run(|b| weighted_sum(b, &it)));
    let [n, used, tokens] = [n, used, tokens].map(|n| n as usize);
    let want = (0..n * tokens).map(|e| {
        let (i, token) = (e % n, e / n);
        let terms = (0..used).map(|u| {
            f64::from(values[(token * used + u) * n + i]) * f64::from(shares[token * used + u])
        });
        terms.sum()
    });
    compare("sum", &bench.read(&dst), want, 1e-6);
}
