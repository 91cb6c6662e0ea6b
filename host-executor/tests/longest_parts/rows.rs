//! Operators whose part is a row.

use vgpu_transport::ir::{Op, OpKind, Precision, RopeMode, SortOrder, Type};

use crate::ops::{Sliding, rope, slide, usual};
use crate::samples::{f32, typed};
use crate::shapes::{Shapes, shapes, strided};

/// Operators whose part is a row, with each layout of rows.
pub(crate) fn rows() -> Vec<Shapes> {
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
        all.push(shapes(
            format!("DSV4_HC_PRE of many streams of {} elements", stride / 4),
            move |streams| {
                let n = stride / 4;
                let src = vec![f32([n, streams, 1, 1]), f32([n, streams, 1, 1])];
                let op = Op::Dsv4HcPre {
                    scale: 1.0,
                    gated: true,
                };
                Some((op, f32([n, 1, 1, 1]), src))
            },
        ));
        all.push(shapes(
            format!("DSV4_HC_POST of many streams of {} elements", stride / 4),
            move |streams| {
                let n = stride / 4;
                let rows = f32([n, streams, 1, 1]);
                let mut mixes = f32([streams, streams, 1, 1]);
                (mixes.nb[1], mixes.nb[2], mixes.nb[3]) = (0, 0, 0);
                let src = vec![f32([n, 1, 1, 1]), rows, f32([streams, 1, 1, 1]), mixes];
                Some((Op::Dsv4HcPost {}, rows, src))
            },
        ));
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
pub(crate) fn of_types() -> Vec<Shapes> {
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
