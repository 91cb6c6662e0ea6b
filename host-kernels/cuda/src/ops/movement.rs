//! COPY (DUP, CPY, CONT), REPEAT, REPEAT_BACK, CONCAT, SET, ACC, DIAG, DIAG_MASK_INF,
//! DIAG_MASK_ZERO, PAD, PAD_REFLECT_1D, ROLL, TRI, FILL, ARANGE; GET_ROWS, GET_ROWS_BACK, SET_ROWS.

use vgpu_transport::ir::{Op, OpKind, Rule, Shape, TriKind, Type};

use super::elementwise::add;
use crate::launch::builder::Builder;
use crate::params::*;
use crate::types::{READABLE, WRITABLE};
use vgpu_cpu::formats::{f32_to_bf16, f32_to_f16};
use vgpu_engine::EngineError;
use vgpu_engine::types::{ANY, F32, FLOATS, I32, PLAIN};

pub(crate) fn rules() -> Vec<Rule> {
    vec![
        Rule::uniform(OpKind::Copy, ANY, 1),
        Rule::new(OpKind::Copy, WRITABLE, &[READABLE]),
        Rule::new(OpKind::Copy, I32, &[FLOATS]),
        Rule::new(OpKind::Copy, FLOATS, &[I32]),
        Rule::uniform(OpKind::Repeat, ANY, 1),
        Rule::uniform(OpKind::RepeatBack, FLOATS, 1),
        Rule::uniform(OpKind::Concat, ANY, 2),
        Rule::uniform(OpKind::Set, PLAIN, 2),
        Rule::uniform(OpKind::Acc, FLOATS, 2),
        Rule::uniform(OpKind::Diag, PLAIN, 1),
        Rule::uniform(OpKind::DiagMaskInf, FLOATS, 1),
        Rule::uniform(OpKind::DiagMaskZero, FLOATS, 1),
        Rule::uniform(OpKind::Pad, PLAIN, 1),
        Rule::uniform(OpKind::PadReflect1d, PLAIN, 1),
        Rule::uniform(OpKind::Roll, PLAIN, 1),
        Rule::uniform(OpKind::Tri, PLAIN, 1),
        Rule::new(OpKind::Fill, FLOATS, &[]),
        Rule::new(OpKind::Arange, F32, &[]),
        Rule::new(OpKind::GetRows, F32, &[READABLE]),
        Rule::new(OpKind::GetRows, I32, &[I32]),
        Rule::new(OpKind::GetRowsBack, F32, &[READABLE.union(I32)]),
        Rule::new(OpKind::SetRows, WRITABLE, &[FLOATS]),
    ]
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    Some(match *op {
        Op::Copy {} => copy(b),
        Op::Repeat {} => {
            let (dst, src) = (b.dst(), b.src(0));
            repeat(b, dst, src)
        }
        Op::RepeatBack {} => {
            let params = VgRepeatBackParams {
                dst: b.dst(),
                src: b.src(0),
            };
            b.for_each("vg_repeat_back", params.dst.elements(), &params)
        }
        Op::Concat { dim } => concat(b, dim as usize),
        Op::Set {
            nb1,
            nb2,
            nb3,
            offset,
        } => start_from(b).and_then(|()| {
            let part = placed(b, [nb1, nb2, nb3], offset);
            let src = b.src(1);
            repeat(b, part, src)
        }),
        Op::Acc {
            nb1,
            nb2,
            nb3,
            offset,
        } => start_from(b).and_then(|()| {
            let part = placed(b, [nb1, nb2, nb3], offset);
            let src = b.src(1);
            add(b, part, src)
        }),
        Op::Diag {} => shuffle(b, VG_MOVE_DIAG, [0; 4]),
        Op::DiagMaskInf { n_past } => {
            let ty = b.dst_shape().ty;
            let hidden = bits_of(ty, f32::NEG_INFINITY);
            band(b, i64::MIN, i64::from(n_past) + 1, hidden)
        }
        Op::DiagMaskZero { n_past } => band(b, i64::MIN, i64::from(n_past) + 1, 0),
        Op::Tri { kind } => {
            let (low, high) = match kind {
                TriKind::UpperDiag => (0, i64::MAX),
                TriKind::Upper => (1, i64::MAX),
                TriKind::LowerDiag => (i64::MIN, 1),
                TriKind::Lower => (i64::MIN, 0),
            };
            band(b, low, high, 0)
        }
        Op::Pad { left, circular, .. } => {
            let kind = if circular {
                VG_MOVE_CIRCULAR
            } else {
                VG_MOVE_PAD
            };
            shuffle(b, kind, left.map(i64::from))
        }
        Op::PadReflect1d { p0, .. } => shuffle(b, VG_MOVE_REFLECT, [i64::from(p0), 0, 0, 0]),
        Op::Roll { shift } => shuffle(b, VG_MOVE_CIRCULAR, shift.map(i64::from)),
        Op::Fill { value } => {
            let dst = b.dst();
            let params = VgMoveParams {
                dst,
                src: dst,
                other: bits_of(b.dst_shape().ty, value),
                size: b.dst_shape().ty.block_bytes() as u32,
                op: VG_MOVE_FILL,
                ..VgMoveParams::default()
            };
            b.for_each("vg_move", dst.elements(), &params)
        }
        Op::Arange { start, step, .. } => {
            let dst = b.dst();
            b.for_each("vg_arange", dst.ne[0], &VgArangeParams { dst, start, step })
        }
        Op::GetRows {} => {
            let params = rows(b);
            b.for_each("vg_get_rows", params.dst.elements(), &params)
        }
        Op::GetRowsBack {} => {
            let params = rows(b);
            b.for_each("vg_get_rows_back", params.dst.ne[0], &params)
        }
        Op::SetRows {} => {
            let params = rows(b);
            match params.src.elements() {
                0 => Ok(()),
                elements => b.for_each("vg_set_rows", elements, &params),
            }
        }
        _ => return None,
    })
}

