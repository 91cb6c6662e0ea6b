//! Where the tensors of a graph are on the device.

use std::sync::Arc;

use vgpu_engine::{EngineError, Memory};
use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Graph, Node, Tensor};

use crate::memory::{GgmlMemory, Storage};
use crate::segments::{GgmlExtent, LocatedSegment, UsedRanges};
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
    places: Vec<Place>,
    /// For each buffer of the graph, the [changes](GgmlMemory::changes) as long as the places are
    /// right.
    changes: Box<[u64]>,
}

/// The bytes of a tensor in a memory of `size` bytes, at least one: a tensor without elements can
/// be anywhere.
fn bytes_of(tensor: &Tensor, size: u64) -> std::ops::Range<u64> {
    let start = tensor.offset.min(size.saturating_sub(1));
    let len = tensor.shape.byte_len().unwrap_or(0);
    start..tensor.offset.saturating_add(len).max(start + 1)
}

impl Located {
    /// Finds the tensors of a graph. Weights in several segments move to one, and weights that the
    /// graph writes to one of their memory alone. Tensors that overlap move together.
    ///
    /// # Errors
    /// As for [`SegmentedMemory::locate`](crate::segments::SegmentedMemory::locate).
    pub(crate) fn of(
        graph: &Graph,
        memory: &[&GgmlMemory],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Located, EngineError> {
        let mut changes = vec![0; memory.len()];
        let mut found: Vec<(UsedRanges, Vec<LocatedSegment>)> = Vec::new();
        found.resize_with(memory.len(), Default::default);
        let segmented = |index: usize| match memory[index].storage() {
            Storage::Whole(_) => None,
            Storage::Segments(segments) => Some(segments),
        };
        if (0..memory.len()).any(|index| segmented(index).is_some()) {
            let mut is_written = vec![false; graph.tensors.len()];
            for tensor in graph.nodes.iter().flat_map(Node::written_tensors) {
                is_written[tensor] = true;
            }
            for (tensor, is_written) in graph.tensors.iter().zip(is_written) {
                let index = tensor.buffer as usize;
                if let Some(segments) = segmented(index) {
                    let bytes = bytes_of(tensor, segments.size());
                    found[index].0.add(bytes, is_written);
                }
            }
        }
        for (index, (used, extents)) in found.iter_mut().enumerate() {
            if let Some(segments) = segmented(index) {
                used.join();
                (*extents, changes[index]) = segments.locate(used, is_cancelled)?;
            }
        }
        let place = |tensor: &Tensor| {
            let index = tensor.buffer as usize;
            let segments = match memory[index].storage() {
                Storage::Whole(buffer) => {
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
            Ok(Place {
                whole: extent.buffer().whole(),
                offset: tensor.offset - start,
                extent: Some(Arc::clone(extent)),
            })
        };
        let places = graph.tensors.iter().map(place);
        Ok(Located {
            places: places.collect::<Result<_, EngineError>>()?,
            changes: changes.into(),
        })
    }

    /// The place of the tensor with this index.
    pub(crate) fn place(&self, tensor: u32) -> &Place {
        &self.places[tensor as usize]
    }

    /// The tensor with this index, which is `tensor`, as ggml's view of its buffer.
    ///
    /// # Safety
    /// The places must be right, and the memory of the graph alive.
    pub(crate) unsafe fn view(&self, index: u32, tensor: &Tensor) -> abi::ggml_tensor {
        let Place { whole, offset, .. } = *self.place(index);
        // SAFETY: `whole` is the tensor of a buffer of the graph's memory, which is alive: this
        // function's contract.
        unsafe { view(&tensor.shape, whole, offset) }
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
