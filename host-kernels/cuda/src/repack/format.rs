//! Weights in planes: which tensors can be, and the guest's bytes back from them.
//!
//! A block of 17, 18, 34 or 210 bytes begins anywhere, and a kernel that reads it takes it in small pieces. In planes the
//! quants of all blocks of a matrix lie one after the other, each at a multiple of 16 bytes, then the blocks' scales in the
//! same order: the same bytes in all, so a tensor is arranged where it is. `cuda/repack.cu` arranges (`vg_repack`). The way
//! back is here, on the host: it is taken when a guest reads weights or changes a part of them, which hardly any does, and it
//! needs no memory of a device that may have none left.

use std::ops::Range;

use vgpu_transport::ir::{Tensor, Type};

use vgpu_engine::EngineError;

/// What quants and matrices begin at multiples of.
const ALIGN: u64 = 16;

/// About so many bytes are brought back at a time.
const PIECE: u64 = 1 << 20;

/// A block of a type: bytes of quants and of scale, whether the scale comes first in the guest's block, and whether its
/// bytes have elements `i` and `i + 16`, of which planes make nibbles in the order of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    quants: u64,
    scale: u64,
    is_first: bool,
    has_nibbles: bool,
}

impl Block {
    /// Of the types whose weights are arranged: every kernel for products has a form that reads them so.
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

    /// Appends the guest's block to `out`.
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

/// Matrices in planes, one behind the other: what is written down of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RepackFormat {
    /// Its type.
    pub(crate) ty: Type,
    /// Blocks of a matrix.
    blocks: u64,
    matrices: u64,
}

/// Where parts of a matrix lie in its tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// Blocks of it.
    pub(crate) blocks: u64,
    /// Their bytes as the guest has them.
    pub(crate) whole: Range<u64>,
    /// Their quants and their scales in planes.
    pub(crate) quants: Range<u64>,
    /// See there.
    pub(crate) scales: Range<u64>,
}

impl Part {
    /// How often there are 16 bytes of quants.
    pub(crate) fn quants_of_16(&self) -> u64 {
        (self.quants.end - self.quants.start) / ALIGN
    }
}

impl RepackFormat {
    /// How a tensor lies in planes, if products can read it so.
    pub(crate) fn of(tensor: &Tensor) -> Option<RepackFormat> {
        let shape = &tensor.shape;
        let fits = Block::of(shape.ty).is_some()
            && !shape.is_empty()
            && shape.is_contiguous()
            && tensor.offset.is_multiple_of(ALIGN);
        if !fits {
            return None;
        }
        let planes = RepackFormat {
            ty: shape.ty,
            blocks: shape.ne[0] / shape.ty.block_elements() * shape.ne[1],
            matrices: shape.ne[2] * shape.ne[3],
        };
        // Each matrix begins with quants.
        let is_aligned = planes.matrices == 1 || planes.of_matrix().is_multiple_of(ALIGN);
        is_aligned.then_some(planes)
    }

