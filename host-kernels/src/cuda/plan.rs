//! From a graph to launches.

use std::sync::{Arc, PoisonError};

use tracing::error;
use vgpu_transport::ir::{Graph, Shape, Tensor, Type};

pub(super) use super::builder::{Builder, MOST_BLOCKS, threads_for};
use super::device::Address;
use super::host::{Host, HostNode};
use super::memory::CudaMemory;
use super::ops;
use super::params::{VgFault, VgView};
use super::scratch::Claim;
use super::segment::{Failure, Segment, Step};
use super::stream::Stream;
use crate::engine::{EngineError, Memory, Plan, Progress, RunError, Turn};

/// A graph, compiled: launches in order, and now and then work of the host.
pub(super) struct CudaPlan {
    stream: Arc<Stream>,
    parts: Vec<Part>,
    /// The part that a run that has yielded goes on with.
    at: usize,
    /// Names of the nodes' operators, for errors.
    ops: Vec<&'static str>,
    /// What the addresses in the launches point into.
    _memory: Vec<Arc<dyn Memory>>,
    _scratch: Claim,
}

enum Part {
    Launches(Segment),
    /// Runs on the host, between launches.
    Host {
        work: HostNode,
        node: usize,
    },
}

impl CudaPlan {
    pub(super) fn compile(
        graph: &Graph,
        buffers: &[Arc<dyn Memory>],
        stream: &Arc<Stream>,
    ) -> Result<CudaPlan, EngineError> {
        let bases = { buffers.iter() }
            .map(|memory| {
                let memory: Option<&CudaMemory> = memory.as_any().downcast_ref();
                let memory = memory.ok_or(EngineError::ForeignMemory)?;
                memory.check_there()?;
                match memory.is_of(&stream.pool) {
                    true => Ok(memory.address()),
                    false => Err(EngineError::ForeignMemory),
                }
            })
            .collect::<Result<Vec<Address>, EngineError>>()?;
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
        let views: Vec<VgView> = graph
            .tensors
            .iter()
            .map(|t| VgView::new(bases[t.buffer as usize] + t.offset, &t.shape))
            .collect();
        let memory: Vec<usize> = { buffers.iter() }
            .map(|memory| Arc::as_ptr(memory).cast::<()>() as usize)
            .collect();
        let mut parts = Vec::new();
        let mut steps: Vec<Step> = Vec::new();
        let mut scratch_bytes = 0;
        let segment = |steps| Part::Launches(Segment::new(steps, &memory, &stream.lineages));
        for (i, node) in graph.nodes.iter().enumerate() {
            if graph.dst(node).shape.is_empty() {
                continue;
            }
            if Host::takes(graph, node) {
                if !steps.is_empty() {
                    parts.push(segment(std::mem::take(&mut steps)));
                }
                let work = stream.host.compile(graph, node, &bases)?;
                parts.push(Part::Host { work, node: i });
                continue;
            }
            let mut builder = Builder::new(graph, &views, i, stream);
            ops::compile(&node.op, &mut builder)?;
            scratch_bytes = scratch_bytes.max(builder.scratch_bytes());
            steps.extend(builder.into_steps());
        }
        if !steps.is_empty() {
            parts.push(segment(steps));
        }
        Ok(CudaPlan {
            stream: Arc::clone(stream),
            parts,
            at: 0,
            ops: graph
                .nodes
                .iter()
                .map(|n| n.op.kind().ggml_name())
                .collect(),
            _memory: buffers.to_vec(),
            _scratch: stream.scratch.claim(scratch_bytes)?,
        })
    }

    /// Goes on from where the last turn has ended.
    ///
    /// # Safety
    /// The device is the caller's.
    unsafe fn go_on(&mut self, turn: &Turn) -> Result<Progress, RunError> {
        let stream = Arc::clone(&self.stream);
        let device = &stream.device;
        let mut last = None;
        while let Some(part) = self.parts.get_mut(self.at) {
            let outcome = match part {
                Part::Launches(segment) => {
                    last = Some(segment.last_node());
                    // SAFETY: compiled from a validated graph over memory that this plan holds on to; the device is
                    // the caller's.
                    unsafe { segment.advance(device, stream.pace, turn) }
                        .map_err(|Failure { node, error }| failure(&self.ops, node, &error))
                }
                // SAFETY: as above.
                Part::Host { work, node } => unsafe { work.run(&**device) }
                    .map(|()| Progress::Done)
                    .map_err(|error| at_node(&self.ops, *node, error)),
            };
            // What runs on the device still can fail as well, and comes first in the graph.
            let outcome = match outcome {
                Ok(Progress::Done) => {
                    self.at += 1;
                    continue;
                }
                other => other,
            };
            // One error is enough; and what runs on reports no fault.
            if outcome.is_err() && device.synchronize().is_err() {
                return outcome;
            }
            // SAFETY: no kernel runs, and the device is the caller's.
            if let Some(fault) = unsafe { stream.take_fault() } {
                return Err(self.fault(&fault));
            }
            return outcome;
        }
        if let Some(node) = last {
            device
                .synchronize()
                .map_err(|error| failure(&self.ops, node, &error))?;
        }
        // SAFETY: as above.
        match unsafe { stream.take_fault() } {
            Some(fault) => Err(self.fault(&fault)),
            None => Ok(Progress::Done),
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
        RunError::Moved => {}
    }
    error
}

impl Plan for CudaPlan {
    fn run(&mut self) -> Result<(), RunError> {
        let turn = Turn::new();
        while self.advance(&turn)? == Progress::Yielded {}
        Ok(())
    }

    fn advance(&mut self, turn: &Turn) -> Result<Progress, RunError> {
        let stream = Arc::clone(&self.stream);
        let _turn = { stream.running.lock() }.unwrap_or_else(PoisonError::into_inner);
        let was_there = stream.device.lost().is_none();
        let progress = match stream.device.lost() {
            // SAFETY: the lock makes the device ours.
            None => unsafe { self.go_on(turn) },
            Some(reason) => Err(failure(&self.ops, 0, &EngineError::Lost { reason })),
        };
        if let (true, Err(error), Some(reason)) = (was_there, &progress, stream.device.lost()) {
            // What failed began at this node or before: the device works on several at a time.
            error!("{error}; the device is lost, with the memory of all guests: {reason}");
        }
        if progress != Ok(Progress::Yielded) {
            // The next run begins anew, whatever became of this one.
            self.at = 0;
            for part in &mut self.parts {
                if let Part::Launches(segment) = part {
                    segment.rewind();
                }
            }
        }
        progress
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
