//! ADD, SUB, MUL, DIV, ADD1, ADD_ID, SCALE, CLAMP; UNARY of every kind, SQR, SQRT, LOG, SIN, COS, LEAKY_RELU,
//! XIELU, SILU_BACK; GLU of every kind.

use vgpu_transport::ir::{GluKind, Op, OpKind, Rule, Type, UnaryKind};

use crate::launch::builder::Builder;
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::{F32, FLOATS};

pub(crate) fn rules() -> Vec<Rule> {
    let mut rules = vec![
        Rule::new(OpKind::AddId, F32, &[F32, F32]),
        Rule::new(OpKind::Glu, FLOATS, &[FLOATS, FLOATS]),
        Rule::new(OpKind::SiluBack, FLOATS, &[FLOATS, FLOATS]),
    ];
    let binary = [
        OpKind::Add,
        OpKind::Sub,
        OpKind::Mul,
        OpKind::Div,
        OpKind::Add1,
    ];
    rules.extend(binary.map(|op| Rule::new(op, FLOATS, &[FLOATS, FLOATS])));
    let unary = [
        OpKind::Scale,
        OpKind::Clamp,
        OpKind::Unary,
        OpKind::Sqr,
        OpKind::Sqrt,
        OpKind::Log,
        OpKind::Sin,
        OpKind::Cos,
        OpKind::LeakyRelu,
        OpKind::Xielu,
    ];
    rules.extend(unary.map(|op| Rule::new(op, FLOATS, &[FLOATS])));
    rules
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let none = [0.0; 4];
    let (code, c) = match *op {
        Op::AddId {} => return Some(add_id(b)),
        Op::Add {} | Op::Add1 {} => (VG_MAP_ADD, none),
        Op::Sub {} => (VG_MAP_SUB, none),
        Op::Mul {} => (VG_MAP_MUL, none),
        Op::Div {} => (VG_MAP_DIV, none),
        Op::Scale { scale, bias } => (VG_MAP_SCALE, [scale, bias, 0.0, 0.0]),
        Op::Clamp { min, max } => (VG_MAP_CLAMP, [min, max, 0.0, 0.0]),
        Op::Sqr {} => (VG_MAP_SQR, none),
        Op::Sqrt {} => (VG_MAP_SQRT, none),
        Op::Log {} => (VG_MAP_LOG, none),
        Op::Sin {} => (VG_MAP_SIN, none),
        Op::Cos {} => (VG_MAP_COS, none),
        Op::LeakyRelu { negative_slope } => (VG_MAP_LEAKY_RELU, [negative_slope, 0.0, 0.0, 0.0]),
        Op::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => (VG_MAP_XIELU, [alpha_n, alpha_p, beta, eps]),
        Op::SiluBack {} => (VG_MAP_SILU_BACK, none),
        Op::Unary { kind } => (unary(kind), none),
        Op::Glu {
            kind,
            swapped,
            alpha,
            limit,
        } => return Some(glu(b, kind, swapped, [alpha, limit, 0.0, 0.0])),
        _ => return None,
    };
    let sources = [b.src(0), b.optional(1)];
    // ADD1 and the binary operators have two, the second repeated; all others one.
    Some(map(b, code, c, sources))
}

fn unary(kind: UnaryKind) -> VgMap {
    match kind {
        UnaryKind::Abs => VG_MAP_ABS,
        UnaryKind::Sgn => VG_MAP_SGN,
        UnaryKind::Neg => VG_MAP_NEG,
        UnaryKind::Step => VG_MAP_STEP,
        UnaryKind::Tanh => VG_MAP_TANH,
        UnaryKind::Elu => VG_MAP_ELU,
        UnaryKind::Relu => VG_MAP_RELU,
        UnaryKind::Sigmoid => VG_MAP_SIGMOID,
        UnaryKind::Gelu => VG_MAP_GELU,
        UnaryKind::GeluQuick => VG_MAP_GELU_QUICK,
        UnaryKind::Silu => VG_MAP_SILU,
        UnaryKind::HardSwish => VG_MAP_HARDSWISH,
        UnaryKind::HardSigmoid => VG_MAP_HARDSIGMOID,
        UnaryKind::Exp => VG_MAP_EXP,
        UnaryKind::Expm1 => VG_MAP_EXPM1,
        UnaryKind::Softplus => VG_MAP_SOFTPLUS,
        UnaryKind::GeluErf => VG_MAP_GELU_ERF,
        UnaryKind::Floor => VG_MAP_FLOOR,
        UnaryKind::Ceil => VG_MAP_CEIL,
        UnaryKind::Round => VG_MAP_ROUND,
        UnaryKind::Trunc => VG_MAP_TRUNC,
    }
}

fn glu(b: &mut Builder<'_>, kind: GluKind, swapped: bool, c: [f32; 4]) -> Result<(), EngineError> {
    let code = match kind {
        GluKind::Reglu => VG_MAP_REGLU,
        GluKind::Geglu => VG_MAP_GEGLU,
        GluKind::Swiglu => VG_MAP_SWIGLU,
        GluKind::SwigluOai => VG_MAP_SWIGLU_OAI,
        GluKind::GegluErf => VG_MAP_GEGLU_ERF,
        GluKind::GegluQuick => VG_MAP_GEGLU_QUICK,
        GluKind::SwigluClamp => VG_MAP_SWIGLU_CLAMP,
    };
    let (x, gate) = (b.src(0), b.optional(1));
    if gate.data != 0 {
        return map(b, code, c, [x, gate]);
    }
    // Without a second source, the halves of the first.
    let dst = b.dst();
    let half = |second: bool| {
        let offset = if second { dst.ne[0] * x.nb[0] } else { 0 };
        VgView {
            data: x.data + offset as u64,
            ne: dst.ne,
            ..x
        }
    };
    map(b, code, c, [half(swapped), half(!swapped)])
}

fn map(
    b: &mut Builder<'_>,
    op: VgMap,
    c: [f32; 4],
    sources: [VgView; 2],
) -> Result<(), EngineError> {
    let dst = b.dst();
    map_to(b, dst, op, c, sources)
}

/// Adds `x` to `part` of the destination.
pub(crate) fn add(b: &mut Builder<'_>, part: VgView, x: VgView) -> Result<(), EngineError> {
    map_to(b, part, VG_MAP_ADD, [0.0; 4], [part, x])
}

fn map_to(
    b: &mut Builder<'_>,
    dst: VgView,
    op: VgMap,
    c: [f32; 4],
    [x, y]: [VgView; 2],
) -> Result<(), EngineError> {
    if dst.elements() == 0 {
        return Ok(());
    }
    let plain = |v: &VgView| v.data == 0 || v.ne == dst.ne && v.is_dense(Type::F32);
    let params = VgMapParams {
        dst,
        a: x,
        b: y,
        c,
        op,
        flat: u32::from([dst, x, y].iter().all(plain)),
    };
    b.for_each("vg_map", dst.elements(), &params)
}

fn add_id(b: &mut Builder<'_>) -> Result<(), EngineError> {
    let params = VgAddIdParams {
        dst: b.dst(),
        a: b.src(0),
        b: b.src(1),
        ids: b.src(2),
        place: b.place(),
    };
    b.for_each("vg_add_id", params.dst.elements(), &params)
}
