//! CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D.

mod depthwise;
mod operand;
mod product;
mod transposed;

use vgpu_transport::ir::{ConvGeometry, Op, OpKind, Rule};

use super::conv_axis::ConvAxis;
use super::patches::{Images, Patches};
use crate::kernel::Compiled;
use crate::operands::Operands;
use depthwise::depthwise;
use product::{Results, convolution};
use transposed::{Axes, transposed};
use vgpu_engine::types::{F32, FLOATS};

pub(super) fn rules() -> Vec<Rule> {
    let convolutions = [
        OpKind::Conv2d,
        OpKind::Conv3d,
        OpKind::Conv2dDw,
        OpKind::ConvTranspose1d,
        OpKind::ConvTranspose2d,
    ];
    convolutions
        .map(|op| Rule::new(op, F32, &[FLOATS, F32]))
        .into()
}

pub(super) fn compile(o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    let op = o.op();
    Some(match *op {
        Op::Conv2d { .. } => {
            let [x, y] = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            let (kernel, image) = (o.src(0), o.src(1));
            let (ne, nb) = (image.ne, image.nb);
            let patches = Patches {
                ne: [ne[0], ne[1], 1],
                nb: [nb[0], nb[1], 0],
                channels: ne[2],
                channel_stride: nb[2],
                kernel: [kernel.ne[0], kernel.ne[1], 1],
                axes: [x, y, ConvAxis::UNIT],
            };
            let results = Results {
                dst,
                ne: [dst.ne[0], dst.ne[1], 1],
                nb: [dst.nb[0], dst.nb[1], 0],
                channels: dst.ne[2],
                channel_stride: dst.nb[2],
                images: dst.ne[3],
                image_stride: dst.nb[3],
            };
            let images = Images {
                base: image,
                stride: nb[3],
            };
            // SAFETY: `o` has passed the check of CONV_2D: the destination has the outputs of the
            // kernel for each output channel and image, and kernel and image have the same
            // channels. Image and destination are f32 by the rule.
            unsafe { convolution(results, kernel, patches, images, o.workers()) }
        }
        Op::Conv3d { c, n, oc, .. } => {
            let (kernel, image) = (o.src(0), o.src(1));
            let (ne, nb) = (image.ne, image.nb);
            let patches = Patches {
                ne: [ne[0], ne[1], ne[2]],
                nb: [nb[0], nb[1], nb[2]],
                channels: c as usize,
                channel_stride: nb[3],
                kernel: [kernel.ne[0], kernel.ne[1], kernel.ne[2]],
                axes: ConvAxis::all(&ConvGeometry::<3>::of(op)?),
            };
            let results = Results {
                dst,
                ne: [dst.ne[0], dst.ne[1], dst.ne[2]],
                nb: [dst.nb[0], dst.nb[1], dst.nb[2]],
                channels: oc as usize,
                channel_stride: dst.nb[3],
                images: n as usize,
                image_stride: dst.nb[3] * oc as usize,
            };
            let images = Images {
                base: image,
                stride: nb[3] * c as usize,
            };
            // SAFETY: `o` has passed the check of CONV_3D: dimension 3 has `c` channels for each of
            // `oc` kernels, `c` channels for each of `n` images, and `oc` channels of outputs of
            // the kernel for each image in the destination. Image and destination are f32 by the
            // rule.
            unsafe { convolution(results, kernel, patches, images, o.workers()) }
        }
        Op::Conv2dDw { .. } => depthwise(o, ConvAxis::all(&ConvGeometry::<2>::of(op)?)),
        Op::ConvTranspose1d { .. } => {
            let [x] = ConvAxis::all(&ConvGeometry::<1>::of(op)?);
            let (k, a) = (o.src(0), o.src(1));
            // A one-dimensional image is an image of one row.
            let kernel = Axes {
                view: k,
                ne: [k.ne[0], 1, k.ne[1], k.ne[2]],
                nb: [k.nb[0], 0, k.nb[1], k.nb[2]],
            };
            let image = Axes {
                view: a,
                ne: [a.ne[0], 1, a.ne[1], 1],
                nb: [a.nb[0], 0, a.nb[1], 0],
            };
            let out = Axes {
                view: dst,
                ne: [dst.ne[0], 1, dst.ne[1], 1],
                nb: [dst.nb[0], 0, dst.nb[1], 0],
            };
            // SAFETY: `o` has passed the check of CONV_TRANSPOSE_1D: kernel and image have the same
            // channels, and the destination has a row for each output channel, f32 by the rule.
            unsafe { transposed(out, kernel, image, [x, ConvAxis::UNIT], o.workers()) }
        }
        Op::ConvTranspose2d { .. } => {
            let axes = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            let [out, kernel, image] = [dst, o.src(0), o.src(1)].map(|view| Axes {
                view,
                ne: view.ne,
                nb: view.nb,
            });
            // SAFETY: `o` has passed the check of CONV_TRANSPOSE_2D: kernel and image have the same
            // channels, and the destination has a plane for each output channel and image, f32 by
            // the rule.
            unsafe { transposed(out, kernel, image, axes, o.workers()) }
        }
        _ => return None,
    })
}
