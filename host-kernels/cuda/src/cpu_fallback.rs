//! Nodes of a CUDA plan that run on the CPU engine.
//!
//! These operators quantise to K-quants, IQ and FP4 types, which needs a search, and no model does
//! it often. A plan copies the node's tensors to the host and the result back, so that a guest's
//! graph is never split. The copies are slow but correct.

use std::ops::Range;
use std::sync::OnceLock;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{Graph, Node, Op, OpKind, Rule, TypeSet};

use crate::device::{Address, Device};
use crate::params::VgView;
use crate::types::{READABLE, WRITABLE};
use vgpu_cpu::CpuEngine;
use vgpu_engine::fuse::ByteRange;
use vgpu_engine::types::FLOATS;
use vgpu_engine::work::Speed;
use vgpu_engine::{DeviceMemory, Engine, EngineError, RunError, RunStatus, SingleNode, Turn};

/// The operators and types of the fallback.
pub(crate) fn rules() -> Vec<Rule> {
    let searched = READABLE.without(WRITABLE);
    let mut rules = vec![
        Rule::new(OpKind::Copy, searched, &[READABLE]),
        Rule::new(OpKind::SetRows, searched, &[FLOATS]),
    ];
    // The sum with a quantised tensor is quantised again.
    for ty in READABLE.without(FLOATS).iter() {
        let set = TypeSet::of(&[ty]);
        rules.push(Rule::new(OpKind::Add, set, &[set, FLOATS]));
        rules.push(Rule::new(OpKind::Add1, set, &[set, FLOATS]));
    }
    rules
}

/// The CPU engine of a CUDA engine, started for the first such node.
#[derive(Default)]
pub(crate) struct CpuFallback {
    engine: OnceLock<Result<CpuEngine, EngineError>>,
}

impl CpuFallback {
    /// The CPU engine, started by the first call.
    ///
    /// # Errors
    /// [`EngineError`] of the CPU engine if it did not start; the same for every later call.
    fn engine(&self) -> Result<&CpuEngine, EngineError> {
        let engine = self.engine.get_or_init(|| CpuEngine::new(0, None));
        engine.as_ref().map_err(Clone::clone)
    }

    /// Whether the CPU engine runs this node.
    pub(crate) fn takes(graph: &Graph, node: &Node) -> bool {
        if !matches!(
            node.op,
            Op::Copy {} | Op::SetRows {} | Op::Add {} | Op::Add1 {}
        ) {
            return false;
        }
        let dst = graph.dst(node).shape.ty;
        let same = graph.src(node, 0).is_some_and(|src| src.shape.ty == dst);
        match node.op {
            Op::Copy {} => READABLE.without(WRITABLE).contains(dst) && !same,
            Op::SetRows {} => READABLE.without(WRITABLE).contains(dst),
            _ => dst.is_quantized(),
        }
    }

    /// What [`Engine::kept_scratch_bytes`] says of the CPU engine. Starts none.
    pub(crate) fn kept_scratch_bytes(&self) -> u64 {
        let engine = self.engine.get().and_then(|engine| engine.as_ref().ok());
        engine.map_or(0, Engine::kept_scratch_bytes)
    }

    /// The speed of the CPU engine. If it does not start, that of a slow one.
    pub(crate) fn speed(&self) -> Speed {
        self.engine()
            .map_or_else(|_| Speed::default(), Engine::speed)
    }

    /// Compiles node `at` of `graph`, whose tensors are at `views`.
    ///
    /// # Errors
    /// [`EngineError`] of the CPU engine.
    pub(crate) fn compile(
        &self,
        graph: &Graph,
        at: usize,
        views: &[VgView],
    ) -> Result<FallbackNode, EngineError> {
        let node = &graph.nodes[at];
        let tensors = node.src.as_slice().iter().flatten().chain([&node.dst]);
        let places = tensors.map(|&tensor| Place {
            range: ByteRange::of(&graph.tensors[tensor as usize]),
            address: views[tensor as usize].data,
            is_written: node.written_tensors().any(|it| it == tensor as usize),
        });
        Ok(FallbackNode {
            node: SingleNode::compile(self.engine()?, graph, at)?,
            places: places.collect(),
        })
    }
}

/// A node for the CPU engine, with host memory for its tensors.
pub(crate) struct FallbackNode {
    node: SingleNode,
    /// Where the tensors of the node are.
    places: Box<[Place]>,
}

/// Where a tensor is.
struct Place {
    range: ByteRange,
    address: Address,
    /// Whether the node writes to the tensor. Its memory belongs to this guest alone then.
    is_written: bool,
}

impl FallbackNode {
    /// Bytes of host memory, without the node itself.
    pub(crate) fn bytes(&self) -> usize {
        self.node.bytes() + size_of_val(&*self.places)
    }

    /// Bytes of host memory that a run needs besides.
    pub(crate) fn working_bytes(&self) -> u64 {
        self.node.working_bytes()
    }

    /// Runs the node until `turn` is over, after all work that the device was asked for. The device
    /// has no work left when the run yields.
    ///
    /// # Errors
    /// [`RunError`] of the CPU engine, or of a copy.
    ///
    /// # Safety
    /// The memory of the graph that the node was compiled from still exists.
    pub(crate) unsafe fn run(
        &mut self,
        device: &dyn Device,
        turn: &Turn,
    ) -> Result<RunStatus, RunError> {
        let places = &self.places;
        let status = self.node.run(&mut Buffers { device, places }, turn)?;
        if status == RunStatus::Yielded {
            let idle = device.synchronize();
            idle.map_err(|error| self.node.failed(&error))?;
        }
        Ok(status)
    }
}

/// The tensors of a node, which exist. Only [`FallbackNode::run`] makes this value, and its caller
/// guarantees it.
struct Buffers<'a> {
    device: &'a dyn Device,
    places: &'a [Place],
}

impl Place {
    /// The bytes of the tensor that are among `len` bytes at `offset` of a buffer.
    fn part(&self, buffer: usize, offset: u64, len: usize) -> Option<Range<u64>> {
        let ByteRange {
            buffer: of,
            ref bytes,
        } = self.range;
        let part = bytes.start.max(offset)..bytes.end.min(offset + len as u64);
        (of as usize == buffer && part.start < part.end).then_some(part)
    }
}

impl DeviceMemory for Buffers<'_> {
    fn read(&mut self, buffer: usize, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
        for place in self.places {
            let Some(part) = place.part(buffer, offset, out.len()) else {
                continue;
            };
            let from = place.address + (part.start - place.range.bytes.start);
            let to = &mut out[(part.start - offset) as usize..(part.end - offset) as usize];
            // SAFETY: the tensor exists, as this structure says, and `part` has checked that the
            // bytes lie inside it.
            unsafe { self.device.download(from, BytesMut::from(to)) }?;
        }
        Ok(())
    }

    fn write(&mut self, buffer: usize, offset: u64, data: &[u8]) -> Result<(), EngineError> {
        for place in self.places.iter().filter(|place| place.is_written) {
            let Some(part) = place.part(buffer, offset, data.len()) else {
                continue;
            };
            let to = place.address + (part.start - place.range.bytes.start);
            let from = &data[(part.start - offset) as usize..(part.end - offset) as usize];
            // SAFETY: the tensor exists, as this structure says, and no other code uses its bytes
            // now. `part` has checked that the bytes lie inside it.
            unsafe { self.device.upload(to, Bytes::from(from)) }?;
        }
        Ok(())
    }
}
