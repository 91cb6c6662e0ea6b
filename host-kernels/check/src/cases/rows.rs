//! Operators on rows: norms, softmax, rotation, rows by index, sorting.

use vgpu_transport::ir::{Op, RopeMode, SortOrder, Type};

use super::list::{List, between, f32s, indices};
use super::operation::EXACT;
use crate::graph::{Fill, Operand};

pub(super) fn all(list: &mut List) {
    let ne = [1000, 5, 2, 1];
    for op in [
        Op::Norm { eps: 1e-5 },
        Op::RmsNorm { eps: 1e-5 },
        Op::L2Norm { eps: 1e-5 },
        Op::Cumsum {},
    ] {
        list.add(op, EXACT, f32s(ne), &[f32s(ne)]);
    }
    let group = Op::GroupNorm {
        n_groups: 3,
        eps: 1e-5,
    };
    list.add(group, EXACT, f32s([10, 9, 6, 2]), &[f32s([10, 9, 6, 2])]);
    let soft_max = Op::SoftMax {
        scale: 0.5,
        max_bias: 8.0,
    };
    let mask = Operand {
        ty: Type::F16,
        ne: [1000, 5, 1, 1],
        fill: Fill::Mask(500),
    };
    list.add(soft_max, EXACT, f32s(ne), &[f32s(ne), mask]);
    for mode in [RopeMode::Normal, RopeMode::Neox, RopeMode::Mrope] {
        let op = Op::Rope {
            mode,
            backward: false,
            n_dims: 64,
            n_offs: 0,
            n_ctx_orig: 4096,
            freq_base: 10000.0,
            freq_scale: 0.5,
            ext_factor: 0.5,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            sections: [8, 12, 12, 0],
        };
        let count = if mode == RopeMode::Mrope { 4 } else { 1 };
        let positions = indices(Type::I32, Fill::Count, [6 * count, 1, 1, 1]);
        let ne = [80, 4, 6, 1];
        list.add(op, EXACT, f32s(ne), &[f32s(ne), positions]);
    }
    list.add(Op::Sum {}, EXACT, f32s([1; 4]), &[between(0.0, 1.0, ne)]);
    list.add(
        Op::SumRows {},
        EXACT,
        f32s([1, 5, 2, 1]),
        &[between(0.0, 1.0, ne)],
    );
    let i32s = |ne| indices(Type::I32, Fill::Count, ne);
    list.add(
        Op::Argmax {},
        0.0,
        i32s([5, 1, 1, 1]),
        &[f32s([1000, 5, 1, 1])],
    );
    for columns in [1000, 6000] {
        let op = Op::Argsort {
            order: SortOrder::Descending,
        };
        list.add(
            op,
            0.0,
            i32s([columns, 5, 1, 1]),
            &[f32s([columns, 5, 1, 1])],
        );
    }
}
