//! Operands of the matrix products in convolutions: tensors prepared in scratch memory, and the
//! size of the tiles.

use crate::formats::Format;
use crate::kernel::{Compiled, Estimate, Worker};
use crate::ops::copy_raw::{self, Element};
use crate::ops::f32_rows::{Access, STAGE};
use crate::ops::scratch::ScratchLayout;
use crate::ops::sequence::Sequence;
use crate::view::View;

/// Floats of patches, or of results, in a tile.
const TILE_FLOATS: usize = 1 << 16;

/// The most outputs of a tile.
const TILE_OUTPUTS: usize = 128;

/// The most products in a tile of several outputs.
const TILE_PRODUCTS: usize = 1 << 26;

/// The outputs of a tile, of `outputs`, for patches of `k` floats and `channels` output channels.
/// `products`: the products of an output.
pub(super) fn tile_outputs(k: usize, channels: usize, products: usize, outputs: usize) -> usize {
    (TILE_FLOATS / k.max(channels).max(1))
        .min(TILE_PRODUCTS / products.max(1))
        .clamp(1, TILE_OUTPUTS)
        .min(outputs.max(1))
}

/// The most products of one output in a block, about: the operands of that many products come from
/// memory, not from a cache.
const BLOCK_PRODUCTS: usize = 1 << 22;

/// The fewest channels of a block: a patch is copied for each block.
const BLOCK_CHANNELS: usize = 64;

/// The output channels, of `channels`, of a block, for patches of `k` floats.
pub(super) fn block_channels(k: usize, channels: usize) -> usize {
    (BLOCK_PRODUCTS / k.max(1))
        .max(BLOCK_CHANNELS)
        .min(channels)
        .max(1)
}

/// A matrix in scratch memory: the elements of a tensor in order, converted to the type that the
/// product takes.
pub(super) struct Prepared {
    sequence: Sequence,
    reader: Access,
    pub(super) format: &'static Format,
    elements: usize,
    /// The offset of the matrix in the scratch memory.
    pub(super) offset: usize,
}

impl Prepared {
    /// Reserves scratch memory for the elements of `view`.
    pub(super) fn new(view: View, format: &'static Format, layout: &mut ScratchLayout) -> Prepared {
        let sequence = Sequence::new(view);
        Prepared {
            reader: Access::new(view.ty, sequence.step()),
            sequence,
            format,
            elements: view.elements(),
            offset: layout.room(view.elements(), format.bytes),
        }
    }

    /// Writes this worker's range of the elements.
    pub(super) fn write(&self, w: &Worker<'_>) {
        let mut stage = [0.0; STAGE];
        for strip in { w.range_of(self.elements.div_ceil(STAGE)) }.each(Estimate::steps(STAGE)) {
            let start = strip * STAGE;
            let n = STAGE.min(self.elements - start);
            let quantize = self.format.quantize_row;
            // SAFETY: the sequence visits elements of the tensor; `n <= STAGE`. The scratch memory
            // has room for `elements` elements from `offset` on, and only this worker writes the
            // elements `start .. start + n`.
            unsafe {
                self.sequence.strips(start, n, |src, done, len| {
                    self.reader.load(src, len, stage.as_mut_ptr().add(done));
                });
                let to = w.scratch().add(self.offset + start * self.format.bytes);
                quantize(stage.as_ptr(), to, n);
            }
        }
    }
}

/// A convolution without input channels: every output is zero.
pub(super) fn zero(dst: View) -> Compiled {
    Compiled {
        kernels: vec![copy_raw::fill(dst, Element::zero(dst.ty))],
        scratch_bytes: 0,
    }
}
