//! REPEAT, REPEAT_BACK, CONCAT, SET, ACC, DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO, PAD, PAD_REFLECT_1D,
//! ROLL, TRI, FILL, ARANGE.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, TriKind, Type};

use crate::common::*;

/// Sums of a few values in f32.
const TOLERANCE: f64 = 1e-6;

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

const PLAIN: [Type; 8] = [
    Type::F32,
    Type::F16,
    Type::Bf16,
    Type::F64,
    Type::I8,
    Type::I16,
    Type::I32,
    Type::I64,
];

/// A tensor of whole numbers that every plain type holds exactly.
fn tensor(ty: Type, ne: [u64; 4], random: &mut Random) -> Data {
    Data::random(ty, ne, random).fill(|| random.between(-100.0, 100.0).round())
}

pub(crate) fn repeat(engine: &dyn Engine) {
    property(200, |random| {
        let mut ne = lengths(random);
        let ty = random.pick(&[&PLAIN[..], &[Type::Q4_0, Type::Q6K]].concat());
        let mut part = part_of(ne, random);
        ne[0] *= ty.block_elements();
        part[0] *= ty.block_elements();
        if ty.is_quantized() {
            ne[0] = ne[0].min(part[0] * 3);
        }
        let src = tensor(ty, part, random);
        let dst = Data::random(ty, ne, random);
        let got = run(engine, Op::Repeat {}, &dst, &[Some(&src)]);
        compare("REPEAT", &got, 0.0, |i| src.get(repeated(i, part)));
    });
}

pub(crate) fn repeat_back(engine: &dyn Engine) {
    property(100, |random| {
        let ne = lengths(random);
        let part = part_of(ne, random);
        let ty = random.pick(&FLOATS);
        let src = Data::random(ty, ne, random).fill(|| random.between(0.0, 1.0));
        let dst = Data::random(ty, part, random);
        let got = run(engine, Op::RepeatBack {}, &dst, &[Some(&src)]);
        let mut sums = vec![0.0; got.values().len()];
        let place =
            |i: Index| (((i[3] * part[2] + i[2]) * part[1] + i[1]) * part[0] + i[0]) as usize;
        for i in src.indices() {
            sums[place(repeated(i, part))] += src.get(i);
        }
        compare("REPEAT_BACK", &got, 10.0 * TOLERANCE, |i| sums[place(i)]);
    });
}

pub(crate) fn concat(engine: &dyn Engine) {
    property(200, |random| {
        let ty = random.pick(&[&PLAIN[..], &[Type::Q8_0, Type::Q4K]].concat());
        let mut ne = lengths(random);
        ne[0] = if ty.is_quantized() {
            ne[0].min(3) * ty.block_elements()
        } else {
            ne[0]
        };
        let dim = random.below(4) as usize;
        let (mut second, mut whole) = (ne, ne);
        second[dim] = random.below(4) * if dim == 0 { ty.block_elements() } else { 1 };
        whole[dim] += second[dim];
        let (a, b) = (tensor(ty, ne, random), tensor(ty, second, random));
        let dst = Data::random(ty, whole, random);
        let got = run(
            engine,
            Op::Concat { dim: dim as u32 },
            &dst,
            &[Some(&a), Some(&b)],
        );
        compare("CONCAT", &got, 0.0, |mut i| {
            if i[dim] < ne[dim] {
                return a.get(i);
            }
            i[dim] -= ne[dim];
            b.get(i)
        });
    });
}

/// The strides of a dense tensor of these lengths and a random window of it: start and lengths.
fn view_of(ne: [u64; 4], random: &mut Random) -> ([u64; 4], [u64; 4]) {
    let start = ne.map(|n| random.below(n.max(1)));
    let part = std::array::from_fn(|d| random.below(ne[d] - start[d].min(ne[d]) + 1));
    (start, part)
}

