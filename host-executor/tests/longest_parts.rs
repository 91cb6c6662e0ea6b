//! How long a part of a node runs that no kernel divides: for every operator of the CPU engine,
//! with the longest rows, windows and tiles that the limits of `vgpu_engine::work` admit, in the
//! types and layouts in which they take longest.
//!
//! `VGPU_PARTS=0.5 cargo test --release -p vgpu-executor --test longest_parts -- --nocapture`
//! measures each shape for that many seconds, as `cargo xtask bench parts` does. The ordinary test
//! measures nothing: it runs one launch of each, so that the shapes stay valid.

#[path = "../../transport/tests/common/ops.rs"]
#[allow(dead_code)]
mod ops;
#[path = "../../transport/tests/common/samples.rs"]
mod samples;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ops::{Sliding, rope, slide, usual};
use samples::{f32, sample, typed};
use serde_json::json;
use vgpu_cpu::CpuEngine;
use vgpu_engine::work::{self, Work};
use vgpu_engine::{Engine, EngineError, Memory, RunStatus, Turn};
use vgpu_gguf::Rng;
use vgpu_median::median;
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, OpKind, PoolKind, Precision, RopeMode, Shape, SortOrder,
    Sources, Tensor, Type, ValidGraph, validate,
};

/// Bytes of the buffer of each operand.
const BUFFER: u64 = 256 << 20;

/// The buffer of the destination. Those of the sources come before it.
const DESTINATION: u32 = 9;

/// An operation of a length that is found by trying.
struct Shapes {
    name: String,
    make: Box<dyn Fn(u64) -> Option<Operation>>,
}

type Operation = (Op, Shape, Vec<Shape>);

fn graph((op, dst, src): &Operation) -> Graph {
    let sources = src.iter().zip(0..DESTINATION);
    let all = sources.chain([(dst, DESTINATION)]);
    Graph {
        buffers: (0..=u64::from(DESTINATION)).map(BufferId).collect(),
        tensors: all
            .map(|(&shape, buffer)| Tensor {
                shape,
                buffer,
                offset: 0,
            })
            .collect(),
        nodes: vec![Node {
            op: *op,
            dst: src.len() as u32,
            src: Sources::new((0..src.len() as u32).map(Some)),
        }],
    }
}

/// A shape whose rows have `stride` bytes between elements, and whose rows follow each other.
fn strided(ty: Type, ne: [u64; 4], stride: u64) -> Shape {
    let mut shape = typed(ty, ne);
    shape.nb[0] = stride;
    for d in 1..4 {
        shape.nb[d] = shape.nb[d - 1] * ne[d - 1];
    }
    shape
}

/// Matrices whose rows overlap: `nb[1]` is one block.
fn overlapping(ty: Type, ne: [u64; 4]) -> Shape {
    let mut shape = typed(ty, ne);
    shape.nb[1] = shape.nb[0];
    shape.nb[2] = shape.nb[0] * ne[1];
    shape.nb[3] = shape.nb[2];
    shape
}

fn shapes(name: impl Into<String>, make: impl Fn(u64) -> Option<Operation> + 'static) -> Shapes {
    Shapes {
        name: name.into(),
        make: Box::new(make),
    }
}

