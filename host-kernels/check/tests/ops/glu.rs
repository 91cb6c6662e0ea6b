//! GLU of every kind.

use vgpu_engine::Engine;
use vgpu_transport::ir::{GluKind, Op, Type};

use crate::common::*;
use crate::unary::{gelu, gelu_erf, sigmoid};

/// Tolerance: a few roundings of f32 in a formula whose terms are as large as its result.
const TOLERANCE: f64 = 1e-6;

const FLOATS: [Type; 3] = [Type::F32, Type::F16, Type::Bf16];

const ALPHA: f32 = 1.702;
const LIMIT: f32 = 2.5;

fn glu(kind: GluKind, x: f64, g: f64) -> f64 {
    let limit = f64::from(LIMIT);
    match kind {
        GluKind::Reglu => x.max(0.0) * g,
        GluKind::Geglu => gelu(x) * g,
        GluKind::Swiglu => x * sigmoid(x) * g,
        GluKind::GegluErf => gelu_erf(x) * g,
        GluKind::GegluQuick => x * sigmoid(1.702 * x) * g,
        GluKind::SwigluOai => {
            let x = x.min(limit);
            x * sigmoid(f64::from(ALPHA) * x) * (g.clamp(-limit, limit) + 1.0)
        }
        GluKind::SwigluClamp => x.min(limit) * sigmoid(x.min(limit)) * g.clamp(-limit, limit),
    }
}

pub(crate) fn two_sources(engine: &dyn Engine) {
    for &kind in GluKind::ALL {
        property(25, |random| {
            let ne = lengths(random);
            let mut tensor = || {
                let ty = random.pick(&FLOATS);
                Data::random(ty, ne, random).fill(|| random.between(-6.0, 6.0))
            };
            let (x, g, dst) = (tensor(), tensor(), tensor());
            let op = Op::Glu {
                kind,
                swapped: false,
                alpha: ALPHA,
                limit: LIMIT,
            };
            let got = run(engine, op, &dst, &[Some(&x), Some(&g)]);
            compare(&format!("{kind:?}"), &got, TOLERANCE, |i| {
                glu(kind, x.get(i), g.get(i))
            });
        });
    }
}

pub(crate) fn halves(engine: &dyn Engine) {
    for &kind in GluKind::ALL {
        property(25, |random| {
            let ne = lengths(random);
            let (ty, out) = (random.pick(&FLOATS), random.pick(&FLOATS));
            let both = [ne[0] * 2 + random.below(2), ne[1], ne[2], ne[3]];
            let x = Data::random(ty, both, random).fill(|| random.between(-6.0, 6.0));
            let dst = Data::random(out, ne, random);
            let swapped = random.chance(2);
            let op = Op::Glu {
                kind,
                swapped,
                alpha: ALPHA,
                limit: LIMIT,
            };
            let got = run(engine, op, &dst, &[Some(&x)]);
            compare(&format!("{kind:?}"), &got, TOLERANCE, |[i0, i1, i2, i3]| {
                let low = x.get([i0, i1, i2, i3]);
                let high = x.get([i0 + ne[0], i1, i2, i3]);
                if swapped {
                    glu(kind, high, low)
                } else {
                    glu(kind, low, high)
                }
            });
        });
    }
}
