//! IM2COL, IM2COL_BACK, IM2COL_3D, COL2IM_1D: between images and the patches that a filter covers.

use vgpu_transport::ir::{ConvGeometry, Op, OpKind, Rule};

use super::conv_axis::ConvAxis;
use super::copy_raw::{self, Element, each_row};
use super::f32_rows::Access;
use crate::kernel::{Compiled, Kernel};
use crate::operands::Operands;
use crate::view::View;
use vgpu_engine::types::{ANY, F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    vec![
        // Of the kernel only the extents matter.
        Rule::new(OpKind::Im2col, FLOATS, &[ANY, F32]),
        Rule::new(OpKind::Im2col3d, FLOATS, &[ANY, F32]),
        Rule::new(OpKind::Im2colBack, F32, &[FLOATS, ANY]),
        Rule::uniform(OpKind::Col2im1d, FLOATS, 1),
    ]
}

pub(super) fn compile(op: &Op, o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    match *op {
        Op::Im2col { is_2d, .. } => {
            let axes = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            let (patches, image) = patches_of(o.src(1), o.src(0), axes, is_2d);
            let images = move |[y, n]: [usize; 2]| if is_2d { (y, 0, n) } else { (0, 0, y) };
            Some(im2col(dst, patches, image, images, o.workers()))
        }
        Op::Im2col3d { ic, .. } => {
            let (image, kernel) = (o.src(1), o.src(0));
            let channels = ic as usize;
            let patches = Patches {
                size: [image.ne[0], image.ne[1], image.ne[2]],
                step: [image.nb[0], image.nb[1], image.nb[2]],
                channels,
                channel_step: image.nb[3],
                kernel: [kernel.ne[0], kernel.ne[1], kernel.ne[2]],
                axes: ConvAxis::all(&ConvGeometry::<3>::of(op)?),
            };
            let image = Images {
                base: image,
                step: channels * image.nb[3],
            };
            let depth = dst.ne[3]
                .checked_div(o.src(1).ne[3] / channels)
                .unwrap_or(1)
                .max(1);
            let images = move |[y, zn]: [usize; 2]| (y, zn % depth, zn / depth);
            Some(im2col(dst, patches, image, images, o.workers()))
        }
        Op::Im2colBack { is_2d, .. } => {
            let axes = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            let (patches, image) = patches_of(dst, o.src(1), axes, is_2d);
            Some(im2col_back(dst, o.src(0), patches, image, is_2d))
        }
        Op::Col2im1d { .. } => {
            let [axis] = ConvAxis::all(&ConvGeometry::<1>::of(op)?);
            let kernel = col2im_1d(dst, o.src(0), axis);
            Some(Compiled {
                kernels: vec![kernel],
                scratch_bytes: 0,
            })
        }
        _ => None,
    }
}

/// What a kernel covers of an image of `f32` in up to three dimensions, at each of its places.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patches {
    /// Extents and strides of the image.
    pub(super) size: [usize; 3],
    pub(super) step: [usize; 3],
    pub(super) channels: usize,
    pub(super) channel_step: usize,
    pub(super) kernel: [usize; 3],
    pub(super) axes: [ConvAxis; 3],
}

impl Patches {
    /// Elements of a patch: all channels of one place.
    pub(super) fn len(&self) -> usize {
        self.channels * self.kernel.iter().product::<usize>()
    }

    /// Writes the patch at `place`, zeros where it is outside the image.
    ///
    /// # Safety
    /// `image` is an image of the size and strides given; `out` is writable for [`Patches::len`] floats,
    /// and no part of it.
    pub(super) unsafe fn write(&self, image: *const u8, place: [usize; 3], out: *mut f32) {
        let [kw, kh, kd] = self.kernel;
        let taps = |d: usize| self.axes[d].taps(place[d], self.kernel[d], self.size[d]);
        let [(xs, x0), (ys, y0), (zs, z0)] = [taps(0), taps(1), taps(2)];
        let step = |d: usize| self.axes[d].dilation * self.step[d];
        let first = image.wrapping_add(x0 * self.step[0] + y0 * self.step[1] + z0 * self.step[2]);
        // SAFETY: the taps are inside the image, and the patch has a place for each.
        unsafe {
            if xs.len() * ys.len() * zs.len() < kw * kh * kd {
                out.write_bytes(0, self.len());
            }
            for c in 0..self.channels {
                for (z, kz) in zs.clone().enumerate() {
                    for (y, ky) in ys.clone().enumerate() {
                        let to = out.add(((c * kd + kz) * kh + ky) * kw + xs.start);
                        let from =
                            first.wrapping_add(c * self.channel_step + z * step(2) + y * step(1));
                        for x in 0..xs.len() {
                            let tap = from.wrapping_add(x * step(0)).cast::<f32>();
                            to.add(x).write(tap.read());
                        }
                    }
                }
            }
        }
    }
}

/// A row of images.
#[derive(Debug, Clone, Copy)]
pub(super) struct Images {
    pub(super) base: View,
    pub(super) step: usize,
}

