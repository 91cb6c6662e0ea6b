//! CONV_2D_DW: one kernel for each channel.

use vgpu_transport::ir::{Op, Type};

use crate::kernel::Compiled;
use crate::operands::{Operands, parameters};
use crate::ops::conv_axis::ConvAxis;
use crate::ops::f32_rows::{Access, Map, STAGE, apply, maps};
use crate::simd::{Lanes, Simd};

/// Products in a unit of work, about.
const UNIT_PRODUCTS: usize = 1 << 20;

maps! {
    MulAdd |a, b, sum| a.mul_add(b, sum);
}

/// `dst[:, :, c, n]` is the convolution of channel c of image n with kernel c.
pub(super) fn depthwise(o: &Operands<'_>, [x_axis, y_axis]: [ConvAxis; 2]) -> Compiled {
    parameters!(o, Op::Conv2dDw { .. });
    let (dst, [kernel, image]) = (o.dst(), o.sources());
    let [kw, kh, ..] = kernel.ne;
    let [iw, ih, ..] = image.ne;
    let direct = Access::direct();
    // The vectors run along the dimension in which the image has the smaller stride: channels, or
    // outputs of a row.
    let by_channel = image.nb[2] < image.nb[0];
    let (lanes, others) = if by_channel {
        (dst.ne[2], dst.ne[0])
    } else {
        (dst.ne[0], dst.ne[2])
    };
    let (d_lane, d_other) = if by_channel { (2, 0) } else { (0, 2) };
    let out = Access::new(Type::F32, dst.nb[d_lane]);
    // The taps of a unit of work are bounded where the kernel is large.
    let stage = (UNIT_PRODUCTS / (kw * kh).max(1)).clamp(16, STAGE);
    let strips = lanes.div_ceil(stage);
    Compiled::one(move |w| {
        let mut sums = [0.0; STAGE];
        for unit in w.range_of(strips * others * dst.ne[1] * dst.ne[3]) {
            let (strip, rest) = (unit % strips, unit / strips);
            let (other, rest) = (rest % others, rest / others);
            let (oy, n) = (rest % dst.ne[1], rest / dst.ne[1]);
            let start = strip * stage;
            let len = stage.min(lanes - start);
            sums.fill(0.0);
            let (ys, y0) = y_axis.taps(oy, kh, ih);
            for (y, ky) in ys.enumerate() {
                let row_offset = n * image.nb[3] + (y0 + y * y_axis.dilation) * image.nb[1];
                for kx in 0..kw {
                    let tap = kx * kernel.nb[0] + ky * kernel.nb[1];
                    // The lanes whose tap is inside the image, the offset of the first element and
                    // the stride of the elements, the offset of the first weight and the stride of
                    // the weights.
                    let (range, from, step, weight, weight_step) = if by_channel {
                        let (xs, x0) = x_axis.taps(other, kw, iw);
                        if !xs.contains(&kx) {
                            continue;
                        }
                        let x = x0 + (kx - xs.start) * x_axis.dilation;
                        let from = row_offset + x * image.nb[0] + start * image.nb[2];
                        (
                            0..len,
                            from,
                            image.nb[2],
                            tap + start * kernel.nb[3],
                            kernel.nb[3],
                        )
                    } else {
                        let (outputs, x0) = x_axis.outputs(kx, dst.ne[0], iw);
                        let range = outputs.start.max(start)..outputs.end.min(start + len);
                        if range.is_empty() {
                            continue;
                        }
                        let x = x0 + (range.start - outputs.start) * x_axis.stride;
                        let from = row_offset + x * image.nb[0] + other * image.nb[2];
                        let range = range.start - start..range.end - start;
                        let step = x_axis.stride * image.nb[0];
                        (range, from, step, tap + other * kernel.nb[3], 0)
                    };
                    let sum = sums[range.start..].as_mut_ptr();
                    let values = (
                        Access::new(Type::F32, step),
                        image.ptr().wrapping_add(from).cast_const(),
                    );
                    let weights = (
                        Access::new(kernel.ty, weight_step),
                        kernel.ptr().wrapping_add(weight).cast_const(),
                    );
                    // SAFETY: `range` has the lanes whose tap is inside the image; the tap is below
                    // `kw` and `kh`; `range.end <= len <= STAGE`, the length of `sums`. `o` has
                    // passed the check of CONV_2D_DW: the image has the channels and images of the
                    // destination, and the kernel the channels. The image is f32 by the rule.
                    unsafe {
                        let old = (direct, sum.cast_const().cast());
                        let new = (direct, sum.cast());
                        apply(MulAdd {}, new, [values, weights, old], range.len());
                    }
                }
            }
            let to =
                oy * dst.nb[1] + n * dst.nb[3] + start * dst.nb[d_lane] + other * dst.nb[d_other];
            // SAFETY: `start + len <= lanes`, the length of the destination in dimension `d_lane`.
            // The destination is f32 by the rule.
            unsafe { out.store(sums.as_ptr(), len, dst.ptr().wrapping_add(to)) };
        }
        Ok(())
    })
}
