//! Decides between which kernels threads meet at a barrier.
//!
//! A barrier costs about a microsecond, more with many threads; decoding one token would need about
//! twenty per layer. Two kernels need no barrier between them
//! - if neither accesses what the other writes: ROPE of the queries and SET_ROWS of the values;
//! - if both are so little work that one thread computes them alone, in order: operations on the
//!   row of a single token;
//! - if each thread reads only what it has itself written: a norm of rows and their quantisation.
//!
//! A kernel that takes chunks is alone in its phase: a turn can end before its last chunk, and
//! another kernel of the phase would then run twice.

use std::ops::Range;
use std::sync::Arc;

use vgpu_transport::ir::{Graph, Op, Tensor};

use vgpu_engine::RunError;
use vgpu_engine::fuse::{ByteRange, reads, writes};

use crate::kernel::{Estimate, Fault, JointKernel, Kernel};

/// Elements up to which one thread computes faster than several threads that meet at a barrier.
pub(crate) const SOLO_ELEMENTS: u64 = 4096;

/// The most kernels in a phase. A kernel is compared with all others of its phase when the graph is
/// compiled.
const MAX_PARTS: usize = 64;

/// What threads run between two barriers: kernels, in order.
pub(crate) struct Phase {
    pub(crate) parts: Vec<PlannedKernel>,
}

impl Phase {
    /// The kernel of the phase, if plans can run it together.
    pub(crate) fn joint(&self) -> Option<&dyn JointKernel> {
        match &self.parts[..] {
            [part] => part.joint.as_deref(),
            _ => None,
        }
    }

    /// Bytes of host memory of the kernels, without the phase itself.
    pub(crate) fn bytes(&self) -> usize {
        let parts = self.parts.iter().map(|part| {
            let kernel = size_of_val(&*part.kernel);
            let nodes = part.nodes.capacity() * size_of::<usize>();
            kernel + part.held + nodes + PART_BYTES
        });
        parts.sum::<usize>() + self.parts.capacity() * size_of::<PlannedKernel>()
    }
}

/// Bytes of a part besides its kernel and its nodes: what the kernel itself has allocated, and what
/// the allocator adds.
const PART_BYTES: usize = 384;

/// A kernel of the plan, and the nodes that it computes.
pub(crate) struct PlannedKernel {
    pub(crate) kernel: Kernel,
    /// The nodes that it computes; empty if it only prepares data for another kernel.
    pub(crate) nodes: Vec<usize>,
    /// The node that errors report.
    node: usize,
    op: &'static str,
    /// Offset of the part's scratch memory in bytes.
    pub(crate) scratch: usize,
    /// Whether the first thread runs the part alone.
    pub(crate) is_solo: bool,
    /// The estimated work of the part on all threads.
    pub(crate) work: Estimate,
    /// The kernel again, if plans can run it together. The kernel multiplies with frozen weights.
    pub(crate) joint: Option<Arc<dyn JointKernel>>,
    /// Bytes that the kernel has allocated, if they are more than a few.
    pub(crate) held: usize,
}

impl PlannedKernel {
    pub(crate) fn new(
        kernel: Kernel,
        nodes: Vec<usize>,
        (node, op): (usize, &'static str),
        work: Estimate,
    ) -> PlannedKernel {
        PlannedKernel {
            kernel,
            nodes,
            node,
            op,
            scratch: 0,
            is_solo: false,
            work,
            joint: None,
            held: 0,
        }
    }

    /// The error for a fault of this kernel.
    pub(crate) fn error(&self, fault: Fault) -> RunError {
        let (node, op) = (self.node, self.op);
        match fault {
            Fault::Index { index, count } => RunError::Index {
                node,
                op,
                index,
                count,
            },
            Fault::OutOfMemory { bytes } => RunError::OutOfMemory {
                wanted: bytes as u64,
            },
            Fault::Panic { message } => RunError::Kernel { node, op, message },
        }
    }
}

/// The phases of a plan during compilation.
pub(crate) struct BarrierSchedule {
    merges: bool,
    phases: Vec<Phase>,
    scratch_bytes: usize,
    /// The memory accesses of the parts of the last phase, and whether each part is solo; empty if
    /// no kernel can join that phase.
    open: Vec<(MemoryAccess, bool)>,
    /// Scratch memory of these parts in bytes.
    open_bytes: usize,
}

impl BarrierSchedule {
    /// With `merges`, barriers are left out where they are not needed.
    pub(crate) fn new(merges: bool) -> BarrierSchedule {
        BarrierSchedule {
            merges,
            phases: Vec::new(),
            scratch_bytes: 0,
            open: Vec::new(),
            open_bytes: 0,
        }
    }

    /// Reserves scratch memory at offset 0 for later kernels.
    pub(crate) fn reserve(&mut self, scratch_bytes: usize) {
        self.scratch_bytes = self.scratch_bytes.max(scratch_bytes);
    }

