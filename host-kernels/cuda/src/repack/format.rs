//! The repacked format of weights: which tensors may have it, and the way back to ggml's format.
//!
//! Blocks of 17, 18, 34 or 210 bytes are not aligned, so a kernel reads them in small loads.
//! Repacked, a matrix is a structure of arrays: the quants of all blocks, each aligned to 16 bytes,
//! then the scales of all blocks in the same order. The bytes are the same in number, so a tensor
//! is repacked in place. `kernels/repack.cu` (`vg_repack`) repacks. The way back is on the host: it
//! is rare (a guest reads weights, or changes a part of a tensor), and needs no device memory, of
//! which none may be left.

use std::ops::Range;

use vgpu_transport::ir::{Tensor, Type};

use vgpu_engine::EngineError;

/// The alignment of quants and matrices in bytes.
const ALIGN: u64 = 16;

/// About the number of bytes that are restored at a time.
const CHUNK: u64 = 1 << 20;

/// The layout of a block: bytes of quants and of the scale, whether ggml's block begins with the
/// scale, and whether its bytes have elements `i` and `i + 16`, which become nibbles in element
/// order when repacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    quants: u64,
    scale: u64,
    is_first: bool,
    has_nibbles: bool,
}

impl Block {
    /// The block of a type that is repacked: every matrix kernel has a variant for it.
    fn of(ty: Type) -> Option<Block> {
        let (quants, scale, is_first, has_nibbles) = match ty {
            Type::Mxfp4 => (16, 1, true, true),
            Type::Iq4Nl => (16, 2, true, true),
            Type::Q4_0 => (16, 2, true, false),
            Type::Q8_0 => (32, 2, true, false),
            Type::Q6K => (208, 2, false, false),
            _ => return None,
        };
        Some(Block {
            quants,
            scale,
            is_first,
            has_nibbles,
        })
    }

    fn bytes(&self) -> u64 {
        self.quants + self.scale
    }

    /// Appends ggml's block to `out`.
    fn restore(&self, quants: &[u8], scale: &[u8], out: &mut Vec<u8>) {
        if self.is_first {
            out.extend_from_slice(scale);
        }
        if self.has_nibbles {
            let nibble = |i: usize| quants[i / 2] >> (4 * (i % 2)) & 15;
            out.extend((0..16).map(|i| nibble(i) | nibble(i + 16) << 4));
        } else {
            out.extend_from_slice(quants);
        }
        if !self.is_first {
            out.extend_from_slice(scale);
        }
    }
}

/// The repacked format of a tensor: adjacent matrices of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RepackFormat {
    /// The type of the weights.
    pub(crate) ty: Type,
    /// The number of blocks of a matrix.
    blocks: u64,
    matrices: u64,
}

/// The ranges of some blocks of a matrix in their tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockRange {
    /// The number of blocks.
    pub(crate) blocks: u64,
    /// The bytes of the blocks in ggml's format.
    pub(crate) whole: Range<u64>,
    /// The quants of the blocks, repacked.
    pub(crate) quants: Range<u64>,
    /// The scales of the blocks, repacked.
    pub(crate) scales: Range<u64>,
}

impl BlockRange {
    /// The number of 16-byte units of quants.
    pub(crate) fn quants_of_16(&self) -> u64 {
        (self.quants.end - self.quants.start) / ALIGN
    }
}

impl RepackFormat {
    /// The repacked format of a tensor, if kernels can read it.
    pub(crate) fn of(tensor: &Tensor) -> Option<RepackFormat> {
        let shape = &tensor.shape;
        let fits = Block::of(shape.ty).is_some()
            && !shape.is_empty()
            && shape.is_contiguous()
            && tensor.offset.is_multiple_of(ALIGN);
        if !fits {
            return None;
        }
        let format = RepackFormat {
            ty: shape.ty,
            blocks: shape.ne[0] / shape.ty.block_elements() * shape.ne[1],
            matrices: shape.ne[2] * shape.ne[3],
        };
        // Each matrix begins with quants, which have to be aligned.
        let is_aligned = format.matrices == 1 || format.of_matrix().is_multiple_of(ALIGN);
        is_aligned.then_some(format)
    }

    fn block(&self) -> Block {
        Block::of(self.ty).expect("only types with such blocks are repacked")
    }

    /// Bytes of a matrix.
    pub(crate) fn of_matrix(&self) -> u64 {
        self.blocks * self.block().bytes()
    }

