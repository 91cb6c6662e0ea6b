//! From a graph to launches.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tracing::error;
use vgpu_transport::ir::{Graph, Op, Shape, Tensor, Type};

use crate::activation_cache::{ACTIVATION_CACHE_BYTES, ActivationCache};
use crate::context::{DeviceGuard, ExecutionContext};
use crate::cpu_fallback::{CpuFallback, FallbackNode};
use crate::device::Address;
use crate::fused_launch::{GroupNode, emit};
use crate::graph_exec::{Failure, LaunchSequence};
use crate::launch::builder::Builder;
use crate::launch::planned::PlannedLaunch;
use crate::launch::q8::FEW_COLUMNS;
use crate::launch::q8::next_product_quantizes;
use crate::megakernel::lowering;
use crate::memory::CudaMemory;
use crate::ops;
use crate::params::{VgFault, VgView};
use crate::repack::pass::RepackPass;
use crate::scratch::Claim;
use vgpu_engine::fuse::{Arrangement, Kind};
use vgpu_engine::{EngineError, Memory, Plan, RunStatus, RunError, NodeTiming, Turn};

/// A graph, compiled: launches in order, and now and then work of the host.
pub(crate) struct CudaPlan {
    context: Arc<ExecutionContext>,
    parts: Vec<Part>,
    /// The part that a run that has yielded goes on with.
    at: usize,
    /// What the launches and the host's pieces of work are for, in order: how many, and the nodes.
    groups: Vec<(usize, Vec<usize>)>,
    /// Names of the nodes' operators, for errors.
    ops: Vec<&'static str>,
    /// What it is called in logs.
    name: String,
    /// That the device works on the end of a run.
    under_way: Option<UnderWay>,
    /// Whether a run has yielded and is not over.
    has_yielded: bool,
    /// What the addresses in the launches point into, and [`Arranged::changes`](crate::repack::state::RepackState::changes) of each.
    memory: Vec<(Arc<dyn Memory>, u64)>,
    _scratch: Claim,
    /// The tables of steps.
    _tables: Vec<CudaMemory>,
}

/// The end of a run, which the device works on.
struct UnderWay {
    /// The node of the last launch.
    node: usize,
    _device: DeviceGuard,
}

enum Part {
    Launches(LaunchSequence),
    /// Runs on the host, between launches.
    Cpu {
        work: FallbackNode,
        node: usize,
    },
}

impl CudaPlan {
    pub(crate) fn compile(
        graph: &Graph,
        buffers: &[Arc<dyn Memory>],
        context: &Arc<ExecutionContext>,
    ) -> Result<CudaPlan, EngineError> {
        let memories = { buffers.iter() }
            .map(|memory| {
                let memory = cuda_memory(memory).ok_or(EngineError::ForeignMemory)?;
                memory.check_there()?;
                match memory.is_of(&context.allocator) {
                    true => Ok(memory),
                    false => Err(EngineError::ForeignMemory),
                }
            })
            .collect::<Result<Vec<&CudaMemory>, EngineError>>()?;
        let bases: Vec<Address> = memories.iter().map(|memory| memory.address()).collect();
        if let Some(tensor) = graph.tensors.iter().find(|tensor| !is_aligned(tensor)) {
            return Err(EngineError::Unsupported {
                op: "a graph",
                why: format!(
                    "{} at offset {} with strides {:?} is not where a GPU reads it",
                    tensor.shape.ty.ggml_name(),
                    tensor.offset,
                    tensor.shape.nb
                ),
            });
        }
        let plain: Vec<VgView> = graph
            .tensors
            .iter()
            .map(|t| VgView::new(bases[t.buffer as usize] + t.offset, &t.shape))
            .collect();
        let arrangement = match context.policy.fusion {
            true => Arrangement::of(graph, FEW_COLUMNS as u64),
            false => Arrangement::plain(graph),
        };
        let mut repack = RepackPass::of(graph, &memories, context)?;
        let mut views;
        let mut compiler = loop {
            views = plain.clone();
            repack.mark(&mut views);
            let compiler = Compiler::of(&arrangement, &views, &bases, context)?;
            if !repack.refuse(&compiler.refused) {
                break compiler;
            }
        };
        let needed = compiler.needed();
        let groups = std::mem::take(&mut compiler.groups);
        let ops: Vec<&'static str> = { graph.nodes.iter() }
            .map(|n| n.op.kind().ggml_name())
            .collect();
        let places: Vec<usize> = { buffers.iter() }
            .map(|memory| Arc::as_ptr(memory).cast::<()>() as usize)
            .collect();
        let (parts, tables) = compiler.into_parts(&places, &ops)?;
        let scratch = context.scratch.claim(needed)?;
        repack.apply()?;
        let changes = memories
            .iter()
            .map(|memory| memory.repack_state().changes());
        Ok(CudaPlan {
            context: Arc::clone(context),
            parts,
            at: 0,
            groups,
            ops,
            name: "a graph".into(),
            under_way: None,
            has_yielded: false,
            memory: buffers.iter().cloned().zip(changes).collect(),
            _tables: tables,
            _scratch: scratch,
        })
    }

