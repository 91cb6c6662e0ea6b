//! Graphs that would run for minutes or years: other guests keep their share of the device, and the
//! graph ends with its guest and with the executor.

mod common;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::scripted_engine::{Act, ScriptedEngine};
use common::{Build, Guest, Host, TIMEOUT, add, bytes};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_executor::{Limits, Stats};
use vgpu_transport::ir::{
    BufferId, GluKind, Graph, Op, PoolKind, Precision, ScaleMode, Shape, SortOrder, Type,
};
use vgpu_transport::wire::{GraphId, Reply};

const GRAPH: GraphId = GraphId(1);

/// Bytes of each buffer of an endless graph.
const BUFFER: u64 = 64 << 20;

/// Elements of f32 in a buffer.
const FLOATS: u64 = BUFFER / 4;

/// An engine of one thread with room for three such buffers and for working memory.
fn engine() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(1, Some(1 << 30)).expect("a thread and 1 GiB"))
}

/// A host that accepts nodes of any time.
fn host() -> Host {
    let limits = Limits {
        node_time: Some(Duration::MAX),
        ..Limits::default()
    };
    Host::limited(engine(), limits, 64)
}

fn f32(ne: [u64; 4]) -> Shape {
    typed(Type::F32, ne)
}

fn typed(ty: Type, ne: [u64; 4]) -> Shape {
    Shape::contiguous(ty, ne).expect("a dense tensor")
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

/// Convolutions, pooling and resampling.
fn images(name: &str) -> Option<Operation> {
    let (s0, s1, p0, p1, d0, d1) = (1, 1, 0, 0, 1, 1);
    let (image, kernel) = (f32(SQUARE), f32([512, 512, 1, 1]));
    let convolved = f32([4096 - 511, 4096 - 511, 1, 1]);
    let (kind, k0, k1) = (PoolKind::Max, 32768, 32768);
    let (around, pooled) = (16383, f32([4095, 4095, 1, 1]));
    Some(match name {
        "POOL_1D" => {
            let (line, k0) = (f32([FLOATS, 1, 1, 1]), 1 << 22);
            let outputs = FLOATS - (1 << 22) + 1;
            let op = Op::Pool1d { kind, k0, s0, p0 };
            (op, f32([outputs, 1, 1, 1]), vec![(line, A)], 1)
        }
        "POOL_2D" => {
            let (p0, p1) = (around, around);
            let op = Op::Pool2d {
                kind,
                k0,
                k1,
                s0,
                s1,
                p0,
                p1,
            };
            (op, pooled, vec![(image, A)], 1)
        }
        "POOL_2D_BACK" => {
            let (kind, p0, p1) = (PoolKind::Average, around, around);
            let op = Op::Pool2dBack {
                kind,
                k0,
                k1,
                s0,
                s1,
                p0,
                p1,
            };
            (op, image, vec![(pooled, A), (image, B)], 1)
        }
        "CONV_2D" => {
            let op = Op::Conv2d {
                s0,
                s1,
                p0,
                p1,
                d0,
                d1,
            };
            (op, convolved, vec![(kernel, B), (image, A)], 1)
        }
        "CONV_2D_DW" => {
            let op = Op::Conv2dDw {
                s0,
                s1,
                p0,
                p1,
                d0,
                d1,
            };
            (op, convolved, vec![(kernel, B), (image, A)], 1)
        }
        "CONV_3D" => {
            let op = Op::Conv3d {
                s0,
                s1,
                s2: 1,
                p0,
                p1,
                p2: 0,
                d0,
                d1,
                d2: 1,
                c: 1,
                n: 1,
                oc: 1,
            };
            let src = vec![(f32([64, 64, 64, 1]), B), (f32([256, 256, 256, 1]), A)];
            (op, f32([193, 193, 193, 1]), src, 4)
        }
        "CONV_TRANSPOSE_1D" => {
            let op = Op::ConvTranspose1d { s0, p0, d0 };
            let src = vec![(f32([1 << 14, 1, 64, 1]), B), (f32([1 << 18, 64, 1, 1]), A)];
            (op, f32([(1 << 18) + (1 << 14) - 1, 1, 1, 1]), src, 16)
        }
        "CONV_TRANSPOSE_2D" => {
            let kernel = typed(Type::F16, [512, 512, 1, 1]);
            let src = vec![(kernel, B), (f32([2048, 2048, 1, 1]), A)];
            (
                Op::ConvTranspose2d { stride: 1 },
                f32([2559, 2559, 1, 1]),
                src,
                1,
            )
        }
        "IM2COL_BACK" => {
            let (p0, p1, is_2d) = (32, 32, true);
            let op = Op::Im2colBack {
                s0,
                s1,
                p0,
                p1,
                d0,
                d1,
                is_2d,
            };
            let patches = overlapping(Type::F32, [64 * 64, 257, 257, 1]);
            let src = vec![(patches, A), (f32([64, 64, 1, 1]), B)];
            (op, f32([256, 256, 1, 1]), src, 64)
        }
        "UPSCALE" => {
            let op = Op::Upscale {
                mode: ScaleMode::Bilinear,
                align_corners: false,
                antialias: true,
            };
            (op, f32([512, 512, 1, 1]), vec![(image, A)], 128)
        }
        _ => return None,
    })
}

/// Matrix products and attention.
fn products(name: &str) -> Option<Operation> {
    let (accumulator, activation) = (Precision::F32, Precision::F32);
    // Elements of a row whose overlapping rows visit the buffer 60 times.
    let long = 60 * FLOATS / 4096;
    let square = f32(SQUARE);
    let tall = overlapping(Type::F32, [long, 4096, 1, 1]);
    Some(match name {
        "MUL_MAT" => {
            let op = Op::MulMat {
                accumulator,
                activation,
                hadamard: false,
            };
            (op, square, vec![(tall, A), (tall, B)], 1)
        }
        "MUL_MAT_ID" => {
            let op = Op::MulMatId {
                accumulator,
                activation,
            };
            let ids = typed(Type::I32, [1, 4096, 1, 1]);
            let src = vec![(square, A), (f32([4096, 1, 4096, 1]), B), (ids, A)];
            (op, f32([4096, 1, 4096, 1]), src, 64)
        }
        "OUT_PROD" => {
            let wide = overlapping(Type::F32, [4096, long, 1, 1]);
            (Op::OutProd {}, square, vec![(wide, A), (wide, B)], 1)
        }
        "FLASH_ATTN_EXT" => {
            let op = Op::FlashAttnExt {
                scale: 1.0,
                max_bias: 0.0,
                logit_softcap: 0.0,
                accumulator: Precision::Default,
                n_kv_max: 0,
            };
            let kv = overlapping(Type::F16, [128, 1 << 20, 1, 1]);
            let src = vec![(f32([128, 128, 8, 1]), A), (kv, B), (kv, B)];
            (op, f32([128, 8, 128, 1]), src, 32)
        }
        "LIGHTNING_INDEXER" => {
            let (keys, tokens) = (8192, 1024);
            let src = vec![
                (f32([128, 64, tokens, 1]), A),
                (f32([128, 1, keys, 1]), B),
                (f32([64, tokens, 1, 1]), B),
                (typed(Type::F16, [keys, tokens, 1, 1]), B),
            ];
            (Op::LightningIndexer {}, f32([keys, tokens, 1, 1]), src, 32)
        }
        "SOLVE_TRI" => (Op::SolveTri {}, square, vec![(square, A), (square, B)], 16),
        _ => return None,
    })
}

/// Recurrences over the tokens of a sequence.
fn recurrences(name: &str) -> Option<Operation> {
    let (size, tokens) = (64, 1 << 17);
    let (each, state) = (f32([size, 1, tokens, 1]), f32([size * size, 1, 1, 1]));
    let (gate, dst) = (f32([1, 1, tokens, 1]), f32([size, tokens + size, 1, 1]));
    let times = 128;
    Some(match name {
        "SSM_CONV" => {
            let (taps, outputs) = (8192, 1 << 23);
            let src = vec![
                (f32([outputs + taps - 1, 1, 1, 1]), A),
                (f32([taps, 1, 1, 1]), B),
            ];
            (Op::SsmConv {}, f32([1, outputs, 1, 1]), src, 16)
        }
        "SSM_SCAN" => {
            let (rows, scanned) = (64, f32([128, 1, tokens, 1]));
            let src = vec![
                (f32([128, rows, 1, 1]), A),
                (f32([rows, 1, tokens, 1]), A),
                (f32([1, tokens, 1, 1]), A),
                (f32([1; 4]), A),
                (scanned, B),
                (scanned, B),
                (typed(Type::I32, [1; 4]), A),
            ];
            let total = rows * tokens + 128 * rows;
            (
                Op::SsmScan { snapshots: 1 },
                f32([total, 1, 1, 1]),
                src,
                times,
            )
        }
        "RWKV_WKV6" => {
            let mut src = vec![(each, A); 5];
            src[3].0 = f32([size, 1, 1, 1]);
            src.push((state, B));
            (Op::RwkvWkv6 {}, dst, src, times)
        }
        "RWKV_WKV7" => {
            let mut src = vec![(each, A); 6];
            src.push((state, B));
            (Op::RwkvWkv7 {}, dst, src, times)
        }
        "GATED_LINEAR_ATTN" => {
            let mut src = vec![(each, A); 4];
            src.push((state, B));
            (Op::GatedLinearAttn { scale: 1.0 }, dst, src, times)
        }
        "GATED_DELTA_NET" => {
            let state = f32([size, size, 1, 1]);
            let src = [each, each, each, gate, gate, state].map(|shape| (shape, A));
            (Op::GatedDeltaNet { snapshots: 1 }, dst, src.to_vec(), times)
        }
        "DSV4_HC_COMB" => {
            let op = Op::Dsv4HcComb {
                eps: 0.1,
                n_iter: 1 << 16,
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
                1,
            )
        }
        _ => return None,
    })
}

/// Operators of rows and of elements.
fn rows(name: &str) -> Option<Operation> {
    let square = f32(SQUARE);
    let of_a = |op: Op, dst: Shape, src: Shape, times: usize| (op, dst, vec![(src, A)], times);
    let (times, eps) = (4000, 0.1);
    Some(match name {
        "ADD" => (Op::Add {}, square, vec![(square, A), (square, B)], times),
        "GLU" => {
            let op = Op::Glu {
                kind: GluKind::Swiglu,
                swapped: false,
                alpha: 0.0,
                limit: 0.0,
            };
            (op, square, vec![(square, A), (square, B)], times)
        }
        "CPY" => of_a(Op::Copy {}, typed(Type::F16, SQUARE), square, times),
        "ARGSORT" => {
            let line = [1 << 22, 4, 1, 1];
            let order = SortOrder::Ascending;
            of_a(
                Op::Argsort { order },
                typed(Type::I32, line),
                f32(line),
                128,
            )
        }
        "CUMSUM" => of_a(Op::Cumsum {}, square, square, times),
        "SUM" => of_a(Op::Sum {}, f32([1; 4]), square, 2 * times),
        "REPEAT_BACK" => {
            let many = overlapping(Type::F32, [4096, 15 * 4096, 1, 1]);
            of_a(Op::RepeatBack {}, f32([256, 1, 1, 1]), many, 400)
        }
        "GET_ROWS_BACK" => {
            let ids = typed(Type::I32, [4096, 1, 1, 1]);
            let src = vec![(square, A), (ids, B)];
            (Op::GetRowsBack {}, f32([4096, 1, 1, 1]), src, times)
        }
        "RMS_NORM" => of_a(Op::RmsNorm { eps }, square, square, times),
        "GROUP_NORM" => {
            let op = Op::GroupNorm { n_groups: 1, eps };
            of_a(op, square, square, times)
        }
        "SOFT_MAX" => {
            let op = Op::SoftMax {
                scale: 1.0,
                max_bias: 0.0,
            };
            of_a(op, square, square, times)
        }
        "CROSS_ENTROPY_LOSS" => {
            let src = vec![(square, A), (square, B)];
            (Op::CrossEntropyLoss {}, f32([1; 4]), src, times)
        }
        _ => return None,
    })
}

/// Each operator with a kernel of its own.
const OPERATORS: [&str; 35] = [
    "POOL_1D",
    "POOL_2D",
    "POOL_2D_BACK",
    "CONV_2D",
    "CONV_2D_DW",
    "CONV_3D",
    "CONV_TRANSPOSE_1D",
    "CONV_TRANSPOSE_2D",
    "IM2COL_BACK",
    "UPSCALE",
    "MUL_MAT",
    "MUL_MAT_ID",
    "OUT_PROD",
    "FLASH_ATTN_EXT",
    "LIGHTNING_INDEXER",
    "SOLVE_TRI",
    "SSM_CONV",
    "SSM_SCAN",
    "RWKV_WKV6",
    "RWKV_WKV7",
    "GATED_LINEAR_ATTN",
    "GATED_DELTA_NET",
    "DSV4_HC_COMB",
    "ADD",
    "GLU",
    "CPY",
    "ARGSORT",
    "CUMSUM",
    "SUM",
    "REPEAT_BACK",
    "GET_ROWS_BACK",
    "RMS_NORM",
    "GROUP_NORM",
    "SOFT_MAX",
    "CROSS_ENTROPY_LOSS",
];

/// A graph that runs for much longer than a test.
fn endless(name: &str, [a, b, dst]: [BufferId; 3]) -> Graph {
    let found = images(name).or_else(|| products(name));
    let found = found.or_else(|| recurrences(name)).or_else(|| rows(name));
    let (op, to, from, times) = found.expect("an operator of the list");
    assert_eq!(op.kind().ggml_name(), name);
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

/// Starts an endless graph of a new guest, which is user 1.
fn attack(host: &Host, name: &str) -> Guest {
    let mut attacker = host.guest_of(1);
    let buffers = [0; 3].map(|_| attacker.alloc(BUFFER));
    attacker.graph(GRAPH, &endless(name, buffers));
    attacker.fence();
    attacker.submit(GRAPH);
    attacker
}

/// The figures of the session of this user.
fn stats(host: &Host, uid: u32) -> Stats {
    let sessions = host.server.sessions();
    let of_user = |process: &vgpu_executor::Process| process.uid == uid;
    let found = { sessions.into_iter() }.find(|s| s.peer.process.as_ref().is_some_and(of_user));
    found.expect("the session is open").stats
}

#[test]
fn others_run_beside_an_endless_graph_which_ends_with_its_guest() {
    for name in OPERATORS {
        let host = host();
        let attacker = attack(&host, name);
        let mut other = host.guest_of(2);
        let [x, y] = [0; 2].map(|_| other.alloc_with(&bytes(&[1.0, 2.0])));
        let sum = other.alloc(8);
        other.graph(GRAPH, &add(2, sum, x, y));
        for _ in 0..5 {
            other.submit(GRAPH);
            assert_eq!(other.read_f32(sum, 2), [2.0, 4.0], "{name}");
        }
        assert_eq!(stats(&host, 1).graphs_run, 0, "{name} is not endless");
        drop(attacker);
        let dropped = Instant::now();
        while host.server.sessions().len() > 1 {
            assert!(
                dropped.elapsed() < TIMEOUT,
                "{name} goes on without its guest"
            );
            thread::yield_now();
        }
        other.submit(GRAPH);
        assert_eq!(other.read_f32(sum, 2), [2.0, 4.0], "{name}");
    }
}

#[test]
fn shutdown_cancels_an_endless_graph_and_tells_the_guest() {
    for name in OPERATORS {
        let host = host();
        let attacker = attack(&host, name);
        host.server.shutdown();
        assert_eq!(attacker.ended(), "the host is shutting down", "{name}");
    }
}

#[test]
fn a_node_that_would_take_months_is_refused_with_its_numbers_and_the_session_goes_on() {
    let host = Host::new(engine());
    let mut guest = host.guest_of(1);
    let buffers = [0; 3].map(|_| guest.alloc(BUFFER));
    guest.graph(GRAPH, &endless("POOL_2D", buffers));
    let Reply::Failed { reason, .. } = guest.receive().0 else {
        panic!("the graph is refused");
    };
    let steps = 4095u64.pow(2) * 4096u64.pow(2);
    for words in [
        "node 0 (POOL_2D)",
        &format!("{steps} steps"),
        "the limit is 3600s",
    ] {
        assert!(reason.contains(words), "{words:?} is not in {reason:?}");
    }
    let submit = guest.submit(GRAPH);
    let (reply, _) = guest.receive();
    assert!(
        matches!(&reply, Reply::Failed { request, .. } if *request == submit),
        "{reply:?}"
    );
    let x = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(2), &add(2, x, x, x));
    guest.submit(GraphId(2));
    assert_eq!(guest.read_f32(x, 2), [2.0, 4.0]);
}

#[test]
fn the_limit_of_a_node_is_that_of_the_configuration() {
    let limits = Limits {
        node_time: Some(Duration::from_nanos(1)),
        ..Limits::default()
    };
    let host = Host::limited(engine(), limits, 64);
    let mut guest = host.guest();
    let x = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GRAPH, &add(2, x, x, x));
    let (reply, _) = guest.receive();
    assert!(
        matches!(&reply, Reply::Failed { reason, .. } if reason.contains("the limit is 1ns")),
        "{reply:?}"
    );
}

/// A host whose engine compiles the next graph until it is cancelled, and a guest that has sent the
/// graph.
fn compiling() -> (Host, Guest) {
    let engine = ScriptedEngine::new();
    let host = Host::new(Arc::clone(&engine) as Arc<dyn Engine>);
    let mut guest = host.guest();
    let x = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.fence();
    let (began, compiles) = mpsc::channel();
    engine.next(Act::CompilesUntilCancelled(began));
    guest.graph(GRAPH, &add(2, x, x, x));
    compiles.recv_timeout(TIMEOUT).expect("compilation begins");
    (host, guest)
}

#[test]
fn compilation_ends_with_its_guest() {
    let (host, guest) = compiling();
    drop(guest);
    host.wait_until_empty();
}

#[test]
fn shutdown_cancels_a_compilation_and_tells_the_guest() {
    let (host, guest) = compiling();
    host.server.shutdown();
    assert_eq!(guest.ended(), "the host is shutting down");
}
