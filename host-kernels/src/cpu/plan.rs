//! From a graph to steps.

use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use vgpu_transport::ir::{Graph, Node, Op, Tensor, Type};

use super::memory::CpuMemory;
use super::ops;
use super::pool::{Pool, Started, Worker};
use super::view::View;
use crate::engine::{EngineError, Memory, Plan, Progress, RunError, Span, Turn};

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
    pub(super) fn compile(
        graph: &Graph,
        buffers: &[Arc<dyn Memory>],
        pool: &Arc<Pool>,
    ) -> Result<CpuPlan, EngineError> {
        let memories = memories(buffers).ok_or(EngineError::ForeignMemory)?;
        let (views, moves) = views(graph, &memories)?;
        let mut plan = CpuPlan {
            steps: Vec::new(),
            scratch_bytes: 0,
            kept_bytes: 0,
            pool: Arc::clone(pool),
            started: None,
            buffers: buffers.to_vec(),
            moves,
        };
        let keeper = Keeper::default();
        for (i, node) in graph.nodes.iter().enumerate() {
            let operands = Operands {
                views: &views,
                node,
                keeper: &keeper,
                workers: pool.workers(),
            };
            let compiled = ops::compile(&node.op, &operands)?;
            plan.scratch_bytes = plan.scratch_bytes.max(compiled.scratch_bytes);
            let op = node.op.kind().ggml_name();
            plan.steps
                .extend(compiled.kernels.into_iter().map(|kernel| Step {
                    kernel,
                    node: i,
                    op,
                }));
            written(node).for_each(|index| keeper.written(&views[index]));
        }
        plan.kept_bytes = keeper.bytes.get();
        Ok(plan)
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
    fn run(&mut self) -> Result<(), RunError> {
        let turn = Turn::new();
        while self.advance(&turn)? == Progress::Yielded {}
        Ok(())
    }

    fn advance(&mut self, turn: &Turn) -> Result<Progress, RunError> {
        let started = self.started.take();
        if started.is_none() && !self.is_current() {
            return Err(RunError::Moved);
        }
        let started =
            started.unwrap_or_else(|| self.pool.start(self.scratch_bytes, self.kept_bytes));
        self.started = self.pool.run(&self.steps, started, turn)?;
        Ok(match self.started {
            None => Progress::Done,
            Some(_) => Progress::Yielded,
        })
    }

    fn timeline(&mut self) -> Result<Vec<Span>, RunError> {
        if !self.is_current() {
            return Err(RunError::Moved);
        }
        // One that has yielded begins anew.
        self.started = None;
        let started = self.pool.start(self.scratch_bytes, self.kept_bytes);
        let ends = self.pool.run_timed(&self.steps, started)?;
        let (mut spans, mut before) = (Vec::<Span>::new(), Duration::ZERO);
        for (step, end) in self.steps.iter().zip(ends) {
            let seconds = (end - before).as_secs_f64();
            before = end;
            match spans.last_mut().filter(|span| span.nodes == [step.node]) {
                Some(span) => span.seconds += seconds,
                None => spans.push(Span {
                    nodes: vec![step.node],
                    seconds,
                }),
            }
        }
        Ok(spans)
    }

    fn is_current(&self) -> bool {
        let mut now = self.buffers.iter().map(cpu_memory);
        let mut then = self.moves.iter();
        now.all(|memory| memory.map(CpuMemory::moves) == then.next().copied())
    }
}

/// What is kept from one node for those that follow: the tensor that was last converted, in the type it was converted
/// to. (The products with several weights, of queries, keys and values or of a gate, begin with the same activations.)
#[derive(Default)]
struct Keeper {
    kept: Cell<Option<(View, Type)>>,
    /// The most that was ever to be kept.
    bytes: Cell<usize>,
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

    /// Whether the kept memory ([`Worker::kept`]) already has `source` as `ty` from a node before this one. If not, it is
    /// for this node's first kernel to write there: so many bytes, for itself and the nodes that follow.
    pub(crate) fn keep(&self, source: View, ty: Type, bytes: usize) -> bool {
        let keeper = self.keeper;
        keeper.bytes.set(keeper.bytes.get().max(bytes));
        keeper.kept.replace(Some((source, ty))) == Some((source, ty))
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

/// A kernel of the plan, and the node it came from.
pub(super) struct Step {
    pub(super) kernel: Kernel,
    pub(super) node: usize,
    pub(super) op: &'static str,
}

impl Step {
    /// The fault with its place.
    pub(super) fn error(&self, fault: Fault) -> RunError {
        let (node, op) = (self.node, self.op);
        match fault {
            Fault::Index { index, count } => RunError::Index {
                node,
                op,
                index,
                count,
            },
            Fault::Panic { message } => RunError::Kernel { node, op, message },
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
