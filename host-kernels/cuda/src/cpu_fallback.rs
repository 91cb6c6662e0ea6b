//! Nodes of a CUDA plan that run on the CPU engine.
//!
//! These operators quantise to K-quants, IQ and FP4 types, which needs a search, and no model does
//! it often. A plan copies the node's tensors to the host and the result back, so that a guest's
//! graph is never split. The copies are slow but correct.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{
    BufferId, Capabilities, Graph, Limits, Node, Op, OpKind, Rule, Sources, Tensor, TypeSet,
    validate,
};

use crate::device::{Address, Device};
use crate::types::{READABLE, WRITABLE};
use vgpu_cpu::CpuEngine;
use vgpu_engine::types::FLOATS;
use vgpu_engine::{Engine, EngineError, Memory, Plan, RunError};

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

    /// Compiles a node of `graph`, whose buffers begin at `bases`.
    ///
    /// # Errors
    /// [`EngineError`] of the CPU engine.
    pub(crate) fn compile(
        &self,
        graph: &Graph,
        node: &Node,
        bases: &[Address],
    ) -> Result<FallbackNode, EngineError> {
        let engine = self.engine()?;
        let unsupported = |why: String| EngineError::Unsupported {
            op: node.op.kind().ggml_name(),
            why,
        };
        let sources = (0..node.src.as_slice().len()).map(|i| graph.src(node, i));
        let mut tensors = vec![*graph.dst(node)];
        let mut src = Vec::new();
        for source in sources {
            src.push(source.map(|_| tensors.len() as u32));
            tensors.extend(source);
        }
        let regions = Region::around(&tensors);
        for tensor in &mut tensors {
            let region = regions.iter().position(|region| region.holds(tensor));
            let region = region.expect("every tensor lies in the region around it");
            tensor.buffer = region as u32;
            tensor.offset -= regions[region].bytes.start;
        }
        let part = Graph {
            buffers: (0..regions.len() as u64).map(BufferId).collect(),
            tensors,
            nodes: vec![Node {
                op: node.op,
                dst: 0,
                src: Sources::new(src),
            }],
        };
        let limits = Limits {
            revisits: u64::MAX, // the graph was held to its limits as a whole
            ..Limits::default()
        };
        let size = |id: BufferId| regions.get(id.0 as usize).map(Region::len);
        let capabilities: &Capabilities = engine.capabilities();
        let valid = validate(part, capabilities, &limits, size)
            .map_err(|invalid| unsupported(invalid.to_string()))?;
        let memory = regions
            .iter()
            .map(|region| engine.alloc(region.len()))
            .collect::<Result<Vec<_>, _>>()?;
        let ranges = regions
            .iter()
            .map(|region| bases[region.buffer as usize] + region.bytes.start);
        Ok(FallbackNode {
            plan: engine.compile(&valid, &memory, &|| false)?,
            result: valid.graph().tensors[0].buffer as usize,
            ranges: ranges.zip(memory).collect(),
        })
    }
}

/// A range of a buffer that contains tensors of a node.
struct Region {
    buffer: u32,
    bytes: Range<u64>,
}

impl Region {
    /// The disjoint ranges that contain the tensors.
    fn around(tensors: &[Tensor]) -> Vec<Region> {
        let mut all: Vec<Region> = tensors
            .iter()
            .map(|tensor| Region {
                buffer: tensor.buffer,
                // Offsets keep the alignment of the device's memory.
                bytes: tensor.offset & !255..tensor.offset + byte_len(tensor),
            })
            .collect();
        all.sort_by_key(|region| (region.buffer, region.bytes.start));
        all.dedup_by(|next, last| {
            let overlap = next.buffer == last.buffer && next.bytes.start < last.bytes.end;
            if overlap {
                last.bytes.end = last.bytes.end.max(next.bytes.end);
            }
            overlap
        });
        all
    }

    fn holds(&self, tensor: &Tensor) -> bool {
        let end = tensor.offset + byte_len(tensor);
        self.buffer == tensor.buffer && self.bytes.start <= tensor.offset && end <= self.bytes.end
    }

    fn len(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

fn byte_len(tensor: &Tensor) -> u64 {
    let byte_len = tensor.shape.byte_len();
    byte_len.expect("a validated tensor has a size")
}

/// A node for the CPU engine, with host memory for its tensors.
pub(crate) struct FallbackNode {
    plan: Box<dyn Plan>,
    /// The address of each range on the device, and its host memory.
    ranges: Vec<(Address, Arc<dyn Memory>)>,
    /// The index in `ranges` of the range with the destination.
    result: usize,
}

impl FallbackNode {
    /// Bytes of host memory, without the node itself.
    pub(crate) fn bytes(&self) -> usize {
        let ranges = self.ranges.iter().map(|(_, memory)| memory.size() as usize);
        let table = self.ranges.capacity() * (size_of::<(Address, Arc<dyn Memory>)>() + 128);
        ranges.sum::<usize>() + table + self.plan.plan_bytes() as usize
    }

    /// Bytes of host memory that a run needs besides.
    pub(crate) fn working_bytes(&self) -> u64 {
        let ranges = self.ranges.iter().map(|(_, memory)| memory.size());
        ranges.max().unwrap_or(0) + self.plan.working_bytes()
    }

    /// Runs the node, after all work that the device was asked for.
    ///
    /// # Errors
    /// [`RunError`] of the CPU engine, or of a copy.
    ///
    /// # Safety
    /// The memory of the graph that the node was compiled from still exists.
    pub(crate) unsafe fn run(&mut self, device: &dyn Device) -> Result<(), RunError> {
        let failed = |error: EngineError| RunError::Kernel {
            node: 0,
            op: "",
            message: error.to_string(),
        };
        let mut bytes = Vec::new();
        let largest = self.ranges.iter().map(|(_, memory)| memory.size() as usize);
        let wanted = largest.max().unwrap_or(0);
        if bytes.try_reserve_exact(wanted).is_err() {
            let wanted = wanted as u64;
            return Err(RunError::OutOfMemory { wanted });
        }
        for (address, memory) in &self.ranges {
            bytes.resize(memory.size() as usize, 0u8);
            // SAFETY: `bytes` has the size of the range, which lies in a buffer of the graph. The
            // caller guarantees that the buffer exists.
            unsafe { device.download(*address, BytesMut::from(bytes.as_mut_slice())) }
                .and_then(|()| memory.write(0, Bytes::from(bytes.as_slice())))
                .map_err(failed)?;
        }
        self.plan.run()?;
        let (address, memory) = &self.ranges[self.result];
        bytes.resize(memory.size() as usize, 0);
        memory
            .read(0, BytesMut::from(bytes.as_mut_slice()))
            // SAFETY: `bytes` has the size of this range, which lies in a buffer of the graph. The
            // caller guarantees that the buffer exists.
            .and_then(|()| unsafe { device.upload(*address, Bytes::from(bytes.as_slice())) })
            .map_err(failed)
    }
}
