//! Graphs of every operator that run for much longer than a test, and a guest that submits them.
#![allow(dead_code)] // each test binary uses a part

#[path = "../../../transport/tests/common/ops.rs"]
mod ops;
#[path = "../../../transport/tests/common/samples.rs"]
mod samples;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ops::{Sliding, slide, usual};
use samples::{f32, sample, typed};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_engine::work::PartKind;
use vgpu_executor::{Limits, Stats};
use vgpu_transport::ir::{BufferId, Graph, Op, OpKind, PoolKind, Precision, Shape, Type};
use vgpu_transport::wire::GraphId;

use crate::common::{Build, Guest, Host, TIMEOUT};

pub(crate) const GRAPH: GraphId = GraphId(1);

/// Bytes of each buffer of an endless graph.
pub(crate) const BUFFER: u64 = 64 << 20;

/// Elements of f32 in a buffer.
const FLOATS: u64 = BUFFER / 4;

/// An engine of one thread with room for three such buffers and for working memory.
pub(crate) fn engine() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(1, Some(1 << 30)).expect("a thread and 1 GiB"))
}

/// A host that accepts nodes of any time.
pub(crate) fn host() -> Host {
    host_on(engine())
}

/// The same on another engine.
pub(crate) fn host_on(engine: Arc<dyn Engine>) -> Host {
    let limits = Limits {
        node_time: Some(Duration::MAX),
        ..Limits::default()
    };
    Host::limited(engine, limits, 64)
}

/// A matrix whose rows overlap, so that it visits its buffer as often as the limits allow.
fn overlapping(ty: Type, ne: [u64; 4]) -> Shape {
    let mut shape = typed(ty, ne);
    shape.nb[1] = shape.nb[0];
    shape.nb[2] = shape.nb[0] * ne[1];
    shape.nb[3] = shape.nb[2];
    shape
}

/// The buffer of an operand of an endless graph.
#[derive(Clone, Copy)]
enum At {
    /// The first or second buffer, which are read only.
    A,
    B,
}
use At::{A, B};

/// An operation: operator, destination, sources, and how often the graph has it.
type Operation = (Op, Shape, Vec<(Shape, At)>, usize);

const SQUARE: [u64; 4] = [4096, 4096, 1, 1];

/// An operation with the usual parameters.
fn usual_op(kind: OpKind, dst: Shape, src: &[(Shape, At)], times: usize) -> Operation {
    let op = usual(kind).expect("the parameters do not depend on lengths");
    (op, dst, src.to_vec(), times)
}

/// Convolutions, pooling and resampling.
fn images(kind: OpKind) -> Option<Operation> {
    let (image, kernel) = (f32(SQUARE), f32([512, 512, 1, 1]));
    let convolved = f32([4096 - 511, 4096 - 511, 1, 1]);
    // Windows of a row or an image, as large as the limits allow.
    let (row, plane) = ([1 << 18, 1], [512, 512]);
    let outputs = FLOATS - (1 << 18) + 1;
    let none = 0;
    let (max, average) = (PoolKind::Max, PoolKind::Average);
    let (window, padding, pool, dst, src, times) = match kind {
        OpKind::Pool1d => {
            let line = f32([FLOATS, 1, 1, 1]);
            let dst = f32([outputs, 1, 1, 1]);
            (row, none, max, dst, vec![(line, A)], 1)
        }
        OpKind::Pool2d => (plane, none, max, convolved, vec![(image, A)], 1),
        OpKind::Pool2dBack => {
            let src = vec![(convolved, A), (image, B)];
            (plane, none, average, image, src, 1)
        }
        OpKind::Conv2d => {
            let src = vec![(kernel, B), (image, A)];
            ([1; 2], none, max, convolved, src, 1)
        }
        OpKind::Conv2dDw => {
            let src = vec![(f32([128, 128, 1, 1]), B), (image, A)];
            let dst = f32([4096 - 127, 4096 - 127, 1, 1]);
            ([1; 2], none, max, dst, src, 1)
        }
        OpKind::Conv3d => {
            let src = vec![(f32([64, 64, 64, 1]), B), (f32([256, 256, 256, 1]), A)];
            ([1; 2], none, max, f32([193, 193, 193, 1]), src, 4)
        }
        OpKind::ConvTranspose1d => {
            let src = vec![(f32([1 << 14, 1, 64, 1]), B), (f32([1 << 18, 64, 1, 1]), A)];
            let dst = f32([(1 << 18) + (1 << 14) - 1, 1, 1, 1]);
            ([1; 2], none, max, dst, src, 16)
        }
        OpKind::ConvTranspose2d => {
            let kernel = typed(Type::F16, [512, 512, 1, 1]);
            let src = vec![(kernel, B), (f32([2048, 2048, 1, 1]), A)];
            ([1; 2], none, max, f32([2559, 2559, 1, 1]), src, 1)
        }
        OpKind::Im2colBack => {
            let patches = overlapping(Type::F32, [64 * 64, 257, 257, 1]);
            let src = vec![(patches, A), (f32([64, 64, 1, 1]), B)];
            ([1; 2], 32, max, f32([256, 256, 1, 1]), src, 64)
        }
        OpKind::Upscale => {
            return Some(usual_op(kind, f32([512, 512, 1, 1]), &[(image, A)], 128));
        }
        _ => return None,
    };
    let mut sliding = Sliding {
        window,
        pool,
        ..Sliding::default()
    };
    sliding.geometry.padding = [padding, padding, 0];
    Some((slide(kind, &sliding)?, dst, src, times))
}

