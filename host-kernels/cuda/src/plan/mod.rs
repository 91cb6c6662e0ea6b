//! Plans: compiled graphs, and running them.

mod batch;
mod compiler;
mod located;
mod membership;
mod split;

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing::error;
use vgpu_transport::ir::{Graph, GraphCounts, Node};

use crate::batch::{JointFinder, MAX_OWN_SCRATCH, OWN_CACHE_BYTES, is_of_few_tokens};
use crate::context::{DeviceGuard, ExecutionContext};
use crate::cpu_fallback::CpuFallback;
use crate::graph_exec::{Failure, LaunchSequence, PlanMemory};
use crate::launch::place::OwnPlace;
use crate::launch::policy::SPEED;
use crate::memory::CudaMemory;
use crate::params::{VgFault, VgView};
use crate::repack::pass::RepackPass;
use crate::scratch::Claim;
use compiler::{Compiler, is_aligned};
use located::{Buffer, Located};
use membership::Membership;
use split::{Split, at_node, failure};
use vgpu_engine::fuse::Arrangement;
use vgpu_engine::work;
use vgpu_engine::{
    ALLOCATION_BYTES, BatchKey, EngineError, Memory, NodeTiming, Plan, RunError, RunStatus, Turn,
};

/// Bytes of host memory that a node needs at most while it is compiled, and afterwards in the plan:
/// launches with their parameters, in several forms.
const MAX_NODE_BYTES: u64 = 8 << 10;

/// Bytes of host memory that a tensor needs at most while the graph is compiled, besides the graph.
const MAX_TENSOR_BYTES: u64 = 512;

/// Bytes of host memory that a buffer needs at most while the graph is compiled.
const MAX_BUFFER_BYTES: u64 = 256;

/// Nodes that a graph may have more than twice its own when long ones are divided.
const MAX_MORE_NODES: usize = 128;

/// Bytes of host memory that a plan needs at most, however small it is.
const MAX_EMPTY_BYTES: u64 = 16 << 10;

/// The most bytes of host memory that the compilation of a graph needs, with the plan and without
/// the graph. The memory of nodes that run on the CPU is not touched before a run, and comes on
/// top.
pub(crate) fn compile_bytes(counts: &GraphCounts) -> u64 {
    let bytes = |count: usize, each: u64| (count as u64).saturating_mul(each);
    // The arrangement has a copy of the graph, and nodes are moved through another. Long nodes are
    // divided.
    (2 * counts.decoded_bytes())
        .saturating_add(bytes(max_nodes(counts.nodes), MAX_NODE_BYTES))
        .saturating_add(bytes(counts.tensors, MAX_TENSOR_BYTES))
        .saturating_add(bytes(counts.buffers, MAX_BUFFER_BYTES))
        .saturating_add(MAX_EMPTY_BYTES)
}

/// The most nodes of a graph of `nodes` nodes when long ones are divided.
fn max_nodes(nodes: usize) -> usize {
    nodes.saturating_mul(2).saturating_add(MAX_MORE_NODES)
}

/// Into how many parts a node is divided so that each takes no longer than `longest` by estimate.
pub(crate) fn parts(graph: &Graph, node: &Node, longest: Duration) -> u64 {
    if CpuFallback::takes(graph, node) {
        return 1;
    }
    let time = work::of(graph, node).time(&SPEED);
    (time.as_secs_f64() / longest.as_secs_f64()).ceil().max(1.0) as u64
}

