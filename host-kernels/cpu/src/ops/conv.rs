//! CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D.
//!
//! A convolution is the product of a matrix of patches (im2col) and a matrix of filters. Threads
//! take tiles of patches, which are copied just before they are multiplied. A transposed
//! convolution multiplies first and adds the products to the positions that the filter covers
//! (col2im).

use vgpu_transport::ir::{ConvGeometry, Op, OpKind, Rule, Type};

use super::conv_axis::ConvAxis;
use super::copy_raw::{self, Element, copy_line};
use super::f32_rows::{Access, Map, STAGE, apply, maps};
use super::im2col::{Images, Patches};
use super::scratch::ScratchLayout;
use super::sequence::Sequence;
use crate::formats::Format;
use crate::gemm::{GemmArgs, MatmulKernel};
use crate::kernel::Worker;
use crate::kernel::{Compiled, Kernel};
use crate::operands::Operands;
use crate::simd::{Lanes, Simd};
use crate::view::View;
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

pub(super) fn compile(op: &Op, o: &Operands<'_>) -> Option<Compiled> {
    let dst = o.dst();
    Some(match *op {
        Op::Conv2d { .. } => {
            let [x, y] = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            let (kernel, image) = (o.src(0), o.src(1));
            let (ne, nb) = (image.ne, image.nb);
            let patches = Patches {
                size: [ne[0], ne[1], 1],
                step: [nb[0], nb[1], 0],
                channels: ne[2],
                channel_step: nb[2],
                kernel: [kernel.ne[0], kernel.ne[1], 1],
                axes: [x, y, ConvAxis::UNIT],
            };
            let results = Results {
                dst,
                extents: [dst.ne[0], dst.ne[1], 1],
                steps: [dst.nb[0], dst.nb[1], 0],
                results: dst.ne[2],
                result_step: dst.nb[2],
                images: dst.ne[3],
                image_step: dst.nb[3],
            };
            let images = Images {
                base: image,
                step: nb[3],
            };
            convolution(results, kernel, patches, images, o.workers())
        }
        Op::Conv3d { c, n, oc, .. } => {
            let (kernel, image) = (o.src(0), o.src(1));
            let (ne, nb) = (image.ne, image.nb);
            let patches = Patches {
                size: [ne[0], ne[1], ne[2]],
                step: [nb[0], nb[1], nb[2]],
                channels: c as usize,
                channel_step: nb[3],
                kernel: [kernel.ne[0], kernel.ne[1], kernel.ne[2]],
                axes: ConvAxis::all(&ConvGeometry::<3>::of(op)?),
            };
            let results = Results {
                dst,
                extents: [dst.ne[0], dst.ne[1], dst.ne[2]],
                steps: [dst.nb[0], dst.nb[1], dst.nb[2]],
                results: oc as usize,
                result_step: dst.nb[3],
                images: n as usize,
                image_step: dst.nb[3] * oc as usize,
            };
            let images = Images {
                base: image,
                step: nb[3] * c as usize,
            };
            convolution(results, kernel, patches, images, o.workers())
        }
        Op::Conv2dDw { .. } => {
            let axes = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            depthwise(dst, o.src(0), o.src(1), axes)
        }
        Op::ConvTranspose1d { .. } => {
            let [x] = ConvAxis::all(&ConvGeometry::<1>::of(op)?);
            let (k, a) = (o.src(0), o.src(1));
            // A line is an image of one row.
            let kernel = Axes {
                view: k,
                extents: [k.ne[0], 1, k.ne[1], k.ne[2]],
                steps: [k.nb[0], 0, k.nb[1], k.nb[2]],
            };
            let image = Axes {
                view: a,
                extents: [a.ne[0], 1, a.ne[1], 1],
                steps: [a.nb[0], 0, a.nb[1], 0],
            };
            let out = Axes {
                view: dst,
                extents: [dst.ne[0], 1, dst.ne[1], 1],
                steps: [dst.nb[0], 0, dst.nb[1], 0],
            };
            transposed(out, kernel, image, [x, ConvAxis::UNIT], o.workers())
        }
        Op::ConvTranspose2d { .. } => {
            let axes = ConvAxis::all(&ConvGeometry::<2>::of(op)?);
            let [out, kernel, image] = [dst, o.src(0), o.src(1)].map(|view| Axes {
                view,
                extents: view.ne,
                steps: view.nb,
            });
            transposed(out, kernel, image, axes, o.workers())
        }
        _ => return None,
    })
}

/// Floats of patches, or of results, that a thread works on at a time.
const TILE_FLOATS: usize = 1 << 16;

