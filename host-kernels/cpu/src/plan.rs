//! From a graph to steps.

use std::any::Any;
use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use vgpu_transport::ir::{Graph, Node, Op, Tensor};

use super::gemm::Activation;
use super::memory::CpuMemory;
use super::ops;
use super::pool::{Pool, Started, Worker};
use super::stages::{Part, SMALL, Stages, Step, Touches, elements, is_small, only_shares};
use super::view::View;
use vgpu_engine::fuse::{Arrangement, Kind};
use vgpu_engine::{EngineError, Memory, Plan, RunStatus, RunError, NodeTiming, Turn};

/// A graph, compiled: steps over pointers into buffers that are kept alive.
pub(super) struct CpuPlan {
    steps: Vec<Step>,
    scratch_bytes: usize,
    /// Bytes that a node leaves for those that follow.
    kept_bytes: usize,
    pool: Arc<Pool>,
    /// A run that has yielded.
    started: Option<Started>,
    /// What the pointers in the steps point into.
    buffers: Vec<Arc<dyn Memory>>,
    /// How often the bytes of each had moved when the plan was compiled.
    moves: Vec<u64>,
}

impl CpuPlan {
    /// Compiles a graph. With `fuses`, nodes become one kernel where that gives the same, and threads do not meet where
    /// they need not.
    pub(super) fn compile(
        graph: &Graph,
        buffers: &[Arc<dyn Memory>],
        pool: &Arc<Pool>,
        fuses: bool,
    ) -> Result<CpuPlan, EngineError> {
        let memories = memories(buffers).ok_or(EngineError::ForeignMemory)?;
        let (views, moves) = views(graph, &memories)?;
        let arrangement = match fuses {
            true => Arrangement::of(graph, u64::MAX),
            false => Arrangement::plain(graph),
        };
        let mut compiler = Compiler {
            graph: &arrangement.graph,
            origin: &arrangement.origin,
            views: &views,
            keeper: Keeper::default(),
            workers: pool.workers(),
            stages: Stages::new(fuses),
        };
        let mut at = 0;
        while at < arrangement.graph.nodes.len() {
            let group = arrangement.group_at(at);
            at = match group {
                Some((kind, nodes)) if compiler.group(kind, nodes.clone())? => nodes.end,
                _ => {
                    compiler.node(at)?;
                    at + 1
                }
            };
        }
        let kept_bytes = compiler.keeper.bytes.get();
        let (steps, scratch_bytes) = compiler.stages.finish();
        Ok(CpuPlan {
            steps,
            scratch_bytes,
            kept_bytes,
            pool: Arc::clone(pool),
            started: None,
            buffers: buffers.to_vec(),
            moves,
        })
    }
}

/// A plan in the making.
struct Compiler<'a> {
    /// In our order, and where nodes were in the guest's.
    graph: &'a Graph,
    origin: &'a [usize],
    views: &'a [View],
    keeper: Keeper,
    workers: usize,
    stages: Stages,
}

impl Compiler<'_> {
    fn operands(&self, at: usize) -> Operands<'_> {
        Operands {
            views: self.views,
            node: &self.graph.nodes[at],
            keeper: &self.keeper,
            workers: self.workers,
        }
    }

    /// Compiles nodes as one. `false`, and nothing done, where there is no kernel for them.
    fn group(&mut self, kind: Kind, nodes: Range<usize>) -> Result<bool, EngineError> {
        let operands: Vec<Operands<'_>> = nodes.clone().map(|at| self.operands(at)).collect();
        let Some(compiled) = ops::compile_group(kind, &operands) else {
            return Ok(false);
        };
        // What can fail in a group is an index, which the node that ends it reads.
        let named = match kind {
            Kind::RopeRows => nodes.end - 1,
            _ => nodes.start,
        };
        let shares = matches!(kind, Kind::Norm | Kind::RopeRows);
        self.add(nodes, named, compiled, shares);
        Ok(true)
    }

    /// Compiles a node by itself.
    fn node(&mut self, at: usize) -> Result<(), EngineError> {
        let op = &self.graph.nodes[at].op;
        let compiled = ops::compile(op, &self.operands(at))?;
        self.add(at..at + 1, at, compiled, only_shares(op));
        Ok(())
    }

    /// Adds the kernels of some nodes, `named` for errors. `shares`: if there is one kernel, it deals no chunks.
    fn add(&mut self, nodes: Range<usize>, named: usize, compiled: Compiled, shares: bool) {
        let graph = self.graph;
        let op = graph.nodes[named].op.kind().ggml_name();
        let all = self.origin[nodes.clone()].to_vec();
        let shares = shares && compiled.kernels.len() == 1;
        let scratch_bytes = compiled.scratch_bytes;
        let converts = self.keeper.converts.take();
        let (rows, makes) = (self.keeper.rows.take(), self.keeper.makes.take());
        self.keeper.rows.set(makes);
        self.stages.needs(scratch_bytes);
        for (i, kernel) in compiled.kernels.into_iter().enumerate() {
            let is_first = i == 0 && converts.is_some();
            let computes = if is_first { Vec::new() } else { all.clone() };
            let part = Part::new(kernel, computes, self.origin[named], op);
            if i == 0
                && let Some(source) = converts
            {
                let x = { graph.nodes[nodes.start].src.as_slice() }[1].expect("activations");
                let x = &graph.tensors[x as usize];
                let is_small = elements(x) <= SMALL;
                let follows = rows == Some(source);
                (self.stages).share(part, Touches::reading(x), is_small, 0, follows);
            } else if shares {
                let is_small = nodes.clone().all(|at| is_small(graph, at));
                let touches = Touches::of(graph, nodes.clone());
                (self.stages).share(part, touches, is_small, scratch_bytes, false);
            } else {
                self.stages.alone(part);
            }
        }
        for at in nodes {
            written(&graph.nodes[at]).for_each(|index| self.keeper.written(&self.views[index]));
        }
    }
}