/// A compiled graph: launches in order, and nodes for the CPU engine between them.
pub(crate) struct CudaPlan {
    context: Arc<ExecutionContext>,
    splits: Vec<Split>,
    /// The split that a run that has yielded resumes with.
    at: usize,
    /// For each group of nodes, in order: the number of launches or CPU nodes, and the nodes.
    groups: Vec<(usize, Vec<usize>)>,
    /// The names of the nodes' operators, for errors.
    ops: Vec<&'static str>,
    /// The label in logs.
    name: String,
    /// The end of a run that the device works on.
    under_way: Option<RunInFlight>,
    /// Whether a run has yielded and not ended.
    has_yielded: bool,
    /// The memory that the launches use, each with its [changes](Buffer::changes) at compilation.
    memory: Vec<(Arc<dyn Memory>, u64)>,
    /// The same memory, as the sequences of launches name it.
    plan_memory: PlanMemory,
    /// Bytes of scratch memory that the launches use.
    scratch_bytes: u64,
    /// The scratch memory, once the plan has taken it.
    scratch: Option<Claim>,
    /// The stage tables of megakernels.
    tables: Vec<CudaMemory>,
    /// The number of the plan, which no other plan of the process has.
    number: u64,
    /// The place that only this plan uses, if it may run in a batch.
    own: Option<OwnPlace>,
    /// What it brings into a batch.
    membership: Option<Membership>,
}

/// The number of plans so far.
static PLANS: AtomicU64 = AtomicU64::new(0);

/// The end of a run that the device works on.
struct RunInFlight {
    /// The node of the last launch.
    node: usize,
    _device: DeviceGuard,
}

impl CudaPlan {
    /// Compiles a validated graph over these buffers.
    ///
    /// # Errors
    /// [`EngineError::ForeignMemory`] if a buffer is not of this engine,
    /// [`EngineError::Unsupported`] if a tensor is not aligned or no kernel takes the operands of a
    /// node, [`EngineError::OutOfMemory`] if there is no memory for a stage table or a copy of
    /// weights, [`EngineError::DeviceLost`], [`EngineError::Cancelled`] once `is_cancelled` returns
    /// `true`.
    pub(crate) fn compile(
        graph: &Graph,
        buffers: &[Arc<dyn Memory>],
        context: &Arc<ExecutionContext>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<CudaPlan, EngineError> {
        let memories = { buffers.iter() }
            .map(|memory| {
                let memory = Buffer::of(memory).ok_or(EngineError::ForeignMemory)?;
                memory.check_there()?;
                match memory.is_of(&context.allocator) {
                    true => Ok(memory),
                    false => Err(EngineError::ForeignMemory),
                }
            })
            .collect::<Result<Vec<Buffer<'_>>, EngineError>>()?;
        if let Some(tensor) = graph.tensors.iter().find(|tensor| !is_aligned(tensor)) {
            return Err(EngineError::Unsupported {
                op: "a graph",
                why: format!(
                    "{} at offset {} with strides {:?} is not aligned for the GPU",
                    tensor.shape.ty.ggml_name(),
                    tensor.offset,
                    tensor.shape.nb
                ),
            });
        }
        let located = Located::of(graph, &memories, is_cancelled)?;
        let at = located.places(&memories);
        let mut arrangement = match context.policy.fusion {
            true => Arrangement::of(graph, context.mmv_columns() as u64, is_cancelled),
            false => Arrangement::plain(graph),
        };
        let parents = arrangement.divide(
            |graph, node| parts(graph, node, context.policy.longest_launch),
            max_nodes(graph.nodes.len()),
        );
        let parents = parents.map_err(|error| EngineError::Unsupported {
            op: "a graph",
            why: error.to_string(),
        })?;
        let plain: Vec<VgView> = { arrangement.graph.tensors.iter().enumerate() }
            .map(|(i, tensor)| {
                let whole = match i.checked_sub(graph.tensors.len()) {
                    Some(part) => parents[part],
                    None => i,
                };
                let offset = tensor.offset - graph.tensors[whole].offset;
                VgView::new(at.address(whole) + offset, &tensor.shape)
            })
            .collect();
        let mut repack = RepackPass::of(graph, &at, context)?;
        let weights = at.weight_ranges();
        let is_joint = |compiler: &Compiler<'_>| {
            let mut finder = JointFinder::new((&*context.device, &context.kernels), &weights);
            let mut launches = compiler.launches().into_iter().flatten();
            launches.any(|launch| finder.product(0, launch).is_some())
        };
        let mut own: Option<OwnPlace> = None;
        let mut may_own = context.policy.batch && is_of_few_tokens(graph);
        let mut views;
        let mut compiler = loop {
            views = plain.clone();
            repack.mark(&mut views);
            let place = own
                .as_ref()
                .map_or_else(|| context.shared_place(), OwnPlace::place);
            let compiler = Compiler::of(&arrangement, &views, place, (context, is_cancelled))?;
            if repack.refuse(&compiler.refused) {
                continue;
            }
            if let Some(place) = &own {
                if compiler.needed() <= place.size() && is_joint(&compiler) {
                    break compiler;
                }
                (own, may_own) = (None, false);
                continue;
            }
            let (cache_bytes, bytes) = compiler.parts();
            let parts = (cache_bytes.min(OWN_CACHE_BYTES), bytes);
            if !may_own || bytes > MAX_OWN_SCRATCH || !is_joint(&compiler) {
                break compiler;
            }
            own = OwnPlace::new(&context.allocator, &context.faults, parts);
            if own.is_none() {
                break compiler;
            }
        };
        let needed = compiler.needed();
        let groups = std::mem::take(&mut compiler.groups);
        let ops: Vec<&'static str> = { graph.nodes.iter() }
            .map(|n| n.op.kind().ggml_name())
            .collect();
        let places = buffers
            .iter()
            .map(|memory| Arc::as_ptr(memory).cast::<()>() as usize);
        let plan_memory = context.templates.memory(places);
        let (splits, tables) = compiler.into_splits(&plan_memory, &ops, own.is_some())?;
        let membership =
            { own.as_ref() }.and_then(|_| Membership::of(&splits, graph, &weights, context));
        let formats = located.formats();
        let applied = repack.apply();
        located.note_changes(&memories, &formats);
        let changes: Vec<u64> = memories.iter().map(Buffer::changes).collect();
        located.copy_withheld(&memories, &applied?, is_cancelled)?;
        Ok(CudaPlan {
            context: Arc::clone(context),
            splits,
            at: 0,
            groups,
            ops,
            name: "a graph".into(),
            under_way: None,
            has_yielded: false,
            memory: buffers.iter().cloned().zip(changes).collect(),
            plan_memory,
            tables,
            scratch_bytes: if own.is_some() { 0 } else { needed },
            scratch: None,
            number: PLANS.fetch_add(1, Ordering::Relaxed),
            own,
            membership,
        })
    }

