//! CONV_TRANSPOSE_1D and CONV_TRANSPOSE_2D: a matrix product, whose results are added to the
//! elements that the kernel covers (col2im).

use super::operand::{Prepared, tile_outputs, zero};
use crate::formats::Format;
use crate::gemm::{GemmArgs, MatmulKernel};
use crate::kernel::{Compiled, Estimate, Kernel};
use crate::ops::conv_axis::ConvAxis;
use crate::ops::copy_raw::copy_strided;
use crate::ops::scratch::ScratchLayout;
use crate::ops::walk::laid_out;
use crate::view::View;

/// A tensor of a transposed convolution with four dimensions. The kernel has [width, height, output
/// channels, input channels], the images have [width, height, channels, images].
#[derive(Clone, Copy)]
pub(super) struct Axes {
    pub(super) view: View,
    pub(super) ne: [usize; 4],
    pub(super) nb: [usize; 4],
}

/// Adds the kernel, times the value of each element of the image, to the destination. The kernels
/// of adjacent elements are a stride apart.
///
/// # Safety
/// `kernel` and `image` have as many input channels. `out` is f32, and has the output channels of
/// `kernel` for each image. The lengths and strides of the axes are inside their views.
pub(super) unsafe fn transposed(
    out: Axes,
    kernel: Axes,
    image: Axes,
    [x_axis, y_axis]: [ConvAxis; 2],
    workers: usize,
) -> Compiled {
    let [kw, kh, outputs, channels] = kernel.ne;
    let [iw, ih, _, images] = image.ne;
    let [ow, oh, ..] = out.ne;
    let (taps, pixels) = (kw * kh, iw * ih);
    if channels == 0 {
        return zero(out.view);
    }
    let product = MatmulKernel::of(kernel.view.ty).expect("floats are weights");

    // Both operands have the input channels innermost: src0 has a row for each tap of each output
    // channel, src1 has a column for each pixel.
    let order =
        |a: Axes, d: [usize; 4]| laid_out(a.view, 0, d.map(|d| a.ne[d]), d.map(|d| a.nb[d]));
    let weight = Format::of(kernel.view.ty).expect("floats are a format");
    let mut layout = ScratchLayout::default();
    let weights = Prepared::new(order(kernel, [3, 0, 1, 2]), weight, &mut layout);
    let columns = Prepared::new(
        order(image, [2, 0, 1, 3]),
        product.activation.format(),
        &mut layout,
    );
    let (weights_at, columns_at) = (weights.offset, columns.offset);
    let (weight_bytes, column_bytes) = (
        weights.format.row_bytes(channels),
        columns.format.row_bytes(channels),
    );
    let tile = tile_outputs(taps, 1, taps.saturating_mul(channels), pixels);
    let tiles = pixels.div_ceil(tile);
    // The rows of a plane are set to zero, tiles are added, and the rows are written.
    let (units, steps) = (outputs * images, oh + tiles + oh);
    let most = Estimate::products(tile * taps * channels).max(Estimate::steps(ow.max(tile * taps)));
    let busy = workers.min(units);
    let plane_at = layout.room(busy, ow * oh * size_of::<f32>());
    let tile_at = layout.room(busy, tile * taps * size_of::<f32>());

    let prepare = |operand: Prepared| -> Kernel {
        Box::new(move |w| {
            operand.write(w);
            Ok(())
        })
    };
    let prepare = [prepare(weights), prepare(columns)];
    let multiply: Kernel = Box::new(move |w| {
        let part = |at: usize, floats: usize| {
            w.scratch()
                .wrapping_add(at + w.index() * floats * size_of::<f32>())
                .cast::<f32>()
        };
        for unit in w.range_of_groups(units, steps).each(most) {
            let (step, unit) = (unit % steps, unit / steps);
            let (output, n) = (unit % outputs, unit / outputs);
            // SAFETY: the first `busy` workers have units, and each has its own plane of `ow * oh`
            // floats and its own tile of `tile * taps` floats in the scratch memory. The operands
            // were prepared before the barrier between the two kernels: row `output * taps` has
            // `taps - 1` rows behind it, column `n * pixels + start` has `count - 1`; the caller
            // guarantees that both have `channels` elements. A row of the destination has `ow`
            // elements, for each output and image as the caller guarantees, and one worker writes
            // it.
            unsafe {
                let plane = std::slice::from_raw_parts_mut(part(plane_at, ow * oh), ow * oh);
                let values = part(tile_at, tile * taps);
                let Some(step) = step.checked_sub(oh) else {
                    plane[step * ow..(step + 1) * ow].fill(0.0);
                    continue;
                };
                if step < tiles {
                    let start = step * tile;
                    let count = tile.min(pixels - start);
                    (product.gemm)(&GemmArgs {
                        k: channels,
                        w: w.scratch().add(weights_at + output * taps * weight_bytes),
                        w_stride: weight_bytes,
                        rows: taps,
                        x: w.scratch()
                            .add(columns_at + (n * pixels + start) * column_bytes),
                        x_stride: column_bytes,
                        cols: count,
                        dst: values,
                        dst_stride: taps,
                        table: None,
                    });
                    for i in 0..count {
                        let (x, y) = ((start + i) % iw, (start + i) / iw);
                        let products = std::slice::from_raw_parts(values.add(i * taps), taps);
                        for (ky, row) in products.chunks_exact(kw).enumerate() {
                            let to = (y * y_axis.stride + ky) * ow + x * x_axis.stride;
                            plane[to..to + kw]
                                .iter_mut()
                                .zip(row)
                                .for_each(|(p, v)| *p += v);
                        }
                    }
                }
                if let Some(y) = step.checked_sub(tiles) {
                    let row = &plane[y * ow..(y + 1) * ow];
                    let to = y * out.nb[1] + output * out.nb[2] + n * out.nb[3];
                    let to = out.view.ptr().wrapping_add(to);
                    copy_strided(
                        to,
                        out.nb[0],
                        row.as_ptr().cast(),
                        size_of::<f32>(),
                        ow,
                        size_of::<f32>(),
                    );
                }
            }
        }
        Ok(())
    });
    Compiled {
        kernels: prepare.into_iter().chain([multiply]).collect(),
        scratch_bytes: layout.bytes(),
    }
}
