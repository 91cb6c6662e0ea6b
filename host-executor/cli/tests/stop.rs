//! SIGTERM ends `vgpu serve` at once, whatever the engine computes.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::time::{Duration, Instant};

use common::{Build, TIMEOUT};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};
use served::{Scratch, Serve, vgpu};
use vgpu_transport::ir::{BufferId, Graph, Op, PoolKind, Precision, Shape, Type};
use vgpu_transport::wire::GraphId;

/// Bytes of each buffer.
const BUFFER: u64 = 64 << 20;

/// The processor time that the executor uses after SIGTERM at most. One thread computes, so that
/// the engine goes on for no longer.
const AFTER_SIGTERM: Duration = Duration::from_secs(1);

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
    let before = processor_time(&serve);
    serve.signal(Signal::TERM);
    assert_eq!(guest.ended(), "the host is shutting down");
    // The process has ended, and its parent has not taken its status: its times are still there.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let start = Instant::now();
    let ended = || waitid(WaitId::Pid(Pid::from_child(&serve.child)), options);
    while ended().expect("a child").is_none() {
        assert!(start.elapsed() < TIMEOUT, "vgpu serve does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let used = processor_time(&serve) - before;
    let (status, log) = serve.wait();
    println!("{test}: vgpu serve has used {used:?} after SIGTERM");
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(used <= AFTER_SIGTERM, "{used:?}: {log}");
}

/// The processor time of all threads of an executor, in user space and in the kernel.
fn processor_time(serve: &Serve) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{}/stat", serve.child.id())).expect("a child");
    // The fields behind the name, which ends with the last parenthesis; see proc_pid_stat(5).
    let (_, fields) = stat.rsplit_once(") ").expect("a name");
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = [11, 12].map(|i| fields[i].parse::<u64>().expect("a time"));
    let ticks: u64 = ticks.iter().sum();
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

#[test]
fn sigterm_ends_pooling() {
    ends_while_it_runs("stop-pooling", pooling);
}

#[test]
fn sigterm_ends_a_long_product() {
    ends_while_it_runs("stop-product", product);
}
