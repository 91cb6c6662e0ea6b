//! Operators that move elements.

use vgpu_transport::ir::{Op, TriKind, Type};

use super::list::{List, f32s, indices, numbers_of};
use super::operation::{EXACT, ROUNDED};
use crate::graph::Fill;
use vgpu_cpu::formats::Format;

pub(super) fn all(list: &mut List) {
    let reals = Type::ALL.iter().copied();
    for ty in reals.filter(|&ty| Format::of(ty).is_some()) {
        let src = numbers_of(ty, [256, 9, 2, 1]);
        list.add(Op::Copy {}, EXACT, f32s([256, 9, 2, 1]), &[src]);
        list.add(Op::Copy {}, ROUNDED, src, &[f32s([256, 9, 2, 1])]);
        let ids = indices(Type::I32, Fill::Below(9), [4, 1, 1, 1]);
        list.add(
            Op::GetRows {},
            EXACT,
            f32s([256, 4, 1, 1]),
            &[numbers_of(ty, [256, 9, 1, 1]), ids],
        );
        let ids = indices(Type::I64, Fill::Count, [4, 1, 1, 1]);
        let dst = numbers_of(ty, [256, 9, 1, 1]);
        list.add(Op::SetRows {}, ROUNDED, dst, &[f32s([256, 4, 1, 1]), ids]);
    }
    let ne = [30, 5, 3, 2];
    list.add(Op::Repeat {}, 0.0, f32s([60, 5, 9, 2]), &[f32s(ne)]);
    list.add(
        Op::Concat { dim: 1 },
        0.0,
        f32s([30, 10, 3, 2]),
        &[f32s(ne), f32s(ne)],
    );
    let tri = Op::Tri {
        kind: TriKind::Lower,
    };
    list.add(tri, 0.0, f32s([30, 30, 2, 1]), &[f32s([30, 30, 2, 1])]);
    let pad = Op::Pad {
        left: [1, 0, 2, 0],
        right: [3, 1, 0, 0],
        circular: false,
    };
    list.add(pad, 0.0, f32s([34, 6, 5, 2]), &[f32s(ne)]);
}
