//! Results of the CPU engine do not depend on how many threads it has.

#[allow(dead_code)] // only a part of the harness is needed
mod common;

use common::*;
use vgpu_cpu::CpuEngine;
use vgpu_transport::ir::{Op, Precision, Type};

/// Runs an operation with different numbers of threads and wants the same bytes from all.
fn check(op: Op, dst: [u64; 4], src: &[Option<&Data>]) {
    let dst = Data::dense(Type::F32, dst);
    let results = [1, 2, 5].map(|threads| {
        let engine = CpuEngine::new(threads, None).expect("an engine");
        run(&engine, op, &dst, src).bytes()
    });
    assert!(
        results[0] == results[1] && results[0] == results[2],
        "{op:?}"
    );
}

fn random(ty: Type, ne: [u64; 4], random: &mut Random) -> Data {
    Data::dense(ty, ne).fill(|| random.between(-1.0, 1.0))
}

#[test]
fn matrix_products_do_not_depend_on_threads() {
    for (weight, [k, m, n]) in [
        (Type::F32, [300, 77, 1]),
        (Type::F16, [300, 77, 90]),
        (Type::Q4_0, [1024, 130, 1]),
        (Type::Q6K, [512, 33, 200]),
    ] {
        let r = &mut Random::new(k);
        let (w, x) = (
            random(weight, [k, m, 3, 1], r),
            random(Type::F32, [k, n, 6, 1], r),
        );
        let mul_mat = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        check(mul_mat, [m, n, 6, 1], &[Some(&w), Some(&x)]);

        let x = random(Type::F32, [k, 1, n, 1], r);
        let ids = Data::dense(Type::I32, [2, n, 1, 1]).fill(|| r.below(3) as f64);
        let mul_mat_id = Op::MulMatId {
            accumulator: Precision::Default,
            activation: Precision::Default,
        };
        check(mul_mat_id, [m, 2, n, 1], &[Some(&w), Some(&x), Some(&ids)]);
    }
    let r = &mut Random::new(1);
    let (a, b) = (
        random(Type::F16, [600, 100, 2, 1], r),
        random(Type::F32, [50, 100, 4, 1], r),
    );
    check(Op::OutProd {}, [600, 50, 4, 1], &[Some(&a), Some(&b)]);
}

#[test]
fn attention_does_not_depend_on_threads() {
    use Type::{F16, Iq4Nl, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    for (keys, tokens, [k, v]) in [
        (2000, 1, [F16; 2]),
        (1000, 7, [F16; 2]),
        (300, 100, [F16; 2]),
        (2000, 1, [Q8_0; 2]),
        (1000, 7, [Q4_0; 2]),
        (700, 2, [Q5_0, Q4_1]),
        (900, 3, [Iq4Nl, Q5_1]),
        (500, 1, [Q5_1, Iq4Nl]),
    ] {
        let r = &mut Random::new(keys);
        let q = random(Type::F32, [64, tokens, 6, 1], r);
        let width = if v.is_quantized() { 96 } else { 80 };
        let (k, v) = (
            random(k, [64, keys, 2, 1], r),
            random(v, [width, keys, 2, 1], r),
        );
        let op = Op::FlashAttnExt {
            scale: 0.1,
            max_bias: 0.0,
            logit_softcap: 0.0,
            accumulator: Precision::Default,
            n_kv_max: 0,
        };
        check(op, [width, 6, tokens, 1], &[Some(&q), Some(&k), Some(&v)]);
    }
}
