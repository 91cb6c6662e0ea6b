//! Functions of one operand: UNARY of every kind, SQR, SQRT, LOG, SIN, COS, LEAKY_RELU, XIELU; and
//! SILU_BACK.

use vgpu_transport::ir::{Op, OpKind, Rule, UnaryKind};

use super::f32_rows::{Map, map, maps};
use crate::kernel::Compiled;
use crate::operands::Operands;
use crate::simd::{Lanes, Simd};
use vgpu_engine::types::FLOATS;

pub(super) fn rules() -> Vec<Rule> {
    let unary = [
        OpKind::Unary,
        OpKind::Sqr,
        OpKind::Sqrt,
        OpKind::Log,
        OpKind::Sin,
        OpKind::Cos,
        OpKind::LeakyRelu,
        OpKind::Xielu,
    ];
    let mut rules: Vec<Rule> = unary.map(|op| Rule::new(op, FLOATS, &[FLOATS])).into();
    rules.push(Rule::new(OpKind::SiluBack, FLOATS, &[FLOATS, FLOATS]));
    rules
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    let x = [o.optional(0)?];
    Some(match *o.op() {
        Op::Unary { kind } => match kind {
            UnaryKind::Abs => map(dst, x, Abs {}),
            UnaryKind::Sgn => map(dst, x, Sgn {}),
            UnaryKind::Neg => map(dst, x, Neg {}),
            UnaryKind::Step => map(dst, x, Step {}),
            UnaryKind::Tanh => map(dst, x, Tanh {}),
            UnaryKind::Elu => map(dst, x, Elu {}),
            UnaryKind::Relu => map(dst, x, Relu {}),
            UnaryKind::Sigmoid => map(dst, x, Sigmoid {}),
            UnaryKind::Gelu => map(dst, x, Gelu {}),
            UnaryKind::GeluQuick => map(dst, x, GeluQuick {}),
            UnaryKind::Silu => map(dst, x, Silu {}),
            UnaryKind::HardSwish => map(dst, x, HardSwish {}),
            UnaryKind::HardSigmoid => map(dst, x, HardSigmoid {}),
            UnaryKind::Exp => map(dst, x, Exp {}),
            UnaryKind::Expm1 => map(dst, x, Expm1 {}),
            UnaryKind::Softplus => map(dst, x, Softplus {}),
            UnaryKind::GeluErf => map(dst, x, GeluErf {}),
            UnaryKind::Floor => map(dst, x, Floor {}),
            UnaryKind::Ceil => map(dst, x, Ceil {}),
            UnaryKind::Round => map(dst, x, Round {}),
            UnaryKind::Trunc => map(dst, x, Trunc {}),
        },
        Op::Sqr {} => map(dst, x, Sqr {}),
        Op::Sqrt {} => map(dst, x, Sqrt {}),
        Op::Log {} => map(dst, x, Log {}),
        Op::Sin {} => map(dst, x, Sin {}),
        Op::Cos {} => map(dst, x, Cos {}),
        Op::LeakyRelu { negative_slope } => map(dst, x, LeakyRelu { negative_slope }),
        Op::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => map(
            dst,
            x,
            Xielu {
                alpha_n,
                alpha_p,
                beta,
                eps,
            },
        ),
        Op::SiluBack {} => map(dst, o.sources(), SiluBack {}),
        _ => return None,
    })
}

// NaN is handled as in ggml: a comparison with NaN is false.
maps! {
    Abs |x| x.abs();
    Sgn |x| {
        let (zero, one) = (x.splat(0.0), x.splat(1.0));
        x.gt(zero).select(one, x.lt(zero).select(-one, zero))
    };
    Neg |x| -x;
    Step |x| x.gt(x.splat(0.0)).select(x.splat(1.0), x.splat(0.0));
    Tanh |x| x.tanh();
    Elu |x| x.gt(x.splat(0.0)).select(x, x.expm1());
    Relu |x| x.max(x.splat(0.0));
    Sigmoid |x| x.sigmoid();
    /// The tanh approximation. `1 + tanh(u)` is `2 sigmoid(2 u)`, which is accurate for negative
    /// `u`.
    Gelu |x| {
        const SQRT_2_OVER_PI: f32 = 0.797_884_6;
        let u = (x * SQRT_2_OVER_PI) * (x * x).mul_add(x.splat(0.044_715), x.splat(1.0));
        let y = x * (u * 2.0).sigmoid();
        // For larger magnitudes the result is 0 or x; the formula would give NaN for infinities.
        let y = x.le(x.splat(-10.0)).select(x.splat(0.0), y);
        x.ge(x.splat(10.0)).select(x, y)
    };
    GeluQuick |x| x * (x * 1.702).sigmoid();
    /// The exact form, with the error function.
    GeluErf |x| x * 0.5 * (1.0 + (x * std::f32::consts::FRAC_1_SQRT_2).erf());
    Silu |x| x / (1.0 + (-x).exp());
    HardSigmoid |x| ((x + 3.0) / 6.0).max(x.splat(0.0)).min(x.splat(1.0));
    HardSwish |x| x * HardSigmoid {}.map([x]);
    Exp |x| x.exp();
    Expm1 |x| x.expm1();
    Softplus |x| x.gt(x.splat(20.0)).select(x, (x.exp() + 1.0).ln());
    Floor |x| x.floor();
    Ceil |x| x.ceil();
    /// Ties are rounded away from zero.
    Round |x| x.round();
    Trunc |x| x.trunc();
    Sqr |x| x * x;
    Sqrt |x| x.sqrt();
    Log |x| x.ln();
    Sin |x| x.each(f32::sin);
    Cos |x| x.each(f32::cos);
    LeakyRelu { negative_slope } |x| {
        let zero = x.splat(0.0);
        x.max(zero) + x.min(zero) * negative_slope
    };
    Xielu { alpha_n, alpha_p, beta, eps } |x| {
        let positive = x * x * alpha_p + x * beta;
        let negative = (x.min(x.splat(eps)).expm1() - x) * alpha_n + x * beta;
        x.gt(x.splat(0.0)).select(positive, negative)
    };
    /// The gradient of SILU with input `x`, for the gradient `dy` of its output.
    SiluBack |dy, x| {
        let s = x.sigmoid();
        dy * s * (x * (1.0 - s) + 1.0)
    };
}
