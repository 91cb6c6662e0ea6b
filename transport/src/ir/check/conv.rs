//! Convolution, pooling, resampling, and other image operators.

use super::operation::{Operation, Refusal};
use crate::ir::conv::{ConvGeometry, PoolWindow};
use crate::ir::graph::Shape;
use crate::ir::types::Type;

/// The output lengths of a kernel on an input.
fn outputs<const N: usize>(
    o: &Operation<'_>,
    geometry: ConvGeometry<N>,
    input: &Shape,
    kernel: &Shape,
) -> Result<[u64; N], Refusal> {
    let outputs = geometry.output_lengths(input, kernel);
    o.ensure(
        outputs.is_some(),
        "the kernel does not fit the padded input",
    )?;
    Ok(outputs.unwrap_or([0; N]))
}

/// The lengths of IM2COL's result: `[patch, output x, output y, image]`. A patch has the size of
/// the kernel.
fn columns(
    o: &Operation<'_>,
    kernel: &Shape,
    image: &Shape,
    geometry: ConvGeometry<2>,
    is_2d: bool,
) -> Result<[u64; 4], Refusal> {
    let row: Option<u64>;
    let counts = if is_2d {
        o.ensure(
            kernel.ne[2] == image.ne[2],
            "kernel and image differ in channels",
        )?;
        row = kernel.ne[0]
            .checked_mul(kernel.ne[1])
            .and_then(|n| n.checked_mul(kernel.ne[2]));
        let [ow, oh] = outputs(o, geometry, image, kernel)?;
        [ow, oh, image.ne[3]]
    } else {
        o.ensure(
            kernel.ne[1] == image.ne[1] && image.ne[3] == 1,
            "kernel and image differ in channels",
        )?;
        row = kernel.ne[0].checked_mul(kernel.ne[1]);
        let [ow] = outputs(o, geometry.axis(0), image, kernel)?;
        [ow, image.ne[2], 1]
    };
    o.ensure(row.is_some(), "the kernel's size does not fit 64 bits")?;
    Ok([row.unwrap_or(0), counts[0], counts[1], counts[2]])
}

/// `dst[:, x, y, n]` is the patch of image `n` that the kernel covers at output (x, y).
pub(super) fn im2col(
    o: &Operation<'_>,
    geometry: ConvGeometry<2>,
    is_2d: bool,
) -> Result<(), Refusal> {
    let columns = columns(o, o.src(0)?, o.src(1)?, geometry, is_2d)?;
    o.ensure(o.dst.ne == columns, "the destination has other lengths")
}

/// The gradient of [`im2col`]: each element of the image is the sum over the patches that contain
/// it.
pub(super) fn im2col_back(
    o: &Operation<'_>,
    geometry: ConvGeometry<2>,
    is_2d: bool,
) -> Result<(), Refusal> {
    let columns = columns(o, o.src(1)?, o.dst, geometry, is_2d)?;
    o.ensure(
        o.src(0)?.ne == columns,
        "source 0 has other lengths than patches of the destination",
    )
}

/// [`im2col`] of three-dimensional images. Channels and images share dimension 3.
pub(super) fn im2col_3d(
    o: &Operation<'_>,
    geometry: ConvGeometry<3>,
    channels: i32,
) -> Result<(), Refusal> {
    let (kernel, image) = (o.src(0)?, o.src(1)?);
    let channels = u64::try_from(channels).unwrap_or(0);
    o.ensure(channels > 0, "an image has no channels")?;
    let [ow, oh, od] = outputs(o, geometry, image, kernel)?;
    let patch = kernel.ne[..3]
        .iter()
        .try_fold(channels, |n, &k| n.checked_mul(k));
    let depth = od.checked_mul(image.ne[3] / channels);
    let columns = patch
        .zip(depth)
        .map(|(patch, depth)| [patch, ow, oh, depth]);
    o.ensure(
        columns == Some(o.dst.ne),
        "the destination has other lengths",
    )
}

