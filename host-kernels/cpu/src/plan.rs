//! Compiles a graph into phases, and runs them.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use vgpu_engine::fuse::{Arrangement, FusionKind};
use vgpu_engine::work::{self, Work};
use vgpu_engine::{
    ALLOCATION_BYTES, BatchKey, Cancellation, EngineError, Memory, NodeTiming, Plan, RunError,
    RunStatus, Turn,
};
use vgpu_transport::ir::{Graph, GraphCounts, Node, Op, Tensor, ValidGraph};

use crate::barrier_schedule::{
    BarrierSchedule, MemoryAccess, Phase, PlannedKernel, SOLO_ELEMENTS, elements, is_small,
    only_ranges,
};
use crate::batch::{MAX_BATCH, Membership};
use crate::gemm::{MAX_KEPT, prepared_bytes};
use crate::kernel::{Compiled, Estimate};
use crate::memory::CpuMemory;
use crate::operands::{ActivationCache, Operands, Recorded};
use crate::ops;
use crate::runner::{RunState, Runner};
use crate::view::View;
use crate::weights::WeightRegion;

/// Bytes that a node needs at most while it is compiled, and afterwards in the plan: kernels with
/// their operands, and the ranges that they access.
const MAX_NODE_BYTES: u64 = 4 << 10;

/// Bytes that a tensor needs at most while the graph is compiled, besides the graph.
const MAX_TENSOR_BYTES: u64 = 256;

/// Bytes that a buffer needs at most while the graph is compiled, and afterwards in the plan.
const MAX_BUFFER_BYTES: u64 = 64;

/// Bytes that a plan needs at most, however small it is.
const MAX_EMPTY_BYTES: u64 = 4 << 10;

/// The most bytes of host memory that the compilation of a graph needs, with the plan and without
/// the graph.
pub(crate) fn compile_bytes(counts: &GraphCounts) -> u64 {
    let bytes = |count: usize, each: u64| (count as u64).saturating_mul(each);
    // The arrangement has a copy of the graph, and nodes are moved through another.
    (2 * counts.decoded_bytes())
        .saturating_add(bytes(counts.nodes, MAX_NODE_BYTES))
        .saturating_add(bytes(counts.tensors, MAX_TENSOR_BYTES))
        .saturating_add(bytes(counts.buffers, MAX_BUFFER_BYTES))
        .saturating_add(MAX_EMPTY_BYTES)
}

/// A compiled graph: kernels with pointers into buffers that the plan keeps alive.
pub(crate) struct CpuPlan {
    phases: Vec<Phase>,
    scratch_bytes: usize,
    /// Memory for converted activations, in bytes.
    activation_bytes: usize,
    /// The most bytes that a product prepares in each of the two buffers of a thread.
    prepared_bytes: usize,
    runner: Arc<Runner>,
    /// A run that has yielded.
    yielded: Option<RunState>,
    /// The buffers that the kernels' pointers point into.
    buffers: Vec<Arc<dyn Memory>>,
    /// For each buffer, its number of moves when the plan was compiled.
    moves: Vec<u64>,
    /// What plans have in common that can run as a batch with this one, if there are any.
    membership: Option<Membership>,
}