/// Operators whose part is a row, with each layout of rows.
fn rows() -> Vec<Shapes> {
    let mut all = Vec::new();
    for stride in [4, 64, 4096] {
        let row = move |n: u64| strided(Type::F32, [n, 2, 1, 1], stride);
        let name = |kind: OpKind| match stride {
            4 => kind.ggml_name().to_string(),
            _ => format!("{} of an element each {stride} bytes", kind.ggml_name()),
        };
        let one = [
            OpKind::Cumsum,
            OpKind::Norm,
            OpKind::RmsNorm,
            OpKind::L2Norm,
            OpKind::GroupNorm,
            OpKind::SoftMax,
            OpKind::Roll,
            OpKind::Tri,
            OpKind::DiagMaskInf,
            OpKind::DiagMaskZero,
            OpKind::Copy,
            OpKind::Unary,
            OpKind::Scale,
            OpKind::Fill,
            OpKind::Xielu,
        ];
        for kind in one {
            all.push(shapes(name(kind), move |n| {
                Some((usual(kind)?, row(n), vec![row(n)]))
            }));
        }
        let two = [
            OpKind::Add,
            OpKind::Glu,
            OpKind::SiluBack,
            OpKind::RmsNormBack,
            OpKind::SoftMaxBack,
        ];
        for kind in two {
            all.push(shapes(name(kind), move |n| {
                Some((usual(kind)?, row(n), vec![row(n); 2]))
            }));
        }
        for kind in [OpKind::SumRows, OpKind::Mean] {
            all.push(shapes(name(kind), move |n| {
                Some((usual(kind)?, f32([1, 2, 1, 1]), vec![row(n)]))
            }));
        }
        all.push(shapes(name(OpKind::Sum), move |n| {
            Some((Op::Sum {}, f32([1; 4]), vec![row(n)]))
        }));
        all.push(shapes(name(OpKind::Argmax), move |n| {
            Some((Op::Argmax {}, typed(Type::I32, [2, 1, 1, 1]), vec![row(n)]))
        }));
        for order in [SortOrder::Ascending, SortOrder::Descending] {
            all.push(shapes(name(OpKind::Argsort), move |n| {
                let to = typed(Type::I32, [n, 2, 1, 1]);
                Some((Op::Argsort { order }, to, vec![row(n)]))
            }));
        }
        all.push(shapes(name(OpKind::TopK), move |n| {
            let to = typed(Type::I32, [n / 2, 2, 1, 1]);
            Some((Op::TopK {}, to, vec![row(n)]))
        }));
        all.push(shapes(name(OpKind::Pad), move |n| {
            let half = n / 2;
            let op = Op::Pad {
                left: [half as i32 / 2, 0, 0, 0],
                right: [half as i32 - half as i32 / 2, 0, 0, 0],
                circular: true,
            };
            Some((op, row(n), vec![row(half)]))
        }));
        all.push(shapes(name(OpKind::PadReflect1d), move |n| {
            let (half, side) = (n / 2, n as i32 / 4);
            let op = Op::PadReflect1d { p0: side, p1: side };
            Some((op, row(half + 2 * side as u64), vec![row(half)]))
        }));
        all.push(shapes(name(OpKind::AddId), move |n| {
            let ids = typed(Type::I32, [2, 1, 1, 1]);
            Some((Op::AddId {}, row(n), vec![row(n), row(n), ids]))
        }));
        all.push(shapes(name(OpKind::GetRowsBack), move |n| {
            let ids = typed(Type::I32, [2, 1, 1, 1]);
            Some((Op::GetRowsBack {}, row(n), vec![row(n), ids]))
        }));
        all.push(shapes(name(OpKind::CrossEntropyLoss), move |n| {
            Some((Op::CrossEntropyLoss {}, f32([1; 4]), vec![row(n); 2]))
        }));
        all.push(shapes(name(OpKind::CrossEntropyLossBack), move |n| {
            let src = vec![f32([1; 4]), row(n), row(n)];
            Some((Op::CrossEntropyLossBack {}, row(n), src))
        }));
        all.push(shapes(name(OpKind::OptStepAdamw), move |n| {
            let src = vec![row(n), row(n), row(n), row(n), f32([7, 1, 1, 1])];
            Some((Op::OptStepAdamw {}, row(n), src))
        }));
        all.push(shapes(name(OpKind::OptStepSgd), move |n| {
            let src = vec![row(n), row(n), f32([2, 1, 1, 1])];
            Some((Op::OptStepSgd {}, row(n), src))
        }));
        all.push(shapes(name(OpKind::Rope), move |n| {
            let mut op = rope(n as u32);
            if let Op::Rope {
                ext_factor, mode, ..
            } = &mut op
            {
                (*ext_factor, *mode) = (1.0, RopeMode::Normal);
            }
            let ids = typed(Type::I32, [1, 1, 1, 1]);
            Some((op, row(n), vec![row(n), ids]))
        }));
        all.push(shapes(name(OpKind::TimestepEmbedding), move |n| {
            let op = Op::TimestepEmbedding {
                dim: n as i32,
                max_period: 10_000,
            };
            Some((op, row(n), vec![f32([2, 1, 1, 1])]))
        }));
        all.push(shapes(name(OpKind::WinPart), move |n| {
            let op = Op::WinPart {
                npx: 2,
                npy: 1,
                w: 1,
            };
            let to = strided(Type::F32, [n, 1, 1, 2], stride);
            Some((op, to, vec![row(n)]))
        }));
        all.push(shapes(name(OpKind::Dsv4HcPre), move |n| {
            let src = vec![strided(Type::F32, [n, 4, 1, 1], stride), f32([4, 1, 1, 1])];
            Some((
                usual(OpKind::Dsv4HcPre)?,
                strided(Type::F32, [n, 1, 1, 1], stride),
                src,
            ))
        }));
    }
    all.push(shapes("GET_REL_POS", |n| {
        let (to, from) = (
            typed(Type::F16, [n, 1, 1, 1]),
            typed(Type::F16, [n, 1, 1, 1]),
        );
        Some((Op::GetRelPos {}, to, vec![from]))
    }));
    all.push(shapes("IM2COL", |n| {
        let op = slide(OpKind::Im2col, &Sliding::default())?;
        let side = n.isqrt();
        let kernel = f32([side, side, 1, 1]);
        let image = f32([side, side, 1, 1]);
        Some((op, f32([side * side, 1, 1, 1]), vec![kernel, image]))
    }));
    all.push(shapes("DIAG", |n| {
        Some((Op::Diag {}, f32([n, n, 1, 1]), vec![f32([n, 1, 1, 1])]))
    }));
    all.push(shapes("ADD_REL_POS", |n| {
        let side = n.isqrt();
        let at = f32([side, 1, 1, 1]);
        let x = f32([side * side, 1, 1, 1]);
        Some((Op::AddRelPos {}, x, vec![x, at, at]))
    }));
    all
}