/// Matrix products and attention.
fn products(kind: OpKind) -> Option<Operation> {
    let (accumulator, activation) = (Precision::F32, Precision::F32);
    // Elements of a row whose overlapping rows visit the buffer 60 times.
    let long = 60 * FLOATS / 4096;
    let square = f32(SQUARE);
    let tall = overlapping(Type::F32, [long, 4096, 1, 1]);
    Some(match kind {
        OpKind::MulMat => {
            let op = Op::MulMat {
                accumulator,
                activation,
                hadamard: false,
            };
            (op, square, vec![(tall, A), (tall, B)], 1)
        }
        OpKind::MulMatId => {
            let op = Op::MulMatId {
                accumulator,
                activation,
            };
            let ids = typed(Type::I32, [1, 4096, 1, 1]);
            let src = vec![(square, A), (f32([4096, 1, 4096, 1]), B), (ids, A)];
            (op, f32([4096, 1, 4096, 1]), src, 64)
        }
        OpKind::OutProd => {
            let wide = overlapping(Type::F32, [4096, long, 1, 1]);
            usual_op(kind, square, &[(wide, A), (wide, B)], 1)
        }
        OpKind::FlashAttnExt => {
            let kv = overlapping(Type::F16, [128, 1 << 20, 1, 1]);
            let src = [(f32([128, 128, 8, 1]), A), (kv, B), (kv, B)];
            usual_op(kind, f32([128, 8, 128, 1]), &src, 32)
        }
        OpKind::LightningIndexer => {
            let (keys, tokens) = (8192, 1024);
            let src = [
                (f32([128, 64, tokens, 1]), A),
                (f32([128, 1, keys, 1]), B),
                (f32([64, tokens, 1, 1]), B),
                (typed(Type::F16, [keys, tokens, 1, 1]), B),
            ];
            usual_op(kind, f32([keys, tokens, 1, 1]), &src, 32)
        }
        OpKind::SolveTri => usual_op(kind, square, &[(square, A), (square, B)], 16),
        _ => return None,
    })
}

/// Recurrences over the tokens of a sequence.
fn recurrences(kind: OpKind) -> Option<Operation> {
    let (size, tokens) = (64, 1 << 17);
    let (each, state) = (f32([size, 1, tokens, 1]), f32([size * size, 1, 1, 1]));
    let (gate, dst) = (f32([1, 1, tokens, 1]), f32([size, tokens + size, 1, 1]));
    let times = 128;
    Some(match kind {
        OpKind::SsmConv => {
            let (taps, outputs) = (8192, 1 << 23);
            let src = [
                (f32([outputs + taps - 1, 1, 1, 1]), A),
                (f32([taps, 1, 1, 1]), B),
            ];
            usual_op(kind, f32([1, outputs, 1, 1]), &src, 16)
        }
        OpKind::SsmScan => {
            let (rows, scanned) = (64, f32([128, 1, tokens, 1]));
            let src = [
                (f32([128, rows, 1, 1]), A),
                (f32([rows, 1, tokens, 1]), A),
                (f32([1, tokens, 1, 1]), A),
                (f32([1; 4]), A),
                (scanned, B),
                (scanned, B),
                (typed(Type::I32, [1; 4]), A),
            ];
            let total = rows * tokens + 128 * rows;
            usual_op(kind, f32([total, 1, 1, 1]), &src, times)
        }
        OpKind::RwkvWkv6 => {
            let bonus = f32([size, 1, 1, 1]);
            let src = [each, each, each, bonus, each].map(|shape| (shape, A));
            usual_op(kind, dst, &[&src[..], &[(state, B)]].concat(), times)
        }
        OpKind::RwkvWkv7 => {
            let src = [&[(each, A); 6][..], &[(state, B)]].concat();
            usual_op(kind, dst, &src, times)
        }
        OpKind::GatedLinearAttn => {
            let src = [&[(each, A); 4][..], &[(state, B)]].concat();
            usual_op(kind, dst, &src, times)
        }
        OpKind::GatedDeltaNet => {
            let state = f32([size, size, 1, 1]);
            let src = [each, each, each, gate, gate, state].map(|shape| (shape, A));
            usual_op(kind, dst, &src, times)
        }
        OpKind::Dsv4HcComb => {
            let op = Op::Dsv4HcComb {
                eps: 0.1,
                n_iter: 1 << 12,
            };
            let tokens = 1 << 14;
            let src = [
                f32([24, tokens, 1, 1]),
                f32([3, 1, 1, 1]),
                f32([24, 1, 1, 1]),
            ];
            (
                op,
                f32([4, 4, tokens, 1]),
                src.map(|shape| (shape, A)).to_vec(),
                128,
            )
        }
        _ => return None,
    })
}