impl Images {
    /// Where image `n` begins.
    pub(super) fn at(&self, n: usize) -> *const u8 {
        self.base.ptr().wrapping_add(n * self.step)
    }
}

/// The patches of IM2COL, in one dimension or two, and the images.
fn patches_of(image: View, kernel: View, [x, y]: [ConvAxis; 2], is_2d: bool) -> (Patches, Images) {
    let (ne, nb, k) = (image.ne, image.nb, kernel.ne);
    let patches = if is_2d {
        Patches {
            size: [ne[0], ne[1], 1],
            step: [nb[0], nb[1], 0],
            channels: ne[2],
            channel_step: nb[2],
            kernel: [k[0], k[1], 1],
            axes: [x, y, ConvAxis::UNIT],
        }
    } else {
        Patches {
            size: [ne[0], 1, 1],
            step: [nb[0], 0, 0],
            channels: ne[1],
            channel_step: nb[1],
            kernel: [k[0], 1, 1],
            axes: [x, ConvAxis::UNIT, ConvAxis::UNIT],
        }
    };
    (
        patches,
        Images {
            base: image,
            step: if is_2d { nb[3] } else { nb[2] },
        },
    )
}

/// `dst[:, x, i2, i3]` is the patch at (x, y, z) of image n, with `(y, z, n) = place([i2, i3])`.
fn im2col(
    dst: View,
    patches: Patches,
    images: Images,
    place: impl Fn([usize; 2]) -> (usize, usize, usize) + Send + Sync + 'static,
    workers: usize,
) -> Compiled {
    let out = Access::rows(&dst);
    let n = patches.len();
    let rows = dst.rows();
    let direct = out.is_direct();
    let kernel: Kernel = Box::new(move |w| {
        // There is room for a patch for each worker that has rows.
        let stage = w.scratch().cast::<f32>().wrapping_add(w.index() * n);
        for row in w.share(rows) {
            let index @ [x, i2, i3] = dst.row_index(row);
            let (y, z, image) = place([i2, i3]);
            let to = dst.row_ptr(index);
            // SAFETY: the row has a place for each element of the patch. Direct output may overlap
            // the image in a hostile graph, which is then read as it is.
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
fn im2col_back(dst: View, grad: View, patches: Patches, images: Images, is_2d: bool) -> Compiled {
    if grad.elements() == 0 {
        // The sums of nothing. The extents of the kernel are bounded by the patches alone.
        let zero = Element::zero(dst.ty);
        return Compiled {
            kernels: vec![copy_raw::fill(dst, zero)],
            scratch_bytes: 0,
        };
    }
    let [kw, kh, _] = patches.kernel;
    let [iw, ih, _] = patches.size;
    let (ow, oh) = (grad.ne[1], if is_2d { grad.ne[2] } else { 1 });
    let images_n = if is_2d { dst.ne[3] } else { dst.ne[2] };
    let gradient = Access::new(grad.ty, grad.nb[0]);
    let [x_axis, y_axis, _] = patches.axes;
    Compiled::one(move |w| {
        for unit in w.share(images_n * patches.channels * ih) {
            let (y, c, n) = (
                unit % ih,
                unit / ih % patches.channels,
                unit / (ih * patches.channels),
            );
            let row = images.at(n).cast_mut();
            let row = row.wrapping_add(c * patches.channel_step + y * patches.step[1]);
            for x in 0..iw {
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
                        // SAFETY: the patch has a place for each tap of each channel.
                        unsafe { gradient.load(tap, 1, &mut value) };
                        sum += value;
                    }
                }
                // SAFETY: x is inside the row.
                unsafe {
                    row.wrapping_add(x * patches.step[0])
                        .cast::<f32>()
                        .write(sum)
                };
            }
        }
        Ok(())
    })
}

/// `dst[t, c]` is the sum of all `src[c * k + i, j]` with `j * stride + i == t + padding`.
fn col2im_1d(dst: View, src: View, axis: ConvAxis) -> Kernel {
    let (stride, padding) = (axis.stride, axis.padding);
    let (out, x) = (
        Access::new(dst.ty, dst.nb[0]),
        Access::new(src.ty, src.nb[0]),
    );
    let taps = src.ne[0].checked_div(dst.ne[1]).unwrap_or(0);
    each_row(dst, move |[c, ..], row| {
        for t in 0..dst.ne[0] {
            let at = t + padding;
            let mut sum = 0.0;
            let first = (at + 1).saturating_sub(taps).div_ceil(stride);
            for j in first..src.ne[1].min(at / stride + 1) {
                let tap = c * taps + at - j * stride;
                let mut value = 0.0;
                // SAFETY: `at - j * stride < taps`: the tap is inside the column of channel c.
                unsafe { x.load(x.at(src.row_ptr([j, 0, 0]), tap), 1, &mut value) };
                sum += value;
            }
            // SAFETY: t is inside the row.
            unsafe { out.store(&sum, 1, out.at(row, t).cast_mut()) };
        }
    })
}
