//! A small operation of every operator, and of the types of blocks.

#[path = "../../../transport/tests/common/ops.rs"]
#[allow(dead_code)]
mod ops;
#[path = "../../../transport/tests/common/samples.rs"]
mod samples;

use ops::usual;
use samples::{f32, sample, typed};
use vgpu_transport::ir::{Op, OpKind, Precision, Shape, Type};

/// An operation: operator, destination, and sources. A source may lie in the destination.
pub(crate) struct Operation {
    pub(crate) name: String,
    pub(crate) op: Op,
    pub(crate) dst: Shape,
    pub(crate) src: Vec<Shape>,
    pub(crate) is_in_place: bool,
}

/// An operation of every operator.
pub(crate) fn every_operator() -> Vec<Operation> {
    let kinds = OpKind::ALL.iter().filter(|&&k| k != OpKind::FlashAttnBack);
    kinds
        .map(|&kind| {
            let sample = sample(kind, 8);
            // The engines have GET_REL_POS for half floats only.
            let of_type = |shape: Shape| match kind {
                OpKind::GetRelPos => typed(Type::F16, shape.ne),
                _ => shape,
            };
            Operation {
                name: kind.ggml_name().into(),
                op: sample.op,
                dst: of_type(sample.dst),
                src: sample.src.into_iter().map(of_type).collect(),
                is_in_place: false,
            }
        })
        .collect()
}

/// Operations with blocks, masks and long rows.
pub(crate) fn of_types() -> Vec<Operation> {
    let (accumulator, activation) = (Precision::Default, Precision::Default);
    let ids = |ne: [u64; 4]| typed(Type::I32, ne);
    let of = |name: &str, op: Op, dst: Shape, src: Vec<Shape>| Operation {
        name: name.into(),
        op,
        dst,
        src,
        is_in_place: false,
    };
    let mut all = Vec::new();
    let types = [
        Type::F16,
        Type::Q4_0,
        Type::Q8_0,
        Type::Q4K,
        Type::Q6K,
        Type::Iq2Xs,
        Type::Iq4Xs,
        Type::Mxfp4,
    ];
    for ty in types {
        let named = |op: &str| format!("{op} of {ty:?}");
        let (n, rows) = (512, 96);
        let table = typed(ty, [n, rows, 1, 1]);
        let dense = f32([n, 40, 1, 1]);
        all.push(of(
            &named("SET_ROWS"),
            Op::SetRows {},
            table,
            vec![dense, ids([40, 1, 1, 1])],
        ));
        all.push(of(
            &named("GET_ROWS"),
            Op::GetRows {},
            dense,
            vec![table, ids([40, 1, 1, 1])],
        ));
        all.push(of(
            &named("MUL_MAT_ID"),
            Op::MulMatId {
                accumulator,
                activation,
            },
            f32([64, 4, 40, 1]),
            vec![
                typed(ty, [n, 64, 8, 1]),
                f32([n, 1, 40, 1]),
                ids([4, 40, 1, 1]),
            ],
        ));
        all.push(of(
            &named("MUL_MAT"),
            Op::MulMat {
                accumulator,
                activation,
                hadamard: false,
            },
            f32([rows, 40, 1, 1]),
            vec![table, dense],
        ));
        all.push(of(
            &named("CPY to"),
            Op::Copy {},
            table,
            vec![f32(table.ne)],
        ));
        // The sum is quantised to where its first term is read.
        all.push(Operation {
            is_in_place: true,
            ..of(
                &named("ADD in place"),
                Op::Add {},
                table,
                vec![table, f32(table.ne)],
            )
        });
    }
    let rows = f32([1 << 12, 8, 1, 1]);
    let order = usual(OpKind::Argsort).expect("an order");
    all.push(of("ARGSORT of long rows", order, ids(rows.ne), vec![rows]));
    let mask = typed(Type::F16, [512, 32, 1, 1]);
    let (q, kv) = (f32([64, 32, 4, 1]), typed(Type::F16, [64, 512, 2, 1]));
    all.push(of(
        "FLASH_ATTN_EXT with a mask",
        usual(OpKind::FlashAttnExt).expect("usual parameters"),
        f32([64, 4, 32, 1]),
        vec![q, kv, kv, mask],
    ));
    all.push(of(
        "SOFT_MAX with a mask",
        usual(OpKind::SoftMax).expect("usual parameters"),
        f32([512, 32, 4, 1]),
        vec![f32([512, 32, 4, 1]), mask],
    ));
    all
}