/// The engine's own type of memory; `None` if any is another engine's.
fn memories(buffers: &[Arc<dyn Memory>]) -> Option<Vec<&CpuMemory>> {
    buffers.iter().map(cpu_memory).collect()
}

fn cpu_memory(memory: &Arc<dyn Memory>) -> Option<&CpuMemory> {
    memory.as_any().downcast_ref()
}

fn moves(memories: &[&CpuMemory]) -> Vec<u64> {
    memories.iter().map(|memory| memory.moves()).collect()
}

/// Where the tensors of a graph lie, and how often the bytes of each memory had moved by then.
fn views(graph: &Graph, memories: &[&CpuMemory]) -> Result<(Vec<View>, Vec<u64>), EngineError> {
    let place = |tensor: &Tensor| {
        // Validation has computed it, too.
        let len = tensor.shape.extent().unwrap_or(u64::MAX);
        (memories[tensor.buffer as usize], tensor.offset, len)
    };
    for index in graph.nodes.iter().flat_map(written) {
        let (memory, offset, len) = place(&graph.tensors[index]);
        memory.own(offset, len)?;
    }
    loop {
        let before = moves(memories);
        let views = graph.tensors.iter().map(|tensor| {
            let (memory, offset, len) = place(tensor);
            Ok(View::new(memory.locate(offset, len)?, &tensor.shape))
        });
        let views = views.collect::<Result<Vec<View>, EngineError>>()?;
        // A tensor that lay in several places was put together, which may have moved others. That ends: each time
        // there are fewer places.
        if moves(memories) == before {
            return Ok((views, before));
        }
    }
}

/// The tensors that a node writes: its destination, and what optimisers keep in their sources.
fn written(node: &Node) -> impl Iterator<Item = usize> {
    let is_optimiser = matches!(node.op, Op::OptStepAdamw {} | Op::OptStepSgd {});
    let sources = node.src.as_slice().iter().flatten();
    let sources = sources.filter(move |_| is_optimiser);
    sources.chain([&node.dst]).map(|&index| index as usize)
}

impl Plan for CpuPlan {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        let started = self.started.take();
        if started.is_none() && !self.is_current() {
            return Err(RunError::Stale);
        }
        let started =
            started.unwrap_or_else(|| self.pool.start(self.scratch_bytes, self.kept_bytes));
        self.started = self.pool.run(&self.steps, started, turn)?;
        Ok(match self.started {
            None => RunStatus::Done,
            Some(_) => RunStatus::Yielded,
        })
    }

    fn profile(&mut self) -> Result<Vec<NodeTiming>, RunError> {
        if !self.is_current() {
            return Err(RunError::Stale);
        }
        // One that has yielded begins anew.
        self.started = None;
        let started = self.pool.start(self.scratch_bytes, self.kept_bytes);
        let ends = self.pool.run_timed(&self.steps, started)?;
        let (mut spans, mut before) = (Vec::<NodeTiming>::new(), Duration::ZERO);
        for (step, end) in self.steps.iter().zip(ends) {
            let nodes: Vec<usize> = { step.parts.iter() }
                .flat_map(|part| part.nodes.iter().copied())
                .collect();
            match spans.last_mut().filter(|span| span.nodes == nodes) {
                Some(span) => span.seconds += (end - before).as_secs_f64(),
                // What only prepares counts for what follows.
                None if nodes.is_empty() => continue,
                None => spans.push(NodeTiming {
                    nodes,
                    seconds: (end - before).as_secs_f64(),
                }),
            }
            before = end;
        }
        Ok(spans)
    }

    fn is_current(&self) -> bool {
        let mut now = self.buffers.iter().map(cpu_memory);
        let mut then = self.moves.iter();
        now.all(|memory| memory.map(CpuMemory::moves) == then.next().copied())
    }
}