/// The most places of a tile.
const TILE_PLACES: usize = 128;

/// Where the results of a convolution go.
#[derive(Clone, Copy)]
struct Results {
    dst: View,
    /// Places of the kernel in each dimension, and their distances.
    extents: [usize; 3],
    steps: [usize; 3],
    results: usize,
    result_step: usize,
    images: usize,
    image_step: usize,
}

impl Results {
    fn places(&self) -> usize {
        self.extents.iter().product()
    }

    /// The coordinates of a place.
    fn place(&self, i: usize) -> [usize; 3] {
        let [w, h, _] = self.extents;
        [i % w, i / w % h, i / (w * h)]
    }

    /// Writes one result of the places from `start` on.
    ///
    /// # Safety
    /// `values` is readable for `n` floats; the places are there.
    unsafe fn write(
        &self,
        image: usize,
        result: usize,
        start: usize,
        values: *const f32,
        n: usize,
    ) {
        let base = self.dst.ptr();
        let base = base.wrapping_add(image * self.image_step + result * self.result_step);
        let mut done = 0;
        while done < n {
            let [x, y, z] = self.place(start + done);
            let len = (self.extents[0] - x).min(n - done);
            let [sx, sy, sz] = self.steps;
            let to = base.wrapping_add(x * sx + y * sy + z * sz);
            // SAFETY: `len` places lie on this line, and as many floats are left.
            unsafe {
                copy_line(
                    to,
                    sx,
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

/// A matrix in scratch memory: the elements of a tensor in order, in the type that a product wants.
struct Prepared {
    sequence: Sequence,
    reader: Access,
    format: &'static Format,
    elements: usize,
    at: usize,
}

impl Prepared {
    fn new(view: View, format: &'static Format, layout: &mut ScratchLayout) -> Prepared {
        let sequence = Sequence::new(view);
        Prepared {
            reader: Access::new(view.ty, sequence.step()),
            sequence,
            format,
            elements: view.elements(),
            at: layout.room(view.elements(), format.bytes),
        }
    }

    /// Writes this worker's share.
    fn write(&self, w: &Worker<'_>) {
        let mut stage = [0.0; STAGE];
        for piece in w.share(self.elements.div_ceil(STAGE)) {
            let start = piece * STAGE;
            let n = STAGE.min(self.elements - start);
            let quantize = self.format.quantize_row;
            // SAFETY: the sequence stays inside the tensor; the scratch memory has room for all its
            // elements, and this piece is written by this worker alone.
            unsafe {
                self.sequence.pieces(start, n, |place, done, len| {
                    self.reader.load(place, len, stage.as_mut_ptr().add(done));
                });
                let to = w.scratch().add(self.at + start * self.format.bytes);
                quantize(stage.as_ptr(), to, n);
            }
        }
    }
}

/// How many places a thread works on at a time, for patches of `k` floats and `results` results.
fn tile_places(k: usize, results: usize, places: usize) -> usize {
    (TILE_FLOATS / k.max(results).max(1))
        .clamp(1, TILE_PLACES)
        .min(places.max(1))
}

/// The sum of no channels.
fn nothing(dst: View) -> Compiled {
    Compiled {
        kernels: vec![copy_raw::fill(dst, Element::zero(dst.ty))],
        scratch_bytes: 0,
    }
}

fn convolution(
    out: Results,
    kernel: View,
    patches: Patches,
    images: Images,
    workers: usize,
) -> Compiled {
    // Patches are the weights of the product and kernels its columns, so that the results of
    // neighbouring places are neighbours.
    let product = MatmulKernel::of(kernel.ty).expect("floats are weights");
    let k = patches.len();
    if k == 0 {
        return nothing(out.dst);
    }
    let places = out.places();
    let tile = tile_places(k, out.results, places);
    let tiles = places.div_ceil(tile);
    let busy = workers.min(tiles * out.images);
    let weight = Format::of(kernel.ty).expect("floats are a format");

    let mut layout = ScratchLayout::default();
    let kernels = Prepared::new(kernel, product.activation.format(), &mut layout);
    let kernels_at = kernels.at;
    let kernel_bytes = kernels.format.row_bytes(k);
    let patch_at = layout.room(busy, k * size_of::<f32>());
    let patches_at = layout.room(busy, tile * weight.row_bytes(k));
    let results_at = layout.room(busy, tile * out.results * size_of::<f32>());

    let prepare: Kernel = Box::new(move |w| {
        kernels.write(w);
        Ok(())
    });
    let multiply: Kernel = Box::new(move |w| {
        let part = |at: usize, size: usize| w.scratch().wrapping_add(at + w.index() * size);
        for unit in w.share(tiles * out.images) {
            let (image, start) = (unit / tiles, unit % tiles * tile);
            let n = tile.min(places - start);
            let patch = part(patch_at, k * size_of::<f32>()).cast::<f32>();
            let rows = part(patches_at, tile * weight.row_bytes(k));
            let results = part(results_at, tile * out.results * size_of::<f32>()).cast::<f32>();
            // SAFETY: each worker with units has a part of the scratch memory for one patch, a tile
            // of them and its results; the kernels were prepared before the barrier.
            unsafe {
                for i in 0..n {
                    let place = out.place(start + i);
                    let row = rows.add(i * weight.row_bytes(k));
                    if weight.ty == Type::F32 {
                        patches.write(images.at(image), place, row.cast());
                    } else {
                        patches.write(images.at(image), place, patch);
                        (weight.quantize_row)(patch, row, k);
                    }
                }
                (product.gemm)(&GemmArgs {
                    k,
                    w: rows,
                    w_stride: weight.row_bytes(k),
                    rows: n,
                    x: w.scratch().add(kernels_at),
                    x_stride: kernel_bytes,
                    cols: out.results,
                    dst: results,
                    dst_stride: tile,
                });
                for result in 0..out.results {
                    out.write(image, result, start, results.add(result * tile), n);
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

maps! {
    MulAdd |a, b, sum| a.mul_add(b, sum);
}

/// A kernel for each channel: `dst[x, y, c, n]` is the sum of what kernel c covers of channel c.
fn depthwise(dst: View, kernel: View, image: View, [x_axis, y_axis]: [ConvAxis; 2]) -> Compiled {
    let [kw, kh, ..] = kernel.ne;
    let [iw, ih, ..] = image.ne;
    let direct = Access::direct();
    // Lanes go along the dimension in which the image is dense: channels, or places of a row.
    let by_channel = image.nb[2] < image.nb[0];
    let (lanes, others) = if by_channel {
        (dst.ne[2], dst.ne[0])
    } else {
        (dst.ne[0], dst.ne[2])
    };
    let (d_lane, d_other) = if by_channel { (2, 0) } else { (0, 2) };
    let out = Access::new(Type::F32, dst.nb[d_lane]);
    let pieces = lanes.div_ceil(STAGE);
    Compiled::one(move |w| {
        let mut sums = [0.0; STAGE];
        for unit in w.share(pieces * others * dst.ne[1] * dst.ne[3]) {
            let (piece, rest) = (unit % pieces, unit / pieces);
            let (other, rest) = (rest % others, rest / others);
            let (oy, n) = (rest % dst.ne[1], rest / dst.ne[1]);
            let start = piece * STAGE;
            let len = STAGE.min(lanes - start);
            sums.fill(0.0);
            let (ys, y0) = y_axis.taps(oy, kh, ih);
            for (y, ky) in ys.enumerate() {
                let line = n * image.nb[3] + (y0 + y * y_axis.dilation) * image.nb[1];
                for kx in 0..kw {
                    let tap = kx * kernel.nb[0] + ky * kernel.nb[1];
                    // The lanes for which this tap is on the image; the first element and the
                    // distance to the next; the weight and the distance to that of the next lane.
                    let (range, from, step, weight, weight_step) = if by_channel {
                        let (xs, x0) = x_axis.taps(other, kw, iw);
                        if !xs.contains(&kx) {
                            continue;
                        }
                        let x = x0 + (kx - xs.start) * x_axis.dilation;
                        let from = line + x * image.nb[0] + start * image.nb[2];
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
                        let from = line + x * image.nb[0] + other * image.nb[2];
                        let range = range.start - start..range.end - start;
                        let step = x_axis.stride * image.nb[0];
                        (range, from, step, tap + other * kernel.nb[3], 0)
                    };
                    let place = sums[range.start..].as_mut_ptr();
                    let values = (
                        Access::new(Type::F32, step),
                        image.ptr().wrapping_add(from).cast_const(),
                    );
                    let weights = (
                        Access::new(kernel.ty, weight_step),
                        kernel.ptr().wrapping_add(weight).cast_const(),
                    );
                    // SAFETY: the taps are inside the image and the kernel, the lanes inside the
                    // sums.
                    unsafe {
                        let sum = (direct, place.cast_const().cast());
                        apply(
                            MulAdd {},
                            (direct, place.cast()),
                            [values, weights, sum],
                            range.len(),
                        );
                    }
                }
            }
            let to =
                oy * dst.nb[1] + n * dst.nb[3] + start * dst.nb[d_lane] + other * dst.nb[d_other];
            // SAFETY: the lanes are inside the destination.
            unsafe { out.store(sums.as_ptr(), len, dst.ptr().wrapping_add(to)) };
        }
        Ok(())
    })
}

/// A tensor of a transposed convolution as [width, height, results or channels, channels or
/// images].
#[derive(Clone, Copy)]
struct Axes {
    view: View,
    extents: [usize; 4],
    steps: [usize; 4],
}

/// Adds the kernel, times the value of each element of the image, to the destination. The kernels of
/// adjacent elements are a stride apart.
fn transposed(
    out: Axes,
    kernel: Axes,
    image: Axes,
    [x_axis, y_axis]: [ConvAxis; 2],
    workers: usize,
) -> Compiled {
    let [kw, kh, results, channels] = kernel.extents;
    let [iw, ih, _, images] = image.extents;
    let [ow, oh, ..] = out.extents;
    let (taps, pixels) = (kw * kh, iw * ih);
    if channels == 0 {
        return nothing(out.view);
    }
    let product = MatmulKernel::of(kernel.view.ty).expect("floats are weights");

    // Both with the channels innermost: a row for each tap of each result, a column for each pixel.
    let order = |a: Axes, d: [usize; 4]| {
        super::walk::laid_out(a.view, 0, d.map(|d| a.extents[d]), d.map(|d| a.steps[d]))
    };
    let weight = Format::of(kernel.view.ty).expect("floats are a format");
    let mut layout = ScratchLayout::default();
    let weights = Prepared::new(order(kernel, [3, 0, 1, 2]), weight, &mut layout);
    let columns = Prepared::new(
        order(image, [2, 0, 1, 3]),
        product.activation.format(),
        &mut layout,
    );
    let (weights_at, columns_at) = (weights.at, columns.at);
    let (weight_bytes, column_bytes) = (
        weights.format.row_bytes(channels),
        columns.format.row_bytes(channels),
    );
    let tile = tile_places(taps, 1, pixels);
    let units = results * images;
    let busy = workers.min(units);
    let plane_at = layout.room(busy, ow * oh * size_of::<f32>());
    let tile_at = layout.room(busy, tile * taps * size_of::<f32>());

    let prepare: Kernel = Box::new(move |w| {
        weights.write(w);
        columns.write(w);
        Ok(())
    });
    let multiply: Kernel = Box::new(move |w| {
        let part = |at: usize, floats: usize| {
            w.scratch()
                .wrapping_add(at + w.index() * floats * size_of::<f32>())
                .cast::<f32>()
        };
        for unit in w.share(units) {
            let (result, n) = (unit % results, unit / results);
            // SAFETY: each worker with units has a plane and a tile of its own in the scratch
            // memory; rows and columns were prepared before the barrier. The last pixel's kernel
            // ends with the plane.
            unsafe {
                let plane = std::slice::from_raw_parts_mut(part(plane_at, ow * oh), ow * oh);
                let values = part(tile_at, tile * taps);
                plane.fill(0.0);
                for start in (0..pixels).step_by(tile) {
                    let count = tile.min(pixels - start);
                    (product.gemm)(&GemmArgs {
                        k: channels,
                        w: w.scratch().add(weights_at + result * taps * weight_bytes),
                        w_stride: weight_bytes,
                        rows: taps,
                        x: w.scratch()
                            .add(columns_at + (n * pixels + start) * column_bytes),
                        x_stride: column_bytes,
                        cols: count,
                        dst: values,
                        dst_stride: taps,
                    });
                    for i in 0..count {
                        let (x, y) = ((start + i) % iw, (start + i) / iw);
                        let laid = std::slice::from_raw_parts(values.add(i * taps), taps);
                        for (ky, row) in laid.chunks_exact(kw).enumerate() {
                            let to = (y * y_axis.stride + ky) * ow + x * x_axis.stride;
                            plane[to..to + kw]
                                .iter_mut()
                                .zip(row)
                                .for_each(|(p, v)| *p += v);
                        }
                    }
                }
                for (y, row) in plane.chunks_exact(ow.max(1)).enumerate() {
                    let to = y * out.steps[1] + result * out.steps[2] + n * out.steps[3];
                    let to = out.view.ptr().wrapping_add(to);
                    copy_line(
                        to,
                        out.steps[0],
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
        kernels: vec![prepare, multiply],
        scratch_bytes: layout.bytes(),
    }
}
