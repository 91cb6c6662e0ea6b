//! ADD, SUB, MUL, DIV, ADD1, ADD_ID, SCALE, CLAMP.

use vgpu_engine::{Engine, RunError};
use vgpu_transport::ir::{Invalid, Op, OpKind, Refusal, Type};

use crate::common::*;

/// One rounding of f32, or two where a product is added.
const TOLERANCE: f64 = 2e-7;

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

type Operator = (Op, fn(f64, f64) -> f64);

const OPERATORS: [Operator; 4] = [
    (Op::Add {}, |a, b| a + b),
    (Op::Sub {}, |a, b| a - b),
    (Op::Mul {}, |a, b| a * b),
    (Op::Div {}, |a, b| a / b),
];

pub(crate) fn binary(engine: &dyn Engine) {
    property(400, |random| {
        let ne = lengths(random);
        let (op, exact) = random.pick(&OPERATORS);
        let mut tensor = |ne| {
            let ty = random.pick(&FLOATS);
            Data::random(ty, ne, random).fill(|| random.between(0.5, 9.0))
        };
        let (a, dst) = (tensor(ne), tensor(ne));
        let b = tensor(part_of(
            ne,
            &mut Random::new(a.values().len() as u64 * 77 + 5),
        ));
        let got = run(engine, op, &dst, &[Some(&a), Some(&b)]);
        compare(&format!("{op:?}"), &got, TOLERANCE, |i| {
            exact(a.get(i), b.get(repeated(i, b.shape.ne)))
        });
    });
}

pub(crate) fn in_place(engine: &dyn Engine) {
    property(100, |random| {
        let ne = lengths(random);
        let (op, exact) = random.pick(&OPERATORS);
        let ty = random.pick(&FLOATS);
        let a = Data::random(ty, ne, random).fill(|| random.between(0.5, 9.0));
        let b = Data::random(ty, part_of(ne, random), random).fill(|| random.between(0.5, 9.0));
        let got = run_in_place(engine, op, &[Some(&a), Some(&b)]);
        compare(&format!("{op:?}"), &got, TOLERANCE, |i| {
            exact(a.get(i), b.get(repeated(i, b.shape.ne)))
        });
    });
}

pub(crate) fn quantized_sum(engine: &dyn Engine) {
    property(60, |random| {
        let mut ne = lengths(random);
        let ty = random.pick(&[Type::Q8_0, Type::Q5_0, Type::Q6K]);
        ne[0] = random.below(4) * ty.block_elements();
        let a = Data::random(ty, ne, random).fill(|| random.between(-2.0, 2.0));
        let dst = Data::random(ty, ne, random);
        let addend = part_of(ne, random);
        let b = Data::random(Type::F32, addend, random).fill(|| random.between(-2.0, 2.0));
        let got = run(engine, Op::Add {}, &dst, &[Some(&a), Some(&b)]);
        // The test quantises the same sums: another rounding could change the result by a whole
        // step.
        let sums: Vec<f64> = a
            .indices()
            .map(|i| a.get(i) + b.get(repeated(i, addend)))
            .collect();
        let mut sums = sums.iter().copied();
        let want = dst.clone().fill(|| sums.next().unwrap());
        assert_eq!(got.bytes(), want.bytes(), "{ty:?} {ne:?}");
    });
}

pub(crate) fn add_id(engine: &dyn Engine) {
    property(100, |random| {
        let [n, used, tokens, _] = lengths(random);
        let experts = 1 + random.below(5);
        let ne = [n, used, tokens, 1];
        let mut tensor =
            |ne| Data::random(Type::F32, ne, random).fill(|| random.between(-9.0, 9.0));
        let (a, b, dst) = (tensor(ne), tensor([n, experts, 1, 1]), tensor(ne));
        let ids = Data::random(Type::I32, [used, tokens, 1, 1], random)
            .fill(|| random.below(experts) as f64);
        let got = run(
            engine,
            Op::AddId {},
            &dst,
            &[Some(&a), Some(&b), Some(&ids)],
        );
        compare("ADD_ID", &got, TOLERANCE, |[i0, i1, i2, i3]| {
            a.get([i0, i1, i2, i3]) + b.get([i0, ids.get([i1, i2, 0, 0]) as u64, 0, 0])
        });
    });
}

pub(crate) fn ids_are_checked(engine: &dyn Engine) {
    for id in [-1.0, 3.0, f64::from(i32::MIN), f64::from(i32::MAX)] {
        let a = Data::dense(Type::F32, [8, 2, 2, 1]).fill(|| 1.0);
        let b = Data::dense(Type::F32, [8, 3, 1, 1]).fill(|| 1.0);
        let mut ids = Data::dense(Type::I32, [2, 2, 1, 1]).fill(|| 2.0);
        ids.set([1, 1, 0, 0], id);
        let failure = try_run(engine, Op::AddId {}, &a, &[Some(&a), Some(&b), Some(&ids)]);
        let Err(Failure::Run(error)) = failure.map(|_| ()) else {
            panic!("id {id} was used");
        };
        assert_eq!(
            error,
            RunError::Index {
                node: 0,
                op: "ADD_ID",
                index: id as i64,
                count: 3
            }
        );
    }
}

pub(crate) fn scale_and_clamp(engine: &dyn Engine) {
    property(100, |random| {
        let ne = lengths(random);
        let (ty, out) = (random.pick(&FLOATS), random.pick(&FLOATS));
        let x = Data::random(ty, ne, random).fill(|| random.between(-9.0, 9.0));
        let dst = Data::random(out, ne, random);
        let (scale, bias) = (
            random.between(-3.0, 3.0) as f32,
            random.between(-1.0, 1.0) as f32,
        );
        let got = run(engine, Op::Scale { scale, bias }, &dst, &[Some(&x)]);
        compare("SCALE", &got, 10.0 * TOLERANCE, |i| {
            x.get(i) * f64::from(scale) + f64::from(bias)
        });
        let (min, max) = (-2.5, 3.25);
        let got = run(engine, Op::Clamp { min, max }, &dst, &[Some(&x)]);
        compare("CLAMP", &got, 0.0, |i| {
            x.get(i).clamp(min.into(), max.into())
        });
    });
}

/// Validation refuses operations that the engine does not support, and invalid operations.
pub(crate) fn refusals(engine: &dyn Engine) {
    let refusal = |a: &Data, b: &Data| match try_run(engine, Op::Add {}, a, &[Some(a), Some(b)]) {
        Err(Failure::Invalid(Invalid::Node { refusal, .. })) => refusal,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it ran"),
    };
    let integers = Data::dense(Type::I32, [4, 3, 2, 1]).fill(|| 1.0);
    assert_eq!(
        refusal(&integers, &integers),
        Refusal::NotCapable { op: OpKind::Add }
    );
    let a = Data::dense(Type::F32, [4, 3, 2, 1]).fill(|| 1.0);
    let b = Data::dense(Type::F32, [4, 2, 2, 1]).fill(|| 1.0);
    assert!(matches!(
        refusal(&a, &b),
        Refusal::Malformed {
            op: OpKind::Add,
            ..
        }
    ));
}
