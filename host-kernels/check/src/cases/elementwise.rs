//! Element-wise operators.

use vgpu_transport::ir::{GluKind, Op, Type, UnaryKind};

use super::list::{List, between, f32s, indices};
use super::operation::EXACT;
use crate::graph::Fill;

pub(super) fn all(list: &mut List) {
    let ne = [130, 7, 3, 2];
    for op in [Op::Add {}, Op::Sub {}, Op::Mul {}, Op::Div {}] {
        list.add(
            op,
            EXACT,
            f32s(ne),
            &[f32s(ne), between(0.5, 2.0, [130, 7, 1, 1])],
        );
    }
    for kind in [
        UnaryKind::Silu,
        UnaryKind::Gelu,
        UnaryKind::Exp,
        UnaryKind::Softplus,
    ] {
        list.add(Op::Unary { kind }, EXACT, f32s(ne), &[f32s(ne)]);
    }
    let scale = Op::Scale {
        scale: 2.0,
        bias: 0.5,
    };
    list.add(scale, EXACT, f32s(ne), &[f32s(ne)]);
    for kind in [GluKind::Swiglu, GluKind::Geglu, GluKind::SwigluOai] {
        let op = Op::Glu {
            kind,
            swapped: false,
            alpha: 1.702,
            limit: 7.0,
        };
        list.add(op, EXACT, f32s(ne), &[f32s(ne), f32s(ne)]);
    }
    let ids = indices(Type::I32, Fill::Below(9), [7, 3, 1, 1]);
    list.add(
        Op::AddId {},
        EXACT,
        f32s([130, 7, 3, 1]),
        &[f32s([130, 7, 3, 1]), f32s([130, 9, 1, 1]), ids],
    );
}
