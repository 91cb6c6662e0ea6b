//! CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D, IM2COL, IM2COL_3D,
//! IM2COL_BACK, COL2IM_1D.
//!
//! Kernels process three-dimensional images. Images of one or two dimensions have a length of 1 in
//! the others.

use std::ops::Range;

use vgpu_transport::ir::{ConvGeometry, Op, OpKind, Rule};

use crate::launch::builder::Builder;
use crate::launch::grid::{MAX_GRID_YZ, div_ceil};
use crate::params::*;
use vgpu_engine::EngineError;
use vgpu_engine::types::{ANY, F32, FLOATS};

/// The result tile of a block of `vg_conv`.
const TILE: [i64; 2] = [64, 32];

pub(crate) fn rules() -> Vec<Rule> {
    let convolutions = [
        OpKind::Conv2d,
        OpKind::Conv3d,
        OpKind::Conv2dDw,
        OpKind::ConvTranspose1d,
        OpKind::ConvTranspose2d,
    ];
    let mut rules = Vec::from(convolutions.map(|op| Rule::new(op, F32, &[FLOATS, F32])));
    rules.extend([
        // Only the lengths of the kernel matter.
        Rule::new(OpKind::Im2col, FLOATS, &[ANY, F32]),
        Rule::new(OpKind::Im2col3d, FLOATS, &[ANY, F32]),
        Rule::new(OpKind::Im2colBack, F32, &[FLOATS, ANY]),
        Rule::uniform(OpKind::Col2im1d, FLOATS, 1),
    ]);
    rules
}

pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Option<Result<(), EngineError>> {
    let dst = b.dst();
    Some(match *op {
        Op::Conv2d { .. } => {
            let (kernel, image) = (b.src(0), b.src(1));
            let params = VgConvParams {
                dst: plane(&dst),
                kernel: plane(&kernel),
                image: plane(&image),
                geometry: kernel_geometry(ConvGeometry::<2>::of(op)?),
                channels: image.ne[2],
                results: dst.ne[2],
                images: dst.ne[3],
            };
            convolution(b, params)
        }
        Op::Conv3d { c, n, oc, .. } => {
            let (kernel, image) = (b.src(0), b.src(1));
            let params = VgConvParams {
                dst: space(&dst, oc.into()),
                kernel: space(&kernel, c.into()),
                image: space(&image, c.into()),
                geometry: kernel_geometry(ConvGeometry::<3>::of(op)?),
                channels: c.into(),
                results: oc.into(),
                images: n.into(),
            };
            convolution(b, params)
        }
        Op::Conv2dDw { .. } => {
            let (kernel, image) = (b.src(0), b.src(1));
            let mut params = VgConvParams {
                dst: plane(&dst),
                kernel: VgVolume {
                    channel: kernel.nb[3],
                    ..plane(&kernel)
                },
                image: plane(&image),
                geometry: kernel_geometry(ConvGeometry::<2>::of(op)?),
                channels: dst.ne[2],
                results: 1,
                images: dst.ne[3],
            };
            match take_share(b, &mut params) {
                0 => Ok(()),
                positions => {
                    let results = positions * params.channels * params.images;
                    b.for_each("vg_conv_depthwise", results, &params)
                }
            }
        }
        Op::ConvTranspose1d { s0, .. } => {
            // A line is a plane of one row: [k, results, channels] is [k, 1, results, channels].
            let (kernel, image) = (as_plane(b.src(0)), as_plane(b.src(1)));
            transposed(b, as_plane(dst), kernel, image, s0)
        }
        Op::ConvTranspose2d { stride } => {
            let (kernel, image) = (b.src(0), b.src(1));
            transposed(b, dst, kernel, image, stride)
        }
        Op::Im2col { is_2d, .. } => {
            let (kernel, image) = (b.src(0), b.src(1));
            let geometry = ConvGeometry::<2>::of(op)?;
            let params = patches(dst, kernel, image, geometry, is_2d);
            im2col(b, params)
        }
        Op::Im2col3d { ic, .. } => {
            let (kernel, image) = (b.src(0), b.src(1));
            let images = image.ne[3] / i64::from(ic);
            let params = VgIm2colParams {
                patches: dst,
                image: space(&image, ic.into()),
                geometry: kernel_geometry(ConvGeometry::<3>::of(op)?),
                taps: [kernel.ne[0], kernel.ne[1], kernel.ne[2]],
                channels: ic.into(),
                images,
                depth: dst.ne[3].checked_div(images).unwrap_or(1).max(1),
            };
            im2col(b, params)
        }
        Op::Im2colBack { is_2d, .. } => {
            let (gradient, kernel) = (b.src(0), b.src(1));
            let geometry = ConvGeometry::<2>::of(op)?;
            let mut params = patches(gradient, kernel, dst, geometry, is_2d);
            if gradient.elements() == 0 {
                // All sums are empty. Only patches would limit the lengths of the kernel.
                params.taps = [0; 3];
            }
            b.for_each("vg_im2col_back", dst.elements(), &params)
        }
        Op::Col2im1d { s0, p0, .. } => {
            let params = VgCol2imParams {
                dst,
                src: b.src(0),
                stride: s0.into(),
                padding: p0.into(),
            };
            b.for_each("vg_col2im_1d", dst.elements(), &params)
        }
        _ => return None,
    })
}

/// The geometry in the kernels' three dimensions. Dimensions from `N` on have a length of 1, so
/// their stride and dilation are 1 and their padding is 0.
fn kernel_geometry<const N: usize>(geometry: ConvGeometry<N>) -> VgConvGeometry {
    let extended = |values: [i32; N], rest: i64| {
        std::array::from_fn(|d| values.get(d).map_or(rest, |&value| value.into()))
    };
    VgConvGeometry {
        stride: extended(geometry.stride, 1),
        padding: extended(geometry.padding, 0),
        dilation: extended(geometry.dilation, 1),
    }
}