/// `dst[t, c]` is the sum of all `src0[c * k + i, j]` with `j * s0 + i == t + p0`.
pub(super) fn col2im_1d(
    o: &Operation<'_>,
    geometry: ConvGeometry<1>,
    oc: i32,
) -> Result<(), Refusal> {
    let a = o.src(0)?;
    let (s0, p0) = (geometry.stride[0], geometry.padding[0]);
    let (Ok(s0), Ok(oc), Ok(p0)) = (u64::try_from(s0), u64::try_from(oc), u64::try_from(p0)) else {
        return o.ensure(false, "a parameter is negative");
    };
    o.ensure(s0 > 0 && oc > 0, "stride or channels are 0")?;
    o.ensure(a.ne[2..] == [1, 1], "source 0 is not a matrix")?;
    o.ensure(
        a.ne[0].is_multiple_of(oc),
        "columns are not whole kernels for each channel",
    )?;
    let length = || {
        let last = a.ne[1].checked_sub(1)?.checked_mul(s0)?;
        last.checked_add(a.ne[0] / oc)?
            .checked_sub(p0.checked_mul(2)?)
    };
    o.ensure(
        length().is_some_and(|n| n > 0 && o.dst.ne == [n, oc, 1, 1]),
        "the destination has other lengths",
    )
}

/// src0: kernel [kw, kh, channels, outputs], src1: [w, h, channels, n].
pub(super) fn conv_2d(o: &Operation<'_>, geometry: ConvGeometry<2>) -> Result<(), Refusal> {
    let (kernel, image) = (o.src(0)?, o.src(1)?);
    o.ensure(
        kernel.ne[2] == image.ne[2],
        "kernel and image differ in channels",
    )?;
    let [ow, oh] = outputs(o, geometry, image, kernel)?;
    o.ensure(
        o.dst.ne == [ow, oh, kernel.ne[3], image.ne[3]],
        "the destination has other lengths",
    )
}

/// One kernel per channel. src0: kernel [kw, kh, 1, channels], src1: [w, h, channels, n].
pub(super) fn conv_2d_dw(o: &Operation<'_>, geometry: ConvGeometry<2>) -> Result<(), Refusal> {
    let (kernel, image) = (o.src(0)?, o.src(1)?);
    o.ensure(
        kernel.ne[2] == 1 && kernel.ne[3] == image.ne[2],
        "there is not one kernel for each channel",
    )?;
    let [ow, oh] = outputs(o, geometry, image, kernel)?;
    o.ensure(
        o.dst.ne == [ow, oh, image.ne[2], image.ne[3]],
        "the destination has other lengths",
    )
}

/// src0: kernel [kw, kh, kd, channels * outputs], src1: [w, h, d, channels * n].
pub(super) fn conv_3d(
    o: &Operation<'_>,
    geometry: ConvGeometry<3>,
    [c, n, oc]: [i32; 3],
) -> Result<(), Refusal> {
    let (kernel, image) = (o.src(0)?, o.src(1)?);
    let product = |a: i32, b: i32| u64::try_from(i64::from(a) * i64::from(b)).ok();
    o.ensure(
        c > 0 && n >= 0 && oc >= 0,
        "a number of channels or images is negative",
    )?;
    o.ensure(
        product(c, oc) == Some(kernel.ne[3]) && product(c, n) == Some(image.ne[3]),
        "kernel or image do not consist of whole channels",
    )?;
    let [ow, oh, od] = outputs(o, geometry, image, kernel)?;
    o.ensure(
        product(oc, n).is_some_and(|m| o.dst.ne == [ow, oh, od, m]),
        "the destination has other lengths",
    )
}

/// The output length of a transposed convolution: `(input - 1) * stride + kernel`.
fn transposed_length(input: u64, kernel: u64, stride: i32) -> Option<u64> {
    let stride = u64::try_from(stride).ok().filter(|&s| s > 0)?;
    let last = input.checked_sub(1)?.checked_mul(stride)?;
    last.checked_add(kernel).filter(|_| kernel > 0)
}

