//! Which kernels threads run without meeting in between.
//!
//! A meeting costs about a microsecond, more with many threads, and a token that is decoded had some twenty in each layer.
//! Two kernels need none between them
//! - where neither touches what the other writes: rotating queries, and putting values into the cache;
//! - where both are so little work that one thread does it alone, in order: what happens to a single token's row;
//! - where each thread reads only what it has itself made: rows that are normed, then rounded.
//!
//! Kernels that deal chunks stand alone: a turn can end in the middle of one, and what stands beside it would be done twice.

use std::ops::Range;

use vgpu_transport::ir::{Graph, Op, Tensor};

use super::plan::{Fault, Kernel};
use vgpu_engine::RunError;
use vgpu_engine::fuse::{Span, reads, writes};

/// Elements that one thread computes sooner than several meet.
pub(super) const SMALL: u64 = 4096;

/// What threads run between two meetings, in order.
pub(super) struct Step {
    pub(super) parts: Vec<Part>,
}

/// A kernel of the plan, and where it came from.
pub(super) struct Part {
    pub(super) kernel: Kernel,
    /// The nodes that it computes; none if it prepares what another one computes.
    pub(super) nodes: Vec<usize>,
    /// The node that errors name.
    named: usize,
    op: &'static str,
    /// Where its scratch memory begins.
    pub(super) scratch: usize,
    /// Whether the first thread does it alone.
    pub(super) is_solo: bool,
}

impl Part {
    pub(super) fn new(kernel: Kernel, nodes: Vec<usize>, named: usize, op: &'static str) -> Part {
        Part {
            kernel,
            nodes,
            named,
            op,
            scratch: 0,
            is_solo: false,
        }
    }

    /// The fault with its place.
    pub(super) fn error(&self, fault: Fault) -> RunError {
        let (node, op) = (self.named, self.op);
        match fault {
            Fault::Index { index, count } => RunError::Index {
                node,
                op,
                index,
                count,
            },
            Fault::Panic { message } => RunError::Kernel { node, op, message },
        }
    }
}

/// The steps of a plan in the making.
pub(super) struct Stages {
    merges: bool,
    steps: Vec<Step>,
    scratch_bytes: usize,
    /// What the parts of the last step touch, and whether each is solo; none if it stands alone.
    open: Vec<(Touches, bool)>,
    /// Scratch memory of these parts.
    open_bytes: usize,
}

impl Stages {
    /// With `merges`, threads meet only where they must.
    pub(super) fn new(merges: bool) -> Stages {
        Stages {
            merges,
            steps: Vec::new(),
            scratch_bytes: 0,
            open: Vec::new(),
            open_bytes: 0,
        }
    }

    /// Kernels to come need so much scratch memory, which begins with the first byte.
    pub(super) fn needs(&mut self, scratch_bytes: usize) {
        self.scratch_bytes = self.scratch_bytes.max(scratch_bytes);
    }

    /// A kernel that others must have finished before, and that must have finished before others.
    pub(super) fn alone(&mut self, part: Part) {
        self.open.clear();
        self.open_bytes = 0;
        self.steps.push(Step { parts: vec![part] });
    }

    /// A kernel that shares out its work and deals no chunks, with scratch memory of its own. `follows`: each thread reads
    /// what it has made in the part before, and nothing else that this step has written.
    pub(super) fn share(
        &mut self,
        mut part: Part,
        touches: Touches,
        is_small: bool,
        scratch_bytes: usize,
        follows: bool,
    ) {
        let last_is_solo = self.open.last().is_some_and(|&(_, is_solo)| is_solo);
        part.is_solo = self.merges && (is_small || follows && last_is_solo);
        // What each thread has made is its own share only if the part before was shared out in the same way.
        let follows = follows && last_is_solo == part.is_solo;
        let (last, before) = match self.open.split_last() {
            Some((last, before)) => (Some(last), before),
            None => (None, &[][..]),
        };
        let is_free = |(theirs, is_solo): &(Touches, bool)| {
            *is_solo && part.is_solo || touches.is_apart(theirs)
        };
        let joins = self.merges
            && last.is_some_and(|last| follows || is_free(last))
            && before.iter().all(is_free);
        if !joins {
            self.open.clear();
            self.open_bytes = 0;
            self.steps.push(Step { parts: Vec::new() });
        }
        part.scratch = self.open_bytes;
        self.open_bytes += scratch_bytes.next_multiple_of(64);
        self.scratch_bytes = self.scratch_bytes.max(self.open_bytes);
        self.open.push((touches, part.is_solo));
        let step = self
            .steps
            .last_mut()
            .expect("there is one, or one was made");
        step.parts.push(part);
    }

    /// The steps, and the scratch memory they need.
    pub(super) fn finish(self) -> (Vec<Step>, usize) {
        (self.steps, self.scratch_bytes)
    }
}

/// The memory of tensors that kernels read and write.
pub(super) struct Touches {
    reads: Vec<Span>,
    writes: Vec<Span>,
}

impl Touches {
    /// Of some nodes together.
    pub(super) fn of(graph: &Graph, nodes: Range<usize>) -> Touches {
        let nodes = || graph.nodes[nodes.clone()].iter();
        Touches {
            reads: nodes().flat_map(|node| reads(graph, node)).collect(),
            writes: nodes().flat_map(|node| writes(graph, node)).collect(),
        }
    }

    /// Of a kernel that reads a tensor and writes none.
    pub(super) fn reading(tensor: &Tensor) -> Touches {
        Touches {
            reads: vec![Span::of(tensor)],
            writes: Vec::new(),
        }
    }

    /// Whether both can run at once, and in any order.
    fn is_apart(&self, other: &Touches) -> bool {
        let meets = |a: &[Span], b: &[Span]| a.iter().any(|a| b.iter().any(|b| a.meets(b)));
        !meets(&self.writes, &other.writes)
            && !meets(&self.writes, &other.reads)
            && !meets(&self.reads, &other.writes)
    }
}

/// Whether the kernel of an operator that has only one deals no chunks.
pub(super) fn only_shares(op: &Op) -> bool {
    !matches!(
        op,
        Op::MulMat { .. } | Op::MulMatId { .. } | Op::OutProd {} | Op::FlashAttnExt { .. }
    )
}

/// Whether a node is little work.
pub(super) fn is_small(graph: &Graph, at: usize) -> bool {
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
    work <= SMALL
}

/// How many elements a tensor has.
pub(super) fn elements(tensor: &Tensor) -> u64 {
    tensor.shape.elements().unwrap_or(u64::MAX)
}
