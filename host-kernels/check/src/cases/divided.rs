//! Divided nodes compute what whole ones do, with the cases of all operators.

use std::collections::BTreeSet;

use vgpu_cpu::CpuEngine;
use vgpu_transport::ir::{Op, OpKind, PoolKind, Type};

use super::list::{List, between, f32s, indices};
use super::{Operation, operations};
use crate::graph::{Builder, Fill, LoadedGraph, numbers};

/// The operators that are divided, where the operands allow it.
const DIVIDED: &[OpKind] = &[
    OpKind::Copy,
    OpKind::GetRows,
    OpKind::Add,
    OpKind::Sub,
    OpKind::Mul,
    OpKind::Div,
    OpKind::Scale,
    OpKind::Clamp,
    OpKind::Sqr,
    OpKind::Sqrt,
    OpKind::Log,
    OpKind::Sin,
    OpKind::Cos,
    OpKind::LeakyRelu,
    OpKind::Unary,
    OpKind::Xielu,
    OpKind::Glu,
    OpKind::SiluBack,
    OpKind::SumRows,
    OpKind::Mean,
    OpKind::Cumsum,
    OpKind::Argsort,
    OpKind::TopK,
    OpKind::Norm,
    OpKind::RmsNorm,
    OpKind::RmsNormBack,
    OpKind::L2Norm,
    OpKind::SoftMax,
    OpKind::SoftMaxBack,
    OpKind::MulMat,
    OpKind::MulMatId,
    OpKind::OutProd,
    OpKind::Rope,
    OpKind::FlashAttnExt,
    OpKind::Conv2d,
    OpKind::Conv2dDw,
    OpKind::ConvTranspose2d,
    OpKind::Pool1d,
    OpKind::Pool2d,
    OpKind::Upscale,
];

/// Operators that no case has with several rows.
fn further_operations() -> Vec<Operation> {
    let mut list = List::default();
    let ne = [33, 5, 3, 2];
    let positive = between(0.1, 2.0, ne);
    for op in [
        Op::Clamp {
            min: -0.5,
            max: 0.5,
        },
        Op::Sqr {},
        Op::Sqrt {},
        Op::Log {},
        Op::Sin {},
        Op::Cos {},
        Op::LeakyRelu {
            negative_slope: 0.1,
        },
        Op::Xielu {
            alpha_n: 0.8,
            alpha_p: 0.9,
            beta: 0.5,
            eps: -1e-6,
        },
    ] {
        list.add(op, 0.0, f32s(ne), &[positive]);
    }
    list.add(Op::SiluBack {}, 0.0, f32s(ne), &[f32s(ne), f32s(ne)]);
    list.add(
        Op::RmsNormBack { eps: 1e-5 },
        0.0,
        f32s(ne),
        &[f32s(ne), f32s(ne)],
    );
    list.add(Op::Mean {}, 0.0, f32s([1, 5, 3, 2]), &[f32s(ne)]);
    let places = indices(Type::I32, Fill::Count, [4, 5, 3, 2]);
    list.add(Op::TopK {}, 0.0, places, &[f32s(ne)]);
    list.add(
        Op::Conv2dDw {
            s0: 1,
            s1: 1,
            p0: 0,
            p1: 0,
            d0: 1,
            d1: 1,
        },
        0.0,
        f32s([7, 5, 6, 2]),
        &[f32s([3, 3, 1, 6]), f32s([9, 7, 6, 2])],
    );
    list.add(
        Op::Pool1d {
            kind: PoolKind::Average,
            k0: 2,
            s0: 2,
            p0: 0,
        },
        0.0,
        f32s([8, 5, 3, 2]),
        &[f32s([16, 5, 3, 2])],
    );
    list.0
}

/// The results of a graph.
fn results(engine: &CpuEngine, builder: &Builder, dst: u32) -> Vec<f32> {
    let mut loaded: LoadedGraph = builder.on(engine).expect("a valid graph");
    loaded.plan.run().expect("it runs");
    numbers(&*loaded.memory, &builder.tensor_at(dst)).expect("numbers")
}

/// The mean square of the differences over that of `whole`. 0 for equal bits.
fn error(found: &[f32], whole: &[f32]) -> f64 {
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if bits(found) == bits(whole) {
        return 0.0;
    }
    let square = |x: f64| x * x;
    let pairs = found.iter().zip(whole);
    let differences = pairs.map(|(a, b)| square(f64::from(*a) - f64::from(*b)));
    let all: f64 = whole.iter().map(|x| square(f64::from(*x))).sum();
    differences.sum::<f64>() / all
}

#[test]
fn divided_nodes_compute_what_whole_ones_do() {
    let engine = CpuEngine::new(2, None).expect("an engine");
    let (mut divided, mut wrong) = (BTreeSet::new(), Vec::new());
    for operation in operations(false).into_iter().chain(further_operations()) {
        let (builder, dst) = operation.builder().expect("a graph");
        let whole = results(&engine, &builder, dst);
        for count in [2, 3, 100] {
            let parts = builder.divided(count);
            if parts.nodes() == builder.nodes() {
                continue;
            }
            divided.insert(operation.op.kind());
            let found = results(&engine, &parts, dst);
            // Products and attention of other numbers of tokens have other kernels.
            let limit = match operation.op {
                Op::MulMat { .. } | Op::MulMatId { .. } | Op::FlashAttnExt { .. } => {
                    operation.limit
                }
                _ => 0.0,
            };
            let error = error(&found, &whole);
            if error > limit || error.is_nan() {
                let (name, parts) = (&operation.name, parts.nodes());
                wrong.push(format!(
                    "{name} in {parts} parts: {error}, the limit is {limit}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let expected: BTreeSet<OpKind> = DIVIDED.iter().copied().collect();
    let missing: Vec<_> = expected.difference(&divided).collect();
    let further: Vec<_> = divided.difference(&expected).collect();
    assert!(
        missing.is_empty() && further.is_empty(),
        "{missing:?} {further:?}"
    );
}