    /// Resumes where the last slice has ended. `Done`: all launches were handed to the device.
    /// Returns also the node of the last launch.
    ///
    /// # Errors
    /// [`RunError`] with the node that has failed, or with the index that a kernel has found out of
    /// bounds.
    ///
    /// # Safety
    /// The caller has the device.
    unsafe fn go_on(&mut self, turn: &Turn) -> Result<(RunStatus, usize), RunError> {
        let context = Arc::clone(&self.context);
        let device = &context.device;
        // SAFETY: the caller has the device, so only this plan could have a kernel under way.
        // `launch` has waited for its last run, and a failed run was synchronised, or the device is
        // lost: no kernel runs.
        unsafe { context.reset_counters() }.map_err(|error| failure(&self.ops, 0, &error))?;
        let mut last = 0;
        while let Some(split) = self.splits.get_mut(self.at) {
            let outcome = match split {
                Split::Launches(sequence) => {
                    last = sequence.last_node();
                    // SAFETY: the launches were compiled from a validated graph over memory that
                    // `self.memory`, `tables` and `scratch` keep alive. The caller has the
                    // device, so no other plan uses it.
                    unsafe { sequence.advance(device, context.policy, turn) }
                        .map_err(|Failure { node, error, .. }| failure(&self.ops, node, &error))
                }
                // SAFETY: `self.memory` keeps the memory of the graph alive that the node was
                // compiled from.
                Split::Cpu { work, node } => unsafe { work.run(&**device, turn) }
                    .map_err(|error| at_node(&self.ops, *node, error)),
            };
            // Earlier launches may fail, too, and their fault comes first in the graph.
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
            // If waiting fails, kernels may still run, and the fault cell cannot be read.
            let outcome = outcome.map(|progress| (progress, last));
            if outcome.is_err() && device.synchronize().is_err() {
                return outcome;
            }
            // SAFETY: the turn yielded, after which `advance` or `run` has synchronised the device,
            // or an error occurred and the device was synchronised above. The caller has the
            // device.
            if let Some(fault) = unsafe { self.take_fault() } {
                return Err(self.fault(&fault));
            }
            return outcome;
        }
        Ok((RunStatus::Done, last))
    }

