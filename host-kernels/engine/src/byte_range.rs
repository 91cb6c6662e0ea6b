//! Ranges of bytes in the buffers of a graph.

use std::ops::Range;

use vgpu_transport::ir::Tensor;

/// Bytes of one buffer of a graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteRange {
    /// The index of the buffer in the graph.
    pub buffer: u32,
    /// The bytes of the buffer.
    pub bytes: Range<u64>,
}

impl ByteRange {
    /// The bytes of a tensor of a validated graph, from its first to one past its last. A tensor
    /// with gaps does not use all of them.
    ///
    /// # Panics
    /// If the byte length of the tensor overflows, which validation excludes.
    pub fn of(tensor: &Tensor) -> ByteRange {
        let byte_len = tensor.shape.byte_len();
        let byte_len = byte_len.expect("a validated tensor has a size");
        ByteRange {
            buffer: tensor.buffer,
            bytes: tensor.offset..tensor.offset + byte_len,
        }
    }

    /// Whether both ranges have a byte in common.
    pub fn overlaps(&self, other: &ByteRange) -> bool {
        self.buffer == other.buffer
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }

    /// Whether this range has every byte of `other`.
    pub fn contains(&self, other: &ByteRange) -> bool {
        self.buffer == other.buffer
            && self.bytes.start <= other.bytes.start
            && other.bytes.end <= self.bytes.end
    }
}