/// What nodes tell those that follow: the tensor that was last converted, and to what. (The products with several weights, of queries, keys and values or of a gate, begin with the same activations.)
#[derive(Default)]
struct Keeper {
    kept: Cell<Option<(View, Activation)>>,
    /// The most that was ever to be kept.
    bytes: Cell<usize>,
    /// What the first kernel of the node that is compiled converts, if it does nothing else.
    converts: Cell<Option<View>>,
    /// What the node that is compiled makes row by row, and what the one before has made.
    makes: Cell<Option<View>>,
    rows: Cell<Option<View>>,
}

impl Keeper {
    /// Something was written there: what was made of it holds no longer.
    fn written(&self, view: &View) {
        if self.kept.get().is_some_and(|(kept, _)| kept.overlaps(view)) {
            self.kept.set(None);
        }
    }
}

/// What an operator's file sees of a node.
pub(crate) struct Operands<'a> {
    views: &'a [View],
    node: &'a Node,
    keeper: &'a Keeper,
    workers: usize,
}

impl Operands<'_> {
    /// The operator with its parameters.
    pub(crate) fn op(&self) -> &Op {
        &self.node.op
    }

    /// The destination.
    pub(crate) fn dst(&self) -> View {
        self.views[self.node.dst as usize]
    }

    /// Source `i`, which the operator's rules demand.
    pub(crate) fn src(&self, i: usize) -> View {
        self.optional(i)
            .expect("validation refuses operations without a source they need")
    }

    /// Source `i`, if there is one.
    pub(crate) fn optional(&self, i: usize) -> Option<View> {
        let index = self.node.src.as_slice().get(i).copied().flatten()?;
        Some(self.views[index as usize])
    }

    /// Whether the kept memory ([`Worker::kept`]) already has `source` as `activation` from a node before this one. If not,
    /// it is for this node's first kernel to write there: so many bytes, for itself and the nodes that follow.
    pub(crate) fn keep(&self, source: View, activation: Activation, bytes: usize) -> bool {
        let keeper = self.keeper;
        keeper.bytes.set(keeper.bytes.get().max(bytes));
        keeper.kept.replace(Some((source, activation))) == Some((source, activation))
    }

    /// The node has one kernel, of which each thread makes its [share](Worker::share) of the rows of `view`, and
    /// touches nothing that belongs to other rows.
    pub(crate) fn makes_rows(&self, view: View) {
        self.keeper.makes.set(Some(view));
    }

    /// Whether `view` was made so just before: a kernel that takes the same rows need not wait for other threads.
    pub(crate) fn follows_rows(&self, view: View) -> bool {
        self.keeper.rows.get() == Some(view)
    }

    /// The first kernel reads `source`, which is the node's second, writes [kept memory](Operands::keep) and does nothing
    /// else.
    pub(crate) fn converts_first(&self, source: View) {
        self.keeper.converts.set(Some(source));
    }

    /// How many threads will run each kernel.
    pub(crate) fn workers(&self) -> usize {
        self.workers
    }
}

/// What every thread runs between two barriers.
pub(crate) type Kernel = Box<dyn Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync>;

/// A node, compiled: kernels that run one after the other.
pub(crate) struct Compiled {
    /// The kernels, with a barrier after each.
    pub(crate) kernels: Vec<Kernel>,
    /// Shared working memory they need, in bytes.
    pub(crate) scratch_bytes: usize,
}

impl Compiled {
    /// A single kernel that needs no working memory.
    pub(crate) fn one(
        kernel: impl Fn(&Worker<'_>) -> Result<(), Fault> + Send + Sync + 'static,
    ) -> Compiled {
        Compiled {
            kernels: vec![Box::new(kernel)],
            scratch_bytes: 0,
        }
    }
}

/// Why a kernel stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An index in tensor data points nowhere.
    Index {
        /// The index.
        index: i64,
        /// How many there are.
        count: u64,
    },
    /// The kernel panicked: a bug of ours.
    Panic {
        /// What it said.
        message: String,
    },
}

impl Fault {
    pub(super) fn panic(payload: &(dyn Any + Send)) -> Fault {
        let message = payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| payload.downcast_ref::<&str>().map(|&s| s.to_owned()))
            .unwrap_or_else(|| "a panic without a message".to_owned());
        Fault::Panic { message }
    }
}

/// Checks an index read from tensor data.
pub(crate) fn check_index(index: i64, count: usize) -> Result<usize, Fault> {
    usize::try_from(index)
        .ok()
        .filter(|&i| i < count)
        .ok_or(Fault::Index {
            index,
            count: count as u64,
        })
}