pub(crate) fn set_and_acc(engine: &dyn Engine) {
    property(200, |random| {
        let ne = lengths(random);
        let ty = random.pick(&PLAIN);
        let (start, part) = view_of(ne, random);
        let a = Data::dense(ty, ne).fill(|| random.between(-50.0, 50.0).round());
        let b = Data::random(ty, part, random).fill(|| random.between(-50.0, 50.0).round());
        let nb = a.shape.nb;
        let offset = (0..4).map(|d| start[d] * nb[d]).sum();
        let inside = |i: Index| (0..4).all(|d| (start[d]..start[d] + part[d]).contains(&i[d]));
        let at = |i: Index| std::array::from_fn(|d| i[d] - start[d]);
        let in_place = random.chance(2);
        let check = |op: Op, exact: &dyn Fn(f64, f64) -> f64| {
            let src = [Some(&a), Some(&b)];
            let got = if in_place {
                run_in_place(engine, op, &src)
            } else {
                run(engine, op, &a, &src)
            };
            compare(&format!("{op:?}"), &got, TOLERANCE, |i| {
                if inside(i) {
                    exact(a.get(i), b.get(at(i)))
                } else {
                    a.get(i)
                }
            });
        };
        if b.values().is_empty() && a.values().is_empty() {
            return;
        }
        let [_, nb1, nb2, nb3] = nb;
        check(
            Op::Set {
                nb1,
                nb2,
                nb3,
                offset,
            },
            &|_, b| b,
        );
        if FLOATS.contains(&ty) {
            check(
                Op::Acc {
                    nb1,
                    nb2,
                    nb3,
                    offset,
                },
                &|a, b| a + b,
            );
        }
    });
}

pub(crate) fn diagonals(engine: &dyn Engine) {
    property(100, |random| {
        let [n, rows, i2, i3] = lengths(random);
        let (n, ty) = (n.min(300), random.pick(&PLAIN));
        let src = tensor(ty, [n, 1, i2, i3], random);
        let dst = Data::random(ty, [n, n, i2, i3], random);
        let got = run(engine, Op::Diag {}, &dst, &[Some(&src)]);
        compare("DIAG", &got, 0.0, |[i0, i1, i2, i3]| {
            if i0 == i1 {
                src.get([i0, 0, i2, i3])
            } else {
                0.0
            }
        });

        let ne = [n, rows, i2, i3];
        let x = tensor(ty, ne, random);
        let dst = Data::random(ty, ne, random);
        for &kind in TriKind::ALL {
            let got = run(engine, Op::Tri { kind }, &dst, &[Some(&x)]);
            compare(&format!("TRI {kind:?}"), &got, 0.0, |i| {
                let kept = match kind {
                    TriKind::UpperDiag => i[0] >= i[1],
                    TriKind::Upper => i[0] > i[1],
                    TriKind::LowerDiag => i[0] <= i[1],
                    TriKind::Lower => i[0] < i[1],
                };
                if kept { x.get(i) } else { 0.0 }
            });
        }

        let ty = random.pick(&FLOATS);
        let x = tensor(ty, ne, random);
        let dst = Data::random(ty, ne, random);
        let n_past = random.pick(&[0, 1, 3, i32::MAX]);
        let masks = [
            (Op::DiagMaskInf { n_past }, f64::NEG_INFINITY),
            (Op::DiagMaskZero { n_past }, 0.0),
        ];
        for (op, value) in masks {
            let reference = |i: Index| {
                if i[0] > i[1] + n_past as u64 {
                    value
                } else {
                    x.get(i)
                }
            };
            compare(
                "DIAG_MASK",
                &run(engine, op, &dst, &[Some(&x)]),
                0.0,
                reference,
            );
            compare(
                "DIAG_MASK",
                &run_in_place(engine, op, &[Some(&x)]),
                0.0,
                reference,
            );
        }
    });
}

