//! CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK, OPT_STEP_ADAMW, OPT_STEP_SGD.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Type};

use crate::common::*;

/// Sums over rows in f32.
const TOLERANCE: f64 = 1e-5;

fn tensor(ne: [u64; 4], low: f64, random: &mut Random) -> Data {
    Data::random(Type::F32, ne, random).fill(|| random.between(low, 1.0))
}

fn row(x: &Data, [_, i1, i2, i3]: Index) -> Vec<f64> {
    (0..x.shape.ne[0])
        .map(|i0| x.get([i0, i1, i2, i3]))
        .collect()
}

pub(crate) fn loss(engine: &dyn Engine) {
    property(80, |random| {
        let mut ne = lengths(random).map(|n| n.max(1));
        ne[0] = ne[0].min(600);
        let rows = (ne[1] * ne[2] * ne[3]) as f64;
        let (a, b) = (tensor(ne, -30.0, random), tensor(ne, 0.0, random));
        let log_sum = |i: Index| row(&a, i).iter().map(|x| x.exp()).sum::<f64>().ln();
        let dst = Data::dense(Type::F32, [1; 4]);
        let got = run(engine, Op::CrossEntropyLoss {}, &dst, &[Some(&a), Some(&b)]);
        let total: f64 = a
            .indices()
            .filter(|i| i[0] == 0)
            .map(|i| {
                let sum = log_sum(i);
                let pairs = row(&a, i).into_iter().zip(row(&b, i));
                pairs.map(|(a, b)| (a - sum) * b).sum::<f64>()
            })
            .sum();
        compare("CROSS_ENTROPY_LOSS", &got, TOLERANCE, |_| -total / rows);

        let grad = Data::dense(Type::F32, [1; 4]).fill(|| random.between(-2.0, 2.0));
        let dst = Data::random(Type::F32, ne, random);
        let src = [&grad, &a, &b].map(Some);
        let got = run(engine, Op::CrossEntropyLossBack {}, &dst, &src);
        compare("CROSS_ENTROPY_LOSS_BACK", &got, TOLERANCE, |i| {
            ((a.get(i) - log_sum(i)).exp() - b.get(i)) * grad.get([0; 4]) / rows
        });
    });
}

pub(crate) fn steps(engine: &dyn Engine) {
    property(80, |random| {
        let ne = lengths(random);
        let (w, g) = (tensor(ne, -1.0, random), tensor(ne, -1.0, random));
        let (m, v) = (tensor(ne, -1.0, random), tensor(ne, 0.01, random));
        let settings =
            Data::random(Type::F32, [7, 1, 1, 1], random).fill(|| random.between(0.1, 0.9));
        let p: Vec<f64> = settings.values();
        let [alpha, beta1, beta2, eps, decay, beta1h, beta2h] = p[..] else {
            panic!("seven parameters");
        };
        let after = run_changing(engine, Op::OptStepAdamw {}, &[&w, &g, &m, &v, &settings]);
        let new_m = |i: Index| m.get(i) * beta1 + g.get(i) * (1.0 - beta1);
        let new_v = |i: Index| v.get(i) * beta2 + g.get(i) * g.get(i) * (1.0 - beta2);
        compare("momentum", &after[2], TOLERANCE, new_m);
        compare("second momentum", &after[3], TOLERANCE, new_v);
        compare("OPT_STEP_ADAMW", &after[0], TOLERANCE, |i| {
            let step = new_m(i) * beta1h / ((new_v(i) * beta2h).sqrt() + eps);
            w.get(i) * (1.0 - alpha * decay) - alpha * step
        });
        assert_eq!(after[1].bytes(), g.bytes(), "a step changed the gradient");

        let settings = Data::dense(Type::F32, [2, 1, 1, 1]).fill(|| random.between(0.1, 0.9));
        let [alpha, decay] = settings.values()[..] else {
            panic!("two parameters");
        };
        let after = run_changing(engine, Op::OptStepSgd {}, &[&w, &g, &settings]);
        compare("OPT_STEP_SGD", &after[0], TOLERANCE, |i| {
            w.get(i) * (1.0 - alpha * decay) - alpha * g.get(i)
        });
    });
}