/// The bits of a number in a plain type.
fn bits_of(ty: Type, x: f32) -> u64 {
    match ty {
        Type::F16 => f32_to_f16(x).into(),
        Type::Bf16 => f32_to_bf16(x).into(),
        _ => x.to_bits().into(),
    }
}

fn rows(b: &Builder<'_>) -> VgRowsParams {
    VgRowsParams {
        dst: b.dst(),
        src: b.src(0),
        ids: b.src(1),
        codebooks: b.codebooks(),
        site: b.fault_site(),
    }
}

/// Adds the launch of COPY.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn copy(b: &mut Builder<'_>) -> Result<(), EngineError> {
    let (dst, src) = (b.dst(), b.src(0));
    if dst.type_ == src.type_ && dst.ne == src.ne {
        return repeat(b, dst, src);
    }
    let kernel = if dst.type_ == src.type_ {
        "vg_copy_same"
    } else {
        "vg_copy"
    };
    let params = VgCopyParams {
        dst,
        src,
        codebooks: b.codebooks(),
    };
    let block = b.dst_shape().ty.block_elements() as i64;
    b.for_each(kernel, dst.elements() / block, &params)
}

/// Repeats the elements of `src` in `dst`, a part of the destination.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn repeat(b: &mut Builder<'_>, dst: VgView, src: VgView) -> Result<(), EngineError> {
    moved(
        b,
        &VgMoveParams {
            dst,
            src,
            op: VG_MOVE_REPEAT,
            ..VgMoveParams::default()
        },
    )
}

/// Moves the elements of the first source to the positions that `kind` and `shift` define.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn shuffle(b: &mut Builder<'_>, kind: VgMove, shift: [i64; 4]) -> Result<(), EngineError> {
    let params = VgMoveParams {
        dst: b.dst(),
        src: b.src(0),
        shift,
        op: kind,
        ..VgMoveParams::default()
    };
    moved(b, &params)
}

/// Keeps the elements of the first source where `low <= i0 - i1 < high`; `other` elsewhere.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn band(b: &mut Builder<'_>, low: i64, high: i64, other: u64) -> Result<(), EngineError> {
    let params = VgMoveParams {
        dst: b.dst(),
        src: b.src(0),
        low,
        high,
        other,
        op: VG_MOVE_BAND,
        ..VgMoveParams::default()
    };
    moved(b, &params)
}

/// Moves elements of the destination's type, or whole blocks.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn moved(b: &mut Builder<'_>, params: &VgMoveParams) -> Result<(), EngineError> {
    let ty = b.dst_shape().ty;
    let mut params = *params;
    params.size = ty.block_bytes() as u32;
    for view in [&mut params.dst, &mut params.src] {
        view.ne[0] /= ty.block_elements() as i64;
    }
    let n = params.dst.elements();
    if n == 0 {
        return Ok(());
    }
    b.for_each("vg_move", n, &params)
}

/// Adds the launches of CONCAT, one for each source.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn concat(b: &mut Builder<'_>, dim: usize) -> Result<(), EngineError> {
    let (dst, x, y) = (b.dst(), b.src(0), b.src(1));
    let Shape { ty, .. } = *b.dst_shape();
    let before = match dim {
        0 => x.ne[0] / ty.block_elements() as i64,
        _ => x.ne[dim],
    };
    repeat(b, VgView { ne: x.ne, ..dst }, x)?;
    let second = VgView {
        data: dst.data + (before * dst.nb[dim]) as u64,
        ne: y.ne,
        ..dst
    };
    repeat(b, second, y)
}

/// Copies the first source to the destination, if they are not the same memory.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn start_from(b: &mut Builder<'_>) -> Result<(), EngineError> {
    let (dst, src) = (b.dst(), b.src(0));
    if dst.data == src.data {
        Ok(())
    } else {
        repeat(b, dst, src)
    }
}

/// The part of the destination that SET and ACC change: the lengths of the second source, with the
/// strides of the operator.
fn placed(b: &Builder<'_>, nb: [u64; 3], offset: u64) -> VgView {
    let (dst, part) = (b.dst(), b.src(1));
    let [nb1, nb2, nb3] = nb;
    let shape = Shape {
        ty: b.dst_shape().ty,
        ne: part.ne.map(|n| n as u64),
        nb: [b.dst_shape().ty.block_bytes(), nb1, nb2, nb3],
    };
    VgView::new(dst.data + offset, &shape)
}
