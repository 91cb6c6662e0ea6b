//! SUM, SUM_ROWS, MEAN, CUMSUM, ARGMAX, COUNT_EQUAL, ARGSORT, TOP_K.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, SortOrder, Type};

use crate::common::*;

/// Tolerance of sums of positive numbers, relative to the result.
const TOLERANCE: f64 = 1e-6;

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

fn row(x: &Data, [i1, i2, i3]: [u64; 3]) -> Vec<f64> {
    (0..x.shape.ne[0])
        .map(|i0| x.get([i0, i1, i2, i3]))
        .collect()
}

pub(crate) fn sums(engine: &dyn Engine) {
    property(200, |random| {
        let ne = if random.chance(10) {
            [50_000, 1, 3, 1]
        } else {
            lengths(random)
        };
        let dense_rows = random.chance(2);
        let x = Data::random_rows(random.pick(&FLOATS), ne, dense_rows, random);
        let x = x.fill(|| random.between(0.0, 1.0));
        let out = random.pick(&FLOATS);
        // If rows are not dense, ggml sums the numbers that follow their first element in memory.
        let mut read = x.clone();
        read.shape.nb[0] = x.shape.ty.block_bytes();
        let dst = Data::dense(out, [1; 4]);
        let got = run(engine, Op::Sum {}, &dst, &[Some(&x)]);
        compare("SUM", &got, TOLERANCE, |_| read.values().iter().sum());

        let dst = Data::random(out, [1, ne[1], ne[2], ne[3]], random);
        let got = run(engine, Op::SumRows {}, &dst, &[Some(&x)]);
        compare("SUM_ROWS", &got, TOLERANCE, |[_, i1, i2, i3]| {
            row(&x, [i1, i2, i3]).iter().sum()
        });
        let got = run(engine, Op::Mean {}, &dst, &[Some(&x)]);
        compare("MEAN", &got, TOLERANCE, |[_, i1, i2, i3]| {
            row(&x, [i1, i2, i3]).iter().sum::<f64>() / ne[0] as f64
        });

        let dst = Data::random(out, ne, random);
        let got = run(engine, Op::Cumsum {}, &dst, &[Some(&x)]);
        let mut sum = 0.0;
        let sums: Vec<f64> = x
            .indices()
            .map(|i| {
                sum = if i[0] == 0 { 0.0 } else { sum } + x.get(i);
                sum
            })
            .collect();
        let place = |i: Index| (((i[3] * ne[2] + i[2]) * ne[1] + i[1]) * ne[0] + i[0]) as usize;
        compare("CUMSUM", &got, TOLERANCE, |i| sums[place(i)]);
    });
}

pub(crate) fn argmax(engine: &dyn Engine) {
    property(100, |random| {
        let [n, rows, ..] = lengths(random);
        let n = n.max(1);
        let x = Data::random(random.pick(&FLOATS), [n, rows, 1, 1], random)
            .fill(|| random.between(-5.0, 5.0).round());
        let dst = Data::random(Type::I32, [rows, 1, 1, 1], random);
        let got = run(engine, Op::Argmax {}, &dst, &[Some(&x)]);
        compare("ARGMAX", &got, 0.0, |[i, ..]| {
            let row = row(&x, [i, 0, 0]);
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter().rposition(|&v| v == largest).unwrap() as f64
        });
    });
}

pub(crate) fn count_equal(engine: &dyn Engine) {
    property(100, |random| {
        let ne = if random.chance(10) {
            [50_000, 1, 1, 1]
        } else {
            lengths(random)
        };
        let mut tensor = || Data::random(Type::I32, ne, random).fill(|| random.below(3) as f64);
        let (a, b) = (tensor(), tensor());
        let dst = Data::dense(Type::I64, [1; 4]);
        let got = run(engine, Op::CountEqual {}, &dst, &[Some(&a), Some(&b)]);
        let want = a
            .values()
            .iter()
            .zip(b.values())
            .filter(|(a, b)| **a == *b)
            .count();
        assert_eq!(got.values(), [want as f64]);
    });
}

/// The indices of a row in order, equal elements by index.
fn sorted(row: &[f64], order: SortOrder) -> Vec<f64> {
    let mut indices: Vec<usize> = (0..row.len()).collect();
    indices.sort_by(|&a, &b| match order {
        SortOrder::Ascending => row[a].partial_cmp(&row[b]).unwrap(),
        SortOrder::Descending => row[b].partial_cmp(&row[a]).unwrap(),
    });
    indices.into_iter().map(|i| i as f64).collect()
}

pub(crate) fn argsort(engine: &dyn Engine) {
    property(150, |random| {
        let ne = lengths(random);
        let spread = random.pick(&[3.0, 1000.0]);
        let x = Data::random(random.pick(&FLOATS), ne, random)
            .fill(|| random.between(-spread, spread).round() / 16.0);
        for &order in SortOrder::ALL {
            let dst = Data::random(Type::I32, ne, random);
            let got = run(engine, Op::Argsort { order }, &dst, &[Some(&x)]);
            let values = got.values();
            for (row_values, index) in values.chunks(ne[0].max(1) as usize).zip(rows(ne)) {
                assert_eq!(row_values, sorted(&row(&x, index), order));
            }
        }
        let k = random.below(ne[0] + 1);
        let dst = Data::random(Type::I32, [k, ne[1], ne[2], ne[3]], random);
        let got = run(engine, Op::TopK {}, &dst, &[Some(&x)]);
        let values = got.values();
        for (row_values, index) in values.chunks(k.max(1) as usize).zip(rows(ne)) {
            assert_eq!(
                row_values,
                &sorted(&row(&x, index), SortOrder::Descending)[..k as usize]
            );
        }
    });
}

fn rows(ne: [u64; 4]) -> impl Iterator<Item = [u64; 3]> {
    Data::dense(Type::I8, [1, ne[1], ne[2], ne[3]])
        .indices()
        .map(|[_, i1, i2, i3]| [i1, i2, i3])
}

/// Infinities sort to the ends, NaN sorts last in either order, and zeros are equal.
pub(crate) fn special_values(engine: &dyn Engine) {
    let values = [0.0, f64::NAN, -1.0, f64::INFINITY, -0.0, f64::NEG_INFINITY];
    let mut next = values.into_iter();
    let x = Data::dense(Type::F32, [6, 1, 1, 1]).fill(|| next.next().unwrap());
    let dst = Data::dense(Type::I32, [6, 1, 1, 1]);
    let sort = |order| run(engine, Op::Argsort { order }, &dst, &[Some(&x)]).values();
    assert_eq!(sort(SortOrder::Ascending), [5.0, 2.0, 0.0, 4.0, 3.0, 1.0]);
    assert_eq!(sort(SortOrder::Descending), [3.0, 0.0, 4.0, 2.0, 5.0, 1.0]);
}
