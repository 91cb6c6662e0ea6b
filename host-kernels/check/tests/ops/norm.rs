//! NORM, RMS_NORM, RMS_NORM_BACK, L2_NORM, GROUP_NORM, SOFT_MAX_BACK.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Type};

use crate::common::*;

/// Sums of a row in f32, and the differences computed from them.
const TOLERANCE: f64 = 4e-6;

/// The tolerance if the mean is subtracted. For elements up to 8 the mean has an error of up to
/// 2^-22 in f32. The divisor of the differences is at least the root of [`EPS`], and a row of few
/// elements can have a variance that small.
const TOLERANCE_OF_DIFFERENCES: f64 = TOLERANCE + 7.6e-6;

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

const EPS: f32 = 1e-3;

/// The elements of the row of `index`.
fn row(x: &Data, [_, i1, i2, i3]: Index) -> Vec<f64> {
    (0..x.shape.ne[0])
        .map(|i0| x.get([i0, i1, i2, i3]))
        .collect()
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

fn variance(x: &[f64]) -> f64 {
    let mean = mean(x);
    x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / x.len() as f64
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn short(mut ne: [u64; 4]) -> [u64; 4] {
    ne[0] = ne[0].min(600);
    ne
}

pub(crate) fn of_rows(engine: &dyn Engine) {
    let eps = f64::from(EPS);
    property(100, |random| {
        let ne = short(lengths(random));
        let x = Data::random(random.pick(&FLOATS), ne, random).fill(|| random.between(-3.0, 5.0));
        let dst = Data::random(random.pick(&FLOATS), ne, random);
        let check = |op: Op, reference: &dyn Fn(f64, &[f64]) -> f64| {
            let tolerance = match op {
                Op::Norm { .. } => TOLERANCE_OF_DIFFERENCES,
                _ => TOLERANCE,
            };
            let reference = |i: Index| reference(x.get(i), &row(&x, i));
            let got = run(engine, op, &dst, &[Some(&x)]);
            compare(&format!("{op:?}"), &got, tolerance, reference);
            let got = run_in_place(engine, op, &[Some(&x)]);
            compare(&format!("{op:?} in place"), &got, tolerance, reference);
        };
        check(Op::Norm { eps: EPS }, &|x, row| {
            (x - mean(row)) / (variance(row) + eps).sqrt()
        });
        check(Op::RmsNorm { eps: EPS }, &|x, row| {
            x / (dot(row, row) / row.len() as f64 + eps).sqrt()
        });
        check(Op::L2Norm { eps: EPS }, &|x, row| {
            x / dot(row, row).sqrt().max(eps)
        });
        check(Op::L2Norm { eps: 100.0 }, &|x, row| {
            x / dot(row, row).sqrt().max(100.0)
        });
    });
}

pub(crate) fn of_groups(engine: &dyn Engine) {
    property(100, |random| {
        let ne = short(lengths(random));
        let ne = [ne[0].min(40), ne[1], random.below(9), ne[3]];
        let groups = 1 + random.below(6);
        let x = Data::random(random.pick(&FLOATS), ne, random).fill(|| random.between(-3.0, 5.0));
        let dst = Data::random(random.pick(&FLOATS), ne, random);
        let op = Op::GroupNorm {
            n_groups: groups as i32,
            eps: EPS,
        };
        let got = run(engine, op, &dst, &[Some(&x)]);
        let per_group = ne[2].div_ceil(groups);
        compare("GROUP_NORM", &got, TOLERANCE_OF_DIFFERENCES, |i| {
            let group = i[2] / per_group;
            let members: Vec<f64> = x
                .indices()
                .filter(|j| j[3] == i[3] && j[2] / per_group == group)
                .map(|j| x.get(j))
                .collect();
            (x.get(i) - mean(&members)) / (variance(&members) + f64::from(EPS)).sqrt()
        });
    });
}

pub(crate) fn gradients(engine: &dyn Engine) {
    property(100, |random| {
        let ne = short(lengths(random));
        let mut tensor = || {
            let ty = random.pick(&FLOATS);
            Data::random(ty, ne, random).fill(|| random.between(0.1, 2.0))
        };
        let (dz, x, dst) = (tensor(), tensor(), tensor());
        let n = ne[0] as f64;

        let got = run(
            engine,
            Op::RmsNormBack { eps: EPS },
            &dst,
            &[Some(&dz), Some(&x)],
        );
        compare("RMS_NORM_BACK", &got, TOLERANCE, |i| {
            // z = x r with r = (mean(x^2) + eps)^(-1/2), so dr/dx = -r^3 x / n.
            let (x_row, dz_row) = (row(&x, i), row(&dz, i));
            let r = (dot(&x_row, &x_row) / n + f64::from(EPS)).powf(-0.5);
            dz.get(i) * r - r.powi(3) * x.get(i) / n * dot(&x_row, &dz_row)
        });

        let op = Op::SoftMaxBack {
            scale: 0.5,
            max_bias: 0.0,
        };
        let got = run(engine, op, &dst, &[Some(&dz), Some(&x)]);
        let biased = Op::SoftMaxBack {
            scale: 0.5,
            max_bias: 8.0,
        };
        let biased = run(engine, biased, &dst, &[Some(&dz), Some(&x)]);
        assert_eq!(got.bytes(), biased.bytes(), "ALiBi changes a gradient");
        let exact = |i| 0.5 * x.get(i) * (dz.get(i) - dot(&row(&x, i), &row(&dz, i)));
        compare("SOFT_MAX_BACK", &got, 100.0 * TOLERANCE, exact);
        // ggml may place the result over either source.
        for over in 0..2 {
            let got = run_over(engine, op, &[Some(&dz), Some(&x)], over);
            compare("SOFT_MAX_BACK in place", &got, 100.0 * TOLERANCE, exact);
        }
    });
}
