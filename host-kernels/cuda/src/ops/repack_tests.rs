//! Products with repacked weights, compared with products with the same plain weights.

use vgpu_transport::ir::{Op, Precision, Type};

use super::bench::{Bench, compare};
use super::matmul;
use super::mmv::{self, Product, Products};
use crate::params::*;
use crate::repack::format::reference::{TYPES, repack};

const MUL_MAT: Op = Op::MulMat {
    accumulator: Precision::Default,
    activation: Precision::Default,
    hadamard: false,
};

const MUL_MAT_ID: Op = Op::MulMatId {
    accumulator: Precision::Default,
    activation: Precision::Default,
};

/// A tensor with the same weights repacked, each matrix by itself. A guard page follows the tensor.
fn repacked(bench: &Bench, w: &VgView, ty: Type) -> VgView {
    let all = bench.bytes(w.data, w.nb[3] as usize * w.ne[3] as usize);
    let bytes: Vec<u8> = { all.chunks(w.nb[2] as usize) }
        .flat_map(|matrix| repack(matrix, ty))
        .collect();
    assert_eq!(bytes.len(), all.len());
    let address = bench.device.alloc(bytes.len() as u64).expect("memory");
    // SAFETY: the memory was just allocated with this size.
    unsafe { bench.device.upload(address, bytes.as_slice().into()) }.expect("a copy");
    VgView {
        data: address,
        type_: w.type_ | VG_REPACKED,
        ..*w
    }
}

/// The two results differ only by the order of f32 additions.
fn compare_products(what: &str, bench: &Bench, k: u64, got: &VgView, want: &VgView) {
    let want = { bench.read(want).into_iter() }.map(f64::from);
    compare(what, &bench.read(got), want, 1e-6 * (k as f64).sqrt());
}

/// A product with plain and with repacked weights.
fn check(bench: &mut Bench, ty: Type, [k, m, n]: [u64; 3], [w2, w3, r2, r3]: [u64; 4]) {
    let (w, _) = bench.weights(ty, [k, m, w2, w3]);
    let (x, _) = bench.randoms([k, n, w2 * r2, w3 * r3]);
    let [got, want] = [0; 2].map(|_| bench.nothing(Type::F32, [m, n, w2 * r2, w3 * r3]));
    for (w, dst) in [(w, want), (repacked(bench, &w, ty), got)] {
        let params = VgMulMatParams {
            dst,
            w,
            x,
            ..VgMulMatParams::default()
        };
        assert!(bench.run(|b| Some(matmul::multiply(b, &MUL_MAT, &params))));
    }
    let what = format!("{ty:?}, {k} by {m} with {n}");
    compare_products(&what, bench, k, &got, &want);
}

/// A product with experts, with plain and with repacked weights.
fn check_experts(bench: &mut Bench, ty: Type, [k, m]: [u64; 2], used: u64, tokens: u64) {
    let experts = 5;
    let (w, _) = bench.weights(ty, [k, m, experts, 1]);
    let (x, _) = bench.randoms([k, 1, tokens, 1]);
    let bytes: Vec<u8> = (0..used * tokens)
        .flat_map(|i| [1i32, 1, 0, 1, 2, 1, 3][i as usize % 7].to_le_bytes())
        .collect();
    let ids = bench.tensor(Type::I32, [used, tokens, 1, 1], &bytes);
    let [got, want] = [0; 2].map(|_| bench.nothing(Type::F32, [m, used, tokens, 1]));
    for (w, dst) in [(w, want), (repacked(bench, &w, ty), got)] {
        let params = VgMulMatParams {
            dst,
            w,
            x,
            ids,
            ..VgMulMatParams::default()
        };
        assert!(bench.run(|b| Some(matmul::multiply(b, &MUL_MAT_ID, &params))));
    }
    let what = format!("{ty:?}, {used} of {experts} experts for {tokens} tokens");
    compare_products(&what, bench, k, &got, &want);
}

#[test]
fn few_columns() {
    let mut bench = Bench::new();
    for ty in TYPES {
        let block = ty.block_elements();
        // Rows whose last chunk has any length, and scales at any byte.
        for k in [1, 3, 17, 33, 90, 128].map(|blocks| (blocks * 32 / block).max(1) * block) {
            for (m, n) in [(5, 1), (19, 8), (2, 3)] {
                check(&mut bench, ty, [k, m, n], [1; 4]);
            }
        }
        check(&mut bench, ty, [16 * block, 3, 1], [2, 1, 2, 2]);
        check_experts(&mut bench, ty, [16 * block, 21], 3, 2);
    }
}

#[test]
fn many_columns() {
    for mut bench in [Bench::new(), Bench::on_sm90()] {
        for ty in TYPES {
            let block = ty.block_elements();
            for (blocks, m, n, batch) in [
                (1, 5, 33, [1, 1, 2, 1]),
                (33, 131, 70, [1; 4]),
                (8, 400, 300, [1; 4]),
                (16, 16, 40, [2, 1, 2, 2]),
            ] {
                check(&mut bench, ty, [blocks * block, m, n], batch);
            }
            check_experts(&mut bench, ty, [16 * block, 21], 2, 70);
        }
    }
}

#[test]
fn several_products_and_units() {
    let mut bench = Bench::new();
    for ty in TYPES {
        let k = 34 * ty.block_elements();
        let (x, _) = bench.randoms([k, 1, 1, 1]);
        for (rows, unit) in [
            (vec![10, 3, 7], None),
            (vec![9, 9], Some((VG_OP_SWIGLU, [0.0; 2]))),
        ] {
            let weights: Vec<VgView> = { rows.iter() }
                .map(|&m| bench.weights(ty, [k, m, 1, 1]).0)
                .collect();
            let repacked: Vec<VgView> = { weights.iter() }
                .map(|w| repacked(&bench, w, ty))
                .collect();
            let [want, got] = [&weights, &repacked].map(|weights| {
                let products: Vec<Product> = { weights.iter() }
                    .map(|w| Product {
                        dst: bench.nothing(Type::F32, [w.ne[1] as u64, 1, 1, 1]),
                        w: *w,
                        add: VgView::default(),
                    })
                    .collect();
                let it = Products {
                    x,
                    q8: None,
                    ids: VgView::default(),
                    products: &products,
                    unit,
                };
                assert!(bench.run(|b| mmv::products(b, &it)));
                products
            });
            let results = if unit.is_some() { 1 } else { rows.len() };
            for (got, want) in got.iter().zip(&want).take(results) {
                compare_products(&format!("{ty:?}"), &bench, k, &got.dst, &want.dst);
            }
        }
    }
}