/// src0: kernel [k, outputs, channels], src1: [l, channels].
pub(super) fn conv_transpose_1d(
    o: &Operation<'_>,
    geometry: ConvGeometry<1>,
) -> Result<(), Refusal> {
    let (kernel, a) = (o.src(0)?, o.src(1)?);
    o.ensure(
        geometry.padding == [0] && geometry.dilation == [1],
        "a transposed convolution has padding or dilation",
    )?;
    o.ensure(
        kernel.ne[2] == a.ne[1] && kernel.ne[3] == 1 && a.ne[2..] == [1, 1],
        "kernel and source 1 differ in channels, or have too many dimensions",
    )?;
    o.ensure(
        transposed_length(a.ne[0], kernel.ne[0], geometry.stride[0])
            .is_some_and(|n| o.dst.ne == [n, kernel.ne[1], 1, 1]),
        "the destination has other lengths",
    )
}

/// src0: kernel [kw, kh, outputs, channels], src1: [w, h, channels, n].
pub(super) fn conv_transpose_2d(
    o: &Operation<'_>,
    geometry: ConvGeometry<2>,
) -> Result<(), Refusal> {
    let [sx, sy] = geometry.stride;
    let (kernel, image) = (o.src(0)?, o.src(1)?);
    o.ensure(
        kernel.ne[3] == image.ne[2],
        "kernel and image differ in channels",
    )?;
    let lengths = || {
        Some([
            transposed_length(image.ne[0], kernel.ne[0], sx)?,
            transposed_length(image.ne[1], kernel.ne[1], sy)?,
            kernel.ne[2],
            image.ne[3],
        ])
    };
    o.ensure(
        lengths() == Some(o.dst.ne),
        "the destination has other lengths",
    )
}

/// Checks that pooling `whole` with `window` gives `pooled`.
fn pooled<const N: usize>(
    o: &Operation<'_>,
    whole: &Shape,
    pooled: &Shape,
    window: PoolWindow<N>,
) -> Result<(), Refusal> {
    for (d, size) in window.size.into_iter().enumerate() {
        let size = u64::try_from(size).unwrap_or(0);
        let padding = u64::try_from(window.geometry.padding[d]);
        o.ensure(
            size > 0 && padding.is_ok_and(|p| size <= whole.ne[d] + 2 * p),
            "the window is empty or larger than the padded source",
        )?;
        o.ensure(
            window.geometry.output_length(d, whole.ne[d], size) == Some(pooled.ne[d]),
            "source and destination do not fit the window",
        )?;
    }
    o.ensure(
        pooled.ne[N..] == whole.ne[N..],
        "source and destination differ in outer lengths",
    )
}

pub(super) fn pool_1d(o: &Operation<'_>, window: PoolWindow<1>) -> Result<(), Refusal> {
    pooled(o, o.src(0)?, o.dst, window)
}

pub(super) fn pool_2d(o: &Operation<'_>, window: PoolWindow<2>) -> Result<(), Refusal> {
    pooled(o, o.src(0)?, o.dst, window)
}

/// The gradient of [`pool_2d`] with input src1, for the gradient src0 of its output.
pub(super) fn pool_2d_back(o: &Operation<'_>, window: PoolWindow<2>) -> Result<(), Refusal> {
    let (gradient, forward) = (o.src(0)?, o.src(1)?);
    o.ensure(
        forward.same_lengths(o.dst),
        "lengths of source 1 and destination differ",
    )?;
    pooled(o, o.dst, gradient, window)
}

/// Resampling accepts any lengths, except an empty source for a non-empty destination.
pub(super) fn upscale(o: &Operation<'_>) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        !a.is_empty() || o.dst.is_empty(),
        "an empty source cannot be resampled",
    )
}