pub(crate) fn padding(engine: &dyn Engine) {
    property(200, |random| {
        let ne = lengths(random);
        let ty = random.pick(&PLAIN);
        let src = tensor(ty, ne, random);
        let circular = random.chance(2) && !ne.contains(&0);
        let mut amount = || random.pick(&[0, 0, 1, 2, 7]);
        let (left, right): ([i32; 4], [i32; 4]) = (
            std::array::from_fn(|_| amount()),
            std::array::from_fn(|_| amount()),
        );
        let whole = std::array::from_fn(|d| ne[d] + (left[d] + right[d]) as u64);
        let dst = Data::random(ty, whole, random);
        let got = run(
            engine,
            Op::Pad {
                left,
                right,
                circular,
            },
            &dst,
            &[Some(&src)],
        );
        compare("PAD", &got, 0.0, |i| {
            let from: [i64; 4] = std::array::from_fn(|d| i[d] as i64 - i64::from(left[d]));
            if circular {
                return src.get(std::array::from_fn(|d| {
                    from[d].rem_euclid(ne[d] as i64) as u64
                }));
            }
            let inside = (0..4).all(|d| (0..ne[d] as i64).contains(&from[d]));
            if inside {
                src.get(from.map(|i| i as u64))
            } else {
                0.0
            }
        });
    });
}

pub(crate) fn reflection(engine: &dyn Engine) {
    property(100, |random| {
        let mut ne = lengths(random);
        ne[0] = ne[0].max(1);
        let (p0, p1) = (random.below(ne[0]), random.below(ne[0]));
        let ty = random.pick(&PLAIN);
        let src = tensor(ty, ne, random);
        let dst = Data::random(ty, [ne[0] + p0 + p1, ne[1], ne[2], ne[3]], random);
        let op = Op::PadReflect1d {
            p0: p0 as i32,
            p1: p1 as i32,
        };
        let got = run(engine, op, &dst, &[Some(&src)]);
        compare("PAD_REFLECT_1D", &got, 0.0, |[i0, i1, i2, i3]| {
            let (i, last) = (i0 as i64 - p0 as i64, ne[0] as i64 - 1);
            let i = if i < 0 {
                -i
            } else if i > last {
                2 * last - i
            } else {
                i
            };
            src.get([i as u64, i1, i2, i3])
        });
    });
}

pub(crate) fn roll(engine: &dyn Engine) {
    property(100, |random| {
        let ne = lengths(random);
        let ty = random.pick(&PLAIN);
        let src = tensor(ty, ne, random);
        let dst = Data::random(ty, ne, random);
        let shift: [i32; 4] = std::array::from_fn(|_| random.below(21) as i32 - 10);
        let got = run(engine, Op::Roll { shift }, &dst, &[Some(&src)]);
        compare("ROLL", &got, 0.0, |i| {
            let from = |d: usize| (i[d] as i64 - i64::from(shift[d])).rem_euclid(ne[d] as i64);
            src.get(std::array::from_fn(|d| from(d) as u64))
        });
    });
}

pub(crate) fn constants(engine: &dyn Engine) {
    property(60, |random| {
        let ty = random.pick(&FLOATS);
        let dst = Data::random(ty, lengths(random), random);
        let value = random.between(-9.0, 9.0) as f32;
        let got = run(engine, Op::Fill { value }, &dst, &[]);
        compare("FILL", &got, 0.0, |_| value.into());

        let (start, step) = (
            random.between(-9.0, 9.0) as f32,
            random.between(0.1, 3.0) as f32,
        );
        let stop = start + random.below(2000) as f32;
        let n = ((stop - start) / step).ceil() as u64;
        let dst = Data::random(Type::F32, [n, 1, 1, 1], random);
        let got = run(engine, Op::Arange { start, stop, step }, &dst, &[]);
        compare("ARANGE", &got, TOLERANCE, |i| {
            f64::from(start) + i[0] as f64 * f64::from(step)
        });
    });
}
