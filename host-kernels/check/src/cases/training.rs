//! Operators of training.

use vgpu_transport::ir::Op;

use super::list::{List, between, f32s};
use super::operation::EXACT;

pub(super) fn all(list: &mut List) {
    let ne = [300, 20, 1, 1];
    list.add(
        Op::SoftMaxBack {
            scale: 0.7,
            max_bias: 0.0,
        },
        EXACT,
        f32s(ne),
        &[f32s(ne), between(0.0, 1.0, ne)],
    );
    list.again_over(0);
    list.again_over(1);
    let labels = between(0.0, 1.0, ne);
    list.add(
        Op::CrossEntropyLoss {},
        EXACT,
        f32s([1; 4]),
        &[f32s(ne), labels],
    );
    list.add(
        Op::CrossEntropyLossBack {},
        EXACT,
        f32s(ne),
        &[f32s([1; 4]), f32s(ne), labels],
    );
    let settings = between(0.1, 0.2, [2, 1, 1, 1]);
    list.add(
        Op::OptStepSgd {},
        EXACT,
        f32s(ne),
        &[f32s(ne), f32s(ne), settings],
    );
}
