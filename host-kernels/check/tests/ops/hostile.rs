//! Graphs that ggml never makes, but a hostile guest may send.

use vgpu_engine::Engine;
use vgpu_transport::ir::{
    GluKind, Op, PoolKind, ScaleMode, Shape, SortOrder, TriKind, Type, UnaryKind,
};

use crate::common::*;

/// Operators, and how many sources each takes if all tensors have the same lengths.
fn same_lengths() -> Vec<(Op, usize)> {
    vec![
        (Op::Copy {}, 1),
        (Op::Repeat {}, 1),
        (Op::RepeatBack {}, 1),
        (Op::Add {}, 2),
        (Op::Div {}, 2),
        (
            Op::Scale {
                scale: 2.0,
                bias: 1.0,
            },
            1,
        ),
        (
            Op::Clamp {
                min: -1.0,
                max: 1.0,
            },
            1,
        ),
        (
            Op::Unary {
                kind: UnaryKind::Gelu,
            },
            1,
        ),
        (
            Op::Glu {
                kind: GluKind::Swiglu,
                swapped: false,
                alpha: 0.0,
                limit: 0.0,
            },
            2,
        ),
        (Op::SiluBack {}, 2),
        (Op::Norm { eps: 1e-5 }, 1),
        (Op::RmsNorm { eps: 1e-5 }, 1),
        (Op::RmsNormBack { eps: 1e-5 }, 2),
        (Op::L2Norm { eps: 1e-5 }, 1),
        (
            Op::GroupNorm {
                n_groups: 2,
                eps: 1e-5,
            },
            1,
        ),
        (
            Op::SoftMax {
                scale: 1.0,
                max_bias: 0.0,
            },
            1,
        ),
        (
            Op::SoftMaxBack {
                scale: 1.0,
                max_bias: 0.0,
            },
            2,
        ),
        (Op::Cumsum {}, 1),
        (
            Op::Roll {
                shift: [1, -1, 2, 3],
            },
            1,
        ),
        (
            Op::Tri {
                kind: TriKind::Lower,
            },
            1,
        ),
        (Op::DiagMaskInf { n_past: 1 }, 1),
        (
            Op::Pad {
                left: [0; 4],
                right: [0; 4],
                circular: false,
            },
            1,
        ),
        (
            Op::Pad {
                left: [0; 4],
                right: [0; 4],
                circular: true,
            },
            1,
        ),
        (
            Op::Upscale {
                mode: ScaleMode::Bicubic,
                align_corners: false,
                antialias: false,
            },
            1,
        ),
        (
            Op::Pool1d {
                kind: PoolKind::Max,
                k0: 1,
                s0: 1,
                p0: 0,
            },
            1,
        ),
    ]
}

fn shape(ty: Type, ne: [u64; 4]) -> Shape {
    Shape::contiguous(ty, ne).unwrap_or(Shape {
        ty,
        ne,
        nb: [ty.block_bytes(); 4],
    })
}

/// A tensor with a length of 0 takes no memory, whatever its other lengths are. The operation must
/// take no time either.
pub(crate) fn huge_lengths_of_nothing(engine: &dyn Engine) {
    const HUGE: u64 = 1 << 31;
    for ne in [
        [0, HUGE, 1 << 30, 1],
        [HUGE, 0, 1 << 30, 1],
        [HUGE, 1 << 30, 0, 1],
        [1, HUGE, 1 << 30, 0],
    ] {
        for (op, sources) in same_lengths() {
            let tensors = vec![(shape(Type::F32, ne), 0); sources + 1];
            match run_in_one_buffer(engine, op, &[1; 64], &tensors) {
                Ok(after) => assert_eq!(after, [1; 64], "{op:?}"),
                Err(Failure::Invalid(_)) => {}
                Err(Failure::Run(error)) => panic!("{op:?}: {error}"),
            }
        }
        // A destination that is not empty.
        let one = (shape(Type::F32, [1; 4]), 0);
        let empty = (shape(Type::F32, ne), 0);
        let scalar = [
            (Op::Sum {}, vec![one, empty]),
            (Op::RepeatBack {}, vec![one, empty]),
            (Op::CrossEntropyLoss {}, vec![one, empty, empty]),
        ];
        for (op, tensors) in scalar {
            let outcome = run_in_one_buffer(engine, op, &[1; 64], &tensors);
            assert!(
                !matches!(outcome, Err(Failure::Run(_))),
                "{op:?}: {outcome:?}"
            );
        }
    }
    let indices = shape(Type::I32, [0, HUGE, HUGE, 1]);
    for op in [
        Op::Argsort {
            order: SortOrder::Ascending,
        },
        Op::TopK {},
    ] {
        let tensors = [(indices, 0), (shape(Type::F32, indices.ne), 0)];
        assert!(
            run_in_one_buffer(engine, op, &[1; 64], &tensors).is_ok(),
            "{op:?}"
        );
    }
}

