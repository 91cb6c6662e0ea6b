//! One node of a graph on another engine, with copies of its tensors.
//!
//! An engine that lacks an operator runs the node on the CPU engine, so that a guest's graph is
//! never split. The engine's plan copies the node's tensors from the device and the result back.

use std::ops::Range;
use std::sync::Arc;

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::ir::{
    BufferId, Graph, GraphCounts, Limits, Node, Sources, Tensor, ValidGraph, validate,
};

use crate::engine::Engine;
use crate::error::{EngineError, RunError};
use crate::memory::Memory;
use crate::plan::{ALLOCATION_BYTES, Plan, RunStatus, Turn};

/// Bytes that are copied between two questions whether the turn is over: about a millisecond.
const COPY_BYTES: u64 = 4 << 20;

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

/// What a run does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunPhase {
    /// It copies from the device: the index in `SingleNode::ranges`, and the bytes that are there.
    Read(usize, u64),
    /// It computes.
    Compute,
    /// It copies to the device: the index in `SingleNode::results`, and the bytes that are there.
    Write(usize, u64),
}

/// A node for another engine, without the memory for copies of its tensors.
pub struct PlannedNode {
    part: ValidGraph,
    regions: Vec<Region>,
    /// The index of the node in the graph of the device.
    at: usize,
}

impl PlannedNode {
    /// Node `at` of `graph`, which is valid, for `engine`.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if `engine` has no kernel for the node.
    pub fn new(engine: &dyn Engine, graph: &Graph, at: usize) -> Result<PlannedNode, EngineError> {
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
        let part = validate(part, engine.capabilities(), &limits, size)
            .map_err(|invalid| unsupported(invalid.to_string()))?;
        Ok(PlannedNode { part, regions, at })
    }

    /// Bytes of host memory that the node has now, at most, without the structure itself.
    pub fn own_bytes(&self) -> usize {
        let Graph {
            buffers,
            tensors,
            nodes,
        } = self.part.graph();
        buffers.capacity() * size_of::<BufferId>()
            + tensors.capacity() * size_of::<Tensor>()
            + nodes.capacity() * size_of::<Node>()
            + self.regions.capacity() * size_of::<Region>()
            + 4 * ALLOCATION_BYTES
    }

    /// Bytes of host memory that [`allocate`](PlannedNode::allocate) allocates, at most: the copies
    /// and the plan of `engine`.
    pub fn allocated_bytes(&self, engine: &dyn Engine) -> usize {
        let graph = self.part.graph();
        let counts = GraphCounts {
            buffers: graph.buffers.len(),
            tensors: graph.tensors.len(),
            nodes: graph.nodes.len(),
        };
        let copies =
            { self.regions.iter() }.map(|region| engine.allocation_size(region.len()) as usize);
        let table = self.regions.len() * COPIED_BYTES;
        copies.sum::<usize>() + table + engine.compile_bytes(&counts) as usize
    }

    /// Allocates the copies and compiles the node, for the engine that it was made for.
    ///
    /// # Errors
    /// [`EngineError`] of `engine`.
    pub fn allocate(&self, engine: &dyn Engine) -> Result<SingleNode, EngineError> {
        let graph = self.part.graph();
        let memory = { self.regions.iter() }
            .map(|region| engine.alloc(region.len()))
            .collect::<Result<Vec<_>, _>>()?;
        let plan = engine.compile(&self.part, &memory, &|| false)?;
        let sizes = self.regions.iter().map(|region| region.len());
        let copied_bytes = sizes.map(|size| engine.allocation_size(size)).sum();
        let ranges = self.regions.iter().zip(memory);
        let ranges = ranges.map(|(region, memory)| Copied {
            buffer: region.buffer as usize,
            offset: region.bytes.start,
            memory,
        });
        let results = match graph.nodes[0].op.updates_sources() {
            true => (0..self.regions.len()).collect(),
            false => vec![graph.tensors[0].buffer as usize],
        };
        Ok(SingleNode {
            plan,
            results,
            ranges: ranges.collect(),
            copied_bytes,
            at: self.at,
            next: RunPhase::Read(0, 0),
        })
    }
}

/// Bytes of the tables for a range, at most.
const COPIED_BYTES: usize = size_of::<Copied>() + size_of::<usize>() + 128;