/// Operators of rows and of elements.
fn rows(kind: OpKind) -> Option<Operation> {
    let square = f32(SQUARE);
    let (of_a, times) = ([(square, A)], 4000);
    Some(match kind {
        OpKind::Add | OpKind::Glu => usual_op(kind, square, &[(square, A), (square, B)], times),
        OpKind::Copy => usual_op(kind, typed(Type::F16, SQUARE), &of_a, times),
        OpKind::Argsort => {
            let line = [1 << 22, 4, 1, 1];
            usual_op(kind, typed(Type::I32, line), &[(f32(line), A)], 128)
        }
        OpKind::Cumsum | OpKind::RmsNorm | OpKind::GroupNorm | OpKind::SoftMax => {
            usual_op(kind, square, &of_a, times)
        }
        OpKind::Sum => usual_op(kind, f32([1; 4]), &of_a, 2 * times),
        OpKind::RepeatBack => {
            let many = overlapping(Type::F32, [4096, 15 * 4096, 1, 1]);
            usual_op(kind, f32([256, 1, 1, 1]), &[(many, A)], 400)
        }
        OpKind::GetRowsBack => {
            let ids = typed(Type::I32, [4096, 1, 1, 1]);
            let src = [(square, A), (ids, B)];
            usual_op(kind, f32([4096, 1, 1, 1]), &src, times)
        }
        OpKind::CrossEntropyLoss => {
            let src = [(square, A), (square, B)];
            usual_op(kind, f32([1; 4]), &src, times)
        }
        _ => return None,
    })
}

/// Each operator with a kernel of its own that has loops of its own.
pub(crate) const OPERATORS: [OpKind; 35] = [
    OpKind::Pool1d,
    OpKind::Pool2d,
    OpKind::Pool2dBack,
    OpKind::Conv2d,
    OpKind::Conv2dDw,
    OpKind::Conv3d,
    OpKind::ConvTranspose1d,
    OpKind::ConvTranspose2d,
    OpKind::Im2colBack,
    OpKind::Upscale,
    OpKind::MulMat,
    OpKind::MulMatId,
    OpKind::OutProd,
    OpKind::FlashAttnExt,
    OpKind::LightningIndexer,
    OpKind::SolveTri,
    OpKind::SsmConv,
    OpKind::SsmScan,
    OpKind::RwkvWkv6,
    OpKind::RwkvWkv7,
    OpKind::GatedLinearAttn,
    OpKind::GatedDeltaNet,
    OpKind::Dsv4HcComb,
    OpKind::Add,
    OpKind::Glu,
    OpKind::Copy,
    OpKind::Argsort,
    OpKind::Cumsum,
    OpKind::Sum,
    OpKind::RepeatBack,
    OpKind::GetRowsBack,
    OpKind::RmsNorm,
    OpKind::GroupNorm,
    OpKind::SoftMax,
    OpKind::CrossEntropyLoss,
];

/// Operators with a part as long as the limits allow: a row or a tile. Pooling has one anyway.
pub(crate) const LONG_PARTS: [OpKind; 4] = [
    OpKind::Cumsum,
    OpKind::MulMat,
    OpKind::RmsNorm,
    OpKind::SoftMax,
];

