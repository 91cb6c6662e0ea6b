//! UNARY of every kind, SQR, SQRT, LOG, SIN, COS, LEAKY_RELU, XIELU, SILU_BACK.

use vgpu_engine::Engine;
use vgpu_transport::ir::{Op, Type, UnaryKind};

use crate::common::*;

/// Tolerance: a few roundings of f32 in a formula whose terms are as large as its result.
const TOLERANCE: f64 = 1e-6;

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

/// The error function by its Taylor series, or by the continued fraction of its complement.
pub(crate) fn erf(x: f64) -> f64 {
    let a = x.abs();
    let value = if a < 2.5 {
        let (mut term, mut sum) = (a, a);
        for n in 1..80 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let tail = (1..200)
            .rev()
            .fold(0.0, |f, n| f64::from(n) / 2.0 / (a + f));
        1.0 - (-a * a).exp() / (std::f64::consts::PI.sqrt() * (a + tail))
    };
    value.copysign(x)
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn gelu(x: f64) -> f64 {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    0.5 * x * (1.0 + (c * x * (1.0 + 0.044715 * x * x)).tanh())
}

pub(crate) fn gelu_erf(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))
}

fn hard_sigmoid(x: f64) -> f64 {
    ((x + 3.0) / 6.0).clamp(0.0, 1.0)
}

fn unary(kind: UnaryKind, x: f64) -> f64 {
    match kind {
        UnaryKind::Abs => x.abs(),
        UnaryKind::Sgn if x == 0.0 => 0.0,
        UnaryKind::Sgn => x.signum(),
        UnaryKind::Neg => -x,
        UnaryKind::Step => f64::from(u8::from(x > 0.0)),
        UnaryKind::Tanh => x.tanh(),
        UnaryKind::Elu => {
            if x > 0.0 {
                x
            } else {
                x.exp_m1()
            }
        }
        UnaryKind::Relu => x.max(0.0),
        UnaryKind::Sigmoid => sigmoid(x),
        UnaryKind::Gelu => gelu(x),
        UnaryKind::GeluQuick => x * sigmoid(1.702 * x),
        UnaryKind::Silu => x * sigmoid(x),
        UnaryKind::HardSwish => x * hard_sigmoid(x),
        UnaryKind::HardSigmoid => hard_sigmoid(x),
        UnaryKind::Exp => x.exp(),
        UnaryKind::Expm1 => x.exp_m1(),
        UnaryKind::Softplus => x.exp().ln_1p(),
        UnaryKind::GeluErf => gelu_erf(x),
        UnaryKind::Floor => x.floor(),
        UnaryKind::Ceil => x.ceil(),
        UnaryKind::Round => x.round(),
        UnaryKind::Trunc => x.trunc(),
    }
}

type Function = (Op, fn(f64) -> f64);

/// Functions with operators of their own, for positive arguments.
const FUNCTIONS: [Function; 5] = [
    (Op::Sqr {}, |x| x * x),
    (Op::Sqrt {}, f64::sqrt),
    (Op::Log {}, f64::ln),
    (Op::Sin {}, f64::sin),
    (Op::Cos {}, f64::cos),
];

fn kinds() -> impl Iterator<Item = (Op, Box<dyn Fn(f64) -> f64>)> {
    let unaries = UnaryKind::ALL.iter().map(|&kind| {
        (
            Op::Unary { kind },
            Box::new(move |x| unary(kind, x)) as Box<dyn Fn(f64) -> f64>,
        )
    });
    unaries.chain(FUNCTIONS.map(|(op, f)| (op, Box::new(f) as Box<dyn Fn(f64) -> f64>)))
}

fn lowest(op: Op) -> f64 {
    if matches!(op, Op::Sqrt {} | Op::Log {}) {
        0.001
    } else {
        -20.0
    }
}

pub(crate) fn every_kind(engine: &dyn Engine) {
    for (op, exact) in kinds() {
        property(25, |random| {
            let ne = lengths(random);
            let (ty, out) = (random.pick(&FLOATS), random.pick(&FLOATS));
            let x = Data::random(ty, ne, random).fill(|| random.between(lowest(op), 15.0));
            let dst = Data::random(out, ne, random);
            let got = run(engine, op, &dst, &[Some(&x)]);
            compare(&format!("{op:?}"), &got, TOLERANCE, |i| exact(x.get(i)));
        });
    }
}

