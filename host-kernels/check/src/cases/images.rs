//! Operators of vision models.

use vgpu_transport::ir::{Op, PoolKind, ScaleMode, Type};

use super::list::{List, f32s, numbers_of};
use super::operation::{EXACT, ROUNDED};

pub(super) fn all(list: &mut List) {
    let kernel = numbers_of(Type::F16, [3, 3, 8, 12]);
    let image = f32s([20, 17, 8, 2]);
    let conv = Op::Conv2d {
        s0: 1,
        s1: 2,
        p0: 1,
        p1: 1,
        d0: 1,
        d1: 1,
    };
    list.add(conv, ROUNDED, f32s([20, 9, 12, 2]), &[kernel, image]);
    let im2col = Op::Im2col {
        s0: 1,
        s1: 2,
        p0: 1,
        p1: 1,
        d0: 1,
        d1: 1,
        is_2d: true,
    };
    list.add(
        im2col,
        EXACT,
        numbers_of(Type::F16, [72, 20, 9, 2]),
        &[kernel, image],
    );
    let pool = Op::Pool2d {
        kind: PoolKind::Max,
        k0: 2,
        k1: 2,
        s0: 2,
        s1: 2,
        p0: 0,
        p1: 0,
    };
    list.add(pool, 0.0, f32s([10, 8, 8, 2]), &[image]);
    for mode in [ScaleMode::Nearest, ScaleMode::Bilinear, ScaleMode::Bicubic] {
        let op = Op::Upscale {
            mode,
            align_corners: false,
            antialias: false,
        };
        list.add(op, EXACT, f32s([40, 34, 8, 2]), &[image]);
    }
    let transposed = Op::ConvTranspose2d { stride: 2 };
    list.add(
        transposed,
        ROUNDED,
        f32s([41, 35, 12, 2]),
        &[numbers_of(Type::F16, [3, 3, 12, 8]), image],
    );
}
