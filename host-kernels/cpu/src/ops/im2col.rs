//! IM2COL, IM2COL_BACK, IM2COL_3D, COL2IM_1D: conversions between images and matrices of patches.

use vgpu_transport::ir::{ConvGeometry, Op, OpKind, Rule};

use super::conv_axis::ConvAxis;
use super::copy_raw::{self, Element, each_part};
use super::f32_rows::Access;
use super::patches::{Images, Patches};
use crate::kernel::{Compiled, Kernel};
use crate::operands::{Operands, parameters};
use crate::view::View;
use vgpu_engine::types::{ANY, F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        // Of the kernel only the lengths matter.
        Rule::new(OpKind::Im2col, FLOATS, &[ANY, F32]),
        Rule::new(OpKind::Im2col3d, FLOATS, &[ANY, F32]),
        Rule::new(OpKind::Im2colBack, F32, &[FLOATS, ANY]),
        Rule::uniform(OpKind::Col2im1d, FLOATS, 1),
    ]
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    let op = o.op();
    match *op {
        Op::Im2col { is_2d, .. } => {
            let axes = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            let (patches, image) = patches_of(o.src(1), o.src(0), axes, is_2d);
            let images = move |[y, n]: [usize; 2]| if is_2d { (y, 0, n) } else { (0, 0, y) };
            // SAFETY: `o` has passed the check of IM2COL: the destination has a row of the length
            // of a patch for each output (x, y) of image n, or without `is_2d`, for each output x
            // of image y. The images are f32 by the rule.
            Some(unsafe { im2col(dst, patches, image, images, o.workers()) })
        }
        Op::Im2col3d { ic, .. } => {
            let (image, kernel) = (o.src(1), o.src(0));
            let channels = ic as usize;
            let patches = Patches {
                ne: [image.ne[0], image.ne[1], image.ne[2]],
                nb: [image.nb[0], image.nb[1], image.nb[2]],
                channels,
                channel_stride: image.nb[3],
                kernel: [kernel.ne[0], kernel.ne[1], kernel.ne[2]],
                axes: ConvAxis::all(&ConvGeometry::<3>::of(op)?),
            };
            let image = Images {
                base: image,
                stride: channels * image.nb[3],
            };
            let depth = dst.ne[3]
                .checked_div(o.src(1).ne[3] / channels)
                .unwrap_or(1)
                .max(1);
            let images = move |[y, zn]: [usize; 2]| (y, zn % depth, zn / depth);
            // SAFETY: `o` has passed the check of IM2COL_3D: the destination has a row of the
            // length of a patch of `channels` channels for each output (x, y, z) of an image.
            // Dimension 3 has `depth` outputs z for each image, and the channels of the images
            // follow each other. The images are f32 by the rule.
            Some(unsafe { im2col(dst, patches, image, images, o.workers()) })
        }
        Op::Im2colBack { .. } => im2col_back(o),
        Op::Col2im1d { .. } => Some(Compiled {
            kernels: vec![col2im_1d(o)?],
            scratch_bytes: 0,
        }),
        _ => None,
    }
}

/// Taps that a unit of work adds, about.
const UNIT_TAPS: usize = 1 << 18;

/// The patches of IM2COL, in one dimension or two, and the images.
fn patches_of(image: View, kernel: View, [x, y]: [ConvAxis; 2], is_2d: bool) -> (Patches, Images) {
    let (ne, nb, k) = (image.ne, image.nb, kernel.ne);
    let patches = if is_2d {
        Patches {
            ne: [ne[0], ne[1], 1],
            nb: [nb[0], nb[1], 0],
            channels: ne[2],
            channel_stride: nb[2],
            kernel: [k[0], k[1], 1],
            axes: [x, y, ConvAxis::UNIT],
        }
    } else {
        Patches {
            ne: [ne[0], 1, 1],
            nb: [nb[0], 0, 0],
            channels: ne[1],
            channel_stride: nb[1],
            kernel: [k[0], 1, 1],
            axes: [x, ConvAxis::UNIT, ConvAxis::UNIT],
        }
    };
    (
        patches,
        Images {
            base: image,
            stride: if is_2d { nb[3] } else { nb[2] },
        },
    )
}

/// `dst[:, x, i2, i3]` is the patch of output (x, y, z) of image n, with
/// `(y, z, n) = output([i2, i3])`.
///
/// # Safety
/// A row of `dst` has [`Patches::len`] elements, and `output` returns an image of `images` for the
/// indices of each row. The images are f32 with the lengths and strides of `patches`.
unsafe fn im2col(
    dst: View,
    patches: Patches,
    images: Images,
    output: impl Fn([usize; 2]) -> (usize, usize, usize) + Send + Sync + 'static,
    workers: usize,
) -> Compiled {
    let out = Access::rows(&dst);
    let n = patches.len();
    let rows = dst.rows();
    let direct = out.is_direct();
    let kernel: Kernel = Box::new(move |w| {
        // The scratch memory has a patch for each worker that has rows.
        let stage = w.scratch().cast::<f32>().wrapping_add(w.index() * n);
        for row in w.range_of(rows) {
            let index @ [x, i2, i3] = dst.row_index(row);
            let (y, z, image) = output([i2, i3]);
            let to = dst.row_ptr(index);
            // SAFETY: the caller guarantees `n` elements of a row of the destination, and the
            // image. The patch of this worker in the scratch memory has `n` floats. In a hostile
            // graph, the row may overlap the image: elements are read and written through raw
            // pointers, so only the values change.
            unsafe {
                let patch = if direct { to.cast() } else { stage };
                patches.write(images.at(image), [x, y, z], patch);
                if !direct {
                    out.store(patch, n, to);
                }
            }
        }
        Ok(())
    });
    let stages = if direct { 0 } else { workers.min(rows) * n };
    Compiled {
        kernels: vec![kernel],
        scratch_bytes: stages * size_of::<f32>(),
    }
}