impl CpuPlan {
    /// Compiles a graph that was validated with the rules of this engine. With `fuses`, nodes are
    /// fused where this gives the same results, and barriers are left out where they are not
    /// needed.
    ///
    /// # Errors
    /// [`EngineError::ForeignMemory`] if a buffer belongs to another engine;
    /// [`EngineError::Unsupported`] if a node has no kernel; [`EngineError::OutOfMemory`] if
    /// weights that the graph writes need memory of their own; [`EngineError::Cancelled`] once
    /// `is_cancelled` returns `true`.
    pub(crate) fn compile(
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        runner: &Arc<Runner>,
        fuses: bool,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<CpuPlan, EngineError> {
        let graph = graph.graph();
        let memories = memories(buffers).ok_or(EngineError::ForeignMemory)?;
        let (views, moves) = views(graph, &memories, is_cancelled)?;
        let arrangement = match fuses {
            true => Arrangement::of(graph, u64::MAX, is_cancelled),
            false => Arrangement::plain(graph),
        };
        let mut compiler = Compiler {
            graph: &arrangement.graph,
            origin: &arrangement.origin,
            views: &views,
            is_weight: &is_weight(graph, &memories),
            cache: ActivationCache::default(),
            workers: runner.workers(),
            schedule: BarrierSchedule::new(fuses),
        };
        let mut cancellation = Cancellation::new(is_cancelled);
        let mut at = 0;
        while at < arrangement.graph.nodes.len() {
            cancellation.check(at)?;
            let group = arrangement.group_at(at);
            at = match group {
                Some((kind, nodes)) if compiler.group(kind, nodes.clone())? => nodes.end,
                _ => {
                    compiler.node(at)?;
                    at + 1
                }
            };
        }
        let activation_bytes = compiler.cache.bytes();
        let (phases, scratch_bytes) = compiler.schedule.finish();
        let each = graph.nodes.iter().map(|node| {
            let k = product_terms(graph, node);
            k.map_or(0, prepared_bytes)
        });
        let prepared_bytes = each.max().unwrap_or(0);
        let membership = runner.membership(&phases);
        Ok(CpuPlan {
            membership,
            phases,
            scratch_bytes,
            activation_bytes,
            prepared_bytes,
            runner: Arc::clone(runner),
            yielded: None,
            buffers: buffers.to_vec(),
            moves,
        })
    }
}

impl CpuPlan {
    /// The first turn of a run.
    ///
    /// # Errors
    /// [`RunError::OutOfMemory`] if there is no memory for it.
    fn start(&self) -> Result<RunState, RunError> {
        let (scratch, activations) = (self.scratch_bytes, self.activation_bytes);
        (self.runner).start(scratch, activations, self.prepared_bytes)
    }
}

/// A plan during compilation. Only [`CpuPlan::compile`] makes one.
struct Compiler<'a> {
    /// The validated graph, with its nodes in the order of the arrangement.
    graph: &'a Graph,
    /// The index of each node in the guest's graph.
    origin: &'a [usize],
    /// The views of the graph's tensors, in order.
    views: &'a [View],
    /// For each tensor, whether it is of frozen weights, which no plan writes in place.
    is_weight: &'a [bool],
    cache: ActivationCache,
    /// The threads of the runner of the plan.
    workers: usize,
    schedule: BarrierSchedule,
}

