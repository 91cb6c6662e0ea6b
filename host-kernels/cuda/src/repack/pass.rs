//! Which weights of a graph are repacked.
//!
//! A tensor is repacked if its memory is for weights, and the graph does nothing with its bytes but
//! multiply by it, always as the same matrices. The first such plan repacks it when it is compiled,
//! once for each upload. A plan that uses the tensor otherwise restores it, and the tensor stays
//! plain. Plans compiled before are then [stale](vgpu_engine::Plan::is_current).

use std::ops::Range;
use std::sync::Arc;

use tracing::debug;
use vgpu_transport::ir::{Graph, Op, Tensor};

use crate::context::ExecutionContext;
use crate::device::Address;
use crate::memory::{CudaMemory, RepackBuffer, Restored};
use crate::params::{VG_REPACKED, VgView};
use crate::repack::format::RepackFormat;
use crate::repack::state::Placement;
use vgpu_engine::{EngineError, Memory as _};

/// The allocations that a graph uses, and where in them its tensors are.
pub(crate) struct Places<'m> {
    /// The allocations.
    pub(crate) memories: Vec<&'m CudaMemory>,
    /// For each tensor, the index of its allocation and the offset in it.
    pub(crate) tensors: Vec<(usize, u64)>,
    /// The index of the first allocation that is a piece of a buffer for weights.
    pub(crate) first_piece: usize,
}

impl Places<'_> {
    /// The address of a tensor.
    pub(crate) fn address(&self, tensor: usize) -> Address {
        let (memory, offset) = self.tensors[tensor];
        self.memories[memory].address() + offset
    }

    /// The addresses of the pieces of buffers for weights.
    pub(crate) fn weight_ranges(&self) -> Vec<Range<Address>> {
        { self.memories[self.first_piece..].iter() }
            .map(|memory| memory.address()..memory.address() + memory.size())
            .collect()
    }
}

/// The allocations whose tensors could not get the format that a graph needs, since several buffers
/// hold them: the graph has to be compiled again.
#[derive(Debug, Default)]
pub(crate) struct Withheld {
    /// Those that are repacked, and that the graph needs plain, by the number of the piece.
    pub(crate) repacked: Vec<usize>,
    /// Whether others were shared after the graph was compiled to read them repacked.
    pub(crate) has_plain: bool,
}

/// The format of each weight tensor of a graph.
pub(crate) struct RepackPass<'m> {
    memories: &'m [&'m CudaMemory],
    first_piece: usize,
    /// The tensors that kernels read repacked.
    repacked: Vec<RepackedTensor>,
    /// Other bytes of weight memory that the graph uses: the index of the memory, and the range.
    plain: Vec<(usize, Range<u64>)>,
    /// The buffer to repack through, if a tensor is still plain.
    buffer: Option<RepackBuffer>,
}

/// A tensor that is only a factor of products.
struct RepackedTensor {
    /// The index of its memory.
    memory: usize,
    start: u64,
    format: RepackFormat,
    is_done: bool,
    /// The tensors of the graph that are this one.
    tensors: Vec<u32>,
}

/// The bytes that a node uses.
struct Use {
    memory: usize,
    /// The range in the memory, and the address on the device.
    bytes: Range<u64>,
    at: Address,
    /// The repacked format, if the node multiplies by them and they can have it.
    format: Option<RepackFormat>,
    tensor: u32,
}

impl<'m> RepackPass<'m> {
    /// Decides for a graph whose tensors are at `places`. Nothing is changed yet.
    ///
    /// # Errors
    /// [`EngineError`] of the device, other than a lack of memory.
    pub(crate) fn of(
        graph: &Graph,
        places: &'m Places<'_>,
        context: &Arc<ExecutionContext>,
    ) -> Result<RepackPass<'m>, EngineError> {
        let memories = &places.memories[..];
        let mut layout = RepackPass {
            memories,
            first_piece: places.first_piece,
            repacked: Vec::new(),
            plain: Vec::new(),
            buffer: None,
        };
        if !context.policy.repack || !memories.iter().any(|it| it.repack_state().is_allowed()) {
            return Ok(layout);
        }
        let mut uses = uses(graph, places);
        uses.sort_unstable_by_key(|it| (it.at, it.bytes.end - it.bytes.start));
        let mut rest = uses.as_slice();
        while let Some(first) = rest.first() {
            // Uses with bytes in common.
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
        layout.alloc_buffer(context)?;
        Ok(layout)
    }

