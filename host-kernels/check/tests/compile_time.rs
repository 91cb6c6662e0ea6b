//! The time of compilation is proportional to the number of nodes.

use std::sync::Arc;
use std::time::Duration;

use vgpu_cpu::CpuEngine;
use vgpu_engine::work;
use vgpu_engine::{Engine, EngineError, Memory};
use vgpu_transport::ir::{
    BufferId, Graph, Limits, Node, Op, Precision, Shape, Sources, Tensor, Type, ValidGraph,
    validate,
};

/// Bytes of a row of 32 floats.
const ROW: u64 = 128;

/// A graph of `nodes` small nodes whose results are never overwritten: nothing proves that a result
/// is dead, so the search for groups looks at all later nodes.
fn hostile(nodes: usize) -> Graph {
    let mut graph = Graph {
        buffers: vec![BufferId(1)],
        ..Graph::default()
    };
    let tensor = |graph: &mut Graph, at: usize, ne: [u64; 4]| {
        graph.tensors.push(Tensor {
            shape: Shape::contiguous(Type::F32, ne).expect("a row"),
            buffer: 0,
            offset: at as u64 * ROW,
        });
        graph.tensors.len() as u32 - 1
    };
    let row = [32, 1, 1, 1];
    let weights = tensor(&mut graph, 0, [32, 32, 1, 1]);
    let mut last = tensor(&mut graph, 40, row);
    for at in 0..nodes {
        let dst = tensor(&mut graph, 64 + at, row);
        let (op, src) = match at % 4 {
            0 => (Op::Add {}, [Some(last), Some(last)]),
            1 => (Op::RmsNorm { eps: 0.1 }, [Some(last), None]),
            2 => {
                let (accumulator, activation) = (Precision::Default, Precision::Default);
                let hadamard = false;
                let op = Op::MulMat {
                    accumulator,
                    activation,
                    hadamard,
                };
                (op, [Some(weights), Some(last)])
            }
            _ => (Op::Add {}, [Some(last), Some(last)]),
        };
        let src = Sources::new(src);
        graph.nodes.push(Node { op, dst, src });
        last = dst;
    }
    graph
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

fn size(nodes: usize) -> u64 {
    (nodes as u64 + 64) * ROW
}

fn valid(engine: &CpuEngine, words: &[u32], nodes: usize) -> ValidGraph {
    let graph = Graph::decode(words).expect("a graph");
    let limits = Limits::default();
    let graph = validate(graph, engine.capabilities(), &limits, |_| Some(size(nodes)));
    graph.expect("a valid graph")
}

/// The processor time from the words of a graph to its plan: decoding, validation, the estimate of
/// the work, fusion and compilation.
fn compile_time(engine: &CpuEngine, nodes: usize) -> Duration {
    let words = hostile(nodes).encode();
    let memory: Arc<dyn Memory> = engine.alloc(size(nodes)).expect("memory");
    let begin = now();
    let graph = valid(engine, &words, nodes);
    let speed = |node: &Node| engine.speed_of(graph.graph(), node);
    work::check(graph.graph(), speed, engine.max_node_time()).expect("little work");
    let plan = engine.compile(&graph, &[memory], &|| false);
    plan.expect("the engine compiles a valid graph");
    now() - begin
}

#[test]
fn the_time_of_compilation_is_proportional_to_the_nodes() {
    let engine = CpuEngine::new(1, Some(1 << 30)).expect("an engine");
    let few = 8 << 10;
    let small = (0..3).map(|_| compile_time(&engine, few)).min();
    let large = compile_time(&engine, 16 * few);
    let ratio = large.as_secs_f64() / small.map_or(0.0, |time| time.as_secs_f64());
    // 16 if the time is linear, 256 if it is quadratic.
    assert!(
        ratio < 64.0,
        "{small:?} for {few} nodes, {large:?} for 16 times as many"
    );
}

#[test]
fn compilation_ends_soon_after_it_is_cancelled() {
    let engine = CpuEngine::new(1, Some(1 << 30)).expect("an engine");
    let nodes = 32 << 10;
    let graph = valid(&engine, &hostile(nodes).encode(), nodes);
    let memory: Arc<dyn Memory> = engine.alloc(size(nodes)).expect("memory");
    let asked = std::cell::Cell::new(0);
    let count = || {
        asked.set(asked.get() + 1);
        false
    };
    engine
        .compile(&graph, &[Arc::clone(&memory)], &count)
        .expect("nobody cancels");
    let questions = asked.get();
    assert!(questions >= nodes / 4096, "{questions} questions");
    // Cancelled at any question, compilation asks once more at most.
    for at in [1, 2, questions / 2, questions] {
        asked.set(0);
        let is_cancelled = || {
            asked.set(asked.get() + 1);
            asked.get() >= at
        };
        let outcome = engine.compile(&graph, &[Arc::clone(&memory)], &is_cancelled);
        assert_eq!(
            outcome.err(),
            Some(EngineError::Cancelled),
            "at question {at}"
        );
        assert!(
            asked.get() <= at + 1,
            "{} questions, cancelled at {at}",
            asked.get()
        );
    }
}