impl Compiler<'_> {
    fn operands(&self, at: usize) -> Operands<'_> {
        let node = &self.graph.nodes[at];
        // SAFETY: an arrangement changes the order of the nodes and neither a node nor a tensor, so
        // the node is one of the `ValidGraph` that `CpuPlan::compile` has got, and `views` are
        // those of its tensors (the function `views`). `CpuEngine::compile` has refused a graph
        // that was not validated with the rules of this engine. The plan keeps the runner with its
        // `workers` threads, and each run has the scratch memory that `add` reserves in the
        // schedule, and the bytes of `cache` at the end of the compilation, which do not decrease.
        unsafe { Operands::new(node, self.views, &self.cache, self.workers) }
    }

    /// Compiles fused nodes. Returns `false` and changes nothing if there is no kernel for them.
    fn group(&mut self, kind: FusionKind, nodes: Range<usize>) -> Result<bool, EngineError> {
        let operands: Vec<Operands<'_>> = nodes.clone().map(|at| self.operands(at)).collect();
        // SAFETY: `nodes` is a group of `kind` that the arrangement has found in the graph.
        let Some(compiled) = (unsafe { ops::compile_group(kind, &operands) }) else {
            return Ok(false);
        };
        // Only an index can be invalid. In these groups, the last node reads it.
        let reported = match kind {
            FusionKind::RopeRows => nodes.end - 1,
            _ => nodes.start,
        };
        let has_ranges = matches!(kind, FusionKind::Norm | FusionKind::RopeRows);
        self.add(nodes, reported, compiled, has_ranges);
        Ok(true)
    }

    /// Compiles one node.
    fn node(&mut self, at: usize) -> Result<(), EngineError> {
        let op = &self.graph.nodes[at].op;
        let compiled = ops::compile(&self.operands(at))?;
        self.add(at..at + 1, at, compiled, only_ranges(op));
        Ok(())
    }

    /// Adds the kernels of `nodes`. Errors report node `reported`. `has_ranges`: a single kernel
    /// takes no chunks.
    fn add(&mut self, nodes: Range<usize>, reported: usize, compiled: Compiled, has_ranges: bool) {
        let graph = self.graph;
        let op = graph.nodes[reported].op.kind().ggml_name();
        let all = self.origin[nodes.clone()].to_vec();
        let has_ranges = has_ranges && compiled.kernels.len() == 1;
        let scratch_bytes = compiled.scratch_bytes;
        let each = graph.nodes[nodes.clone()].iter();
        let work = each.map(|node| work::of(graph, node)).reduce(Work::and);
        let work = Estimate::of(&work.unwrap_or_default());
        let Recorded {
            converts,
            follows,
            joint,
            held,
        } = self.cache.take_recorded();
        let mut joint = joint.filter(|_| self.multiplies_weights(nodes.clone()));
        self.schedule.reserve(scratch_bytes);
        let last = compiled.kernels.len().wrapping_sub(1);
        for (i, kernel) in compiled.kernels.into_iter().enumerate() {
            let only_converts = i == 0 && converts.is_some();
            let computes = match only_converts {
                true => Vec::new(),
                false => all.clone(),
            };
            let mut part = PlannedKernel::new(kernel, computes, (self.origin[reported], op), work);
            if only_converts {
                let x = { graph.nodes[nodes.start].src.as_slice() }[1].expect("activations");
                let x = &graph.tensors[x as usize];
                let steps = usize::try_from(elements(x)).unwrap_or(usize::MAX);
                part.work = Estimate::steps(steps);
                let is_small = elements(x) <= SOLO_ELEMENTS;
                let access = MemoryAccess::reading(x);
                (self.schedule).push_shared(part, access, is_small, 0, follows);
            } else if has_ranges {
                let is_small = nodes.clone().all(|at| is_small(graph, at));
                let access = MemoryAccess::of(graph, nodes.clone());
                (self.schedule).push_shared(part, access, is_small, scratch_bytes, false);
            } else {
                if i == last {
                    (part.joint, part.held) = (joint.take(), held);
                }
                self.schedule.push_alone(part);
            }
        }
        for at in nodes {
            let written = graph.nodes[at].written_tensors();
            written.for_each(|index| self.cache.invalidate(&self.views[index]));
        }
    }
}

impl Compiler<'_> {
    /// Whether all products of these nodes multiply with frozen weights.
    fn multiplies_weights(&self, nodes: Range<usize>) -> bool {
        let mut products = self.graph.nodes[nodes].iter().filter_map(|node| {
            let is_product = matches!(node.op, Op::MulMat { .. } | Op::MulMatId { .. });
            is_product.then(|| node.src.as_slice().first().copied().flatten())
        });
        products.all(|weight| weight.is_some_and(|weight| self.is_weight[weight as usize]))
    }
}

/// For each tensor of a graph, whether it is of frozen weights, which no plan writes in place.
fn is_weight(graph: &Graph, memories: &[&CpuMemory]) -> Vec<bool> {
    let is_frozen = |memory: &&CpuMemory| {
        let weights = memory.as_weights();
        weights.is_ok_and(WeightRegion::is_unmodified)
    };
    let frozen: Vec<bool> = memories.iter().map(is_frozen).collect();
    let tensors = graph.tensors.iter();
    tensors
        .map(|tensor| frozen[tensor.buffer as usize])
        .collect()
}

/// The buffers as this engine's type; `None` if one belongs to another engine.
fn memories(buffers: &[Arc<dyn Memory>]) -> Option<Vec<&CpuMemory>> {
    buffers.iter().map(cpu_memory).collect()
}

fn cpu_memory(memory: &Arc<dyn Memory>) -> Option<&CpuMemory> {
    memory.as_any().downcast_ref()
}

fn moves(memories: &[&CpuMemory]) -> Vec<u64> {
    memories.iter().map(|memory| memory.moves()).collect()
}

