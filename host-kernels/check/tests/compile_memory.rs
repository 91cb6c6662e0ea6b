//! The memory that graphs of a hostile guest take while they are decoded, validated and compiled,
//! and afterwards, beside what an allocator counts: no more than the head of the image announces,
//! and than the plan reports.

#[allow(dead_code)] // as in `common`
#[path = "common/counting.rs"]
mod counting;
#[path = "../../../host-executor/tests/common/operations.rs"]
mod operations;
#[path = "../../shim/device.rs"]
mod shim;

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use counting::{Counting, counted};
use operations::{Operation, every_operator, of_types};
use vgpu_cpu::CpuEngine;
use vgpu_cuda::{CudaEngine, LaunchPolicy};
use vgpu_engine::{Engine, EngineError, Memory};
use vgpu_transport::ir::{
    BufferId, Graph, GraphCounts, Limits, Node, Op, Shape, Sources, Tensor, Type, validate,
};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Nodes of a graph of one operation: more than a plan has fixed costs.
const NODES: usize = 300;

/// What the executor allocates for each buffer of a graph besides.
const EXECUTOR_BUFFER_BYTES: u64 = 32;

/// A graph, and the bytes of each of its buffers.
struct Hostile {
    name: String,
    graph: Graph,
    sizes: Vec<u64>,
}

/// Makes graphs.
#[derive(Default)]
struct Build {
    graph: Graph,
    sizes: Vec<u64>,
}

impl Build {
    /// A tensor in a new buffer.
    fn place(&mut self, shape: Shape) -> u32 {
        self.graph
            .buffers
            .push(BufferId(self.sizes.len() as u64 + 1));
        let len = shape.byte_len().expect("a small shape");
        self.sizes.push(len.next_multiple_of(256).max(256));
        self.tensor(shape, self.sizes.len() - 1, 0)
    }

    fn tensor(&mut self, shape: Shape, buffer: usize, offset: u64) -> u32 {
        self.graph.tensors.push(Tensor {
            shape,
            buffer: buffer as u32,
            offset,
        });
        self.graph.tensors.len() as u32 - 1
    }

    fn node(&mut self, op: Op, dst: u32, src: &[u32]) {
        let src = Sources::new(src.iter().map(|&src| Some(src)));
        self.graph.nodes.push(Node { op, dst, src });
    }

    fn named(self, name: &str) -> Hostile {
        Hostile {
            name: name.into(),
            graph: self.graph,
            sizes: self.sizes,
        }
    }
}

fn row(elements: u64) -> Shape {
    Shape::contiguous(Type::F32, [elements, 1, 1, 1]).expect("a row")
}

/// [`NODES`] nodes of one operation, each on the same tensors.
fn repeated(operation: &Operation) -> Hostile {
    let mut build = Build::default();
    let dst = build.place(operation.dst);
    let mut src = Vec::new();
    for (i, &shape) in operation.src.iter().enumerate() {
        let in_place = operation.is_in_place && i == 0;
        src.push(if in_place { dst } else { build.place(shape) });
    }
    (0..NODES).for_each(|_| build.node(operation.op, dst, &src));
    build.named(&operation.name)
}

/// Nodes of tensors of their own, in one buffer: the search for groups looks far, and finds rows
/// that can share a phase.
fn rows_of_their_own(nodes: usize) -> Hostile {
    let mut build = Build::default();
    let first = build.place(row(32 * (nodes as u64 + 1)));
    build.graph.tensors[first as usize].shape = row(32);
    let mut last = first;
    for at in 0..nodes {
        let dst = build.tensor(row(32), 0, 128 * (at as u64 + 1));
        match at % 3 {
            0 => build.node(Op::Add {}, dst, &[first, last]),
            1 => build.node(Op::RmsNorm { eps: 0.1 }, dst, &[last]),
            _ => build.node(Op::Mul {}, dst, &[first, last]),
        }
        last = dst;
    }
    build.named("rows of their own")
}

/// One node, and a long table of tensors that it does not name.
fn unused_tensors(tensors: usize) -> Hostile {
    let mut build = Build::default();
    let row = row(32);
    let first = build.place(row);
    for _ in 1..tensors {
        build.tensor(row, 0, 0);
    }
    build.node(Op::Add {}, first, &[first, first]);
    build.named("unused tensors")
}

/// One node, and a long table of buffers.
fn many_buffers(buffers: usize) -> Hostile {
    let mut build = Build::default();
    let first = build.place(row(32));
    for _ in 1..buffers {
        build.place(row(32));
    }
    build.node(Op::Add {}, first, &[first, first]);
    build.named("many buffers")
}

/// Many buffers, and many sequences of different operators between nodes that the CUDA engine
/// leaves to the CPU: sums that are quantised.
fn sequences_over_many_buffers(buffers: usize, sequences: usize) -> Hostile {
    let mut build = Build::default();
    let first = build.place(row(32));
    for _ in 1..buffers {
        build.place(row(32));
    }
    let quantised = Shape::contiguous(Type::Q8_0, [32, 1, 1, 1]).expect("a block");
    let quantised = build.place(quantised);
    for sequence in 0..sequences {
        let mut digits = sequence;
        for _ in 0..4 {
            let op = [Op::Add {}, Op::Sub {}, Op::Mul {}, Op::Div {}][digits % 4];
            build.node(op, first, &[first, first]);
            digits /= 4;
        }
        build.node(Op::Add {}, quantised, &[quantised, first]);
    }
    build.named("sequences over many buffers")
}