/// A compiled node, with memory for copies of its tensors.
pub struct SingleNode {
    plan: Box<dyn Plan>,
    ranges: Vec<Copied>,
    /// Bytes that the copies take of the engine's memory, in whole pages.
    copied_bytes: u64,
    /// The indices in `ranges` of the ranges that the node writes.
    results: Vec<usize>,
    /// The index of the node in the graph of the device.
    at: usize,
    /// Where the next turn continues.
    next: RunPhase,
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
        PlannedNode::new(engine, graph, at)?.allocate(engine)
    }

    /// Bytes of host memory, without the structure itself.
    pub fn bytes(&self) -> usize {
        let table = self.ranges.capacity() * COPIED_BYTES;
        self.copied_bytes as usize + table + self.plan.plan_bytes() as usize
    }

    /// Bytes of host memory that a run needs besides.
    pub fn working_bytes(&self) -> u64 {
        let ranges = self.ranges.iter().map(|range| range.memory.size());
        ranges.max().unwrap_or(0).min(COPY_BYTES) + self.plan.working_bytes()
    }

    /// Copies the tensors from `device`, runs the node, and copies the result back, until `turn` is
    /// over. [`RunStatus::Yielded`]: the next call continues. Every call makes progress.
    ///
    /// # Errors
    /// [`RunError`] of the other engine, or of a copy. The next call starts a new run.
    pub fn run(
        &mut self,
        device: &mut dyn DeviceMemory,
        turn: &Turn,
    ) -> Result<RunStatus, RunError> {
        let outcome = self.go_on(device, turn);
        if outcome != Ok(RunStatus::Yielded) {
            self.next = RunPhase::Read(0, 0);
        }
        outcome
    }

    fn go_on(&mut self, device: &mut dyn DeviceMemory, turn: &Turn) -> Result<RunStatus, RunError> {
        let mut bytes = Vec::new();
        loop {
            let next = match self.next {
                RunPhase::Read(at, done) => match self.ranges.get(at) {
                    None => Some(RunPhase::Compute),
                    Some(range) => {
                        let len = self.buffer(&mut bytes, range, done)?;
                        let copied = device.read(range.buffer, range.offset + done, &mut bytes);
                        copied
                            .and_then(|()| range.memory.write(done, Bytes::from(&*bytes)))
                            .map_err(|error| self.failed(&error))?;
                        Some(match done + len < range.memory.size() {
                            true => RunPhase::Read(at, done + len),
                            false => RunPhase::Read(at + 1, 0),
                        })
                    }
                },
                RunPhase::Compute => match self.compute(turn)? {
                    RunStatus::Yielded => return Ok(RunStatus::Yielded),
                    RunStatus::Done | RunStatus::InFlight => Some(RunPhase::Write(0, 0)),
                },
                RunPhase::Write(at, done) => match self.results.get(at) {
                    None => None,
                    Some(&result) => {
                        let range = &self.ranges[result];
                        let len = self.buffer(&mut bytes, range, done)?;
                        let copied = range.memory.read(done, BytesMut::from(&mut *bytes));
                        copied
                            .and_then(|()| device.write(range.buffer, range.offset + done, &bytes))
                            .map_err(|error| self.failed(&error))?;
                        Some(match done + len < range.memory.size() {
                            true => RunPhase::Write(at, done + len),
                            false => RunPhase::Write(at + 1, 0),
                        })
                    }
                },
            };
            let Some(next) = next else {
                return Ok(RunStatus::Done);
            };
            self.next = next;
            if turn.is_over() {
                return Ok(RunStatus::Yielded);
            }
        }
    }

    /// Runs the plan of the node until `turn` is over.
    fn compute(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        let at = self.at;
        let outcome = match self.plan.launch(turn) {
            Ok(RunStatus::InFlight) => self.plan.wait().map(|()| RunStatus::Done),
            other => other,
        };
        outcome.map_err(|mut error| {
            if let RunError::Index { node, .. } | RunError::Kernel { node, .. } = &mut error {
                *node = at;
            }
            error
        })
    }

    /// Makes `bytes` as long as the next part of `range`, behind `done` bytes.
    fn buffer(&self, bytes: &mut Vec<u8>, range: &Copied, done: u64) -> Result<u64, RunError> {
        let len = (range.memory.size() - done).min(COPY_BYTES);
        bytes.clear();
        if bytes.try_reserve_exact(len as usize).is_err() {
            return Err(RunError::OutOfMemory { wanted: len });
        }
        bytes.resize(len as usize, 0);
        Ok(len)
    }

    /// An error of the device in a run of the node.
    pub fn failed(&self, error: &EngineError) -> RunError {
        RunError::Kernel {
            node: self.at,
            op: "",
            message: error.to_string(),
        }
    }
}