/// Conversions between types, and products with rows of each type.
fn of_types() -> Vec<Shapes> {
    let (accumulator, activation) = (Precision::Default, Precision::Default);
    let mut all = Vec::new();
    for &ty in Type::ALL {
        let name = move |op: &str| format!("{op} of {ty:?}");
        all.push(shapes(name("GET_ROWS"), move |n| {
            let ids = typed(Type::I32, [2, 1, 1, 1]);
            let table = typed(ty, [n, 2, 1, 1]);
            Some((Op::GetRows {}, f32([n, 2, 1, 1]), vec![table, ids]))
        }));
        all.push(shapes(name("SET_ROWS"), move |n| {
            let ids = typed(Type::I32, [1, 1, 1, 1]);
            let table = typed(ty, [n, 1, 1, 1]);
            Some((Op::SetRows {}, table, vec![f32([n, 1, 1, 1]), ids]))
        }));
        all.push(shapes(name("CPY to"), move |n| {
            Some((
                Op::Copy {},
                typed(ty, [n, 1, 1, 1]),
                vec![f32([n, 1, 1, 1])],
            ))
        }));
        all.push(shapes(name("CPY from"), move |n| {
            Some((
                Op::Copy {},
                f32([n, 1, 1, 1]),
                vec![typed(ty, [n, 1, 1, 1])],
            ))
        }));
        all.push(shapes(name("ADD"), move |n| {
            let row = typed(ty, [n, 1, 1, 1]);
            Some((Op::Add {}, row, vec![row, f32([n, 1, 1, 1])]))
        }));
        let name = format!("MUL_MAT of {ty:?}, 4096 by 512, of up to 8192");
        all.push(shapes(name, move |n| {
            let op = usual(OpKind::MulMat)?;
            let n = n.min(8192);
            let src = vec![typed(ty, [n, 4096, 1, 1]), f32([n, 512, 1, 1])];
            Some((op, f32([4096, 512, 1, 1]), src))
        }));
        for (rows, columns) in [(16, 16), (16, 1), (1, 16), (256, 256)] {
            let name = format!("MUL_MAT of {ty:?}, {rows} by {columns}");
            all.push(shapes(name, move |n| {
                let op = Op::MulMat {
                    accumulator,
                    activation,
                    hadamard: false,
                };
                let src = vec![typed(ty, [n, rows, 1, 1]), f32([n, columns, 1, 1])];
                Some((op, f32([rows, columns, 1, 1]), src))
            }));
            let name = format!("MUL_MAT_ID of {ty:?}, {rows} by {columns}");
            all.push(shapes(name, move |n| {
                let op = Op::MulMatId {
                    accumulator,
                    activation,
                };
                let src = vec![
                    typed(ty, [n, rows, 1, 1]),
                    f32([n, 1, columns, 1]),
                    typed(Type::I32, [1, columns, 1, 1]),
                ];
                Some((op, f32([rows, 1, columns, 1]), src))
            }));
            let name = format!("OUT_PROD of {ty:?}, {rows} by {columns}");
            all.push(shapes(name, move |n| {
                let src = vec![typed(ty, [rows.max(256), n, 1, 1]), f32([columns, n, 1, 1])];
                Some((Op::OutProd {}, f32([rows.max(256), columns, 1, 1]), src))
            }));
        }
        for width in [64u64, 256, 1024, 2048] {
            for queries in [1, 128] {
                let name = format!("FLASH_ATTN_EXT of {ty:?}, {queries} queries of {width}");
                all.push(shapes(name, move |n| {
                    if !width.is_multiple_of(ty.block_elements()) {
                        return None;
                    }
                    let kv = typed(ty, [width, n, 1, 1]);
                    let src = vec![f32([width, queries, 1, 1]), kv, kv];
                    Some((
                        usual(OpKind::FlashAttnExt)?,
                        f32([width, 1, queries, 1]),
                        src,
                    ))
                }));
            }
        }
    }
    all
}