    fn block(&self) -> Block {
        Block::of(self.ty).expect("the types that are arranged have such blocks")
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

    /// The matrices, each in parts of about so many bytes, at least one block, in order.
    pub(crate) fn parts(&self, bytes: u64) -> impl DoubleEndedIterator<Item = Vec<Part>> {
        let planes = *self;
        let step = (bytes / planes.block().bytes()).max(1);
        (0..planes.matrices).map(move |matrix| {
            let firsts = (0..planes.blocks).step_by(step as usize);
            firsts
                .map(|first| planes.part(matrix, first..(first + step).min(planes.blocks)))
                .collect()
        })
    }

    /// Some blocks of a matrix.
    fn part(&self, matrix: u64, blocks: Range<u64>) -> Part {
        let Block { quants, scale, .. } = self.block();
        let begin = matrix * self.of_matrix();
        let scales = begin + self.blocks * quants;
        let times =
            |begin: u64, bytes: u64| begin + blocks.start * bytes..begin + blocks.end * bytes;
        Part {
            blocks: blocks.end - blocks.start,
            whole: times(begin, quants + scale),
            quants: times(begin, quants),
            scales: times(scales, scale),
        }
    }

    /// The guest's bytes of a part.
    fn guests(&self, quants: &[u8], scales: &[u8]) -> Vec<u8> {
        let block = self.block();
        let mut out = Vec::with_capacity(quants.len() + scales.len());
        let scales = scales.chunks_exact(block.scale as usize);
        for (quants, scale) in quants.chunks_exact(block.quants as usize).zip(scales) {
            block.restore(quants, scale, &mut out);
        }
        out
    }

    /// Hands the guest's bytes in `range` of the tensor to `give`, in order and in pieces; `fetch` reads what lies in planes.
    pub(crate) fn read(
        &self,
        range: Range<u64>,
        mut fetch: impl FnMut(Range<u64>) -> Result<Vec<u8>, EngineError>,
        mut give: impl FnMut(&[u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let (matrix, block) = (self.of_matrix(), self.block().bytes());
        let step = (PIECE / block).max(1);
        let mut at = range.start;
        while at < range.end {
            let (of, first) = (at / matrix, at % matrix / block);
            let until = (range.end - of * matrix).div_ceil(block);
            let part = self.part(of, first..until.min(first + step).min(self.blocks));
            let bytes = self.guests(&fetch(part.quants)?, &fetch(part.scales)?);
            let end = part.whole.end.min(range.end);
            give(&bytes[(at - part.whole.start) as usize..(end - part.whole.start) as usize])?;
            at = end;
        }
        Ok(())
    }

    /// Brings the whole tensor back where it lies: `fetch` reads bytes of it, `put` writes there.
    pub(crate) fn restore(
        &self,
        mut fetch: impl FnMut(Range<u64>) -> Result<Vec<u8>, EngineError>,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for parts in self.parts(PIECE) {
            let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
                continue;
            };
            let begin = first.scales.start;
            let scales = fetch(begin..last.scales.end)?;
            // From the end: blocks lie behind their quants, where only those of later blocks were.
            for part in parts.iter().rev() {
                let quants = fetch(part.quants.clone())?;
                let scales = &scales
                    [(part.scales.start - begin) as usize..(part.scales.end - begin) as usize];
                put(part.whole.start, &self.guests(&quants, scales))?;
            }
        }
        Ok(())
    }
}

/// What tests compare with.
#[cfg(test)]
pub(crate) mod reference {
    use super::*;

    /// The types that are arranged.
    pub(crate) const TYPES: [Type; 5] =
        [Type::Mxfp4, Type::Iq4Nl, Type::Q4_0, Type::Q8_0, Type::Q6K];

    /// A matrix in planes as the text above says, from the guest's bytes.
    pub(crate) fn arranged(matrix: &[u8], ty: Type) -> Vec<u8> {
        let block = Block::of(ty).expect("a type with planes");
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

    use super::reference::{TYPES, arranged};
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
        let arranged = |ty: &Type| Block::of(*ty).is_some();
        let count = Type::ALL.iter().filter(|ty| arranged(ty)).count();
        assert_eq!(count, TYPES.len());
        assert_eq!(Block::of(Type::Q4K), None);
    }

    #[test]
    fn guests_bytes_come_back_whole_and_in_parts() {
        for ty in TYPES {
            // Larger than a piece, and several matrices with an odd number of blocks.
            for (blocks, matrices) in [(PIECE / 16 + 5, 1), (37, 3), (1, 1)] {
                let planes = RepackFormat {
                    ty,
                    blocks,
                    matrices,
                };
                let guests = bytes(planes.bytes());
                let mut lies: Vec<u8> = { guests.chunks(planes.of_matrix() as usize) }
                    .flat_map(|matrix| arranged(matrix, ty))
                    .collect();
                let fetch =
                    |range: Range<u64>| Ok(lies[range.start as usize..range.end as usize].to_vec());
                let size = planes.bytes();
                let block = planes.block().bytes();
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
                    planes.read(range.clone(), fetch, give).unwrap();
                    assert!(
                        out == guests[range.start as usize..range.end as usize],
                        "{planes:?} {range:?}"
                    );
                }
                let lies = std::cell::RefCell::new(&mut lies);
                planes
                    .restore(
                        |range| {
                            Ok(lies.borrow()[range.start as usize..range.end as usize].to_vec())
                        },
                        |at, bytes| {
                            lies.borrow_mut()[at as usize..][..bytes.len()].copy_from_slice(bytes);
                            Ok(())
                        },
                    )
                    .unwrap();
                assert!(**lies.borrow() == guests, "{planes:?}");
            }
        }
    }

    #[test]
    fn only_dense_matrices_at_places_of_16_bytes_are_arranged() {
        let tensor = |ne, offset| Tensor {
            shape: Shape::contiguous(Type::Mxfp4, ne).unwrap(),
            buffer: 0,
            offset,
        };
        // Rows need not be multiples of 16 bytes; matrices behind the first do.
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