/// [w, h, channels, images]
fn plane(v: &VgView) -> VgVolume {
    VgVolume {
        data: v.data,
        ne: [v.ne[0], v.ne[1], 1],
        nb: [v.nb[0], v.nb[1], 0],
        channel: v.nb[2],
        image: v.nb[3],
        type_: v.type_,
        reserved: 0,
    }
}

/// [w, h, d, channels * images]
fn space(v: &VgView, channels: i64) -> VgVolume {
    VgVolume {
        data: v.data,
        ne: [v.ne[0], v.ne[1], v.ne[2]],
        nb: [v.nb[0], v.nb[1], v.nb[2]],
        channel: v.nb[3],
        image: v.nb[3] * channels,
        type_: v.type_,
        reserved: 0,
    }
}

/// A line as a plane of one row.
fn as_plane(v: VgView) -> VgView {
    VgView {
        ne: [v.ne[0], 1, v.ne[1], v.ne[2]],
        nb: [v.nb[0], 0, v.nb[1], v.nb[2]],
        ..v
    }
}

/// The patches of planes or lines of the IM2COL operators.
fn patches(
    patches: VgView,
    kernel: VgView,
    image: VgView,
    geometry: ConvGeometry<2>,
    is_2d: bool,
) -> VgIm2colParams {
    if is_2d {
        return VgIm2colParams {
            patches,
            image: plane(&image),
            geometry: kernel_geometry(geometry),
            taps: [kernel.ne[0], kernel.ne[1], 1],
            channels: image.ne[2],
            images: image.ne[3],
            depth: 1,
        };
    }
    let line = ConvGeometry {
        stride: [geometry.stride[0]],
        padding: [geometry.padding[0]],
        dilation: [geometry.dilation[0]],
    };
    VgIm2colParams {
        patches: VgView {
            ne: [patches.ne[0], patches.ne[1], 1, patches.ne[2]],
            nb: [patches.nb[0], patches.nb[1], 0, patches.nb[2]],
            ..patches
        },
        image: plane(&as_plane(image)),
        geometry: kernel_geometry(line),
        taps: [kernel.ne[0], 1, 1],
        channels: image.ne[1],
        images: image.ne[2],
        depth: 1,
    }
}

/// The share of the positions along the dimension with the most of them, and that dimension. In
/// the padding of a share lie the positions before it.
fn share_of_positions(
    b: &Builder<'_>,
    ne: &[i64],
    geometry: &mut VgConvGeometry,
) -> (usize, Range<i64>) {
    let dim = (0..ne.len()).max_by_key(|&dim| ne[dim]).unwrap_or(0);
    let share = b.share_of(ne[dim]);
    geometry.padding[dim] -= share.start * geometry.stride[dim];
    (dim, share)
}

/// Limits a convolution to the share of its positions. Returns how many there are.
fn take_share(b: &Builder<'_>, params: &mut VgConvParams) -> i64 {
    let ne = params.dst.ne;
    let (dim, share) = share_of_positions(b, &ne, &mut params.geometry);
    params.dst.data += (share.start * params.dst.nb[dim]) as u64;
    params.dst.ne[dim] = share.end - share.start;
    params.dst.ne.iter().product()
}

/// Adds the launch of IM2COL or IM2COL_3D.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn im2col(b: &mut Builder<'_>, mut params: VgIm2colParams) -> Result<(), EngineError> {
    // Dimension 3 of patches has the positions of all images.
    let dims = if params.images == 1 { 3 } else { 2 };
    let ne = params.patches.ne;
    let (dim, share) = share_of_positions(b, &ne[1..=dims], &mut params.geometry);
    if share.is_empty() {
        return Ok(());
    }
    params.patches.data += (share.start * params.patches.nb[1 + dim]) as u64;
    params.patches.ne[1 + dim] = share.end - share.start;
    b.for_each("vg_im2col", params.patches.elements(), &params)
}

/// Adds the launch of CONV_2D or CONV_3D.
///
/// # Errors
/// [`EngineError::Unsupported`] if there are more output channels than a grid has blocks for;
/// [`EngineError::Device`] if the device lacks a kernel.
fn convolution(b: &mut Builder<'_>, mut params: VgConvParams) -> Result<(), EngineError> {
    let positions = take_share(b, &mut params);
    if positions == 0 {
        return Ok(());
    }
    let grid = [
        div_ceil(positions, TILE[0]),
        div_ceil(params.results, TILE[1]),
        params.images,
    ];
    if grid[1] > MAX_GRID_YZ {
        let results = params.results;
        return Err(b.unsupported(format!("a convolution with {results} output channels")));
    }
    b.launch_over("vg_conv", grid, 256, 0, &params)
}

/// Adds the launch of CONV_TRANSPOSE_1D or CONV_TRANSPOSE_2D.
///
/// # Errors
/// [`EngineError::Device`] if the device lacks a kernel.
fn transposed(
    b: &mut Builder<'_>,
    dst: VgView,
    kernel: VgView,
    image: VgView,
    stride: i32,
) -> Result<(), EngineError> {
    let params = VgConvParams {
        dst: plane(&dst),
        kernel: VgVolume {
            // The kernel is summed over its last dimension.
            channel: kernel.nb[3],
            image: kernel.nb[2],
            ..plane(&kernel)
        },
        image: plane(&image),
        geometry: kernel_geometry(ConvGeometry {
            stride: [stride; 3],
            padding: [0; 3],
            dilation: [1; 3],
        }),
        channels: kernel.ne[3],
        results: dst.ne[2],
        images: dst.ne[3],
    };
    b.for_each("vg_conv_transposed", dst.elements(), &params)
}