/// An operation with such parts.
fn with_long_parts(kind: OpKind) -> Option<Operation> {
    let row = PartKind::Row.limit();
    let line = f32([row, FLOATS / row, 1, 1]);
    match kind {
        OpKind::MulMat => {
            let (op, ..) = products(kind)?;
            let matrix = f32([PartKind::Tile.limit() / 256, 16, 1, 1]);
            Some((
                op,
                f32([16, 16, 1, 1]),
                vec![(matrix, A), (matrix, B)],
                4000,
            ))
        }
        _ => {
            let (op, _, _, times) = rows(kind)?;
            Some((op, line, vec![(line, A)], times))
        }
    }
}

/// An operation of any other operator, of a million steps or more, very often.
fn others(kind: OpKind) -> Operation {
    let sizes = (4..=16).map(|log| sample(kind, 1 << log));
    let found = { sizes }.find(|sample| sample.count >= 1 << 20);
    let sample = found.expect("samples grow");
    // The engines have GET_REL_POS for half floats only.
    let of_type = |shape: Shape| match kind {
        OpKind::GetRelPos => typed(Type::F16, shape.ne),
        _ => shape,
    };
    let src = { sample.src.iter() }
        .map(|&shape| (of_type(shape), A))
        .collect();
    (sample.op, of_type(sample.dst), src, 50_000)
}

/// A graph that runs for much longer than a test.
pub(crate) fn endless(kind: OpKind, buffers: [BufferId; 3]) -> Graph {
    let found = images(kind).or_else(|| products(kind));
    let found = found.or_else(|| recurrences(kind)).or_else(|| rows(kind));
    graph(kind, found.unwrap_or_else(|| others(kind)), buffers)
}

/// As [`endless`], of one of the [`LONG_PARTS`].
pub(crate) fn endless_with_long_parts(kind: OpKind, buffers: [BufferId; 3]) -> Graph {
    let found = with_long_parts(kind).expect("an operator of the list");
    graph(kind, found, buffers)
}

fn graph(kind: OpKind, (op, to, from, times): Operation, [a, b, dst]: [BufferId; 3]) -> Graph {
    assert_eq!(op.kind(), kind);
    let mut build = Build::default();
    let to = build.place(to, dst, 0);
    let from: Vec<u32> = { from.into_iter() }
        .map(|(shape, at)| build.place(shape, if matches!(at, A) { a } else { b }, 0))
        .collect();
    for _ in 0..times {
        build.node(op, to, &from);
    }
    build.0
}

/// Starts an endless graph of a new guest, which is user 1. Returns once the graph has had a turn
/// that ended before the graph did.
pub(crate) fn attack(host: &Host, graph: impl Fn([BufferId; 3]) -> Graph) -> Guest {
    let mut attacker = host.guest_of(1);
    let buffers = [0; 3].map(|_| attacker.alloc(BUFFER));
    attacker.graph(GRAPH, &graph(buffers));
    attacker.fence();
    attacker.submit(GRAPH);
    wait_for_turns(host, 1, 1);
    attacker
}

/// Waits until a request of this user has had so many turns, and goes on.
pub(crate) fn wait_for_turns(host: &Host, uid: u32, turns: u64) {
    let begin = Instant::now();
    loop {
        let stats = stats(host, uid);
        assert_eq!(stats.graphs_run, 0, "the graph has ended");
        if stats.turns >= turns {
            return;
        }
        let waits = begin.elapsed();
        assert!(
            waits < TIMEOUT,
            "no turn has ended: {:?}",
            host.server.sessions()
        );
        thread::yield_now();
    }
}

/// In what time a graph ends at the latest that nobody waits for any more, where the processors are
/// free.
pub(crate) const PROMPT: Duration = Duration::from_secs(1);

/// The same on a machine that is busy with other programs.
pub(crate) const LATE: Duration = Duration::from_secs(10);

/// Checks how long the end of something takes, which `once` measures: once in three tries less than
/// [`PROMPT`], and never [`LATE`].
pub(crate) fn ends_promptly(what: &str, mut once: impl FnMut() -> Duration) {
    let mut tries = Vec::new();
    while tries.len() < 3 && tries.iter().all(|took| *took >= PROMPT) {
        let took = once();
        assert!(took < LATE, "{what} ends only after {took:?}");
        tries.push(took);
    }
    let is_prompt = tries.iter().any(|took| *took < PROMPT);
    assert!(is_prompt, "{what} ends only after {tries:?}");
}

/// The figures of the session of this user.
pub(crate) fn stats(host: &Host, uid: u32) -> Stats {
    let sessions = host.server.sessions();
    let of_user = |process: &vgpu_executor::Process| process.uid == uid;
    let found = { sessions.into_iter() }.find(|s| s.peer.process.as_ref().is_some_and(of_user));
    found.expect("the session is open").stats
}
