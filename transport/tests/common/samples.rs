//! A valid operation of each operator, and how often the inner loop of its definition runs.
#![allow(dead_code)] // each test binary uses a part

use vgpu_transport::ir::{ConvGeometry, Op, OpKind, PoolKind, Shape, Type};

use super::ops::{Sliding, rope, slide, usual};

/// An operation, and the iterations of the inner loop of its definition.
pub(crate) struct Sample {
    pub(crate) op: Op,
    pub(crate) dst: Shape,
    pub(crate) src: Vec<Shape>,
    pub(crate) count: u64,
}

pub(crate) fn f32(ne: [u64; 4]) -> Shape {
    Shape::contiguous(Type::F32, ne).expect("a small shape")
}

pub(crate) fn typed(ty: Type, ne: [u64; 4]) -> Shape {
    Shape::contiguous(ty, ne).expect("a small shape")
}

/// Counts the taps of a kernel of `k` that lie inside `n` elements, for `outputs` outputs.
fn taps(n: u64, k: u64, [stride, padding, dilation]: [u64; 3]) -> (u64, u64) {
    let outputs = (n + 2 * padding - dilation * (k - 1) - 1) / stride + 1;
    let mut inside = 0;
    for output in 0..outputs {
        for tap in 0..k {
            let at = (output * stride + tap * dilation).checked_sub(padding);
            inside += u64::from(at.is_some_and(|at| at < n));
        }
    }
    (outputs, inside)
}

pub(crate) fn usual_op(kind: OpKind) -> Op {
    usual(kind).expect("the parameters do not depend on lengths")
}

