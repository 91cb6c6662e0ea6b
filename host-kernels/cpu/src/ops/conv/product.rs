//! CONV_2D and CONV_3D: the product of a matrix of patches (im2col) and a matrix of kernels.
//!
//! Threads take tiles of patches, which are copied just before they are multiplied.

use vgpu_transport::ir::Type;

use super::operand::{Prepared, block_channels, tile_outputs, zero};
use crate::formats::Format;
use crate::gemm::{GemmArgs, MatmulKernel};
use crate::kernel::{Compiled, Kernel};
use crate::ops::copy_raw::copy_strided;
use crate::ops::patches::{Images, Patches};
use crate::ops::scratch::ScratchLayout;
use crate::view::View;

/// The destination of a convolution. Strides are in bytes.
#[derive(Clone, Copy)]
pub(super) struct Results {
    pub(super) dst: View,
    /// Outputs of one channel in each dimension.
    pub(super) ne: [usize; 3],
    pub(super) nb: [usize; 3],
    pub(super) channels: usize,
    pub(super) channel_stride: usize,
    pub(super) images: usize,
    pub(super) image_stride: usize,
}

impl Results {
    /// Outputs of one channel of one image.
    fn outputs(&self) -> usize {
        self.ne.iter().product()
    }

    /// The coordinates of output `i`.
    fn coordinates(&self, i: usize) -> [usize; 3] {
        let [w, h, _] = self.ne;
        [i % w, i / w % h, i / (w * h)]
    }

    /// Writes the outputs `start .. start + n` of one channel.
    ///
    /// # Safety
    /// `values` is readable for `n` floats. The image, the channel and the outputs exist, and no
    /// other thread accesses them.
    unsafe fn write(
        &self,
        image: usize,
        channel: usize,
        start: usize,
        values: *const f32,
        n: usize,
    ) {
        let base = self.dst.ptr();
        let base = base.wrapping_add(image * self.image_stride + channel * self.channel_stride);
        let mut done = 0;
        while done < n {
            let [x, y, z] = self.coordinates(start + done);
            let len = (self.ne[0] - x).min(n - done);
            let [nb0, nb1, nb2] = self.nb;
            let to = base.wrapping_add(x * nb0 + y * nb1 + z * nb2);
            // SAFETY: the row has `ne[0] - x >= len` outputs from `to` on, and `values` has
            // `n - done >= len` floats from `done` on.
            unsafe {
                copy_strided(
                    to,
                    nb0,
                    values.add(done).cast(),
                    size_of::<f32>(),
                    len,
                    size_of::<f32>(),
                )
            };
            done += len;
        }
    }
}

/// CONV_2D and CONV_3D.
///
/// # Safety
/// `kernel` has, in the order of its elements, `out.channels` kernels of [`Patches::len`] elements.
/// `images` has `out.images` images of f32 with the lengths and strides of `patches`. The memory of
/// `out.dst` is f32 with the lengths and strides of `out`.
pub(super) unsafe fn convolution(
    out: Results,
    kernel: View,
    patches: Patches,
    images: Images,
    workers: usize,
) -> Compiled {
    // The patches are src0 of the product and the kernels are src1, so that adjacent outputs of a
    // channel are adjacent in the result.
    let product = MatmulKernel::of(kernel.ty).expect("floats are weights");
    let k = patches.len();
    if k == 0 {
        return zero(out.dst);
    }
    let outputs = out.outputs();
    let tile = tile_outputs(k, out.channels, k.saturating_mul(out.channels), outputs);
    let tiles = outputs.div_ceil(tile);
    let block = block_channels(k, out.channels);
    let blocks = out.channels.div_ceil(block);
    let units = tiles * blocks * out.images;
    let busy = workers.min(units);
    let weight = Format::of(kernel.ty).expect("floats are a format");

    let mut layout = ScratchLayout::default();
    let kernels = Prepared::new(kernel, product.activation.format(), &mut layout);
    let kernels_at = kernels.offset;
    let kernel_bytes = kernels.format.row_bytes(k);
    let patch_at = layout.room(busy, k * size_of::<f32>());
    let patches_at = layout.room(busy, tile * weight.row_bytes(k));
    let results_at = layout.room(busy, tile * block * size_of::<f32>());

    let prepare: Kernel = Box::new(move |w| {
        kernels.write(w);
        Ok(())
    });
    let multiply: Kernel = Box::new(move |w| {
        let part = |at: usize, size: usize| w.scratch().wrapping_add(at + w.index() * size);
        for unit in w.range_of(units) {
            let (unit, first) = (unit / blocks, unit % blocks * block);
            let channels = block.min(out.channels - first);
            let (image, start) = (unit / tiles, unit % tiles * tile);
            let n = tile.min(outputs - start);
            let patch = part(patch_at, k * size_of::<f32>()).cast::<f32>();
            let rows = part(patches_at, tile * weight.row_bytes(k));
            let results = part(results_at, tile * block * size_of::<f32>()).cast::<f32>();
            // SAFETY: the first `busy` workers have units, and each has its own part of the scratch
            // memory for one patch, for `tile >= n` patches and for their results in
            // `block >= channels` channels. The kernels were prepared before the barrier between
            // the two kernels, and kernel `first` has `channels - 1` behind it, of the
            // `out.channels` that the caller guarantees, as the image and the outputs. The outputs
            // of a unit are written by one worker.
            unsafe {
                for i in 0..n {
                    let output = out.coordinates(start + i);
                    let row = rows.add(i * weight.row_bytes(k));
                    if weight.ty == Type::F32 {
                        patches.write(images.at(image), output, row.cast());
                    } else {
                        patches.write(images.at(image), output, patch);
                        (weight.quantize_row)(patch, row, k);
                    }
                }
                (product.gemm)(&GemmArgs {
                    k,
                    w: rows,
                    w_stride: weight.row_bytes(k),
                    rows: n,
                    x: w.scratch().add(kernels_at + first * kernel_bytes),
                    x_stride: kernel_bytes,
                    cols: channels,
                    dst: results,
                    dst_stride: tile,
                    table: None,
                });
                for channel in 0..channels {
                    out.write(
                        image,
                        first + channel,
                        start,
                        results.add(channel * tile),
                        n,
                    );
                }
            }
        }
        Ok(())
    });
    Compiled {
        kernels: vec![prepare, multiply],
        scratch_bytes: layout.bytes(),
    }
}
