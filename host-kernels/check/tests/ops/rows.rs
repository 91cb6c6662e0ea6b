//! GET_ROWS, GET_ROWS_BACK, SET_ROWS.

use vgpu_cpu::formats::Format;
use vgpu_engine::{Engine, RunError};
use vgpu_transport::ir::{Op, Type};

use crate::common::*;

/// Sums of f32.
const TOLERANCE: f64 = 1e-6;

fn types() -> impl Iterator<Item = Type> {
    Type::ALL
        .iter()
        .copied()
        .filter(|&ty| Format::of(ty).is_some())
}

fn row_length(ty: Type, random: &mut Random) -> u64 {
    if ty.is_quantized() {
        random.below(3) * ty.block_elements()
    } else {
        random.below(300)
    }
}

pub(crate) fn get(engine: &dyn Engine) {
    for ty in types().chain([Type::I32]) {
        property(20, |random| {
            let [rows, used, j, k] = lengths(random);
            let (n, rows) = (row_length(ty, random), rows.max(1));
            let a = Data::random(ty, [n, rows, j, k], random).fill(|| random.between(-9.0, 9.0));
            let ids =
                Data::random(Type::I32, [used, j, k, 1], random).fill(|| random.below(rows) as f64);
            let to = if ty == Type::I32 { ty } else { Type::F32 };
            let dst = Data::random(to, [n, used, j, k], random);
            let got = run(engine, Op::GetRows {}, &dst, &[Some(&a), Some(&ids)]);
            compare(&format!("GET_ROWS {ty:?}"), &got, 0.0, |[i0, i, j, k]| {
                a.get([i0, ids.get([i, j, k, 0]) as u64, j, k])
            });
        });
    }
}

pub(crate) fn get_back(engine: &dyn Engine) {
    for ty in types().chain([Type::I32]) {
        property(20, |random| {
            let (n, rows) = (row_length(ty, random), 1 + random.below(5));
            let (grads, used) = (random.below(9), random.below(9));
            let used = used.min(grads);
            let a = Data::random(ty, [n, grads, 1, 1], random).fill(|| random.between(-9.0, 9.0));
            let ids =
                Data::random(Type::I32, [used, 1, 1, 1], random).fill(|| random.below(rows) as f64);
            let dst = Data::random(Type::F32, [n, rows, 1, 1], random);
            let got = run(engine, Op::GetRowsBack {}, &dst, &[Some(&a), Some(&ids)]);
            compare(
                &format!("GET_ROWS_BACK {ty:?}"),
                &got,
                10.0 * TOLERANCE,
                |[i0, i1, ..]| {
                    let named = (0..used).filter(|&i| ids.get([i, 0, 0, 0]) as u64 == i1);
                    named.map(|i| a.get([i0, i, 0, 0])).sum()
                },
            );
        });
    }
}

pub(crate) fn set(engine: &dyn Engine) {
    for ty in types() {
        // Quantising with a codebook is slow.
        property(if ty.is_quantized() { 5 } else { 30 }, |random| {
            let [rows, new, j, k] = lengths(random);
            let (n, new) = (row_length(ty, random), new.min(rows));
            let from = random.pick(&[Type::F32, Type::F16, Type::Bf16]);
            let a = Data::random(from, [n, new, j, k], random).fill(|| random.between(-9.0, 9.0));
            let ids_ne = part_of([1, j, k, 1], random);
            let ids_ty = random.pick(&[Type::I32, Type::I64]);
            let mut ids = Data::random(ids_ty, [new, ids_ne[1], ids_ne[2], 1], random);
            // Each set of ids names a row at most once, in random order.
            for id_k in 0..ids_ne[2] {
                for id_j in 0..ids_ne[1] {
                    let mut order: Vec<u64> = (0..rows).collect();
                    for i in 0..new {
                        let chosen = i + random.below(rows - i);
                        order.swap(i as usize, chosen as usize);
                        ids.set([i, id_j, id_k, 0], order[i as usize] as f64);
                    }
                }
            }
            let dst = Data::random_rows(ty, [n, rows, j, k], true, random)
                .fill(|| random.between(-9.0, 9.0));
            let got = run(engine, Op::SetRows {}, &dst, &[Some(&a), Some(&ids)]);
            for k in 0..k {
                for j in 0..j {
                    let named: Vec<u64> = (0..new)
                        .map(|i| ids.get([i, j % ids_ne[1], k % ids_ne[2], 0]) as u64)
                        .collect();
                    for row in 0..rows {
                        let got = got.row([row, j, k]);
                        match named.iter().position(|&id| id == row) {
                            None => assert_eq!(got.bytes(), dst.row([row, j, k]).bytes()),
                            Some(i) => {
                                let row = a.row([i as u64, j, k]).values();
                                let mut values = row.into_iter();
                                let want = got.clone().fill(|| values.next().unwrap());
                                assert_eq!(got.bytes(), want.bytes(), "{from:?} to {ty:?}");
                            }
                        }
                    }
                }
            }
        });
    }
}

pub(crate) fn ids_are_checked(engine: &dyn Engine) {
    let a = Data::dense(Type::F32, [8, 3, 2, 1]).fill(|| 1.0);
    let vector = Data::dense(Type::F32, [8, 3, 1, 1]).fill(|| 1.0);
    let check = |op: Op, name: &'static str, ids: &Data, dst: &Data, a: &Data, id: f64| {
        let failure = try_run(engine, op, dst, &[Some(a), Some(ids)]).map(|_| ());
        let Err(Failure::Run(error)) = failure else {
            panic!("{name} used the index {id}");
        };
        assert_eq!(
            error,
            RunError::Index {
                node: 0,
                op: name,
                index: id as i64,
                count: 3
            }
        );
    };
    for id in [-1.0, 3.0, f64::from(i32::MIN), f64::from(i32::MAX)] {
        let mut ids = Data::dense(Type::I32, [3, 2, 1, 1]).fill(|| 2.0);
        ids.set([1, 1, 0, 0], id);
        check(Op::GetRows {}, "GET_ROWS", &ids, &a, &a, id);
        check(Op::SetRows {}, "SET_ROWS", &ids, &a, &a, id);
        let mut ids = Data::dense(Type::I32, [3, 1, 1, 1]).fill(|| 2.0);
        ids.set([1, 0, 0, 0], id);
        check(
            Op::GetRowsBack {},
            "GET_ROWS_BACK",
            &ids,
            &vector,
            &vector,
            id,
        );
    }
    let mut ids = Data::dense(Type::I64, [3, 2, 1, 1]).fill(|| 2.0);
    ids.set([0, 0, 0, 0], 3e12);
    check(Op::SetRows {}, "SET_ROWS", &ids, &a, &a, 3e12);
}