/// Rows more than 4 GiB apart. The memory between them is never touched.
pub(crate) fn rows_far_apart(engine: &dyn Engine) {
    const FAR: u64 = (1 << 32) + 64;
    let Ok(memory) = engine.alloc(FAR + (1 << 16)) else {
        return; // the engine has too little memory for such strides
    };
    let mut random = Random::new(5);
    for (op, sources) in same_lengths() {
        let ne = [8, 2, 1, 1];
        let dense: Vec<Data> = (0..=sources)
            .map(|_| Data::dense(Type::F32, ne).fill(|| random.between(-1.0, 1.0)))
            .collect();
        let src: Vec<Option<&Data>> = dense[1..].iter().map(Some).collect();
        let expected = match try_run(engine, op, &dense[0], &src) {
            Ok(expected) => expected,
            Err(Failure::Invalid(_)) => continue, // the engine does not support the operator
            Err(Failure::Run(error)) => panic!("{op:?}: {error}"),
        };
        let far = Shape {
            ty: Type::F32,
            ne,
            nb: [4, FAR, 2 * FAR, 2 * FAR],
        };
        let tensors: Vec<_> = (0..=sources as u64).map(|i| (far, 256 * i)).collect();
        let rows =
            |data: &Data| -> Vec<Vec<u8>> { data.bytes().chunks(32).map(<[u8]>::to_vec).collect() };
        for (data, (_, offset)) in dense.iter().zip(&tensors) {
            for (row, bytes) in rows(data).iter().enumerate() {
                memory
                    .write(offset + row as u64 * FAR, bytes.as_slice().into())
                    .expect("inside the memory");
            }
        }
        run_in(engine, op, &memory, FAR + (1 << 16), &tensors)
            .unwrap_or_else(|error| panic!("{op:?}: {error:?}"));
        for (row, expected) in rows(&expected).iter().enumerate() {
            let mut got = vec![0; 32];
            memory
                .read(row as u64 * FAR, got.as_mut_slice().into())
                .expect("inside the memory");
            assert!(&got == expected, "{op:?}, row {row}");
        }
    }
}

/// If sources overlap the destination, the result is unspecified, but no memory outside the
/// destination changes.
pub(crate) fn overlapping_memory(engine: &dyn Engine) {
    property(150, |random| {
        let ne = std::array::from_fn(|_| 1 + random.below(7));
        let place = |random: &mut Random| {
            let data = Data::random(Type::F32, ne, random);
            (data.shape, 4 * random.below(64))
        };
        let mut buffer: Vec<u8> = (0..16_384).map(|_| random.bits() as u8).collect();
        for (op, sources) in same_lengths() {
            let tensors: Vec<_> = (0..=sources).map(|_| place(random)).collect();
            let length = |&(shape, offset): &(Shape, u64)| shape.byte_len().unwrap() + offset;
            let needed = tensors.iter().map(length).max().unwrap() as usize;
            buffer.resize(buffer.len().max(needed), 0x5a);
            let after = match run_in_one_buffer(engine, op, &buffer, &tensors) {
                Ok(after) => after,
                Err(Failure::Invalid(_)) => continue,
                Err(Failure::Run(error)) => panic!("{op:?}: {error}"),
            };
            let (dst, offset) = tensors[0];
            let mut inside = vec![false; buffer.len()];
            for [i0, i1, i2, i3] in Data::dense(Type::I8, ne).indices() {
                let steps = i0 * dst.nb[0] + i1 * dst.nb[1] + i2 * dst.nb[2] + i3 * dst.nb[3];
                inside[(offset + steps) as usize..][..4].fill(true);
            }
            for (i, inside) in inside.into_iter().enumerate() {
                assert!(inside || buffer[i] == after[i], "{op:?} changed byte {i}");
            }
        }
    });
}
