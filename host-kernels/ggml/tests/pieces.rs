//! Into which pieces a run is divided, how often it waits for the device, and what the other engine
//! gets: on a device that computes after the call, as a GPU does, in a time that is known.

#[path = "../../../tests/common/changed_backend.rs"]
mod changed_backend;
#[path = "../../../tests/common/mod.rs"]
mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use changed_backend::{Changes, Queue, changed_backend};
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine, Memory, Plan, RunStatus, Turn};
use vgpu_ggml::{BackendOptions, GgmlEngine};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{
    BufferId, Graph, GraphCounts, Limits, Node, Op, Shape, Sources, Tensor, Type, ValidGraph,
    validate,
};

/// Elements of a vector.
const WIDTH: u64 = 64;

fn cpu() -> Arc<dyn Engine> {
    Arc::new(CpuEngine::new(1, None).unwrap())
}

/// A device whose nodes take so many microseconds each, after the call.
fn later(node_time: u32) -> Changes<'static> {
    Changes {
        end: "return compute_later(backend, graph);",
        node_time,
        ..Changes::default()
    }
}

/// The same, of a device that leaves the end of a run to whoever waits for it.
fn with_queue(node_time: u32) -> Changes<'static> {
    Changes {
        end: "return compute_queued(backend, graph);",
        node_time,
        queue: Queue::GraphsAndCopies,
        kind: "GGML_BACKEND_DEVICE_TYPE_GPU",
        ..Changes::default()
    }
}

fn start(folder: &Path, changes: &Changes<'_>) -> GgmlEngine {
    let path = changed_backend(&common::cached(""), folder, changes);
    GgmlEngine::start(
        &path,
        &BackendOptions {
            threads: 1,
            ..BackendOptions::default()
        },
        cpu(),
    )
    .unwrap()
}

/// A plan, and the memory of its only buffer.
struct Test {
    plan: Box<dyn Plan>,
    memory: Arc<dyn Memory>,
}

/// A graph over one buffer of vectors with `width` elements. Each node is an operator, the vector
/// of its result, and those of its sources.
fn compile(engine: &dyn Engine, width: u64, nodes: &[(Op, u32, &[u32])]) -> Test {
    let shape = Shape::contiguous(Type::F32, [width, 1, 1, 1]).unwrap();
    let of = |(_, dst, src): &(Op, u32, &[u32])| src.iter().fold(*dst, |most, &it| most.max(it));
    let count = nodes.iter().map(of).max().unwrap() + 1;
    let size = 4 * width;
    let tensor = |at| Tensor {
        shape,
        buffer: 0,
        offset: u64::from(at) * size,
    };
    let graph = Graph {
        buffers: vec![BufferId(1)],
        tensors: (0..count).map(tensor).collect(),
        nodes: { nodes.iter() }
            .map(|&(op, dst, src)| Node {
                op,
                dst,
                src: Sources::new(src.iter().map(|&it| Some(it))),
            })
            .collect(),
    };
    let memory = engine.alloc(u64::from(count) * size).unwrap();
    let limits = Limits {
        revisits: u64::MAX,
        ..Limits::default()
    };
    let valid: ValidGraph = validate(graph, engine.capabilities(), &limits, |_| {
        Some(memory.size())
    })
    .unwrap();
    let plan = engine.compile(&valid, &[Arc::clone(&memory)], &|| false);
    Test {
        plan: plan.unwrap(),
        memory,
    }
}

impl Test {
    /// Adds vector 1, of ones, `count` times to vector 0.
    fn sums(engine: &dyn Engine, count: usize) -> Test {
        let test = compile(engine, WIDTH, &vec![(Op::Add {}, 0, &[0, 1][..]); count]);
        let ones = 1f32.to_le_bytes().repeat(WIDTH as usize);
        test.memory.write(4 * WIDTH, Bytes::from(&*ones)).unwrap();
        test
    }

    /// The first number of vector 0, which is zero afterwards.
    fn take_sum(&self) -> f32 {
        let mut bytes = [0; 4];
        self.memory.read(0, BytesMut::from(&mut bytes[..])).unwrap();
        self.memory.fill(0, 4 * WIDTH, 0).unwrap();
        f32::from_le_bytes(bytes)
    }

    /// Runs the plan, in one turn.
    fn run(&mut self) -> Duration {
        let begin = Instant::now();
        let status = self.plan.launch(&Turn::new());
        assert!(matches!(status, Ok(RunStatus::Done | RunStatus::InFlight)));
        self.plan.wait().unwrap();
        begin.elapsed()
    }
}

#[test]
fn a_run_that_nobody_waits_for_waits_once_for_the_device() {
    for changes in [later(50), with_queue(50)] {
        runs_with_one_wait(&changes);
    }
}

fn runs_with_one_wait(changes: &Changes<'_>) {
    /// 10 ms of work.
    const NODES: usize = 200;
    /// Runs that other work of the machine may slow down.
    const TRIES: usize = 20;
    let folder = tempfile::tempdir().unwrap();
    let engine = start(folder.path(), changes);
    let mut test = Test::sums(&engine, NODES);
    let mut runs = Vec::new();
    for _ in 0..2 + TRIES {
        let before = engine.waits();
        let took = test.run();
        assert_eq!(test.take_sum(), NODES as f32);
        runs.push((engine.waits() - before, took));
    }
    println!("waits, and the time of the run: {runs:?}");
    // In pieces of at most 1.5 ms that are measured.
    for (waits, _) in &runs[..2] {
        assert!((5..=60).contains(waits), "{waits}");
    }
    // The device has had its pieces in time: the run is hardly longer than its work.
    let is_good = |(waits, took): &(u64, Duration)| *waits == 1 && took.as_millis() < 16;
    assert!(runs[2..].iter().any(is_good));
    assert!(runs[2..].iter().filter(|(waits, _)| *waits == 1).count() > TRIES / 4);
    // A plan of the same operators knows its pieces.
    let mut other = Test::sums(&engine, NODES);
    let before = engine.waits();
    other.run();
    assert!(engine.waits() - before <= 2);
}

