//! One node of a graph on another engine, with copies of its tensors.
//!
//! An engine that lacks an operator runs the node on the CPU engine, so that a guest's graph is
//! never split. Its plan copies the node's tensors from the device and the result back.

use std::ops::Range;
use std::sync::Arc;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{BufferId, Graph, Limits, Node, Op, Sources, Tensor, validate};

use crate::engine::Engine;
use crate::error::{EngineError, RunError};
use crate::memory::Memory;
use crate::plan::Plan;

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

/// A range of a buffer of the device's graph, and its copy.
struct Copied {
    /// The index of the buffer in the graph.
    buffer: usize,
    /// The first byte in the buffer.
    offset: u64,
    memory: Arc<dyn Memory>,
}

/// The memory that a node's tensors are copied from and to.
pub trait DeviceMemory {
    /// Reads `out.len()` bytes at `offset` of the buffer with this index in the graph, after all
    /// work that the device was asked for.
    ///
    /// # Errors
    /// What the device reports.
    fn read(&mut self, buffer: usize, offset: u64, out: &mut [u8]) -> Result<(), EngineError>;

    /// Writes `data` at `offset` of the buffer with this index in the graph.
    ///
    /// # Errors
    /// What the device reports.
    fn write(&mut self, buffer: usize, offset: u64, data: &[u8]) -> Result<(), EngineError>;
}

/// A compiled node, with memory for copies of its tensors.
pub struct SingleNode {
    plan: Box<dyn Plan>,
    ranges: Vec<Copied>,
    /// The indices in `ranges` of the ranges that the node writes.
    results: Vec<usize>,
    /// The index of the node in the graph of the device.
    at: usize,
}

impl SingleNode {
    /// Compiles node `at` of `graph`, which is valid, for `engine`.
    ///
    /// # Errors
    /// [`EngineError`] of `engine`.
    pub fn compile(
        engine: &dyn Engine,
        graph: &Graph,
        at: usize,
    ) -> Result<SingleNode, EngineError> {
        let node = &graph.nodes[at];
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
        let valid = validate(part, engine.capabilities(), &limits, size)
            .map_err(|invalid| unsupported(invalid.to_string()))?;
        let memory = regions
            .iter()
            .map(|region| engine.alloc(region.len()))
            .collect::<Result<Vec<_>, _>>()?;
        let plan = engine.compile(&valid, &memory, &|| false)?;
        let ranges = regions.iter().zip(memory).map(|(region, memory)| Copied {
            buffer: region.buffer as usize,
            offset: region.bytes.start,
            memory,
        });
        let results = match node.op {
            // The momenta, which are sources, are updated too.
            Op::OptStepAdamw {} => (0..regions.len()).collect(),
            _ => vec![valid.graph().tensors[0].buffer as usize],
        };
        Ok(SingleNode {
            plan,
            results,
            ranges: ranges.collect(),
            at,
        })
    }

    /// Bytes of host memory, without the structure itself.
    pub fn bytes(&self) -> usize {
        let ranges = self.ranges.iter().map(|range| range.memory.size() as usize);
        let table = self.ranges.capacity() * (size_of::<Copied>() + size_of::<usize>() + 128);
        ranges.sum::<usize>() + table + self.plan.plan_bytes() as usize
    }

    /// Bytes of host memory that a run needs besides.
    pub fn working_bytes(&self) -> u64 {
        let ranges = self.ranges.iter().map(|range| range.memory.size());
        ranges.max().unwrap_or(0) + self.plan.working_bytes()
    }

    /// Copies the tensors from `device`, runs the node, and copies the result back.
    ///
    /// # Errors
    /// [`RunError`] of the other engine, or of a copy.
    pub fn run(&mut self, device: &mut dyn DeviceMemory) -> Result<(), RunError> {
        let at = self.at;
        let failed = |error: EngineError| RunError::Kernel {
            node: at,
            op: "",
            message: error.to_string(),
        };
        let mut bytes = Vec::new();
        let largest = self.ranges.iter().map(|range| range.memory.size() as usize);
        let wanted = largest.max().unwrap_or(0);
        if bytes.try_reserve_exact(wanted).is_err() {
            let wanted = wanted as u64;
            return Err(RunError::OutOfMemory { wanted });
        }
        for range in &self.ranges {
            bytes.resize(range.memory.size() as usize, 0u8);
            device
                .read(range.buffer, range.offset, &mut bytes)
                .and_then(|()| range.memory.write(0, Bytes::from(bytes.as_slice())))
                .map_err(failed)?;
        }
        self.plan.run().map_err(|error| match error {
            RunError::Index {
                op, index, count, ..
            } => RunError::Index {
                node: at,
                op,
                index,
                count,
            },
            RunError::Kernel { op, message, .. } => RunError::Kernel {
                node: at,
                op,
                message,
            },
            other => other,
        })?;
        for range in self.results.iter().map(|&result| &self.ranges[result]) {
            bytes.resize(range.memory.size() as usize, 0);
            range
                .memory
                .read(0, BytesMut::from(bytes.as_mut_slice()))
                .and_then(|()| device.write(range.buffer, range.offset, &bytes))
                .map_err(failed)?;
        }
        Ok(())
    }
}