/// Operators whose part is a window, or another thing.
fn windows() -> Vec<Shapes> {
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

/// The remaining operators, with the shapes of the samples.
fn others() -> Vec<Shapes> {
    let kinds = OpKind::ALL.iter().filter(|&&k| k != OpKind::FlashAttnBack);
    kinds
        .map(|&kind| {
            shapes(format!("{} of a sample", kind.ggml_name()), move |n| {
                // Some samples have 16 times this size in all four dimensions.
                let size = Some(n.div_ceil(16)).filter(|&size| size <= 1 << 10)?;
                let sample = sample(kind, size);
                Some((sample.op, sample.dst, sample.src))
            })
        })
        .collect()
}

/// The processor time of this thread.
fn now() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is writable, and the clock exists on every Linux.
    let outcome = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(outcome, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The engine and its buffers: numbers between 0 and 1 in the first, and zeros in the others, which
/// are valid indices. All pages have been written to.
struct Bench {
    engine: CpuEngine,
    buffers: Vec<Arc<dyn Memory>>,
}

impl Bench {
    fn new(size: u64) -> Bench {
        let engine = CpuEngine::new(1, Some(14 << 30)).expect("a thread and memory");
        let buffers: Vec<Arc<dyn Memory>> = (0..=DESTINATION)
            .map(|_| engine.alloc(size).expect("memory"))
            .collect();
        for buffer in &buffers {
            buffer.fill(0, size, 0).expect("the buffer has this size");
        }
        let mut random = Rng::new(1, 0);
        let numbers: Vec<u8> = (0..1 << 20)
            .flat_map(|_| ((random.below(1 << 20) as f32) / (1 << 20) as f32).to_le_bytes())
            .collect();
        for at in (0..size).step_by(numbers.len()) {
            let part = &numbers[..numbers.len().min((size - at) as usize)];
            buffers[0]
                .write(at, part.into())
                .expect("the buffer has this size");
        }
        Bench { engine, buffers }
    }

    /// The valid graph with the greatest admitted length, and what it is.
    fn longest(&self, shapes: &Shapes, size: u64) -> Option<(u64, ValidGraph, Work)> {
        (10..=27).rev().find_map(|log| {
            let operation = (shapes.make)(1 << log)?;
            let valid = validate(
                graph(&operation),
                self.engine.capabilities(),
                &Limits::default(),
                |_| Some(size),
            )
            .ok()?;
            let speed = |node: &Node| self.engine.speed_of(valid.graph(), node);
            let limit = self.engine.max_node_time();
            work::check(valid.graph(), speed, limit).ok()?;
            let work = work::of(valid.graph(), &valid.graph().nodes[0]);
            Some((1 << log, valid, work))
        })
    }

    /// The processor time of each launch in a turn that is over, for `time` at most. A launch that
    /// fails, because a result of an earlier shape is no index, has a time as well.
    fn launches(&self, graph: &ValidGraph, time: Duration) -> Result<Vec<Duration>, EngineError> {
        let mut plan = self.engine.compile(graph, &self.buffers, &|| false)?;
        let turn = Turn::new();
        turn.set_end(Some(Duration::ZERO));
        let begin = Instant::now();
        let mut launches = Vec::new();
        loop {
            let before = now();
            let status = plan.launch(&turn);
            launches.push(now() - before);
            match status {
                Ok(RunStatus::InFlight) => plan.wait().expect("the CPU engine has nothing left"),
                Ok(_) => {}
                Err(error) => {
                    println!("a run has failed: {error}");
                    return Ok(launches);
                }
            }
            if begin.elapsed() >= time {
                return Ok(launches);
            }
        }
    }
}

#[test]
fn the_longest_parts_of_every_operator() {
    let seconds = std::env::var("VGPU_PARTS").ok();
    let seconds = seconds.map(|s| s.parse::<f64>().expect("seconds"));
    let only = std::env::var("VGPU_PARTS_OF").unwrap_or_default();
    let size = BUFFER;
    let bench = Bench::new(size);
    for shapes in [rows(), of_types(), windows(), others()]
        .into_iter()
        .flatten()
    {
        if !shapes.name.contains(&only) {
            continue;
        }
        let Some((n, graph, work)) = bench.longest(&shapes, size) else {
            println!("{}: not supported", shapes.name);
            continue;
        };
        let time = Duration::from_secs_f64(seconds.unwrap_or(0.0));
        let mut launches = match bench.launches(&graph, time) {
            Ok(launches) => launches,
            Err(error) => {
                println!("{}: {error}", shapes.name);
                continue;
            }
        };
        launches.sort();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        println!(
            "{}",
            json!({
                "name": shapes.name,
                "length": n,
                "part": work.part,
                "part_kind": format!("{:?}", work.part_kind),
                "products": work.products,
                "steps": work.steps,
                "launches": launches.len(),
                "median_ms": ms(median(launches.iter().copied())),
                "second_ms": ms(launches[launches.len().saturating_sub(2)]),
                "longest_ms": ms(launches[launches.len() - 1]),
            })
        );
    }
}