/// Each element of `dst` is the sum of its copies in the patches of `grad`.
fn im2col_back(o: &Operands<'_>) -> Option<Compiled> {
    parameters!(o, Op::Im2colBack { is_2d, .. });
    let (dst, grad) = (o.dst(), o.src(0));
    let axes = ConvAxis::all(&ConvGeometry::<2>::of(o.op())?);
    let (patches, images) = patches_of(dst, o.src(1), axes, is_2d);
    if grad.elements() == 0 {
        // Without patches, every sum is 0. The lengths of the kernel may then be huge: only the
        // size of the patches bounds them.
        let zero = Element::zero(dst.ty);
        return Some(Compiled {
            kernels: vec![copy_raw::fill(dst, zero)],
            scratch_bytes: 0,
        });
    }
    let [kw, kh, _] = patches.kernel;
    let [iw, ih, _] = patches.ne;
    let (ow, oh) = (grad.ne[1], if is_2d { grad.ne[2] } else { 1 });
    let images_n = if is_2d { dst.ne[3] } else { dst.ne[2] };
    let gradient = Access::new(grad.ty, grad.nb[0]);
    let [x_axis, y_axis, _] = patches.axes;
    let grain = (UNIT_TAPS / kw.saturating_mul(kh).max(1)).max(1);
    let parts = iw.div_ceil(grain);
    Some(Compiled::one(move |w| {
        for unit in w.range_of(images_n * patches.channels * ih * parts) {
            let (start, unit) = (unit % parts * grain, unit / parts);
            let (y, c, n) = (
                unit % ih,
                unit / ih % patches.channels,
                unit / (ih * patches.channels),
            );
            let row = images.at(n).cast_mut();
            let row = row.wrapping_add(c * patches.channel_stride + y * patches.nb[1]);
            for x in start..iw.min(start + grain) {
                let mut sum = 0.0;
                for ky in 0..kh {
                    let Some(oy) = y_axis.output_at(y, ky, oh) else {
                        continue;
                    };
                    for kx in 0..kw {
                        let Some(ox) = x_axis.output_at(x, kx, ow) else {
                            continue;
                        };
                        let index = if is_2d { [ox, oy, n] } else { [ox, n, 0] };
                        let tap = grad.row_ptr(index);
                        let tap = gradient.at(tap, (c * kh + ky) * kw + kx);
                        let mut value = 0.0;
                        // SAFETY: `o` has passed the check of IM2COL_BACK: the gradient has a patch
                        // of `channels * kh * kw` elements, more than the index, for each output of
                        // each image. `output_at` returns outputs below `ow` and `oh`.
                        unsafe { gradient.load(tap, 1, &mut value) };
                        sum += value;
                    }
                }
                // SAFETY: `row` is a row of an image, which is the destination and f32 by the rule
                // of IM2COL_BACK, and `x < iw`, the length of the row.
                unsafe { row.wrapping_add(x * patches.nb[0]).cast::<f32>().write(sum) };
            }
        }
        Ok(())
    }))
}

/// `dst[t, c]` is the sum of all `src[c * k + i, j]` with `j * stride + i == t + padding`.
fn col2im_1d(o: &Operands<'_>) -> Option<Kernel> {
    parameters!(o, Op::Col2im1d { .. });
    let (dst, src) = (o.dst(), o.src(0));
    let [axis] = ConvAxis::all(&ConvGeometry::<1>::of(o.op())?);
    let (stride, padding) = (axis.stride, axis.padding);
    let (out, x) = (
        Access::new(dst.ty, dst.nb[0]),
        Access::new(src.ty, src.nb[0]),
    );
    let taps = src.ne[0].checked_div(dst.ne[1]).unwrap_or(0);
    let grain = UNIT_TAPS / taps.div_ceil(stride).min(src.ne[1]).max(1);
    Some(each_part(dst, grain, move |[c, ..], row, part| {
        for t in part {
            let at = t + padding;
            let mut sum = 0.0;
            let first = (at + 1).saturating_sub(taps).div_ceil(stride);
            for j in first..src.ne[1].min(at / stride + 1) {
                let tap = c * taps + at - j * stride;
                let mut value = 0.0;
                // SAFETY: `o` has passed the check of COL2IM_1D: column `j` of the source has
                // `taps` elements for each channel of the destination. `at - j * stride < taps`, so
                // the tap is one of channel c.
                unsafe { x.load(x.at(src.row_ptr([j, 0, 0]), tap), 1, &mut value) };
                sum += value;
            }
            // SAFETY: `t < dst.ne[0]`, the length of the row.
            unsafe { out.store(&sum, 1, out.at(row, t).cast_mut()) };
        }
    }))
}