    /// Goes on from where the last turn has ended; `Done` says that all is launched. The node of the last launch is told,
    /// too, if there was one.
    ///
    /// # Safety
    /// The device is the caller's.
    unsafe fn go_on(&mut self, turn: &Turn) -> Result<(RunStatus, usize), RunError> {
        let context = Arc::clone(&self.context);
        let device = &context.device;
        // SAFETY: the device is ours; what failed has ended, or the device is lost.
        unsafe { context.reset_counters() }.map_err(|error| failure(&self.ops, 0, &error))?;
        let mut last = 0;
        while let Some(part) = self.parts.get_mut(self.at) {
            let outcome = match part {
                Part::Launches(sequence) => {
                    last = sequence.last_node();
                    // SAFETY: compiled from a validated graph over memory that this plan holds on to; the device is
                    // the caller's.
                    unsafe { sequence.advance(device, context.policy, turn) }
                        .map_err(|Failure { node, error }| failure(&self.ops, node, &error))
                }
                // SAFETY: as above.
                Part::Cpu { work, node } => unsafe { work.run(&**device) }
                    .map(|()| RunStatus::Done)
                    .map_err(|error| at_node(&self.ops, *node, error)),
            };
            // What runs on the device still can fail as well, and comes first in the graph.
            let outcome = match outcome {
                Ok(RunStatus::Done) => {
                    self.at += 1;
                    continue;
                }
                Err(error) => {
                    context.counters_dirty.store(true, Ordering::Relaxed);
                    Err(error)
                }
                other => other,
            };
            // One error is enough; and what runs on reports no fault.
            let outcome = outcome.map(|progress| (progress, last));
            if outcome.is_err() && device.synchronize().is_err() {
                return outcome;
            }
            // SAFETY: no kernel runs, and the device is the caller's.
            if let Some(fault) = unsafe { context.take_fault() } {
                return Err(self.fault(&fault));
            }
            return outcome;
        }
        Ok((RunStatus::Done, last))
    }

    /// Begins anew the next time, whatever became of this run.
    fn rewind(&mut self) {
        (self.at, self.has_yielded) = (0, false);
        for part in &mut self.parts {
            if let Part::Launches(sequence) = part {
                sequence.rewind();
            }
        }
    }

    /// The failure of a run on a device that was there when it began. If it is lost now, that is logged with what ran.
    fn failed(&self, error: RunError) -> RunError {
        if let Some(reason) = self.context.device.lost() {
            // What failed began at this node or before: the device works on several at a time.
            error!(
                "{} of {} nodes: {error}; the device is lost, with the memory of all guests: {reason}",
                self.name,
                self.ops.len()
            );
        }
        error
    }