    /// Bytes of the tensor.
    pub(crate) fn bytes(&self) -> u64 {
        self.matrices * self.of_matrix()
    }

    /// Bytes of the scales of a matrix.
    pub(crate) fn scales(&self) -> u64 {
        self.blocks * self.block().scale
    }

    /// The matrices in order, each in parts of about `bytes` bytes, at least one block.
    pub(crate) fn parts(&self, bytes: u64) -> impl DoubleEndedIterator<Item = Vec<BlockRange>> {
        let format = *self;
        let step = (bytes / format.block().bytes()).max(1);
        (0..format.matrices).map(move |matrix| {
            let firsts = (0..format.blocks).step_by(step as usize);
            firsts
                .map(|first| format.part(matrix, first..(first + step).min(format.blocks)))
                .collect()
        })
    }

    /// A range of blocks of a matrix.
    fn part(&self, matrix: u64, blocks: Range<u64>) -> BlockRange {
        let Block { quants, scale, .. } = self.block();
        let begin = matrix * self.of_matrix();
        let scales = begin + self.blocks * quants;
        let times =
            |begin: u64, bytes: u64| begin + blocks.start * bytes..begin + blocks.end * bytes;
        BlockRange {
            blocks: blocks.end - blocks.start,
            whole: times(begin, quants + scale),
            quants: times(begin, quants),
            scales: times(scales, scale),
        }
    }

    /// The bytes of some blocks in ggml's format.
    fn original(&self, quants: &[u8], scales: &[u8]) -> Vec<u8> {
        let block = self.block();
        let mut out = Vec::with_capacity(quants.len() + scales.len());
        let scales = scales.chunks_exact(block.scale as usize);
        for (quants, scale) in quants.chunks_exact(block.quants as usize).zip(scales) {
            block.restore(quants, scale, &mut out);
        }
        out
    }

    /// Passes the bytes in `range` of the tensor, in ggml's format, to `give`, in order and in
    /// chunks. `fetch` reads repacked bytes.
    ///
    /// # Errors
    /// The first error of `fetch` or `give`.
    pub(crate) fn read(
        &self,
        range: Range<u64>,
        mut fetch: impl FnMut(Range<u64>) -> Result<Vec<u8>, EngineError>,
        mut give: impl FnMut(&[u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let (matrix, block) = (self.of_matrix(), self.block().bytes());
        let step = (CHUNK / block).max(1);
        let mut at = range.start;
        while at < range.end {
            let (of, first) = (at / matrix, at % matrix / block);
            let until = (range.end - of * matrix).div_ceil(block);
            let part = self.part(of, first..until.min(first + step).min(self.blocks));
            let bytes = self.original(&fetch(part.quants)?, &fetch(part.scales)?);
            let end = part.whole.end.min(range.end);
            give(&bytes[(at - part.whole.start) as usize..(end - part.whole.start) as usize])?;
            at = end;
        }
        Ok(())
    }

    /// Restores the whole tensor in place: `fetch` reads bytes of it, `put` writes them.
    ///
    /// # Errors
    /// The first error of `fetch` or `put`.
    pub(crate) fn restore(
        &self,
        mut fetch: impl FnMut(Range<u64>) -> Result<Vec<u8>, EngineError>,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for parts in self.parts(CHUNK) {
            let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
                continue;
            };
            let begin = first.scales.start;
            let scales = fetch(begin..last.scales.end)?;
            // From the end: plain blocks lie behind their quants, where only quants of later blocks
            // were.
            for part in parts.iter().rev() {
                let quants = fetch(part.quants.clone())?;
                let scales = &scales
                    [(part.scales.start - begin) as usize..(part.scales.end - begin) as usize];
                put(part.whole.start, &self.original(&quants, scales))?;
            }
        }
        Ok(())
    }
}

/// A second implementation for tests.
#[cfg(test)]
pub(crate) mod reference {
    use super::*;

    /// The types that are repacked.
    pub(crate) const TYPES: [Type; 5] =
        [Type::Mxfp4, Type::Iq4Nl, Type::Q4_0, Type::Q8_0, Type::Q6K];

