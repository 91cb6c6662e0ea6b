//! Plans: compiled graphs, and running them.

mod compiler;
mod part;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tracing::error;
use vgpu_transport::ir::Graph;

use crate::context::{DeviceGuard, ExecutionContext};
use crate::device::Address;
use crate::graph_exec::Failure;
use crate::launch::q8::FEW_COLUMNS;
use crate::memory::CudaMemory;
use crate::params::{VgFault, VgView};
use crate::repack::pass::RepackPass;
use crate::scratch::Claim;
use compiler::{Compiler, is_aligned};
use part::{Part, at_node, failure};
use vgpu_engine::fuse::Arrangement;
use vgpu_engine::{EngineError, Memory, NodeTiming, Plan, RunError, RunStatus, Turn};

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

/// Memory as the engine's own.
fn cuda_memory(memory: &Arc<dyn Memory>) -> Option<&CudaMemory> {
    memory.as_any().downcast_ref()
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
