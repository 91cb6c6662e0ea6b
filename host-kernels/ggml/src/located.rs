//! Where the tensors of a graph are on the device.

use std::sync::Arc;

use vgpu_engine::{Cancellation, EngineError, Memory};
use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Graph, Tensor};

use crate::memory::{GgmlMemory, Storage};
use crate::segments::{BYTES_TO_LOCATE, GgmlExtent, LocatedSegment, UsedRanges};
use crate::tensors::view;

/// The place of a tensor.
pub(crate) struct Place {
    /// The tensor with all bytes of the buffer.
    whole: *mut abi::ggml_tensor,
    /// The first byte there.
    offset: u64,
    /// The segment that the buffer is, if the memory has segments.
    extent: Option<Arc<GgmlExtent>>,
}

impl Place {
    /// The segment of the tensor, and the first byte in it, if its memory has segments.
    pub(crate) fn segment(&self) -> Option<(&GgmlExtent, u64)> {
        let extent = self.extent.as_deref()?;
        Some((extent, self.offset))
    }
}

/// The places of the tensors of a graph.
pub(crate) struct Located {
    /// `None`: a tensor that no node names.
    places: Vec<Option<Place>>,
    /// For each buffer of the graph, the [changes](GgmlMemory::changes) as long as the places are
    /// right.
    changes: Box<[u64]>,
}

/// What nodes do with a tensor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    None,
    Reads,
    Writes,
}

/// The bytes of host memory that [`Located::of`] takes for each tensor of a graph at most.
pub(crate) const BYTES_OF_TENSOR: usize =
    size_of::<Use>() + size_of::<Option<Place>>() + BYTES_TO_LOCATE;

/// The same for each buffer.
pub(crate) const BYTES_OF_BUFFER: usize =
    2 * size_of::<(UsedRanges, Vec<LocatedSegment>)>() + 2 * size_of::<u64>();

/// The bytes of a tensor in a memory of `size` bytes, at least one: a tensor without elements can
/// be anywhere.
fn bytes_of(tensor: &Tensor, size: u64) -> std::ops::Range<u64> {
    let start = tensor.offset.min(size.saturating_sub(1));
    let len = tensor.shape.byte_len().unwrap_or(0);
    start..tensor.offset.saturating_add(len).max(start + 1)
}

impl Located {
    /// Finds the tensors that nodes of a graph name. Weights in several segments move to one, and
    /// weights that the graph writes to one of their memory alone. Tensors that overlap move
    /// together.
    ///
    /// # Errors
    /// As for [`SegmentedMemory::locate`](crate::segments::SegmentedMemory::locate).
    pub(crate) fn of(
        graph: &Graph,
        memory: &[&GgmlMemory],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Located, EngineError> {
        let mut uses = vec![Use::None; graph.tensors.len()];
        let mut cancellation = Cancellation::new(is_cancelled);
        for (at, node) in graph.nodes.iter().enumerate() {
            cancellation.check(at)?;
            for &source in node.src.as_slice().iter().flatten() {
                let use_of = &mut uses[source as usize];
                *use_of = (*use_of).max(Use::Reads);
            }
            node.written_tensors()
                .for_each(|tensor| uses[tensor] = Use::Writes);
        }
        let mut changes = vec![0; memory.len()];
        let mut found: Vec<(UsedRanges, Vec<LocatedSegment>)> = Vec::new();
        found.resize_with(memory.len(), Default::default);
        let segmented = |index: usize| match memory[index].storage() {
            Storage::Whole(_) => None,
            Storage::Segments(segments) => Some(segments),
        };
        for (tensor, use_of) in graph.tensors.iter().zip(&uses) {
            let index = tensor.buffer as usize;
            let segments = segmented(index).filter(|_| *use_of != Use::None);
            if let Some(segments) = segments {
                let bytes = bytes_of(tensor, segments.size());
                found[index].0.add(bytes, *use_of == Use::Writes);
            }
        }
        for (index, (used, extents)) in found.iter_mut().enumerate() {
            if let Some(segments) = segmented(index) {
                used.join();
                (*extents, changes[index]) = segments.locate(used, is_cancelled)?;
            }
        }
        let place = |tensor: &Tensor| -> Result<Place, EngineError> {
            let index = tensor.buffer as usize;
            let segments = match memory[index].storage() {
                Storage::Whole(buffer) => {
                    buffer.mark_used();
                    return Ok(Place {
                        whole: buffer.whole(),
                        offset: tensor.offset,
                        extent: None,
                    });
                }
                Storage::Segments(segments) => segments,
            };
            let first = bytes_of(tensor, segments.size()).start;
            let (used, segments_used) = &found[index];
            let segment = segments_used.get(used.find(first));
            let LocatedSegment { start, extent } = segment.ok_or(EngineError::OutOfBounds {
                offset: tensor.offset,
                len: tensor.shape.byte_len().unwrap_or(0),
                size: segments.size(),
            })?;
            extent.buffer().mark_used();
            Ok(Place {
                whole: extent.buffer().whole(),
                offset: tensor.offset - start,
                extent: Some(Arc::clone(extent)),
            })
        };
        let mut places = Vec::with_capacity(graph.tensors.len());
        for (tensor, use_of) in graph.tensors.iter().zip(&uses) {
            places.push(match use_of {
                Use::None => None,
                Use::Reads | Use::Writes => Some(place(tensor)?),
            });
        }
        Ok(Located {
            places,
            changes: changes.into(),
        })
    }

    /// The place of the tensor with this index. `None` if no node names the tensor.
    pub(crate) fn place(&self, tensor: u32) -> Option<&Place> {
        self.places[tensor as usize].as_ref()
    }

    /// The tensor with this index, which is `tensor`, as ggml's view of its buffer. `None` if no
    /// node names the tensor.
    ///
    /// # Safety
    /// The places must be right, and the memory of the graph alive.
    pub(crate) unsafe fn view(&self, index: u32, tensor: &Tensor) -> Option<abi::ggml_tensor> {
        let Place { whole, offset, .. } = *self.place(index)?;
        // SAFETY: `whole` is the tensor of a buffer of the graph's memory, which is alive: this
        // function's contract.
        Some(unsafe { view(&tensor.shape, whole, offset) })
    }

    /// For each buffer of the graph, the [changes](GgmlMemory::changes) as long as the places are
    /// right.
    pub(crate) fn into_changes(self) -> Box<[u64]> {
        self.changes
    }
}

/// Whether bytes of a graph's memory are where they were at these `changes`.
pub(crate) fn is_current(buffers: &[Arc<dyn Memory>], changes: &[u64]) -> bool {
    buffers.iter().zip(changes).all(|(memory, &changes)| {
        let memory = memory.as_any().downcast_ref::<GgmlMemory>();
        memory.is_some_and(|memory| memory.changes() == changes)
    })
}
