//! Graphs that would run for minutes or years: other guests keep their share of the device, and the
//! graph ends with its guest and with the executor.

mod common;

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use common::{Build, Guest, Host, TIMEOUT, add, bytes};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine;
use vgpu_transport::ir::{BufferId, Graph, Op, PoolKind, Precision, Shape, Type};
use vgpu_transport::wire::GraphId;

const GRAPH: GraphId = GraphId(1);

/// Bytes of each buffer of an endless graph.
const BUFFER: u64 = 64 << 20;

/// Elements of f32 in a buffer.
const FLOATS: u64 = BUFFER / 4;

/// An engine of one thread with room for three such buffers.
fn engine() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(1, Some(512 << 20)).expect("a thread and 512 MiB"))
}

/// A matrix whose rows overlap, so that it visits its buffer as often as the limits allow.
fn overlapping(columns: u64, rows: u64) -> Shape {
    let mut shape = Shape::contiguous(Type::F32, [columns, rows, 1, 1]).expect("a dense matrix");
    shape.nb[1] = 4;
    shape.nb[2] = 4 * rows;
    shape.nb[3] = 4 * rows;
    shape
}

/// Graphs of one node over three buffers, each with the name of its operator.
fn endless([a, b, dst]: [BufferId; 3]) -> Vec<(&'static str, Graph)> {
    let graph = |op: Op, to: Shape, from: &[(Shape, BufferId)]| {
        let mut build = Build::default();
        let to = build.place(to, dst, 0);
        let from: Vec<u32> = { from.iter() }
            .map(|&(shape, buffer)| build.place(shape, buffer, 0))
            .collect();
        build.node(op, to, &from);
        build.0
    };
    let f32 = |ne: [u64; 4]| Shape::contiguous(Type::F32, ne).expect("a dense tensor");
    let image = f32([4096, 4096, 1, 1]);
    let kernel = f32([512, 512, 1, 1]);
    // Elements of a row whose overlapping rows visit the buffer 60 times.
    let long = 60 * FLOATS / 4096;
    let conv = |channels| match channels {
        true => Op::Conv2dDw {
            s0: 1,
            s1: 1,
            p0: 0,
            p1: 0,
            d0: 1,
            d1: 1,
        },
        false => Op::Conv2d {
            s0: 1,
            s1: 1,
            p0: 0,
            p1: 0,
            d0: 1,
            d1: 1,
        },
    };
    let convolved = f32([4096 - 511, 4096 - 511, 1, 1]);
    let pool = Op::Pool2d {
        kind: PoolKind::Max,
        k0: 32768,
        k1: 32768,
        s0: 1,
        s1: 1,
        p0: 16383,
        p1: 16383,
    };
    let pooled = f32([4095, 4095, 1, 1]);
    let product = Op::MulMat {
        accumulator: Precision::F32,
        activation: Precision::F32,
        hadamard: false,
    };
    let pool_back = Op::Pool2dBack {
        kind: PoolKind::Average,
        k0: 32768,
        k1: 32768,
        s0: 1,
        s1: 1,
        p0: 16383,
        p1: 16383,
    };
    let tall = overlapping(long, 4096);
    let square = f32([4096, 4096, 1, 1]);
    vec![
        ("POOL_2D", graph(pool, pooled, &[(image, a)])),
        (
            "POOL_2D_BACK",
            graph(pool_back, image, &[(pooled, a), (image, b)]),
        ),
        (
            "CONV_TRANSPOSE_2D",
            graph(
                Op::ConvTranspose2d { stride: 1 },
                f32([2559, 2559, 1, 1]),
                &[
                    (
                        Shape::contiguous(Type::F16, [512, 512, 1, 1]).expect("dense"),
                        b,
                    ),
                    (f32([2048, 2048, 1, 1]), a),
                ],
            ),
        ),
        (
            "CONV_2D",
            graph(conv(false), convolved, &[(kernel, b), (image, a)]),
        ),
        (
            "CONV_2D_DW",
            graph(conv(true), convolved, &[(kernel, b), (image, a)]),
        ),
        ("MUL_MAT", graph(product, square, &[(tall, a), (tall, b)])),
        (
            "OUT_PROD",
            graph(
                Op::OutProd {},
                square,
                &[(overlapping(4096, long), a), (overlapping(4096, long), b)],
            ),
        ),
    ]
}

/// Starts an endless graph of a new guest.
fn attack(host: &Host, name: &str, at: usize) -> Guest {
    let mut attacker = host.guest_of(1);
    let buffers = [0; 3].map(|_| attacker.alloc(BUFFER));
    let (op, graph) = endless(buffers).swap_remove(at);
    assert_eq!(op, name);
    attacker.graph(GRAPH, &graph);
    attacker.fence();
    attacker.submit(GRAPH);
    attacker
}

const OPERATORS: [&str; 7] = [
    "POOL_2D",
    "POOL_2D_BACK",
    "CONV_TRANSPOSE_2D",
    "CONV_2D",
    "CONV_2D_DW",
    "MUL_MAT",
    "OUT_PROD",
];

#[test]
fn others_run_beside_an_endless_graph_which_ends_with_its_guest() {
    for (at, name) in OPERATORS.into_iter().enumerate() {
        let host = Host::new(engine());
        let attacker = attack(&host, name, at);
        let mut other = host.guest_of(2);
        let values = [1.0, 2.0, 3.0, 4.0];
        let [x, y] = [0; 2].map(|_| other.alloc_with(&bytes(&values)));
        let sum = other.alloc(16);
        other.graph(GRAPH, &add(4, sum, x, y));
        for _ in 0..5 {
            other.submit(GRAPH);
            assert_eq!(other.read_f32(sum, 4), [2.0, 4.0, 6.0, 8.0], "{name}");
        }
        let running = host.server.sessions();
        let stats = running
            .iter()
            .find(|session| session.peer.process.as_ref().is_some_and(|p| p.uid == 1));
        let stats = stats.expect("the attacker's session is open").stats;
        assert_eq!(stats.graphs_run, 0, "{name} is not endless");
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
        assert_eq!(other.read_f32(sum, 4), [2.0, 4.0, 6.0, 8.0], "{name}");
    }
}

#[test]
fn shutdown_cancels_an_endless_graph_and_tells_the_guest() {
    for (at, name) in OPERATORS.into_iter().enumerate() {
        let host = Host::new(engine());
        let attacker = attack(&host, name, at);
        host.server.shutdown();
        assert_eq!(attacker.ended(), "the host is shutting down", "{name}");
    }
}