#[test]
fn a_long_run_ends_its_turn_soon_after_somebody_waits() {
    // 200 ms.
    for changes in [later(500), with_queue(500)] {
        ends_its_turn_soon(&changes);
    }
}

fn ends_its_turn_soon(changes: &Changes<'_>) {
    const NODES: usize = 400;
    let folder = tempfile::tempdir().unwrap();
    let engine = start(folder.path(), changes);
    let mut test = Test::sums(&engine, NODES);
    for _ in 0..2 {
        test.run();
    }
    test.take_sum();
    // The other work of the machine may delay one of them.
    let mut late = Vec::new();
    for _ in 0..5 {
        let turn = Turn::new();
        let end = Duration::from_millis(40);
        std::thread::scope(|scope| {
            // Somebody comes while the plan runs.
            scope.spawn(|| {
                std::thread::sleep(end);
                turn.set_end(Some(turn.now()));
            });
            assert_eq!(test.plan.launch(&turn), Ok(RunStatus::Yielded));
        });
        late.push(turn.now() - end);
        let mut turns = 1;
        loop {
            let turn = Turn::new();
            turn.set_end(Some(Duration::from_millis(30)));
            turns += 1;
            if test.plan.launch(&turn) != Ok(RunStatus::Yielded) {
                break;
            }
            assert!(turns < 20, "it makes no progress");
        }
        test.plan.wait().unwrap();
        assert_eq!(test.take_sum(), NODES as f32);
    }
    println!("turns ended so late: {late:?}");
    late.sort();
    assert!(late[0] < Duration::from_millis(9), "{late:?}");
}

#[test]
fn a_plan_that_was_not_measured_yields_between_its_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let engine = start(folder.path(), &later(1000));
    let mut test = Test::sums(&engine, 40);
    let turn = Turn::new();
    turn.set_end(Some(Duration::ZERO));
    let mut turns = 1;
    // One node, and then no more than have taken 1.5 ms: one, again and again.
    while test.plan.launch(&turn) != Ok(RunStatus::Done) {
        turns += 1;
    }
    assert_eq!(turns, 40);
    assert_eq!(test.take_sum(), 40.0);
}

/// A device that leaves sums to the other engine.
fn without_sums(folder: &Path) -> GgmlEngine {
    let changes = Changes {
        lacks: "GGML_OP_CUMSUM",
        ..Changes::default()
    };
    start(folder, &changes)
}

#[test]
fn copies_of_single_nodes_are_allocated_after_compilation() {
    const NODES: usize = 8;
    let width = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    // Its memory is not that of the machine, which others use.
    let fallback = CpuEngine::new(1, None).unwrap().with_fixed_memory(1 << 30);
    let fallback: Arc<dyn Engine> = Arc::new(fallback);
    let changes = Changes {
        lacks: "GGML_OP_CUMSUM",
        ..Changes::default()
    };
    let path = changed_backend(&common::cached(""), folder.path(), &changes);
    let engine = GgmlEngine::start(
        &path,
        &BackendOptions {
            threads: 1,
            ..BackendOptions::default()
        },
        Arc::clone(&fallback),
    )
    .unwrap();
    let used = || (1 << 30) - fallback.memory().free;
    let nodes = vec![(Op::Cumsum {}, 0, &[1][..]); NODES];
    let mut test = compile(&engine, width, &nodes);
    let counts = GraphCounts {
        buffers: 1,
        tensors: 2,
        nodes: NODES,
    };
    let copies = NODES as u64 * 2 * 4 * width;
    let announced = engine.compile_bytes(&counts);
    assert!(announced < copies / 10, "{announced}");
    assert_eq!(used(), 0, "compilation allocates no copy");
    let said = test.plan.plan_bytes();
    assert!(said >= copies, "{said} of {copies}");
    test.plan.allocate().unwrap();
    let kept = test.plan.plan_bytes();
    assert!((copies..=said).contains(&kept), "{kept} of {said}");
    assert_eq!(used(), copies);
    test.run();
}

#[test]
fn what_the_other_engine_runs_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let engine = without_sums(folder.path());
    let nodes = [
        (Op::Add {}, 0, &[0, 1][..]),
        (Op::Cumsum {}, 2, &[1]),
        (Op::Add {}, 0, &[0, 2]),
        (Op::Add {}, 0, &[0, 2]),
    ];
    let mut test = compile(&engine, 1 << 18, &nodes);
    assert_eq!(engine.fallback_use(), Some(Default::default()));
    for _ in 0..3 {
        test.run();
    }
    let used = engine.fallback_use().unwrap();
    assert_eq!((used.device_nodes, used.other_nodes), (9, 3));
    assert!(
        !used.device_time.is_zero() && !used.other_time.is_zero(),
        "{used:?}"
    );
}