    /// A matrix in repacked format, by the description of this module, from ggml's bytes.
    pub(crate) fn repack(matrix: &[u8], ty: Type) -> Vec<u8> {
        let block = Block::of(ty).expect("a type that is repacked");
        let (mut out, mut scales) = (Vec::new(), Vec::new());
        for bytes in matrix.chunks_exact(block.bytes() as usize) {
            let (scale, quants) = match block.is_first {
                true => bytes.split_at(block.scale as usize),
                false => {
                    let (quants, scale) = bytes.split_at(block.quants as usize);
                    (scale, quants)
                }
            };
            scales.extend_from_slice(scale);
            if block.has_nibbles {
                let elements: Vec<u8> = { quants.iter().map(|byte| byte & 15) }
                    .chain(quants.iter().map(|byte| byte >> 4))
                    .collect();
                out.extend(elements.chunks(2).map(|pair| pair[0] | pair[1] << 4));
            } else {
                out.extend_from_slice(quants);
            }
        }
        out.extend(scales);
        out
    }
}

#[cfg(test)]
mod tests {
    use vgpu_transport::ir::Shape;

    use super::reference::{TYPES, repack};
    use super::*;

    fn bytes(len: u64) -> Vec<u8> {
        (0..len as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect()
    }

    #[test]
    fn blocks_have_the_bytes_of_their_types() {
        for ty in TYPES {
            assert_eq!(Block::of(ty).map(|it| it.bytes()), Some(ty.block_bytes()));
        }
        let is_repacked = |ty: &Type| Block::of(*ty).is_some();
        let count = Type::ALL.iter().filter(|ty| is_repacked(ty)).count();
        assert_eq!(count, TYPES.len());
        assert_eq!(Block::of(Type::Q4K), None);
    }

    #[test]
    fn repacked_tensors_are_read_back_whole_and_in_parts() {
        for ty in TYPES {
            // Larger than a chunk, and several matrices with an odd number of blocks.
            for (blocks, matrices) in [(CHUNK / 16 + 5, 1), (37, 3), (1, 1)] {
                let format = RepackFormat {
                    ty,
                    blocks,
                    matrices,
                };
                let original = bytes(format.bytes());
                let mut repacked: Vec<u8> = { original.chunks(format.of_matrix() as usize) }
                    .flat_map(|matrix| repack(matrix, ty))
                    .collect();
                let fetch = |range: Range<u64>| {
                    Ok(repacked[range.start as usize..range.end as usize].to_vec())
                };
                let size = format.bytes();
                let block = format.block().bytes();
                for range in [
                    0..size,
                    0..1,
                    size - 1..size,
                    size / 2..size / 2,
                    block / 2..size - block / 2,
                    size / 3..size / 3 * 2,
                ] {
                    let mut out = Vec::new();
                    let give = |part: &[u8]| {
                        out.extend_from_slice(part);
                        Ok(())
                    };
                    format.read(range.clone(), fetch, give).unwrap();
                    assert!(
                        out == original[range.start as usize..range.end as usize],
                        "{format:?} {range:?}"
                    );
                }
                let repacked = std::cell::RefCell::new(&mut repacked);
                format
                    .restore(
                        |range| {
                            Ok(
                                repacked.borrow()[range.start as usize..range.end as usize]
                                    .to_vec(),
                            )
                        },
                        |at, bytes| {
                            repacked.borrow_mut()[at as usize..][..bytes.len()]
                                .copy_from_slice(bytes);
                            Ok(())
                        },
                    )
                    .unwrap();
                assert!(**repacked.borrow() == original, "{format:?}");
            }
        }
    }

    #[test]
    fn only_dense_matrices_aligned_to_16_bytes_are_repacked() {
        let tensor = |ne, offset| Tensor {
            shape: Shape::contiguous(Type::Mxfp4, ne).unwrap(),
            buffer: 0,
            offset,
        };
        // Rows need not be multiples of 16 bytes; matrices behind the first need to be.
        let rows = RepackFormat::of(&tensor([2880, 3, 1, 1], 32)).expect("one matrix");
        assert_eq!(rows.bytes(), 3 * 90 * 17);
        assert!(RepackFormat::of(&tensor([2880, 3, 2, 1], 32)).is_none());
        assert!(RepackFormat::of(&tensor([2880, 8, 2, 1], 32)).is_some());
        assert!(RepackFormat::of(&tensor([2880, 3, 1, 1], 40)).is_none());
        assert!(RepackFormat::of(&tensor([2880, 0, 1, 1], 32)).is_none());
        let mut apart = tensor([2880, 3, 1, 1], 32);
        apart.shape.nb[1] += 17;
        assert!(RepackFormat::of(&apart).is_none());
        let mut other = tensor([2880, 3, 1, 1], 32);
        other.shape = Shape::contiguous(Type::Q4K, [256, 3, 1, 1]).unwrap();
        assert!(RepackFormat::of(&other).is_none());
    }
}
