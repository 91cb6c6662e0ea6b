//! ADD, SUB, MUL, DIV, ADD1, ADD_ID, SCALE, CLAMP; all kinds of UNARY, SQR, SQRT, LOG, SIN, COS,
//! LEAKY_RELU, XIELU, SILU_BACK; all kinds of GLU.

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
        Op::Add {} | Op::Add1 {} => (VG_OP_ADD, none),
        Op::Sub {} => (VG_OP_SUB, none),
        Op::Mul {} => (VG_OP_MUL, none),
        Op::Div {} => (VG_OP_DIV, none),
        Op::Scale { scale, bias } => (VG_OP_SCALE, [scale, bias, 0.0, 0.0]),
        Op::Clamp { min, max } => (VG_OP_CLAMP, [min, max, 0.0, 0.0]),
        Op::Sqr {} => (VG_OP_SQR, none),
        Op::Sqrt {} => (VG_OP_SQRT, none),
        Op::Log {} => (VG_OP_LOG, none),
        Op::Sin {} => (VG_OP_SIN, none),
        Op::Cos {} => (VG_OP_COS, none),
        Op::LeakyRelu { negative_slope } => (VG_OP_LEAKY_RELU, [negative_slope, 0.0, 0.0, 0.0]),
        Op::Xielu {
            alpha_n,
            alpha_p,
            beta,
            eps,
        } => (VG_OP_XIELU, [alpha_n, alpha_p, beta, eps]),
        Op::SiluBack {} => (VG_OP_SILU_BACK, none),
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
    // ADD1 and the binary operators have two sources, of which the second is repeated; the others
    // have one.
    Some(map(b, code, c, sources))
}

fn unary(kind: UnaryKind) -> VgElementwiseOp {
    match kind {
        UnaryKind::Abs => VG_OP_ABS,
        UnaryKind::Sgn => VG_OP_SGN,
        UnaryKind::Neg => VG_OP_NEG,
        UnaryKind::Step => VG_OP_STEP,
        UnaryKind::Tanh => VG_OP_TANH,
        UnaryKind::Elu => VG_OP_ELU,
        UnaryKind::Relu => VG_OP_RELU,
        UnaryKind::Sigmoid => VG_OP_SIGMOID,
        UnaryKind::Gelu => VG_OP_GELU,
        UnaryKind::GeluQuick => VG_OP_GELU_QUICK,
        UnaryKind::Silu => VG_OP_SILU,
        UnaryKind::HardSwish => VG_OP_HARDSWISH,
        UnaryKind::HardSigmoid => VG_OP_HARDSIGMOID,
        UnaryKind::Exp => VG_OP_EXP,
        UnaryKind::Expm1 => VG_OP_EXPM1,
        UnaryKind::Softplus => VG_OP_SOFTPLUS,
        UnaryKind::GeluErf => VG_OP_GELU_ERF,
        UnaryKind::Floor => VG_OP_FLOOR,
        UnaryKind::Ceil => VG_OP_CEIL,
        UnaryKind::Round => VG_OP_ROUND,
        UnaryKind::Trunc => VG_OP_TRUNC,
    }
}

/// Adds the launch of a gated unit.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn glu(b: &mut Builder<'_>, kind: GluKind, swapped: bool, c: [f32; 4]) -> Result<(), EngineError> {
    let code = match kind {
        GluKind::Reglu => VG_OP_REGLU,
        GluKind::Geglu => VG_OP_GEGLU,
        GluKind::Swiglu => VG_OP_SWIGLU,
        GluKind::SwigluOai => VG_OP_SWIGLU_OAI,
        GluKind::GegluErf => VG_OP_GEGLU_ERF,
        GluKind::GegluQuick => VG_OP_GEGLU_QUICK,
        GluKind::SwigluClamp => VG_OP_SWIGLU_CLAMP,
    };
    let (x, gate) = (b.src(0), b.optional(1));
    if gate.data != 0 {
        return map(b, code, c, [x, gate]);
    }
    // Without a second source the operands are the halves of the first.
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

/// Adds the launch of an elementwise function of `sources` to the destination.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn map(
    b: &mut Builder<'_>,
    op: VgElementwiseOp,
    c: [f32; 4],
    sources: [VgView; 2],
) -> Result<(), EngineError> {
    let dst = b.dst();
    map_to(b, dst, op, c, sources)
}

/// Adds `x` to `part` of the destination.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
pub(crate) fn add(b: &mut Builder<'_>, part: VgView, x: VgView) -> Result<(), EngineError> {
    map_to(b, part, VG_OP_ADD, [0.0; 4], [part, x])
}

/// Adds the launch of an elementwise function of `x` and `y` to `dst`.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn map_to(
    b: &mut Builder<'_>,
    dst: VgView,
    op: VgElementwiseOp,
    c: [f32; 4],
    [x, y]: [VgView; 2],
) -> Result<(), EngineError> {
    if dst.elements() == 0 {
        return Ok(());
    }
    let plain = |v: &VgView| v.data == 0 || v.ne == dst.ne && v.is_dense(Type::F32);
    let params = VgElementwiseParams {
        dst,
        a: x,
        b: y,
        c,
        op,
        flat: u32::from([dst, x, y].iter().all(plain)),
    };
    b.for_each("vg_elementwise", dst.elements(), &params)
}

/// Adds the launch of ADD_ID.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn add_id(b: &mut Builder<'_>) -> Result<(), EngineError> {
    let params = VgAddIdParams {
        dst: b.dst(),
        a: b.src(0),
        b: b.src(1),
        ids: b.src(2),
        site: b.fault_site(),
    };
    b.for_each("vg_add_id", params.dst.elements(), &params)
}
