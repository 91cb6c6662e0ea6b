//! Products with weights, of every type.

use vgpu_transport::ir::{Op, Precision, Type};

use super::list::{List, between, f32s, indices, numbers_of};
use super::operation::{EXACT, ROUNDED};
use crate::graph::Fill;
use vgpu_cpu::gemm::MatmulKernel;

pub(super) fn all(list: &mut List) {
    let weights = Type::ALL.iter().copied();
    for ty in weights.filter(|&ty| MatmulKernel::of(ty).is_some()) {
        for n in [1, 3, 8, 13, 30, 50, 70] {
            let op = Op::MulMat {
                accumulator: Precision::Default,
                activation: Precision::Default,
                hadamard: false,
            };
            let w = numbers_of(ty, [1280, 96, 1, 1]);
            list.add(
                op,
                ROUNDED,
                f32s([96, n, 1, 1]),
                &[w, f32s([1280, n, 1, 1])],
            );
        }
        for tokens in [1, 40] {
            let op = Op::MulMatId {
                accumulator: Precision::Default,
                activation: Precision::Default,
            };
            let ids = indices(Type::I32, Fill::Below(5), [2, tokens, 1, 1]);
            list.add(
                op,
                ROUNDED,
                f32s([48, 2, tokens, 1]),
                &[
                    numbers_of(ty, [512, 48, 5, 1]),
                    f32s([512, 1, tokens, 1]),
                    ids,
                ],
            );
        }
    }
    // Activations beyond F16, which must stay F32 or BF16.
    for ty in [Type::F16, Type::Bf16, Type::Q4_1, Type::Q8_0] {
        for (n, activation) in [
            (1, Precision::F32),
            (70, Precision::F32),
            (1, Precision::Bf16),
            (70, Precision::Bf16),
        ] {
            let op = Op::MulMat {
                accumulator: Precision::Default,
                activation,
                hadamard: false,
            };
            let sources = [
                numbers_of(ty, [512, 96, 1, 1]),
                between(-1e6, 1e6, [512, n, 1, 1]),
            ];
            list.add(op, ROUNDED, f32s([96, n, 1, 1]), &sources);
        }
    }
    // Lengths that are no multiple of a k step, as attention without FLASH_ATTN_EXT has.
    for ty in [Type::F16, Type::F32] {
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        let sources = [numbers_of(ty, [1500, 72, 2, 1]), f32s([1500, 40, 4, 1])];
        list.add(op, ROUNDED, f32s([72, 40, 4, 1]), &sources);
    }
    let op = Op::OutProd {};
    list.add(
        op,
        EXACT,
        f32s([50, 33, 2, 1]),
        &[f32s([50, 70, 2, 1]), f32s([33, 70, 2, 1])],
    );
}

/// Products large enough for the kernels that GPUs use if all SMs have work.
pub(super) fn large(list: &mut List) {
    let weights = Type::ALL.iter().copied();
    for ty in weights.filter(|&ty| MatmulKernel::of(ty).is_some()) {
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: false,
        };
        // Nearly whole waves of wide tiles on current GPUs.
        let (rows, columns) = (33_000, 512);
        let sources = [
            numbers_of(ty, [256, rows, 1, 1]),
            f32s([256, columns, 1, 1]),
        ];
        list.add(op, ROUNDED, f32s([rows, columns, 1, 1]), &sources);
    }
}
