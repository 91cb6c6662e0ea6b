//! SIGTERM ends `vgpu serve` at once, whatever the engine computes.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::time::{Duration, Instant};

use common::Build;
use rustix::process::Signal;
use served::{Scratch, Serve, vgpu};
use vgpu_transport::ir::{BufferId, Graph, Op, PoolKind, Precision, Shape, Type};
use vgpu_transport::wire::GraphId;

/// Bytes of each buffer.
const BUFFER: u64 = 64 << 20;

/// A process that has not ended after this time hangs. An orderly end takes a fraction of a second,
/// more on a machine with other work.
const HANG: Duration = Duration::from_secs(10);

fn f32(ne: [u64; 4]) -> Shape {
    Shape::contiguous(Type::F32, ne).expect("a dense tensor")
}

/// `op` on whole buffers.
fn graph(op: Op, to: (Shape, BufferId), from: &[(Shape, BufferId)]) -> Graph {
    let mut build = Build::default();
    let to = build.place(to.0, to.1, 0);
    let from: Vec<u32> = { from.iter() }
        .map(|&(shape, buffer)| build.place(shape, buffer, 0))
        .collect();
    build.node(op, to, &from);
    build.0
}

/// Hours of pooling.
fn pooling([a, _, dst]: [BufferId; 3]) -> Graph {
    let op = Op::Pool2d {
        kind: PoolKind::Max,
        k0: 512,
        k1: 512,
        s0: 1,
        s1: 1,
        p0: 0,
        p1: 0,
    };
    let (image, pooled) = (f32([4096, 4096, 1, 1]), f32([3585, 3585, 1, 1]));
    graph(op, (pooled, dst), &[(image, a)])
}

/// Minutes of a product of matrices with overlapping rows.
fn product([a, b, dst]: [BufferId; 3]) -> Graph {
    let op = Op::MulMat {
        accumulator: Precision::F32,
        activation: Precision::F32,
        hadamard: false,
    };
    let mut tall = f32([60 * BUFFER / 4 / 4096, 4096, 1, 1]);
    tall.nb[1] = 4;
    (tall.nb[2], tall.nb[3]) = (4 * 4096, 4 * 4096);
    let square = f32([4096, 4096, 1, 1]);
    graph(op, (square, dst), &[(tall, a), (tall, b)])
}

fn ends_while_it_runs(test: &str, endless: fn([BufferId; 3]) -> Graph) {
    let scratch = Scratch::new(test);
    let socket = scratch.socket();
    let endpoint = format!("unix:{}", socket.display());
    let serve = Serve::of(vgpu(&[
        "serve",
        "--listen",
        &endpoint,
        "--threads",
        "1",
        "--memory",
        "512M",
        "--max-node-time",
        "4000000000",
    ]));
    let mut guest = serve.guest(&socket);
    let buffers = [0; 3].map(|_| guest.alloc(BUFFER));
    guest.graph(GraphId(1), &endless(buffers));
    guest.fence();
    guest.submit(GraphId(1));
    // A request behind the graph: the reply comes only if the graph is not endless.
    guest.send(&vgpu_transport::wire::Request::Fence {});
    std::thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    serve.signal(Signal::TERM);
    assert_eq!(guest.ended(), "the host is shutting down");
    let (status, log) = serve.wait();
    let took = start.elapsed();
    println!("{test}: vgpu serve has ended {took:?} after SIGTERM");
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(took < HANG, "{took:?}: {log}");
}

#[test]
fn sigterm_ends_pooling() {
    ends_while_it_runs("stop-pooling", pooling);
}

#[test]
fn sigterm_ends_a_long_product() {
    ends_while_it_runs("stop-product", product);
}