/// `dst[:, i]` is the embedding of `src0[i]`, of `dim` elements.
pub(super) fn timestep_embedding(
    o: &Operation<'_>,
    dim: i32,
    max_period: i32,
) -> Result<(), Refusal> {
    let a = o.src(0)?;
    o.ensure(
        dim >= 0 && max_period > 0,
        "dimension or period is negative",
    )?;
    o.ensure(
        a.ne[1..] == [1, 1, 1] && o.dst.ne == [dim as u64, a.ne[0], 1, 1],
        "the destination is not one embedding for each step",
    )
}

/// The number of windows of `w` elements that cover `length` elements.
fn windows(length: u64, w: i32) -> Option<u64> {
    u64::try_from(w)
        .ok()
        .filter(|&w| w > 0)
        .map(|w| length.div_ceil(w))
}

/// Partitions dimensions 1 and 2 of src0 into windows, padded with zeros.
pub(super) fn win_part(o: &Operation<'_>, npx: i32, npy: i32, w: i32) -> Result<(), Refusal> {
    let a = o.src(0)?;
    let counts = (u64::try_from(npx).ok(), u64::try_from(npy).ok());
    o.ensure(
        a.ne[3] == 1 && (windows(a.ne[1], w), windows(a.ne[2], w)) == counts,
        "the windows do not cover source 0",
    )?;
    let [npx, npy, w] = [npx, npy, w].map(|n| n as u64);
    o.ensure(
        npx.checked_mul(npy)
            .is_some_and(|n| o.dst.ne == [a.ne[0], w, w, n]),
        "the destination has other lengths",
    )
}

/// The reverse of [`win_part`].
pub(super) fn win_unpart(o: &Operation<'_>, w: i32) -> Result<(), Refusal> {
    let (a, dst) = (o.src(0)?, o.dst);
    let count = || windows(dst.ne[1], w)?.checked_mul(windows(dst.ne[2], w)?);
    o.ensure(
        dst.ne[3] == 1 && count().is_some_and(|n| a.ne == [dst.ne[0], w as u64, w as u64, n]),
        "the windows do not cover the destination",
    )
}

/// `dst[:, k, q] = src0[:, q - k + n - 1]`, n being the length of both.
pub(super) fn get_rel_pos(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, dst) = (o.src(0)?, o.dst);
    o.ensure(
        dst.ne[1] == dst.ne[2] && dst.ne[3] == 1 && dst.ne[0] == a.ne[0] && a.ne[2..] == [1, 1],
        "the destination is not a square of rows",
    )?;
    let positions = dst.ne[1].checked_mul(2).and_then(|n| n.checked_sub(1));
    o.ensure(
        positions == Some(a.ne[1]) || dst.is_empty(),
        "source 0 does not have a row for each distance",
    )
}

/// `dst = src0`, plus `src1[w]` and `src2[h]` at element (w, h) of each row.
pub(super) fn add_rel_pos(o: &Operation<'_>) -> Result<(), Refusal> {
    let (a, pw, ph) = (o.src(0)?, o.src(1)?, o.src(2)?);
    o.ensure(
        a.same_lengths(o.dst),
        "lengths of source 0 and destination differ",
    )?;
    o.ensure(
        pw.same_lengths(ph),
        "positions of width and height differ in lengths",
    )?;
    o.ensure(
        [a, pw, ph, o.dst].iter().all(|t| t.is_contiguous()),
        "a tensor is not contiguous",
    )?;
    o.ensure(
        pw.ne[0].checked_mul(pw.ne[0]) == Some(a.ne[0])
            && pw.ne[1].checked_mul(pw.ne[2]) == Some(a.ne[1])
            && pw.ne[3] == a.ne[2]
            && a.ne[3] == 1,
        "positions do not fit source 0",
    )?;
    o.ensure(
        pw.ty == Type::F32 && ph.ty == Type::F32,
        "positions are not f32",
    )
}