    /// Adds a kernel with a barrier before and after it.
    pub(crate) fn push_alone(&mut self, part: PlannedKernel) {
        self.open.clear();
        self.open_bytes = 0;
        self.phases.push(Phase { parts: vec![part] });
    }

    /// Adds a kernel that divides its work into ranges and takes no chunks, with `scratch_bytes` of
    /// its own. `follows`: each thread reads what it has itself written in the part before, and
    /// nothing else that this phase has written.
    pub(crate) fn push_shared(
        &mut self,
        mut part: PlannedKernel,
        access: MemoryAccess,
        is_small: bool,
        scratch_bytes: usize,
        follows: bool,
    ) {
        let last_is_solo = self.open.last().is_some_and(|&(_, is_solo)| is_solo);
        part.is_solo = self.merges && (is_small || follows && last_is_solo);
        // Both ranges of a thread are the same rows only if both parts are divided in the same way.
        let follows = follows && last_is_solo == part.is_solo;
        let (last, before) = match self.open.split_last() {
            Some((last, before)) => (Some(last), before),
            None => (None, &[][..]),
        };
        let is_free = |(theirs, is_solo): &(MemoryAccess, bool)| {
            *is_solo && part.is_solo || access.is_independent(theirs)
        };
        let joins = self.merges
            && self.open.len() < MAX_PARTS
            && last.is_some_and(|last| follows || is_free(last))
            && before.iter().all(is_free);
        if !joins {
            self.open.clear();
            self.open_bytes = 0;
            self.phases.push(Phase { parts: Vec::new() });
        }
        part.scratch = self.open_bytes;
        let bytes = scratch_bytes.checked_next_multiple_of(64);
        self.open_bytes = self.open_bytes.saturating_add(bytes.unwrap_or(usize::MAX));
        self.scratch_bytes = self.scratch_bytes.max(self.open_bytes);
        self.open.push((access, part.is_solo));
        let phase = self.phases.last_mut();
        let phase = phase.expect("a phase exists, or was just added");
        phase.parts.push(part);
    }

    /// The phases, and the scratch memory that they need in bytes.
    pub(crate) fn finish(self) -> (Vec<Phase>, usize) {
        (self.phases, self.scratch_bytes)
    }
}

/// The memory that kernels read and write.
pub(crate) struct MemoryAccess {
    reads: Vec<ByteRange>,
    writes: Vec<ByteRange>,
}

impl MemoryAccess {
    /// The accesses of some nodes together.
    pub(crate) fn of(graph: &Graph, nodes: Range<usize>) -> MemoryAccess {
        let nodes = || graph.nodes[nodes.clone()].iter();
        MemoryAccess {
            reads: nodes().flat_map(|node| reads(graph, node)).collect(),
            writes: nodes().flat_map(|node| writes(graph, node)).collect(),
        }
    }

    /// The accesses of a kernel that reads `tensor` and writes no tensor.
    pub(crate) fn reading(tensor: &Tensor) -> MemoryAccess {
        MemoryAccess {
            reads: vec![ByteRange::of(tensor)],
            writes: Vec::new(),
        }
    }

    /// Whether both can run concurrently and in any order.
    fn is_independent(&self, other: &MemoryAccess) -> bool {
        let meets =
            |a: &[ByteRange], b: &[ByteRange]| a.iter().any(|a| b.iter().any(|b| a.overlaps(b)));
        !meets(&self.writes, &other.writes)
            && !meets(&self.writes, &other.reads)
            && !meets(&self.reads, &other.writes)
    }
}

/// Whether an operator that is compiled to one kernel divides its work into ranges, without chunks.
pub(crate) fn only_ranges(op: &Op) -> bool {
    !matches!(
        op,
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::FlashAttnExt { .. }
    )
}

/// Whether a node is so little work that one thread computes it.
pub(crate) fn is_small(graph: &Graph, at: usize) -> bool {
    let node = &graph.nodes[at];
    let source = |i| graph.src(node, i).map_or(0, elements);
    let result = elements(graph.dst(node));
    let work = match node.op {
        Op::Add {}
        | Op::Sub {}
        | Op::Mul {}
        | Op::Div {}
        | Op::AddId {}
        | Op::Scale { .. }
        | Op::Clamp { .. }
        | Op::Copy {}
        | Op::Unary { .. }
        | Op::Glu { .. }
        | Op::GetRows {} => result,
        Op::SetRows {} => source(0),
        Op::RmsNorm { .. }
        | Op::Norm { .. }
        | Op::L2Norm { .. }
        | Op::Rope { .. }
        | Op::SoftMax { .. }
        | Op::SumRows {}
        | Op::Argsort { .. }
        | Op::TopK {} => source(0),
        _ => u64::MAX,
    };
    work <= SOLO_ELEMENTS
}

/// The number of elements of a tensor.
pub(crate) fn elements(tensor: &Tensor) -> u64 {
    tensor.shape.elements().unwrap_or(u64::MAX)
}
