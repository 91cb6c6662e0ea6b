//! Which weights of a graph lie in planes.
//!
//! A tensor can if the guest has its memory for weights and the graph does nothing with any of its bytes but multiply by it,
//! always as the same matrices. It is arranged when the first such plan is compiled, once for each upload. A plan that uses
//! it otherwise has it brought back, and then it stays as the guest has it; plans compiled before are
//! [not current](vgpu_engine::Plan::is_current) any more.

use std::ops::Range;
use std::sync::Arc;

use tracing::debug;
use vgpu_transport::ir::{Graph, Op};

use crate::context::ExecutionContext;
use crate::device::Address;
use crate::memory::{CudaMemory, RepackBuffer};
use crate::params::{VG_REPACKED, VgView};
use crate::repack::format::RepackFormat;
use crate::repack::state::Placement;
use vgpu_engine::EngineError;

/// How the weights of a graph are to lie.
pub(crate) struct RepackPass<'m> {
    memories: &'m [&'m CudaMemory],
    /// Tensors that its kernels read in planes.
    planes: Vec<Weights>,
    /// Other bytes of memory for weights that it uses: whose memory, and which.
    plain: Vec<(usize, Range<u64>)>,
    /// RepackBuffer to arrange those that are not in planes yet.
    room: Option<RepackBuffer>,
}

/// A tensor that is only multiplied by.
struct Weights {
    /// Whose memory it is in.
    memory: usize,
    start: u64,
    planes: RepackFormat,
    is_arranged: bool,
    /// The graph's tensors that are this one.
    tensors: Vec<u32>,
}

/// What a node does with bytes.
struct Use {
    memory: usize,
    /// In the memory, and on the device.
    bytes: Range<u64>,
    at: Address,
    /// If it multiplies by them, and they could be in planes.
    planes: Option<RepackFormat>,
    tensor: u32,
}

impl<'m> RepackPass<'m> {
    /// Looks at a graph whose buffers are `memories`. Nothing is changed yet.
    pub(crate) fn of(
        graph: &Graph,
        memories: &'m [&'m CudaMemory],
        context: &Arc<ExecutionContext>,
    ) -> Result<RepackPass<'m>, EngineError> {
        let mut layout = RepackPass {
            memories,
            planes: Vec::new(),
            plain: Vec::new(),
            room: None,
        };
        if !context.policy.repack || !memories.iter().any(|it| it.repack_state().is_allowed()) {
            return Ok(layout);
        }
        let mut uses = uses(graph, memories);
        uses.sort_unstable_by_key(|it| (it.at, it.bytes.end - it.bytes.start));
        let mut rest = uses.as_slice();
        while let Some(first) = rest.first() {
            // Those that share bytes with each other.
            let mut end = first.at;
            let meets = |it: &&Use| {
                let is_met = it.at < end || end == first.at;
                end = end.max(it.at + (it.bytes.end - it.bytes.start));
                is_met
            };
            let count = rest.iter().take_while(meets).count();
            layout.add(&rest[..count]);
            rest = &rest[count..];
        }
        layout.find_room(context)?;
        Ok(layout)
    }

    /// Takes in uses of the same bytes.
    fn add(&mut self, uses: &[Use]) {
        let first = &uses[0];
        let memory = self.memories[first.memory];
        let is_same = |it: &Use| it.planes == first.planes && it.at == first.at;
        let planes = first.planes.filter(|_| uses.iter().all(is_same));
        let lies = planes.map(|planes| {
            (
                planes,
                memory
                    .repack_state()
                    .state()
                    .placement(first.bytes.start, &planes),
            )
        });
        match lies {
            Some((planes, lies @ (Placement::Repacked | Placement::Plain))) => {
                self.planes.push(Weights {
                    memory: first.memory,
                    start: first.bytes.start,
                    planes,
                    is_arranged: lies == Placement::Repacked,
                    tensors: uses.iter().map(|it| it.tensor).collect(),
                })
            }
            _ => self
                .plain
                .extend(uses.iter().map(|it| (it.memory, it.bytes.clone()))),
        }
    }

    /// Takes memory to arrange in. What there is none for stays as the guest has it.
    fn find_room(&mut self, context: &Arc<ExecutionContext>) -> Result<(), EngineError> {
        let new = { self.planes.iter() }.filter(|it| !it.is_arranged);
        let Some(bytes) = new.map(|it| RepackBuffer::bytes_for(&it.planes)).max() else {
            return Ok(());
        };
        match RepackBuffer::new(&context.allocator, bytes) {
            Ok(room) => self.room = Some(room),
            Err(error @ EngineError::OutOfMemory { .. }) => {
                debug!("weights are not arranged: {error}");
                self.leave(|it| !it.is_arranged);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Leaves some as the guest has them. Whether there were any.
    fn leave(&mut self, which: impl Fn(&Weights) -> bool) -> bool {
        let before = self.planes.len();
        self.planes.retain(|it| {
            let is_left = which(it);
            if is_left {
                let bytes = it.start..it.start + it.planes.bytes();
                self.plain.push((it.memory, bytes));
            }
            !is_left
        });
        self.planes.len() < before
    }

    /// Marks the views of the graph's tensors that are in planes.
    pub(crate) fn mark(&self, views: &mut [VgView]) {
        for &tensor in self.planes.iter().flat_map(|it| &it.tensors) {
            views[tensor as usize].type_ |= VG_REPACKED;
        }
    }

    /// Leaves those as the guest has them that kernels have refused, by their addresses. Whether there were any: then the
    /// graph has to be compiled again.
    pub(crate) fn refuse(&mut self, refused: &[Address]) -> bool {
        let memories = self.memories;
        self.leave(|it| refused.contains(&(memories[it.memory].address() + it.start)))
    }

    /// Has all of it so.
    pub(crate) fn apply(self) -> Result<(), EngineError> {
        for (memory, bytes) in &self.plain {
            self.memories[*memory].keep_plain(bytes)?;
        }
        let mut count = 0;
        for it in self.planes.iter().filter(|it| !it.is_arranged) {
            let room = self.room.as_ref();
            let room = room.expect("there is room, or nothing that needs it");
            self.memories[it.memory].arrange(it.start, it.planes, room)?;
            count += 1;
        }
        if count > 0 {
            debug!("{count} tensors of weights lie in planes now");
        }
        Ok(())
    }
}

/// What the nodes of a graph do with memory that is for weights.
fn uses(graph: &Graph, memories: &[&CudaMemory]) -> Vec<Use> {
    let mut uses = Vec::new();
    let nodes = { graph.nodes.iter() }.filter(|node| !graph.dst(node).shape.is_empty());
    for node in nodes {
        let multiplies = matches!(node.op, Op::MulMat { .. } | Op::MulMatId { .. });
        let sources = node.src.as_slice().iter().enumerate();
        let sources = sources.filter_map(|(i, src)| Some((multiplies && i == 0, (*src)?)));
        for (is_weights, tensor) in sources.chain([(false, node.dst)]) {
            let it = &graph.tensors[tensor as usize];
            let memory = memories[it.buffer as usize];
            let bytes = it.shape.extent().expect("a validated tensor has a size");
            if bytes == 0 || !memory.repack_state().is_allowed() {
                continue;
            }
            uses.push(Use {
                memory: it.buffer as usize,
                bytes: it.offset..it.offset + bytes,
                at: memory.address() + it.offset,
                planes: RepackFormat::of(it).filter(|_| is_weights),
                tensor,
            });
        }
    }
    uses
}