pub(crate) fn in_place(engine: &dyn Engine) {
    for (op, exact) in kinds() {
        property(5, |random| {
            let ty = random.pick(&FLOATS);
            let x =
                Data::random(ty, lengths(random), random).fill(|| random.between(lowest(op), 15.0));
            let got = run_in_place(engine, op, &[Some(&x)]);
            compare(&format!("{op:?}"), &got, TOLERANCE, |i| exact(x.get(i)));
        });
    }
}

pub(crate) fn parameters(engine: &dyn Engine) {
    property(60, |random| {
        let ne = lengths(random);
        let ty = random.pick(&FLOATS);
        let mut tensor = || Data::random(ty, ne, random).fill(|| random.between(-8.0, 8.0));
        let (x, dy, dst) = (tensor(), tensor(), tensor());
        let op = Op::LeakyRelu {
            negative_slope: 0.1,
        };
        compare(
            "LEAKY_RELU",
            &run(engine, op, &dst, &[Some(&x)]),
            TOLERANCE,
            |i| {
                let x = x.get(i);
                if x > 0.0 { x } else { f64::from(0.1f32) * x }
            },
        );
        let op = Op::Xielu {
            alpha_n: 4.0,
            alpha_p: 20.0,
            beta: 0.5,
            eps: 1e-7,
        };
        compare(
            "XIELU",
            &run(engine, op, &dst, &[Some(&x)]),
            TOLERANCE,
            |i| {
                let x = x.get(i);
                if x > 0.0 {
                    20.0 * x * x + 0.5 * x
                } else {
                    (x.min(1e-7).exp_m1() - x) * 4.0 + 0.5 * x
                }
            },
        );
        let got = run(engine, Op::SiluBack {}, &dst, &[Some(&dy), Some(&x)]);
        compare("SILU_BACK", &got, TOLERANCE, |i| {
            let (x, s) = (x.get(i), sigmoid(x.get(i)));
            dy.get(i) * (s + x * s * (1.0 - s))
        });
    });
}

/// The results of ggml's comparisons with NaN and infinities.
pub(crate) fn special_values(engine: &dyn Engine) {
    const NAN: f64 = f64::NAN;
    const INF: f64 = f64::INFINITY;
    let x = [NAN, INF, -INF, -0.0];
    let cases: [(UnaryKind, [f64; 4]); 16] = [
        (UnaryKind::Abs, [NAN, INF, INF, 0.0]),
        (UnaryKind::Sgn, [0.0, 1.0, -1.0, 0.0]),
        (UnaryKind::Neg, [NAN, -INF, INF, 0.0]),
        (UnaryKind::Step, [0.0, 1.0, 0.0, 0.0]),
        (UnaryKind::Tanh, [NAN, 1.0, -1.0, 0.0]),
        (UnaryKind::Elu, [NAN, INF, -1.0, 0.0]),
        (UnaryKind::Relu, [0.0, INF, 0.0, 0.0]),
        (UnaryKind::Sigmoid, [NAN, 1.0, 0.0, 0.5]),
        (UnaryKind::Gelu, [NAN, INF, 0.0, 0.0]),
        (UnaryKind::HardSigmoid, [0.0, 1.0, 0.0, 0.5]),
        (UnaryKind::Exp, [NAN, INF, 0.0, 1.0]),
        (UnaryKind::Expm1, [NAN, INF, -1.0, 0.0]),
        (UnaryKind::Softplus, [NAN, INF, 0.0, 2f64.ln()]),
        (UnaryKind::Floor, [NAN, INF, -INF, 0.0]),
        (UnaryKind::Round, [NAN, INF, -INF, 0.0]),
        (UnaryKind::Trunc, [NAN, INF, -INF, 0.0]),
    ];
    for (kind, want) in cases {
        for ty in FLOATS {
            let mut values = x.iter().copied().cycle();
            let x = Data::dense(ty, [68, 1, 1, 1]).fill(|| values.next().unwrap());
            let got = run(engine, Op::Unary { kind }, &x, &[Some(&x)]);
            compare(&format!("{kind:?} of {ty:?}"), &got, TOLERANCE, |i| {
                want[i[0] as usize % 4]
            });
        }
    }
    let halves = Data::dense(Type::F32, [6, 1, 1, 1]);
    let mut values = [0.5, -0.5, 1.5, 2.5, -2.5, 0.499_999_97].into_iter();
    let halves = halves.fill(|| values.next().unwrap());
    let got = run(
        engine,
        Op::Unary {
            kind: UnaryKind::Round,
        },
        &halves,
        &[Some(&halves)],
    );
    assert_eq!(got.values(), [1.0, -1.0, 2.0, 3.0, -3.0, 0.0]);
}