    /// Decides for uses of the same bytes.
    fn add(&mut self, uses: &[Use]) {
        let first = &uses[0];
        let memory = self.memories[first.memory];
        let is_same = |it: &Use| it.format == first.format && it.at == first.at;
        let format = first.format.filter(|_| uses.iter().all(is_same));
        let lies = format.map(|format| {
            (
                format,
                memory
                    .repack_state()
                    .state()
                    .placement(first.bytes.start, &format),
            )
        });
        match lies {
            Some((format, lies @ (Placement::Repacked | Placement::Plain))) => {
                self.repacked.push(RepackedTensor {
                    memory: first.memory,
                    start: first.bytes.start,
                    format,
                    is_done: lies == Placement::Repacked,
                    tensors: uses.iter().map(|it| it.tensor).collect(),
                })
            }
            _ => self
                .plain
                .extend(uses.iter().map(|it| (it.memory, it.bytes.clone()))),
        }
    }

    /// Allocates the buffer. Tensors that there is no memory for stay plain, and all do if the
    /// kernel that repacks may not be used.
    ///
    /// # Errors
    /// [`EngineError`] of the device, but not a lack of memory.
    fn alloc_buffer(&mut self, context: &Arc<ExecutionContext>) -> Result<(), EngineError> {
        let new = { self.repacked.iter() }.filter(|it| !it.is_done);
        let Some(bytes) = new.map(|it| RepackBuffer::bytes_for(&it.format)).max() else {
            return Ok(());
        };
        let Ok(kernel) = context.kernels.find("vg_repack") else {
            self.leave(|it| !it.is_done);
            return Ok(());
        };
        match RepackBuffer::new(&context.allocator, kernel, bytes) {
            Ok(buffer) => self.buffer = Some(buffer),
            Err(error @ EngineError::OutOfMemory { .. }) => {
                debug!("weights are not repacked: {error}");
                self.leave(|it| !it.is_done);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Leaves some tensors plain. Returns whether there were any.
    fn leave(&mut self, which: impl Fn(&RepackedTensor) -> bool) -> bool {
        let before = self.repacked.len();
        self.repacked.retain(|it| {
            let is_left = which(it);
            if is_left {
                let bytes = it.start..it.start + it.format.bytes();
                self.plain.push((it.memory, bytes));
            }
            !is_left
        });
        self.repacked.len() < before
    }

    /// Marks the views of the tensors that are repacked.
    pub(crate) fn mark(&self, views: &mut [VgView]) {
        for &tensor in self.repacked.iter().flat_map(|it| &it.tensors) {
            views[tensor as usize].type_ |= VG_REPACKED;
        }
    }

    /// Leaves tensors plain whose addresses kernels have refused. Returns whether there were any:
    /// the graph has to be compiled again then.
    pub(crate) fn refuse(&mut self, refused: &[Address]) -> bool {
        let memories = self.memories;
        self.leave(|it| refused.contains(&(memories[it.memory].address() + it.start)))
    }

    /// Repacks and restores tensors as decided, but for those that it returns.
    ///
    /// # Errors
    /// [`EngineError`] of the device.
    pub(crate) fn apply(self) -> Result<Withheld, EngineError> {
        let mut withheld = Withheld::default();
        for (memory, bytes) in &self.plain {
            match self.memories[*memory].try_restore(bytes)? {
                Restored::Plain => {}
                Restored::Withheld => withheld.repacked.push(*memory - self.first_piece),
            }
        }
        // Each piece is copied once, however many tensors of it are used.
        withheld.repacked.sort_unstable();
        withheld.repacked.dedup();
        let mut count = 0;
        for it in self.repacked.iter().filter(|it| !it.is_done) {
            let buffer = self.buffer.as_ref();
            let buffer = buffer.expect("there is buffer, or nothing that needs it");
            match self.memories[it.memory].repack(it.start, it.format, buffer)? {
                true => count += 1,
                false => withheld.has_plain = true,
            }
        }
        if count > 0 {
            debug!("{count} weight tensors were repacked");
        }
        Ok(withheld)
    }
}

/// The bytes of weight memory that the nodes of a graph use.
fn uses(graph: &Graph, places: &Places<'_>) -> Vec<Use> {
    let mut uses = Vec::new();
    let nodes = { graph.nodes.iter() }.filter(|node| !graph.dst(node).shape.is_empty());
    for node in nodes {
        let multiplies = matches!(node.op, Op::MulMat { .. } | Op::MulMatId { .. });
        let sources = node.src.as_slice().iter().enumerate();
        let sources = sources.filter_map(|(i, src)| Some((multiplies && i == 0, (*src)?)));
        for (is_weights, tensor) in sources.chain([(false, node.dst)]) {
            let (at, offset) = places.tensors[tensor as usize];
            let memory = places.memories[at];
            let it = &Tensor {
                offset,
                ..graph.tensors[tensor as usize]
            };
            let bytes = it.shape.byte_len().expect("a validated tensor has a size");
            if bytes == 0 || !memory.repack_state().is_allowed() {
                continue;
            }
            uses.push(Use {
                memory: at,
                bytes: it.offset..it.offset + bytes,
                at: memory.address() + it.offset,
                format: RepackFormat::of(it).filter(|_| is_weights),
                tensor,
            });
        }
    }
    uses
}
