//! Where the tensors of a graph are.

use std::collections::HashMap;
use std::sync::Arc;

use vgpu_transport::ir::{Graph, Node, Tensor};

use crate::allocator::Allocator;
use crate::memory::CudaMemory;
use crate::repack::pass::{Places, Withheld};
use crate::weights::{CudaExtent, UsedRanges, WeightMemory};
use vgpu_engine::fuse::ByteRange;
use vgpu_engine::{EngineError, Memory};

/// The memory of a buffer, as this engine's type.
#[derive(Clone, Copy)]
pub(super) enum Buffer<'m> {
    /// One allocation.
    Plain(&'m CudaMemory),
    /// Pieces that other buffers may hold too.
    Weights(&'m WeightMemory),
}

impl<'m> Buffer<'m> {
    /// The memory, if it is of this engine.
    pub(super) fn of(memory: &'m Arc<dyn Memory>) -> Option<Buffer<'m>> {
        let memory = memory.as_any();
        let plain = memory.downcast_ref().map(Buffer::Plain);
        plain.or_else(|| memory.downcast_ref().map(Buffer::Weights))
    }

    /// Whether the memory is from `allocator`.
    pub(super) fn is_of(&self, allocator: &Arc<Allocator>) -> bool {
        match self {
            Buffer::Plain(memory) => memory.is_of(allocator),
            Buffer::Weights(memory) => memory.is_of(allocator),
        }
    }

    /// Checks that the device of the memory is not lost.
    ///
    /// # Errors
    /// [`EngineError::DeviceLost`] if the device is lost.
    pub(super) fn check_there(&self) -> Result<(), EngineError> {
        match self {
            Buffer::Plain(memory) => memory.check_there(),
            Buffer::Weights(memory) => memory.check_there(),
        }
    }

    /// A number that changes when plans that were compiled before become stale.
    pub(super) fn changes(&self) -> u64 {
        match self {
            Buffer::Plain(memory) => memory.repack_state().changes(),
            Buffer::Weights(memory) => memory.changes(),
        }
    }
}

/// The places of the tensors of a graph.
pub(super) struct Located {
    pieces: Vec<Piece>,
    /// The index of each piece, by its first byte in a buffer.
    indices: HashMap<(usize, u64), usize>,
    /// For each tensor, the index of its buffer or of its piece, and the offset there.
    tensors: Vec<(Home, u64)>,
}

/// A piece of a buffer for weights.
struct Piece {
    /// The index of the buffer, and the first byte in it.
    buffer: usize,
    start: u64,
    extent: Arc<CudaExtent>,
}

#[derive(Clone, Copy)]
enum Home {
    Buffer(usize),
    Piece(usize),
}

impl Located {
    /// Finds the tensors of a graph with these buffers, which differ. Tensors in several pieces
    /// move to one, and a tensor that the graph writes to one of its buffer alone. Tensors that
    /// overlap move together.
    ///
    /// # Errors
    /// As for [`WeightMemory::locate`].
    pub(super) fn of(
        graph: &Graph,
        buffers: &[Buffer<'_>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Located, EngineError> {
        let mut is_written = vec![false; graph.tensors.len()];
        for tensor in graph.nodes.iter().flat_map(Node::written_tensors) {
            is_written[tensor] = true;
        }
        // A tensor without elements can be anywhere.
        let bytes = |tensor: &Tensor, memory: &WeightMemory| {
            let bytes = ByteRange::of(tensor).bytes;
            let start = bytes.start.min(memory.size() - 1);
            start..bytes.end.max(start + 1)
        };
        let mut used: Vec<UsedRanges> = Vec::new();
        used.resize_with(buffers.len(), UsedRanges::default);
        for (tensor, is_written) in graph.tensors.iter().zip(&is_written) {
            let index = tensor.buffer as usize;
            if let Buffer::Weights(memory) = buffers[index] {
                used[index].add(&bytes(tensor, memory), *is_written);
            }
        }
        let mut places = Vec::with_capacity(buffers.len());
        for (buffer, used) in buffers.iter().zip(&mut used) {
            used.join();
            places.push(match buffer {
                Buffer::Plain(_) => Vec::new(),
                Buffer::Weights(memory) => memory.locate(used, is_cancelled)?,
            });
        }
        let mut located = Located {
            pieces: Vec::new(),
            indices: HashMap::new(),
            tensors: Vec::with_capacity(graph.tensors.len()),
        };
        for tensor in &graph.tensors {
            let index = tensor.buffer as usize;
            let home = match buffers[index] {
                Buffer::Plain(_) => (Home::Buffer(index), tensor.offset),
                Buffer::Weights(memory) => {
                    let offset = bytes(tensor, memory).start;
                    let (start, extent) = &places[index][used[index].find(offset)];
                    let piece = located.piece(index, *start, Arc::clone(extent));
                    (Home::Piece(piece), offset - start)
                }
            };
            located.tensors.push(home);
        }
        Ok(located)
    }

    /// The index of a piece, which is added if it is new.
    fn piece(&mut self, buffer: usize, start: u64, extent: Arc<CudaExtent>) -> usize {
        let pieces = &mut self.pieces;
        let index = self.indices.entry((buffer, start)).or_insert_with(|| {
            pieces.push(Piece {
                buffer,
                start,
                extent,
            });
            pieces.len() - 1
        });
        *index
    }

    /// The allocations and the places of the tensors in them.
    pub(super) fn places<'m>(&'m self, buffers: &[Buffer<'m>]) -> Places<'m> {
        let mut memories: Vec<&CudaMemory> = Vec::new();
        let mut plain = vec![0; buffers.len()];
        for (index, buffer) in buffers.iter().enumerate() {
            if let Buffer::Plain(memory) = buffer {
                plain[index] = memories.len();
                memories.push(memory);
            }
        }
        let first_piece = memories.len();
        memories.extend(self.pieces.iter().map(|piece| piece.extent.memory()));
        let tensors = self.tensors.iter().map(|&(home, offset)| match home {
            Home::Buffer(index) => (plain[index], offset),
            Home::Piece(index) => (first_piece + index, offset),
        });
        Places {
            tensors: tensors.collect(),
            memories,
            first_piece,
        }
    }

    /// How often the format of each piece has changed.
    pub(super) fn formats(&self) -> Vec<u64> {
        { self.pieces.iter() }
            .map(|piece| piece.extent.memory().repack_state().changes())
            .collect()
    }

    /// Makes plans stale that use buffers whose pieces had other formats `before`.
    pub(super) fn note_changes(&self, buffers: &[Buffer<'_>], before: &[u64]) {
        for ((piece, before), now) in self.pieces.iter().zip(before).zip(self.formats()) {
            if let Buffer::Weights(memory) = buffers[piece.buffer]
                && now != *before
            {
                memory.has_changed();
            }
        }
    }

    /// Gives buffers copies of the pieces that the graph needs in a format that others do not. The
    /// graph has to be compiled again, if there are any.
    ///
    /// # Errors
    /// As for [`WeightMemory::copy_piece`].
    pub(super) fn copy_withheld(
        &self,
        buffers: &[Buffer<'_>],
        withheld: &Withheld,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        for piece in &self.pieces {
            if let Buffer::Weights(memory) = buffers[piece.buffer]
                && withheld.has_plain
            {
                memory.has_changed();
            }
        }
        for &piece in &withheld.repacked {
            let piece = &self.pieces[piece];
            if let Buffer::Weights(memory) = buffers[piece.buffer] {
                memory.copy_piece(piece.start, is_cancelled)?;
            }
        }
        Ok(())
    }
}
