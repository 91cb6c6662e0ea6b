//! Operators whose part is a window, or another thing.

use vgpu_transport::ir::{Op, OpKind, PoolKind, Precision, Type};

use crate::ops::{Sliding, slide, usual};
use crate::samples::{f32, typed};
use crate::shapes::{Shapes, overlapping, shapes, strided};

/// Operators whose part is a window, or another thing.
pub(crate) fn windows() -> Vec<Shapes> {
    let mut all = Vec::new();
    for stride in [4, 64] {
        let at = |op: &str| match stride {
            4 => op.to_string(),
            _ => format!("{op} of an element each {stride} bytes"),
        };
        for pool in [PoolKind::Max, PoolKind::Average] {
            all.push(shapes(at("POOL_1D"), move |n| {
                let sliding = Sliding {
                    window: [n as i32, 1],
                    pool,
                    ..Sliding::default()
                };
                let line = strided(Type::F32, [4 * n, 1, 1, 1], stride);
                let op = slide(OpKind::Pool1d, &sliding)?;
                Some((op, f32([3 * n + 1, 1, 1, 1]), vec![line]))
            }));
            // The operator, the image, and the result of POOL_2D.
            let pool_2d = move |kind: OpKind, n: u64| {
                let side = n.isqrt();
                let sliding = Sliding {
                    window: [side as i32; 2],
                    pool,
                    ..Sliding::default()
                };
                let image = strided(Type::F32, [2 * side, 2 * side, 1, 1], stride);
                Some((
                    slide(kind, &sliding)?,
                    image,
                    f32([side + 1, side + 1, 1, 1]),
                ))
            };
            all.push(shapes(at("POOL_2D"), move |n| {
                let (op, image, pooled) = pool_2d(OpKind::Pool2d, n)?;
                Some((op, pooled, vec![image]))
            }));
            all.push(shapes(at("POOL_2D_BACK"), move |n| {
                let (op, image, pooled) = pool_2d(OpKind::Pool2dBack, n)?;
                Some((op, f32(image.ne), vec![pooled, image]))
            }));
        }
        all.push(shapes(at("CONV_2D"), move |n| {
            let side = n.isqrt();
            let op = slide(OpKind::Conv2d, &Sliding::default())?;
            let kernel = f32([side, side, 1, 1]);
            let image = strided(Type::F32, [2 * side, 2 * side, 1, 1], stride);
            let to = f32([side + 1, side + 1, 1, 1]);
            Some((op, to, vec![kernel, image]))
        }));
        all.push(shapes(at("CONV_2D of 1 by 1, many channels"), move |n| {
            let side = n.isqrt();
            let op = slide(OpKind::Conv2d, &Sliding::default())?;
            let kernel = f32([1, 1, side, side]);
            let image = strided(Type::F32, [4, 4, side, 1], stride);
            Some((op, f32([4, 4, side, 1]), vec![kernel, image]))
        }));
        all.push(shapes(at("CONV_2D of 1 by 1, half as many"), move |n| {
            let side = n.isqrt();
            let op = slide(OpKind::Conv2d, &Sliding::default())?;
            let kernel = f32([1, 1, side, side / 2]);
            let image = strided(Type::F32, [4, 4, side, 1], stride);
            Some((op, f32([4, 4, side / 2, 1]), vec![kernel, image]))
        }));
        all.push(shapes(at("CONV_2D_DW"), move |n| {
            let side = n.isqrt();
            let op = slide(OpKind::Conv2dDw, &Sliding::default())?;
            let image = strided(Type::F32, [2 * side, 2 * side, 1, 1], stride);
            let to = f32([side + 1, side + 1, 1, 1]);
            Some((op, to, vec![f32([side, side, 1, 1]), image]))
        }));
        all.push(shapes(at("CONV_TRANSPOSE_1D"), move |n| {
            let op = slide(OpKind::ConvTranspose1d, &Sliding::default())?;
            let (channels, taps) = (64, n / 64);
            let kernel = f32([taps, 1, channels, 1]);
            let line = strided(Type::F32, [taps, channels, 1, 1], stride);
            let to = f32([2 * taps - 1, 1, 1, 1]);
            Some((op, to, vec![kernel, line]))
        }));
        all.push(shapes(at("CONV_TRANSPOSE_2D"), move |n| {
            let op = slide(OpKind::ConvTranspose2d, &Sliding::default())?;
            let side = n.isqrt();
            let kernel = typed(Type::F16, [side, side, 1, 1]);
            let image = strided(Type::F32, [side, side, 1, 1], stride);
            let to = f32([2 * side - 1, 2 * side - 1, 1, 1]);
            Some((op, to, vec![kernel, image]))
        }));
        all.push(shapes(at("UPSCALE"), move |n| {
            let side = n.isqrt();
            let image = strided(Type::F32, [side, side, 1, 1], stride);
            Some((usual(OpKind::Upscale)?, f32([2, 2, 1, 1]), vec![image]))
        }));
        all.push(shapes(at("IM2COL_BACK"), move |n| {
            let side = n.isqrt();
            let op = slide(OpKind::Im2colBack, &Sliding::default())?;
            let columns = strided(Type::F32, [side * side, side + 1, side + 1, 1], stride);
            let kernel = f32([side, side, 1, 1]);
            let to = f32([2 * side, 2 * side, 1, 1]);
            Some((op, to, vec![columns, kernel]))
        }));
        all.push(shapes(at("COL2IM_1D"), move |n| {
            let op = slide(OpKind::Col2im1d, &Sliding::default())?;
            let columns = strided(Type::F32, [n, n, 1, 1], stride);
            Some((op, f32([2 * n - 1, 1, 1, 1]), vec![columns]))
        }));
        all.push(shapes(at("SSM_CONV"), move |n| {
            let src = vec![
                strided(Type::F32, [2 * n - 1, 1, 1, 1], 4),
                f32([n, 1, 1, 1]),
            ];
            Some((Op::SsmConv {}, strided(Type::F32, [1, n, 1, 1], 4), src))
        }));
    }
    for stride in [64, 4096] {
        let at = |op: &str| format!("{op} of an element each {stride} bytes");
        for ty in [Type::F32, Type::F16, Type::Q4_0, Type::Q4K] {
            for columns in [1, 16, 256] {
                let name = at(&format!("MUL_MAT of {ty:?}, 16 by {columns},"));
                all.push(shapes(name, move |n| {
                    let right = strided(Type::F32, [n, columns, 1, 1], stride);
                    let op = usual(OpKind::MulMat)?;
                    let to = f32([16, columns, 1, 1]);
                    Some((op, to, vec![typed(ty, [n, 16, 1, 1]), right]))
                }));
            }
        }
        all.push(shapes(at("OUT_PROD"), move |n| {
            let left = strided(Type::F32, [256, n, 1, 1], stride);
            let right = strided(Type::F32, [16, n, 1, 1], stride);
            Some((Op::OutProd {}, f32([256, 16, 1, 1]), vec![left, right]))
        }));
        all.push(shapes(at("SUM"), move |n| {
            Some((
                Op::Sum {},
                f32([1; 4]),
                vec![strided(Type::F32, [n, 1, 1, 1], stride)],
            ))
        }));
        // A window of one column: each element is in another row.
        all.push(shapes(
            format!("POOL_2D of a column, each {stride} bytes"),
            move |n| {
                let sliding = Sliding {
                    window: [1, n as i32],
                    ..Sliding::default()
                };
                let image = f32([stride / 4, n + 1, 1, 1]);
                let op = slide(OpKind::Pool2d, &sliding)?;
                Some((op, f32([stride / 4, 2, 1, 1]), vec![image]))
            },
        ));
    }
    all.push(shapes("DSV4_HC_COMB", |n| {
        let op = Op::Dsv4HcComb {
            eps: 0.1,
            n_iter: n as u32,
        };
        let src = vec![f32([24, 4, 1, 1]), f32([3, 1, 1, 1]), f32([24, 1, 1, 1])];
        Some((op, f32([4, 4, 4, 1]), src))
    }));
    all.push(shapes("MUL_MAT, hadamard", |n| {
        let op = Op::MulMat {
            accumulator: Precision::Default,
            activation: Precision::Default,
            hadamard: true,
        };
        let matrix = overlapping(Type::F32, [n, n, 1, 1]);
        Some((op, f32([n, 2, 1, 1]), vec![matrix, f32([n, 2, 1, 1])]))
    }));
    all.push(shapes("SOLVE_TRI", |n| {
        let matrix = f32([n, n, 1, 1]);
        let right = f32([64, n, 1, 1]);
        Some((Op::SolveTri {}, right, vec![matrix, right]))
    }));
    all.push(shapes("LIGHTNING_INDEXER", |n| {
        let heads = 64;
        let src = vec![
            f32([n / heads, heads, 128, 1]),
            f32([n / heads, 1, 4096, 1]),
            f32([heads, 128, 1, 1]),
            typed(Type::F16, [4096, 128, 1, 1]),
        ];
        Some((Op::LightningIndexer {}, f32([4096, 128, 1, 1]), src))
    }));
    all.push(shapes("LIGHTNING_INDEXER of one head", |n| {
        let src = vec![
            f32([n, 1, 1, 1]),
            overlapping(Type::Q3K, [n, 1, 256, 1]),
            f32([1, 1, 1, 1]),
            typed(Type::F16, [256, 1, 1, 1]),
        ];
        Some((Op::LightningIndexer {}, f32([256, 1, 1, 1]), src))
    }));
    let heads = |size: u64| f32([size, 1, 4, 1]);
    for kind in [OpKind::RwkvWkv6, OpKind::RwkvWkv7, OpKind::GatedLinearAttn] {
        all.push(shapes(kind.ggml_name(), move |size| {
            let state = f32([size * size, 1, 1, 1]);
            let mut src = match kind {
                OpKind::RwkvWkv6 => vec![heads(size); 5],
                OpKind::RwkvWkv7 => vec![heads(size); 6],
                _ => vec![heads(size); 4],
            };
            if kind == OpKind::RwkvWkv6 {
                src[3] = f32([size, 1, 1, 1]);
            }
            src.push(state);
            Some((usual(kind)?, f32([size, 4 + size, 1, 1]), src))
        }));
    }
    all.push(shapes("GATED_DELTA_NET", |size| {
        let (v, gate) = (f32([size, 1, 4, 1]), f32([1, 1, 4, 1]));
        let src = vec![v, v, v, gate, gate, f32([size, size, 1, 1])];
        let op = Op::GatedDeltaNet { snapshots: 1 };
        Some((op, f32([size, 4 + size, 1, 1]), src))
    }));
    all.push(shapes("SSM_SCAN", |n| {
        let (rows, tokens) = (256, 4);
        let state = n;
        let src = vec![
            f32([state, rows, 1, 1]),
            f32([rows, 1, tokens, 1]),
            f32([1, tokens, 1, 1]),
            f32([1; 4]),
            f32([state, 1, tokens, 1]),
            f32([state, 1, tokens, 1]),
            typed(Type::I32, [1; 4]),
        ];
        let total = rows * tokens + state * rows;
        Some((Op::SsmScan { snapshots: 1 }, f32([total, 1, 1, 1]), src))
    }));
    all
}