    /// Takes the scratch memory before a run.
    ///
    /// # Errors
    /// [`RunError::OutOfMemory`], or what the device reports.
    fn prepare(&mut self) -> Result<(), RunError> {
        self.reserve().map_err(|error| match error {
            EngineError::OutOfMemory { wanted, .. } => RunError::OutOfMemory { wanted },
            error => failure(&self.ops, 0, &error),
        })
    }

    /// Starts the next run at the first split.
    fn rewind(&mut self) {
        (self.at, self.has_yielded) = (0, false);
        for split in &mut self.splits {
            if let Split::Launches(sequence) = split {
                sequence.rewind();
            }
        }
    }

    /// Logs an error that has made the device unusable, with the plan that ran.
    fn failed(&self, error: RunError) -> RunError {
        if let Some(reason) = self.context.device.lost() {
            // Several launches are under way at a time, so the cause is this node or one before it.
            error!(
                "{} of {} nodes: {error}; all guests lose their memory: {reason}",
                self.name,
                self.ops.len()
            );
        }
        error
    }

    /// Runs split by split, and returns the seconds of each launch and of each CPU node.
    ///
    /// # Errors
    /// As for [`go_on`](CudaPlan::go_on).
    ///
    /// # Safety
    /// The caller has the device.
    unsafe fn time(&mut self) -> Result<Vec<f64>, RunError> {
        let context = Arc::clone(&self.context);
        let mut times = Vec::new();
        for split in &mut self.splits {
            match split {
                Split::Launches(sequence) => {
                    // SAFETY: the launches were compiled from a validated graph over memory that
                    // `self.memory`, `tables` and `scratch` keep alive. The caller has the
                    // device, so no other plan uses it.
                    let outcome = unsafe { sequence.time(&*context.device) };
                    times.extend(
                        outcome.map_err(|Failure { node, error, .. }| {
                            failure(&self.ops, node, &error)
                        })?,
                    );
                }
                Split::Cpu { work, node } => {
                    let start = Instant::now();
                    // SAFETY: `self.memory` keeps the memory of the graph alive that the node was
                    // compiled from.
                    unsafe { work.run(&*context.device, &Turn::new()) }
                        .map_err(|error| at_node(&self.ops, *node, error))?;
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
        // SAFETY: `time` of each sequence has synchronised the device, and the caller has it.
        match unsafe { self.take_fault() } {
            Some(fault) => Err(self.fault(&fault)),
            None => Ok(times),
        }
    }

    /// The fault that kernels of the plan have reported since the last call.
    ///
    /// # Safety
    /// No kernel runs, and the caller has the device.
    unsafe fn take_fault(&self) -> Option<VgFault> {
        let cell = self.own.as_ref().map(|own| &own.cell);
        // SAFETY: no kernel runs. The caller has the device, without which nobody calls this
        // function.
        unsafe { self.context.faults.take_fault(cell) }
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
        self.prepare()?;
        // SAFETY: `taken` holds the device, until the end of this call or in `under_way`.
        match unsafe { self.go_on(turn) } {
            Ok((RunStatus::Done, node)) => {
                self.under_way = Some(RunInFlight {
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
            // SAFETY: the device was synchronised, and `under_way` still holds it.
            Ok(()) => match unsafe { self.take_fault() } {
                Some(fault) => Err(self.fault(&fault)),
                None => Ok(()),
            },
        };
        outcome.map_err(|error| self.failed(error))
    }

    fn kernels(&self) -> Vec<&'static str> {
        let sequences = self.splits.iter().filter_map(|split| match split {
            Split::Launches(sequence) => Some(sequence),
            Split::Cpu { .. } => None,
        });
        let device = &self.context.device;
        let names = sequences.flat_map(LaunchSequence::kernels);
        let names: BTreeSet<_> = names.map(|kernel| device.kernel_name(kernel)).collect();
        names.into_iter().collect()
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
        self.prepare()?;
        // SAFETY: `_device` holds the device until this function returns.
        let times = unsafe { self.time() };
        self.rewind();
        let mut times = times.map_err(|error| self.failed(error))?.into_iter();
        let spans = self.groups.iter().map(|(count, nodes)| NodeTiming {
            nodes: nodes.clone(),
            seconds: times.by_ref().take(*count).sum(),
        });
        Ok(spans.collect())
    }

    fn plan_bytes(&self) -> u64 {
        let splits = self.splits.iter().map(Split::bytes).sum::<usize>();
        let groups = self
            .groups
            .iter()
            .map(|(_, nodes)| nodes.capacity() * size_of::<usize>() + ALLOCATION_BYTES);
        let tables = self.splits.capacity() * size_of::<Split>()
            + self.groups.capacity() * size_of::<(usize, Vec<usize>)>()
            + self.ops.capacity() * size_of::<&'static str>()
            + self.memory.capacity() * size_of::<(Arc<dyn Memory>, u64)>()
            + self.plan_memory.bytes()
            + self.tables.capacity() * size_of::<CudaMemory>();
        let membership = self.membership.as_ref().map_or(0, Membership::bytes);
        let own = size_of::<CudaPlan>() + self.name.capacity() + membership + 8 * ALLOCATION_BYTES;
        (own + splits + groups.sum::<usize>() + tables) as u64
    }

    fn working_bytes(&self) -> u64 {
        { self.splits.iter() }
            .map(Split::working_bytes)
            .max()
            .unwrap_or(0)
    }

    fn device_bytes(&self) -> u64 {
        let tables = self.tables.iter().map(Memory::size);
        let own = self.own.as_ref().map(OwnPlace::size);
        tables
            .chain(own)
            .map(|size| self.context.allocator.allocation_size(size))
            .sum()
    }

    fn device_working_bytes(&self) -> u64 {
        self.context.scratch.claimed(self.scratch_bytes)
    }

    fn reserve(&mut self) -> Result<(), EngineError> {
        if self.scratch.is_none() {
            self.scratch = Some(self.context.scratch.claim(self.scratch_bytes)?);
        }
        Ok(())
    }

    fn batch_key(&self) -> Option<BatchKey> {
        let membership = self.membership.as_ref()?;
        Some(BatchKey {
            products: membership.group.number,
            position: match self.has_yielded {
                false => (0, 0),
                true => (self.passed(), 1),
            },
        })
    }

    fn batch_work(&self) -> u64 {
        self.membership.as_ref().map_or(1, |it| it.work)
    }

    fn as_any_mut(&mut self) -> Option<&mut dyn Any> {
        Some(self)
    }

    fn set_label(&mut self, label: &str) {
        self.name = label.to_owned();
    }

    fn is_current(&self) -> bool {
        self.memory.iter().all(|(memory, changes)| {
            Buffer::of(memory).is_some_and(|memory| memory.changes() == *changes)
        })
    }
}

impl Drop for CudaPlan {
    fn drop(&mut self) {
        // Kernels must not use the memory of a dropped plan, and the next plan must not find its
        // faults.
        let _ = self.wait();
    }
}