/// The addresses of the tensors of a graph, and the number of moves of each memory at that time.
///
/// # Errors
/// [`EngineError::OutOfMemory`] if weights cannot be copied; [`EngineError::Cancelled`] once
/// `is_cancelled` has returned `true`.
pub(crate) fn views(
    graph: &Graph,
    memories: &[&CpuMemory],
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(Vec<View>, Vec<u64>), EngineError> {
    let place = |tensor: &Tensor| {
        // The same value as in validation.
        let len = tensor.shape.byte_len().unwrap_or(u64::MAX);
        (memories[tensor.buffer as usize], tensor.offset, len)
    };
    let mut cancellation = Cancellation::new(is_cancelled);
    for (at, node) in graph.nodes.iter().enumerate() {
        cancellation.check(at)?;
        for index in node.written_tensors() {
            let (memory, offset, len) = place(&graph.tensors[index]);
            memory.own(offset, len, is_cancelled)?;
        }
    }
    loop {
        let before = moves(memories);
        let views = graph.tensors.iter().map(|tensor| {
            let (memory, offset, len) = place(tensor);
            let ptr = memory.locate(offset, len, is_cancelled)?;
            // SAFETY: `locate` returns `len` contiguous bytes of the buffer, which the plan keeps
            // alive with the views. Validation has checked the alignment and the length of the
            // shape. The plan does not run once the bytes have moved. A session carries out one
            // request after another, and buffers of other sessions share only frozen bytes: so no
            // other code of the executor writes these bytes during a run. A plugin in the same
            // process waits until no graph of its session runs. A guest process that has mapped
            // the buffer may write at any time, which the contract permits.
            Ok(unsafe { View::new(ptr, &tensor.shape) })
        });
        let views = views.collect::<Result<Vec<View>, EngineError>>()?;
        // Locating a tensor that was in several segments merges them, which may move other tensors.
        // The loop ends because each iteration reduces the number of segments.
        if moves(memories) == before {
            return Ok((views, before));
        }
    }
}

/// The length of the rows and columns that a node multiplies with the kernels of
/// [`crate::gemm`], at most; `None` if it does not.
fn product_terms(graph: &Graph, node: &Node) -> Option<usize> {
    let first = graph.src(node, 0)?.shape.ne;
    let terms = match node.op {
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::FlashAttnExt { .. } => first[0],
        Op::LightningIndexer { .. } => first[0],
        Op::Conv2d { .. } => first[0].saturating_mul(first[1]).saturating_mul(first[2]),
        Op::Conv3d { c, .. } => first[0]
            .saturating_mul(first[1])
            .saturating_mul(first[2])
            .saturating_mul(u64::from(c.unsigned_abs())),
        Op::ConvTranspose1d { .. } => first[2],
        Op::ConvTranspose2d { .. } => first[3],
        _ => return None,
    };
    Some(usize::try_from(terms).unwrap_or(usize::MAX))
}

impl Drop for CpuPlan {
    fn drop(&mut self) {
        self.yielded = None;
        self.runner.trim();
    }
}

impl CpuPlan {
    /// The state of the run that has yielded, or of a new run.
    ///
    /// # Errors
    /// [`RunError::Stale`] if the plan must be compiled again, [`RunError::OutOfMemory`] if there
    /// is no memory for a run.
    fn resume(&mut self) -> Result<RunState, RunError> {
        match self.yielded.take() {
            Some(state) => Ok(state),
            None if !self.is_current() => Err(RunError::Stale),
            None => self.start(),
        }
    }

    /// Keeps the state of a run that has yielded.
    fn suspend(&mut self, state: Option<RunState>) -> RunStatus {
        self.yielded = state;
        match self.yielded {
            None => RunStatus::Done,
            Some(_) => RunStatus::Yielded,
        }
    }

    /// The runner of plans that can run as a batch. `None` if they cannot.
    fn runner_of_batch(plans: &[&mut CpuPlan]) -> Option<Arc<Runner>> {
        let first = plans.first()?;
        let (key, runner) = (first.batch_key()?, &first.runner);
        let is_kept = |plan: &&mut CpuPlan| {
            plan.batch_key() == Some(key) && Arc::ptr_eq(&plan.runner, runner)
        };
        (plans.len() <= MAX_BATCH && plans.iter().all(is_kept)).then(|| Arc::clone(runner))
    }

    /// Runs plans as a batch, as [`Engine::launch_batch`](vgpu_engine::Engine) does. `None` if
    /// they cannot run as a batch.
    pub(crate) fn launch_batch(
        plans: &mut [&mut CpuPlan],
        turn: &Turn,
    ) -> Option<Vec<Result<RunStatus, RunError>>> {
        let runner = CpuPlan::runner_of_batch(plans)?;
        let states: Vec<Result<RunState, RunError>> =
            plans.iter_mut().map(|plan| plan.resume()).collect();
        let mut members = Vec::with_capacity(plans.len());
        let mut outcomes = Vec::with_capacity(plans.len());
        for (plan, state) in plans.iter().zip(states) {
            outcomes.push(match state {
                Ok(state) => {
                    members.push((plan.phases.as_slice(), state));
                    Ok(())
                }
                Err(error) => Err(error),
            });
        }
        // SAFETY: all plans are of this runner, for which their schedules are, and have one key and
        // position. `resume` returns a state of `start`, with the bytes that the schedule and the
        // activations need, or what a turn since has left.
        let ran = unsafe { runner.run_batch(members, turn) };
        let mut ran = ran.into_iter();
        let outcomes = outcomes.into_iter().zip(plans.iter_mut());
        let each = outcomes.map(|(started, plan)| {
            started?;
            let state = ran.next().expect("an outcome for each member")?;
            Ok(plan.suspend(state))
        });
        Some(each.collect())
    }
}

impl Plan for CpuPlan {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        let state = self.resume()?;
        // SAFETY: the schedule of the phases is for this runner. `resume` returns a state of
        // `start`, with the bytes that the schedule and the activations need, or what a turn since
        // has left.
        let state = unsafe { self.runner.run(&self.phases, state, turn) }?;
        Ok(self.suspend(state))
    }

    fn batch_key(&self) -> Option<BatchKey> {
        Some(BatchKey {
            products: self.membership.as_ref()?.group.number,
            position: match &self.yielded {
                None => (0, 0),
                Some(state) => state.position(&self.phases),
            },
        })
    }

    fn batch_work(&self) -> u64 {
        let membership = self.membership.as_ref();
        membership.map_or(1, |membership| membership.work)
    }

    fn as_any_mut(&mut self) -> Option<&mut dyn Any> {
        Some(self)
    }

    fn profile(&mut self) -> Result<Vec<NodeTiming>, RunError> {
        if !self.is_current() {
            return Err(RunError::Stale);
        }
        // A run that has yielded starts again from the beginning.
        self.yielded = None;
        let state = self.start()?;
        // SAFETY: the schedule of the phases is for this runner. `start` returns a state with the
        // bytes that the schedule and the activations need.
        let ends = unsafe { self.runner.run_timed(&self.phases, state) }?;
        let (mut timings, mut before) = (Vec::<NodeTiming>::new(), Duration::ZERO);
        for (phase, end) in self.phases.iter().zip(ends) {
            let nodes: Vec<usize> = { phase.parts.iter() }
                .flat_map(|part| part.nodes.iter().copied())
                .collect();
            match timings.last_mut().filter(|timing| timing.nodes == nodes) {
                Some(timing) => timing.seconds += (end - before).as_secs_f64(),
                // A phase that only prepares data counts as part of the next.
                None if nodes.is_empty() => continue,
                None => timings.push(NodeTiming {
                    nodes,
                    seconds: (end - before).as_secs_f64(),
                }),
            }
            before = end;
        }
        Ok(timings)
    }

    fn plan_bytes(&self) -> u64 {
        let phases = self.phases.iter().map(Phase::bytes).sum::<usize>();
        let tables = self.phases.capacity() * size_of::<Phase>()
            + self.buffers.capacity() * size_of::<Arc<dyn Memory>>()
            + self.moves.capacity() * size_of::<u64>();
        let membership = self.membership.as_ref();
        let group = membership.map_or(0, |membership| membership.group.bytes());
        (size_of::<CpuPlan>() + 4 * ALLOCATION_BYTES + tables + phases + group) as u64
    }

    fn working_bytes(&self) -> u64 {
        let bytes = self.scratch_bytes.saturating_add(self.activation_bytes);
        // Threads keep so much, and it does not count.
        let prepared = match self.prepared_bytes > MAX_KEPT {
            true => self
                .prepared_bytes
                .saturating_mul(2 * self.runner.workers()),
            false => 0,
        };
        bytes.saturating_add(prepared) as u64
    }

    fn is_current(&self) -> bool {
        let mut now = self.buffers.iter().map(cpu_memory);
        let mut then = self.moves.iter();
        now.all(|memory| memory.map(CpuMemory::moves) == then.next().copied())
    }
}