/// Compiles a graph as the executor does. Returns whether the engine runs it.
fn check(engine: &dyn Engine, hostile: &Hostile) -> bool {
    let Hostile { name, graph, sizes } = hostile;
    let words = graph.encode();
    let counts = GraphCounts::of_image(&words).expect("an image");
    let alloc = |&size: &u64| engine.alloc(size).expect("memory");
    let memory: Vec<Arc<dyn Memory>> = sizes.iter().map(alloc).collect();
    let compile = || {
        let graph = Graph::decode(&words).expect("an image");
        let limits = Limits::default();
        let size_of = |id: BufferId| sizes.get(id.0 as usize - 1).copied();
        let valid = validate(graph, engine.capabilities(), &limits, size_of);
        engine.compile(&valid.expect("a valid graph"), &memory, &|| false)
    };
    // The first graph starts what an engine starts when it is needed.
    match compile() {
        Ok(_) => {}
        Err(EngineError::Unsupported { .. }) => return false,
        Err(error) => panic!("{name}: {error}"),
    }
    let (plan, allocated) = counted(compile);
    let plan = plan.expect("it was compiled before");
    let announced = counts.decoded_bytes()
        + EXECUTOR_BUFFER_BYTES * counts.buffers as u64
        + engine.compile_bytes(&counts);
    let (kept, reported) = (allocated.kept, plan.plan_bytes());
    println!(
        "{} {name}: {} nodes, {announced} bytes announced, {} at most, {reported} reported, {kept} \
         kept",
        engine.name(),
        counts.nodes,
        allocated.most
    );
    assert!(
        allocated.most <= announced,
        "{name}: {announced} bytes were announced, {} were allocated at a time",
        allocated.most
    );
    assert!(
        kept <= reported,
        "{name}: {reported} bytes are reported, {kept} are kept"
    );
    drop(plan);
    // What plans have in common goes with the last one.
    let (_, allocated) = counted(|| drop(compile()));
    assert!(
        allocated.kept <= MAX_LEFT,
        "{name}: {} bytes are left of a plan that is gone",
        allocated.kept
    );
    true
}

/// Bytes that an engine may keep of a plan that is gone: a table that has grown.
const MAX_LEFT: u64 = 4 << 10;

/// Runs a test on a thread with room for the frames of a build without optimisation.
fn on_large_stack(test: impl FnOnce() + Send) {
    thread::scope(|scope| {
        let builder = thread::Builder::new().stack_size(64 << 20);
        let thread = builder.spawn_scoped(scope, test).expect("a thread");
        if let Err(panic) = thread.join() {
            resume_unwind(panic);
        }
    });
}

fn check_all(engine: &dyn Engine) {
    let operations: Vec<Operation> = every_operator().into_iter().chain(of_types()).collect();
    let ran = operations.iter().map(repeated);
    let ran = ran.filter(|hostile| check(engine, hostile)).count();
    assert!(ran > 100, "only {ran} of {} operations", operations.len());
    for hostile in [
        rows_of_their_own(20_000),
        unused_tensors(200_000),
        many_buffers(2000),
        sequences_over_many_buffers(2000, 200),
    ] {
        assert!(check(engine, &hostile), "{}", hostile.name);
    }
}

#[test]
fn graphs_take_what_they_announce_on_the_cpu() {
    on_large_stack(|| check_all(&CpuEngine::new(3, None).expect("an engine")));
}

#[test]
fn graphs_take_what_they_announce_on_cuda() {
    on_large_stack(|| {
        let device = Arc::new(shim::Shim::default());
        check_all(&CudaEngine::new(device).expect("an engine"));
    });
}

/// Nodes of which the CUDA engine makes about as many launches as it may.
#[test]
fn divided_nodes_take_what_they_announce() {
    on_large_stack(check_divided);
}

fn check_divided() {
    let engine = |longest: u64| {
        let policy = LaunchPolicy {
            longest_launch: Duration::from_nanos(longest),
            ..LaunchPolicy::default()
        };
        let device = Arc::new(shim::Shim::default());
        CudaEngine::with_policy(device, policy).expect("an engine")
    };
    let engines: Vec<CudaEngine> = [2, 6, 10, 14, 18].map(|log| engine(1 << log)).into();
    let mut divided = 0;
    for operation in every_operator().iter().chain(&of_types()) {
        let mut hostile = repeated(operation);
        hostile.graph.nodes.truncate(30);
        // The shortest launches of which there are not too many.
        let first = engines.iter().position(|engine| check(engine, &hostile));
        divided += usize::from(first.is_some_and(|first| first > 0));
    }
    assert!(divided > 10, "only {divided} operations have many parts");
}
