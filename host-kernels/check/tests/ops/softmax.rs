//! SOFT_MAX.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Type};

use crate::common::*;

/// Tolerance of results between 0 and 1: logits of up to a few tens are rounded.
const TOLERANCE: f64 = 1e-5;

/// The slope of a head by ALiBi ("Train short, test long").
pub(crate) fn slope(max_bias: f64, heads: u64, head: u64) -> f64 {
    if max_bias == 0.0 {
        return 1.0;
    }
    let power = 1 << heads.ilog2();
    if head < power {
        2f64.powf(-max_bias * (head + 1) as f64 / power as f64)
    } else {
        2f64.powf(-max_bias / 2.0 * (2 * (head - power) + 1) as f64 / power as f64)
    }
}

/// An element of a mask: zero, minus infinity, or a bias.
pub(crate) fn mask_value(random: &mut Random) -> f64 {
    match random.below(4) {
        0 => f64::NEG_INFINITY,
        1 => 0.0,
        _ => random.between(-1.0, 1.0),
    }
}

pub(crate) fn masks_biases_and_sinks(engine: &dyn Engine) {
    property(200, |random| {
        let mut ne = lengths(random);
        ne[0] = ne[0].max(1); // an empty row has no sum of 1
        let [n, rows, heads, _] = ne;
        let x = Data::random_rows(Type::F32, ne, true, random).fill(|| random.between(-8.0, 8.0));
        let mask = random
            .pick(&[None, Some(Type::F32), Some(Type::F16)])
            .map(|ty| {
                let [_, _, m2, m3] = part_of(ne, random);
                let ne = [n, rows + random.below(3), m2, m3];
                Data::random_rows(ty, ne, true, random).fill(|| mask_value(random))
            });
        let sinks = Data::dense(Type::F32, [heads, 1, 1, 1]).fill(|| random.between(-2.0, 2.0));
        let sinks = random.chance(2).then_some(&sinks);
        let max_bias = if mask.is_some() {
            random.pick(&[0.0, 8.0])
        } else {
            0.0
        };
        let scale = random.pick(&[1.0f32, 0.1, 5.0]);
        let op = Op::SoftMax { scale, max_bias };
        let dst = Data::random_rows(Type::F32, ne, true, random);
        let got = run(engine, op, &dst, &[Some(&x), mask.as_ref(), sinks]);
        for row in got.row_indices() {
            let [i1, head, i3] = row;
            let mut logits = x.row_values(row).to_vec();
            logits.iter_mut().for_each(|x| *x *= f64::from(scale));
            if let Some(mask) = &mask {
                let [_, _, m2, m3] = mask.shape.ne;
                let slope = slope(f64::from(max_bias), heads, head);
                for (logit, bias) in
                    logits
                        .iter_mut()
                        .zip(mask.row_values([i1, head % m2, i3 % m3]))
                {
                    *logit += slope * bias;
                }
            }
            let sink = sinks.map(|sinks| sinks.get([head, 0, 0, 0]));
            let all = || logits.iter().copied().chain(sink);
            let largest = all().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = all().map(|x| (x - largest).exp()).sum();
            for (i, (got, logit)) in got.row_values(row).iter().zip(&logits).enumerate() {
                let want = (logit - largest).exp() / sum;
                // A row that is masked completely has a sum of 0: the quotient is undefined.
                let same = (got - want).abs() < TOLERANCE || got.is_nan() && want.is_nan();
                assert!(
                    same,
                    "{op:?} {ne:?}: {i} of row {row:?} is {got:e}, not {want:e}"
                );
            }
        }
    });
}

pub(crate) fn special_values_and_in_place(engine: &dyn Engine) {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let rows = [
        [1.0, 2.0, 3.0, -inf, 0.5],
        [-inf; 5],
        [nan, 1.0, 2.0, 3.0, 4.0],
        [inf, 1.0, 2.0, 3.0, 4.0],
        [-inf, -inf, 7.0, -inf, -inf],
    ];
    let mut next = rows.iter().flatten().copied();
    let x = Data::dense(Type::F32, [5, 5, 1, 1]).fill(|| next.next().unwrap());
    let op = Op::SoftMax {
        scale: 1.0,
        max_bias: 0.0,
    };
    let got = run(engine, op, &x, &[Some(&x)]);
    assert_eq!(got.get([3, 0, 0, 0]), 0.0);
    for row in 1..4 {
        assert!(
            got.row_values([row, 0, 0]).iter().all(|x| x.is_nan()),
            "{row}"
        );
    }
    assert_eq!(got.row_values([4, 0, 0]), [0.0, 0.0, 1.0, 0.0, 0.0]);
    let in_place = run_in_place(engine, op, &[Some(&x)]);
    assert_eq!(in_place.bytes(), got.bytes());
}