    /// Runs part by part, and says how many seconds each launch and each piece of the host's work took.
    ///
    /// # Safety
    /// The device is the caller's.
    unsafe fn time(&mut self) -> Result<Vec<f64>, RunError> {
        let context = Arc::clone(&self.context);
        let mut times = Vec::new();
        for part in &mut self.parts {
            match part {
                Part::Launches(sequence) => {
                    // SAFETY: as in `go_on`.
                    let outcome = unsafe { sequence.time(&*context.device) };
                    times.extend(
                        outcome
                            .map_err(|Failure { node, error }| failure(&self.ops, node, &error))?,
                    );
                }
                Part::Cpu { work, node } => {
                    let start = Instant::now();
                    // SAFETY: as in `go_on`.
                    unsafe { work.run(&*context.device) }
                        .map_err(|error| at_node(&self.ops, *node, error))?;
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
        // SAFETY: all has been waited for, and the device is the caller's.
        match unsafe { context.take_fault() } {
            Some(fault) => Err(self.fault(&fault)),
            None => Ok(times),
        }
    }

    fn fault(&self, fault: &VgFault) -> RunError {
        let node = fault.node as usize;
        RunError::Index {
            node,
            op: self.ops[node],
            index: fault.index,
            count: fault.count as u64,
        }
    }
}

/// A plan in the making.
struct Compiler<'a> {
    context: &'a Arc<ExecutionContext>,
    bases: &'a [Address],
    views: &'a [VgView],
    /// In our order, and where nodes were in the guest's.
    graph: &'a Graph,
    origin: &'a [usize],
    kept: ActivationCache,
    work: Vec<Work>,
    groups: Vec<(usize, Vec<usize>)>,
    scratch_bytes: u64,
    /// Weights in planes that kernels do not read so.
    refused: Vec<Address>,
}

/// What a plan does, in order.
enum Work {
    Launch(PlannedLaunch),
    Cpu(FallbackNode, usize),
}

impl<'a> Compiler<'a> {
    /// Compiles all nodes, over tensors at these places.
    fn of(
        arrangement: &'a Arrangement,
        views: &'a [VgView],
        bases: &'a [Address],
        context: &'a Arc<ExecutionContext>,
    ) -> Result<Compiler<'a>, EngineError> {
        let mut compiler = Compiler {
            context,
            bases,
            views,
            graph: &arrangement.graph,
            origin: &arrangement.origin,
            kept: ActivationCache::new(context.scratch.base()),
            work: Vec::new(),
            groups: Vec::new(),
            scratch_bytes: 0,
            refused: Vec::new(),
        };
        let mut at = 0;
        while at < arrangement.graph.nodes.len() {
            at = match arrangement.group_at(at) {
                Some((kind, nodes)) => {
                    compiler.group(kind, nodes.clone())?;
                    nodes.end
                }
                None => {
                    compiler.node(at)?;
                    at + 1
                }
            };
        }
        Ok(compiler)
    }

    /// Compiles nodes that may become one launch.
    fn group(&mut self, kind: Kind, nodes: Range<usize>) -> Result<(), EngineError> {
        let seen: Vec<GroupNode> = { self.graph.nodes[nodes.clone()].iter() }
            .map(|node| GroupNode {
                op: node.op,
                dst: self.views[node.dst as usize],
                src: { node.src.as_slice().iter() }
                    .map(|src| src.map_or_else(VgView::default, |src| self.views[src as usize]))
                    .collect(),
            })
            .collect();
        let (graph, views) = (self.graph, self.views);
        let is_rounded = |x: &VgView| next_product_quantizes(graph, views, nodes.end, x);
        let added = self.build(nodes.clone(), |builder| {
            emit(kind, &seen, is_rounded, builder)
        });
        match added {
            Some(outcome) => outcome,
            None => nodes.clone().try_for_each(|at| self.node(at)),
        }
    }

    /// Compiles a node by itself.
    fn node(&mut self, at: usize) -> Result<(), EngineError> {
        let node = &self.graph.nodes[at];
        if self.graph.dst(node).shape.is_empty() {
            return Ok(());
        }
        if CpuFallback::takes(self.graph, node) {
            let work = self
                .context
                .cpu_fallback
                .compile(self.graph, node, self.bases)?;
            self.work.push(Work::Cpu(work, self.origin[at]));
            self.groups.push((1, vec![self.origin[at]]));
            self.wrote(at..at + 1, usize::MAX);
            return Ok(());
        }
        let outcome = self.build(at..at + 1, |builder| Some(ops::compile(&node.op, builder)));
        outcome.unwrap_or(Ok(()))
    }

    /// Adds what `body` adds for some nodes.
    fn build(
        &mut self,
        nodes: Range<usize>,
        body: impl FnOnce(&mut Builder<'_>) -> Option<Result<(), EngineError>>,
    ) -> Option<Result<(), EngineError>> {
        let before = self.work.len();
        let kept = (&mut self.kept, before);
        let mut builder = Builder::new(self.graph, self.views, nodes.start, self.context, kept);
        builder.set_label(self.origin[nodes.start]);
        if let Err(error) = body(&mut builder)? {
            return Some(Err(error));
        }
        self.scratch_bytes = self.scratch_bytes.max(builder.scratch_bytes());
        self.refused.extend(builder.refused());
        let steps: Vec<PlannedLaunch> = builder.into_launches().collect();
        let origin = &self.origin[nodes.clone()];
        self.groups.push((steps.len(), origin.to_vec()));
        self.work.extend(steps.into_iter().map(Work::Launch));
        self.wrote(nodes, before);
        Some(Ok(()))
    }

    /// Forgets what was kept, before launch `since`, of what nodes have written.
    fn wrote(&mut self, nodes: Range<usize>, since: usize) {
        for node in &self.graph.nodes[nodes] {
            let also = matches!(node.op, Op::OptStepAdamw {} | Op::OptStepSgd {});
            let sources = node.src.as_slice().iter().flatten().filter(|_| also);
            for &written in sources.chain([&node.dst]) {
                self.kept
                    .wrote(&self.views[written as usize].extent(), since);
            }
        }
    }

    /// Bytes of working memory that the plan needs.
    fn needed(&self) -> u64 {
        match (self.scratch_bytes, self.kept.is_used()) {
            (0, false) => 0,
            (bytes, _) => ACTIVATION_CACHE_BYTES + bytes,
        }
    }

    /// The plan's parts, over the memory at these addresses, and the tables of its steps.
    fn into_parts(
        mut self,
        memory: &[usize],
        ops: &[&'static str],
    ) -> Result<(Vec<Part>, Vec<CudaMemory>), EngineError> {
        for &(made, used) in self.kept.spans() {
            for work in &mut self.work[made..used] {
                if let Work::Launch(step) = work {
                    step.may_yield = false;
                }
            }
        }
        let templates = &self.context.templates;
        let mut tables = Vec::new();
        let mut sequence = |plain: Vec<PlannedLaunch>| -> Result<Part, EngineError> {
            let arranged = lowering::arrange(&plain, self.context, ops)?;
            let has_steps = !arranged.memory.is_empty();
            tables.extend(arranged.memory);
            let plain = LaunchSequence::new(plain, memory, templates);
            Ok(Part::Launches(match has_steps {
                true => LaunchSequence::new(arranged.steps, memory, templates).or(plain),
                false => plain,
            }))
        };
        let mut parts = Vec::new();
        let mut steps: Vec<PlannedLaunch> = Vec::new();
        for work in self.work {
            match work {
                Work::Launch(step) => steps.push(step),
                Work::Cpu(work, node) => {
                    if !steps.is_empty() {
                        parts.push(sequence(std::mem::take(&mut steps))?);
                    }
                    parts.push(Part::Cpu { work, node });
                }
            }
        }
        if !steps.is_empty() {
            parts.push(sequence(steps)?);
        }
        Ok((parts, tables))
    }
}

/// Memory as the engine's own.
fn cuda_memory(memory: &Arc<dyn Memory>) -> Option<&CudaMemory> {
    memory.as_any().downcast_ref()
}

/// Whether elements lie at multiples of their size, and blocks at multiples of the 16-bit numbers in them. A GPU ends
/// everything that runs on it when a kernel reads elsewhere; ggml never puts tensors there.
fn is_aligned(tensor: &Tensor) -> bool {
    let Shape { ty, .. } = tensor.shape;
    let wanted = match ty {
        Type::Mxfp4 => 1,
        ty if ty.is_quantized() => 2,
        ty => ty.block_bytes(),
    };
    // Those of dimensions without extent do not count.
    let strides = tensor.shape.with_plain_strides().nb;
    std::iter::once(tensor.offset)
        .chain(strides)
        .all(|place| place.is_multiple_of(wanted))
}

fn failure(ops: &[&'static str], node: usize, error: &EngineError) -> RunError {
    RunError::Kernel {
        node,
        op: ops[node],
        message: error.to_string(),
    }
}

/// An error of a graph that consists of this one node, as one of the whole graph.
fn at_node(ops: &[&'static str], at: usize, mut error: RunError) -> RunError {
    match &mut error {
        RunError::Index { node, op, .. } | RunError::Kernel { node, op, .. } => {
            (*node, *op) = (at, ops[at]);
        }
        RunError::Stale => {}
    }
    error
}

impl Plan for CudaPlan {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        self.wait()?;
        if !self.has_yielded && !self.is_current() {
            return Err(RunError::Stale);
        }
        let context = Arc::clone(&self.context);
        let taken = context.lock_device();
        if let Some(reason) = context.device.lost() {
            self.rewind();
            return Err(failure(&self.ops, 0, &EngineError::DeviceLost { reason }));
        }
        // SAFETY: the device is ours.
        match unsafe { self.go_on(turn) } {
            Ok((RunStatus::Done, node)) => {
                self.under_way = Some(UnderWay {
                    node,
                    _device: taken,
                });
                Ok(RunStatus::InFlight)
            }
            Ok((progress, _)) => {
                self.has_yielded = true;
                Ok(progress)
            }
            Err(error) => {
                self.rewind();
                Err(self.failed(error))
            }
        }
    }

    fn wait(&mut self) -> Result<(), RunError> {
        let Some(under_way) = self.under_way.take() else {
            return Ok(());
        };
        self.rewind();
        let outcome = match self.context.device.synchronize() {
            Err(error) => {
                self.context.counters_dirty.store(true, Ordering::Relaxed);
                Err(failure(&self.ops, under_way.node, &error))
            }
            // SAFETY: nothing runs any more, and the device is still ours.
            Ok(()) => match unsafe { self.context.take_fault() } {
                Some(fault) => Err(self.fault(&fault)),
                None => Ok(()),
            },
        };
        outcome.map_err(|error| self.failed(error))
    }

    fn profile(&mut self) -> Result<Vec<NodeTiming>, RunError> {
        self.wait()?;
        if !self.is_current() {
            return Err(RunError::Stale);
        }
        let context = Arc::clone(&self.context);
        let _device = context.lock_device();
        if let Some(reason) = context.device.lost() {
            return Err(failure(&self.ops, 0, &EngineError::DeviceLost { reason }));
        }
        // SAFETY: the device is ours for as long as this runs.
        let times = unsafe { self.time() };
        self.rewind();
        let mut times = times.map_err(|error| self.failed(error))?.into_iter();
        let spans = self.groups.iter().map(|(count, nodes)| NodeTiming {
            nodes: nodes.clone(),
            seconds: times.by_ref().take(*count).sum(),
        });
        Ok(spans.collect())
    }

    fn set_label(&mut self, label: &str) {
        self.name = label.to_owned();
    }

    fn is_current(&self) -> bool {
        self.memory.iter().all(|(memory, changes)| {
            cuda_memory(memory).is_some_and(|memory| memory.repack_state().changes() == *changes)
        })
    }
}

impl Drop for CudaPlan {
    fn drop(&mut self) {
        // Its memory must not be used any more, and the next plan must not find its faults.
        let _ = self.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_gpu_cannot_read_is_found() {
        let tensor = |ty, offset, stride: u64| {
            let mut shape = Shape::contiguous(ty, [256, 4, 1, 1]).expect("a small shape");
            shape.nb[1] += stride;
            Tensor {
                shape,
                buffer: 0,
                offset,
            }
        };
        for (ty, offset, stride, is_right) in [
            (Type::Q8_0, 24, 0, true),
            (Type::Q8_0, 25, 0, false),
            (Type::Q8_0, 24, 1, false),
            (Type::Mxfp4, 25, 1, true),
            (Type::F32, 4, 4, true),
            (Type::F32, 4, 2, false),
            (Type::F16, 2, 2, true),
        ] {
            let tensor = tensor(ty, offset, stride);
            assert_eq!(is_aligned(&tensor), is_right, "{tensor:?}");
        }
        // A stride over a dimension of one element says nothing.
        let mut one = tensor(Type::Q8_0, 24, 0);
        (one.shape.ne[1], one.shape.nb[1]) = (1, 33);
        assert!(is_aligned(&one));
    }
}