/// An operator of each kind, of a size that grows with `s`.
pub(crate) fn sample(kind: OpKind, s: u64) -> Sample {
    let (n, m) = (16 * s, 6 * s);
    let rows = f32([n, m, 3, 2]);
    let all = n * m * 6;
    let plain = |sources: usize| Sample {
        op: usual_op(kind),
        dst: rows,
        src: vec![rows; sources],
        count: all,
    };
    let of = |op: Op, dst: [u64; 4], src: Vec<Shape>, count: u64| Sample {
        op,
        dst: f32(dst),
        src,
        count,
    };
    let made = |dst: [u64; 4], src: Vec<Shape>, count: u64| of(usual_op(kind), dst, src, count);
    let moves = |stride: [i32; 3], padding: [i32; 3]| {
        let dilation = [1; 3];
        let sliding = Sliding {
            geometry: ConvGeometry {
                stride,
                padding,
                dilation,
            },
            channels: 2,
            results: 3,
            ..Sliding::default()
        };
        slide(kind, &sliding).expect("a convolution")
    };
    let pools = |pool: PoolKind| {
        let mut sliding = Sliding {
            window: [4 * s as i32, 3],
            pool,
            ..Sliding::default()
        };
        sliding.geometry.padding = [2 * s as i32, 1, 0];
        slide(kind, &sliding).expect("pooling")
    };
    let ids = |ne: [u64; 4]| typed(Type::I32, ne);
    let (si, ni, mi) = (s as i32, n as i32, m as i32);
    match kind {
        OpKind::Copy
        | OpKind::DiagMaskInf
        | OpKind::DiagMaskZero
        | OpKind::Roll
        | OpKind::Tri
        | OpKind::Fill
        | OpKind::Scale
        | OpKind::Clamp
        | OpKind::Sqr
        | OpKind::Sqrt
        | OpKind::Log
        | OpKind::Sin
        | OpKind::Cos
        | OpKind::LeakyRelu
        | OpKind::Unary
        | OpKind::Xielu
        | OpKind::Cumsum
        | OpKind::Norm
        | OpKind::RmsNorm
        | OpKind::GroupNorm
        | OpKind::L2Norm
        | OpKind::SoftMax => plain(1),
        OpKind::Add
        | OpKind::Sub
        | OpKind::Mul
        | OpKind::Div
        | OpKind::Glu
        | OpKind::SiluBack
        | OpKind::RmsNormBack
        | OpKind::SoftMaxBack => plain(2),
        OpKind::Repeat => made(rows.ne, vec![f32([n, 1, 1, 2])], all),
        OpKind::RepeatBack => made([n, 1, 1, 2], vec![rows], all),
        OpKind::Concat => {
            let half = f32([n, m, 3, 1]);
            made(rows.ne, vec![half; 2], all)
        }
        OpKind::GetRows => {
            let table = f32([n, 100, 1, 1]);
            made([n, m, 1, 1], vec![table, ids([m, 1, 1, 1])], n * m)
        }
        OpKind::GetRowsBack => {
            let src = vec![f32([n, m, 1, 1]), ids([m, 1, 1, 1])];
            // Zeros, then sums.
            made([n, 10, 1, 1], src, n * 10 + n * m)
        }
        OpKind::SetRows => {
            let src = vec![f32([n, m, 1, 1]), ids([m, 1, 1, 1])];
            made([n, 1000, 1, 1], src, n * m)
        }
        OpKind::Set | OpKind::Acc => {
            let [nb1, nb2, nb3] = [4 * n, 4 * n * m, 4 * n * m * 3];
            let (part, offset) = (f32([n, m / 2, 1, 1]), 0);
            let op = match kind {
                OpKind::Set => Op::Set {
                    nb1,
                    nb2,
                    nb3,
                    offset,
                },
                _ => Op::Acc {
                    nb1,
                    nb2,
                    nb3,
                    offset,
                },
            };
            of(op, rows.ne, vec![rows, part], all + n * m / 2)
        }
        OpKind::Diag => made([n, n, 2, 1], vec![f32([n, 1, 2, 1])], 2 * n * n),
        OpKind::Pad => {
            let op = Op::Pad {
                left: [si, 0, 0, 0],
                right: [si; 4],
                circular: false,
            };
            let dst = [n + 2 * s, m + s, 3 + s, 2 + s];
            let all = dst.iter().fold(1u64, |all, &n| all.saturating_mul(n));
            of(op, dst, vec![rows], all)
        }
        OpKind::PadReflect1d => {
            let op = Op::PadReflect1d { p0: si, p1: si };
            of(op, [n + 2 * s, m, 3, 2], vec![rows], (n + 2 * s) * m * 6)
        }
        OpKind::Arange => {
            let op = Op::Arange {
                start: 0.0,
                stop: n as f32,
                step: 1.0,
            };
            of(op, [n, 1, 1, 1], Vec::new(), n)
        }
        OpKind::AddId => {
            let [x, bias] = [f32([n, m, 3, 1]), f32([n, 5, 1, 1])];
            made(x.ne, vec![x, bias, ids([m, 3, 1, 1])], n * m * 3)
        }
        OpKind::Add1 => made(rows.ne, vec![rows, f32([1; 4])], all),
        OpKind::Sum => made([1; 4], vec![rows], all),
        OpKind::SumRows | OpKind::Mean => made([1, m, 3, 2], vec![rows], all),
        OpKind::Argmax => Sample {
            op: usual_op(kind),
            dst: ids([m, 1, 1, 1]),
            src: vec![f32([n, m, 1, 1])],
            count: n * m,
        },
        OpKind::CountEqual => Sample {
            op: usual_op(kind),
            dst: typed(Type::I64, [1; 4]),
            src: vec![ids(rows.ne); 2],
            count: all,
        },
        OpKind::Argsort | OpKind::TopK => {
            // The comparisons of a merge sort.
            let mut width = 1;
            let mut count = 0;
            while width < n {
                count += all;
                width *= 2;
            }
            let wanted = if kind == OpKind::TopK { 4 } else { n };
            Sample {
                op: usual_op(kind),
                dst: ids([wanted, m, 3, 2]),
                src: vec![rows],
                count,
            }
        }
        OpKind::MulMat => {
            let src = vec![f32([n, m, 1, 2]), f32([n, 5, 3, 2])];
            let mut count = 0;
            for _result in 0..m * 5 * 6 {
                count += n;
            }
            made([m, 5, 3, 2], src, count)
        }
        OpKind::MulMatId => {
            let src = vec![f32([n, m, 8, 1]), f32([n, 1, 5, 1]), ids([2, 5, 1, 1])];
            made([m, 2, 5, 1], src, n * m * 2 * 5)
        }
        OpKind::OutProd => {
            let src = vec![f32([n, 7, 1, 1]), f32([m, 7, 1, 1])];
            made([n, m, 1, 1], src, n * m * 7)
        }
        OpKind::SolveTri => {
            let src = vec![f32([n, n, 2, 1]), f32([m, n, 2, 1])];
            let mut count = 0;
            for row in 0..n {
                count += m * (row + 1);
            }
            made([m, n, 2, 1], src, 2 * count)
        }
        OpKind::Rope => {
            let src = vec![rows, ids([3, 1, 1, 1])];
            of(rope(n as u32), rows.ne, src, all)
        }
        OpKind::FlashAttnExt => {
            let (queries, keys, heads, values) = (5, 40 * s, 4, 8);
            let src = vec![
                f32([n, queries, heads, 1]),
                f32([n, keys, 2, 1]),
                f32([values, keys, 2, 1]),
            ];
            let mut count = 0;
            for _query in 0..queries * heads {
                for _key in 0..keys {
                    count += n + values;
                }
            }
            made([values, heads, queries, 1], src, count)
        }
        // Validation refuses it.
        OpKind::FlashAttnBack => {
            let qkv = f32([n, m, 2, 1]);
            made(qkv.ne, vec![qkv; 4], 5 * n * m * m * 2)
        }
        OpKind::LightningIndexer => {
            let (heads, tokens, keys) = (4, 3, 10 * s);
            let src = vec![
                f32([n, heads, tokens, 1]),
                f32([n, 1, keys, 1]),
                f32([heads, tokens, 1, 1]),
                typed(Type::F16, [keys, tokens, 1, 1]),
            ];
            made([keys, tokens, 1, 1], src, keys * tokens * heads * n)
        }
        OpKind::SsmConv => {
            let (kernel, tokens) = (4, 8 * s);
            let src = vec![f32([tokens + kernel - 1, m, 2, 1]), f32([kernel, m, 1, 1])];
            made([m, tokens, 2, 1], src, m * tokens * 2 * kernel)
        }
        OpKind::SsmScan => {
            let (state, dim, heads, tokens, seqs) = (n, 4, 2, 5 * s, 2);
            let src = vec![
                f32([state, dim, heads, seqs]),
                f32([dim, heads, tokens, seqs]),
                f32([heads, tokens, seqs, 1]),
                f32([1, heads, 1, 1]),
                f32([state, 1, tokens, seqs]),
                f32([state, 1, tokens, seqs]),
                ids([seqs, 1, 1, 1]),
            ];
            let mut count = 0;
            for _step in 0..tokens * seqs * heads * dim {
                // The new state, and its product with C.
                count += 2 * state;
            }
            let total = dim * heads * tokens * seqs + state * dim * heads * seqs;
            made([total, 1, 1, 1], src, count)
        }
        OpKind::RwkvWkv6 | OpKind::RwkvWkv7 | OpKind::GatedLinearAttn => {
            let (size, heads, tokens, seqs) = (n, 2, 4 * s, 2);
            let each = f32([size, heads, tokens, 1]);
            let state = f32([size * size * heads, seqs, 1, 1]);
            let mut src = match kind {
                OpKind::RwkvWkv6 => {
                    let mut src = vec![each; 5];
                    src[3] = f32([size, heads, 1, 1]);
                    src
                }
                OpKind::RwkvWkv7 => vec![each; 6],
                _ => vec![each; 4],
            };
            src.push(state);
            let dst = [size * heads, tokens + size * seqs, 1, 1];
            // The new state, and its product with the query.
            made(dst, src, 2 * tokens * heads * size * size)
        }
        OpKind::GatedDeltaNet => {
            let (size, heads, tokens, seqs) = (n, 2, 4 * s, 2);
            let v = f32([size, heads, tokens, seqs]);
            let gate = f32([1, heads, tokens, seqs]);
            let src = vec![v, v, v, gate, gate, f32([size, size, heads, seqs])];
            let dst = [size * heads, tokens * seqs + size * seqs, 1, 1];
            // What the state knows, the new state, and its product with the query.
            let count = 3 * tokens * seqs * heads * size * size;
            made(dst, src, count)
        }
        OpKind::Dsv4HcComb => {
            let op = Op::Dsv4HcComb {
                eps: 0.1,
                n_iter: 3 * s as u32,
            };
            let src = vec![f32([24, m, 1, 1]), f32([3, 1, 1, 1]), f32([24, 1, 1, 1])];
            of(op, [4, 4, m, 1], src, m * 16 * 2 * 3 * s)
        }
        OpKind::Dsv4HcPre => {
            let src = vec![f32([n, 4, m, 1]), f32([4, m, 1, 1])];
            made([n, m, 1, 1], src, n * m * 4)
        }
        OpKind::Dsv4HcPost => {
            let src = vec![
                f32([n, m, 1, 1]),
                f32([n, 4, m, 1]),
                f32([4, m, 1, 1]),
                f32([4, 4, m, 1]),
            ];
            made([n, 4, m, 1], src, n * 4 * m * 5)
        }
        OpKind::Im2col => {
            let src = vec![f32([3, 3, 4, 1]), f32([n, m, 4, 2])];
            of(moves([1; 3], [1; 3]), [36, n, m, 2], src, 36 * n * m * 2)
        }
        OpKind::Im2colBack => {
            let src = vec![f32([36, n, m, 2]), f32([3, 3, 4, 1])];
            of(moves([1; 3], [1; 3]), [n, m, 4, 2], src, 36 * n * m * 2)
        }
        OpKind::Im2col3d => {
            let src = vec![f32([3, 3, 3, 4]), f32([n, m, 4, 2])];
            of(moves([1; 3], [1; 3]), [54, n, m, 4], src, 54 * n * m * 4)
        }
        OpKind::Col2im1d => {
            let (taps, columns) = (6, n);
            let op = moves([2, 1, 1], [1, 0, 0]);
            let length = (columns - 1) * 2 + taps - 2;
            // Each tap is added to a result.
            of(
                op,
                [length, 3, 1, 1],
                vec![f32([3 * taps, columns, 1, 1])],
                3 * taps * columns,
            )
        }
        OpKind::Conv2d | OpKind::Conv2dDw => {
            let (x, inside_x) = taps(n, 5, [2, 2, 1]);
            let (y, inside_y) = taps(m, 3, [1, 1, 1]);
            let (op, image) = (moves([2, 1, 1], [2, 1, 0]), f32([n, m, 4, 2]));
            let (kernel, dst, count) = match kind {
                OpKind::Conv2d => {
                    let count = inside_x * inside_y * 4 * 7 * 2;
                    ([5, 3, 4, 7], [x, y, 7, 2], count)
                }
                _ => ([5, 3, 1, 4], [x, y, 4, 2], inside_x * inside_y * 4 * 2),
            };
            of(op, dst, vec![f32(kernel), image], count)
        }
        OpKind::Conv3d => {
            let op = moves([1, 1, 1], [1, 1, 0]);
            let (x, inside_x) = taps(n, 3, [1, 1, 1]);
            let (y, inside_y) = taps(m, 3, [1, 1, 1]);
            let (z, inside_z) = taps(4, 2, [1, 0, 1]);
            let count = inside_x * inside_y * inside_z * 2 * 3;
            of(
                op,
                [x, y, z, 3],
                vec![f32([3, 3, 2, 6]), f32([n, m, 4, 2])],
                count,
            )
        }
        OpKind::ConvTranspose1d => {
            let op = moves([2, 1, 1], [0; 3]);
            let src = vec![f32([4, 3, 5, 1]), f32([n, 5, 1, 1])];
            let mut count = 0;
            for _element in 0..n * 5 {
                count += 4 * 3;
            }
            of(op, [(n - 1) * 2 + 4, 3, 1, 1], src, count)
        }
        OpKind::ConvTranspose2d => {
            let op = moves([2, 1, 1], [0; 3]);
            let src = vec![f32([4, 4, 3, 5]), f32([n, m, 5, 2])];
            let dst = [(n - 1) * 2 + 4, (m - 1) * 2 + 4, 3, 2];
            of(op, dst, src, n * m * 5 * 2 * 16 * 3)
        }
        OpKind::Pool1d => {
            let (x, inside) = taps(n, 4 * s, [1, 2 * s, 1]);
            of(
                pools(PoolKind::Max),
                [x, m, 3, 2],
                vec![rows],
                inside * m * 6,
            )
        }
        OpKind::Pool2d | OpKind::Pool2dBack => {
            let (x, inside_x) = taps(n, 4 * s, [1, 2 * s, 1]);
            let (y, inside_y) = taps(m, 3, [1, 1, 1]);
            let (pooled, count) = (f32([x, y, 3, 2]), inside_x * inside_y * 6);
            let op = pools(PoolKind::Average);
            match kind {
                OpKind::Pool2d => of(op, pooled.ne, vec![rows], count),
                _ => of(op, rows.ne, vec![pooled, rows], count),
            }
        }
        OpKind::Upscale => {
            // Shrinks by 8 and 2: each result averages a triangle of 16 by 4 elements.
            made(
                [n / 8, m / 2, 3, 2],
                vec![rows],
                n / 8 * (m / 2) * 6 * 16 * 4,
            )
        }
        OpKind::TimestepEmbedding => {
            let op = Op::TimestepEmbedding {
                dim: ni,
                max_period: 10_000,
            };
            of(op, [n, m, 1, 1], vec![f32([m, 1, 1, 1])], n * m)
        }
        OpKind::WinPart => {
            let op = Op::WinPart {
                npx: mi,
                npy: 2,
                w: 2,
            };
            of(
                op,
                [n, 2, 2, 2 * m],
                vec![f32([n, 2 * m, 3, 1])],
                n * 4 * 2 * m,
            )
        }
        OpKind::WinUnpart => {
            let src = vec![f32([n, 2, 2, 2 * m])];
            made([n, 2 * m, 3, 1], src, n * 2 * m * 3)
        }
        OpKind::GetRelPos => made([n, m, m, 1], vec![f32([n, 2 * m - 1, 1, 1])], n * m * m),
        OpKind::AddRelPos => {
            let (side, batch) = (m, 2);
            let x = f32([side * side, side * 3, batch, 1]);
            let position = f32([side, side, 3, batch]);
            let count = side * side * side * 3 * batch;
            made(x.ne, vec![x, position, position], count)
        }
        OpKind::CrossEntropyLoss => made([1; 4], vec![rows; 2], all),
        OpKind::CrossEntropyLossBack => {
            let src = vec![f32([1; 4]), rows, rows];
            made(rows.ne, src, all)
        }
        OpKind::OptStepAdamw => {
            let src = vec![rows, rows, rows, rows, f32([7, 1, 1, 1])];
            made(rows.ne, src, all)
        }
        OpKind::OptStepSgd => made(rows.ne, vec![rows, rows, f32([2, 1, 1, 1])], all),
    }
}
