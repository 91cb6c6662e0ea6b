//! Patches: the elements of an image that a convolution kernel covers at one of its positions.

use super::conv_axis::ConvAxis;
use crate::view::View;

/// How patches are taken from an image of `f32` in up to three dimensions. Strides are in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patches {
    /// Lengths and strides of one channel of the image.
    pub(super) ne: [usize; 3],
    pub(super) nb: [usize; 3],
    pub(super) channels: usize,
    pub(super) channel_stride: usize,
    /// The taps of the kernel in each dimension.
    pub(super) kernel: [usize; 3],
    /// How the kernel moves in each dimension.
    pub(super) axes: [ConvAxis; 3],
}

impl Patches {
    /// Elements of a patch, over all channels.
    pub(super) fn len(&self) -> usize {
        self.channels * self.kernel.iter().product::<usize>()
    }

    /// Writes the patch of output `output`. Elements outside the image are 0.
    ///
    /// # Safety
    /// `image` is readable with these lengths and strides. `out` is writable for [`Patches::len`]
    /// floats.
    pub(super) unsafe fn write(&self, image: *const u8, output: [usize; 3], out: *mut f32) {
        let [kw, kh, kd] = self.kernel;
        let taps = |d: usize| self.axes[d].taps(output[d], self.kernel[d], self.ne[d]);
        let [(xs, x0), (ys, y0), (zs, z0)] = [taps(0), taps(1), taps(2)];
        let stride = |d: usize| self.axes[d].dilation * self.nb[d];
        let first = image.wrapping_add(x0 * self.nb[0] + y0 * self.nb[1] + z0 * self.nb[2]);
        // SAFETY: the ranges `xs`, `ys`, `zs` have the taps that are inside the image, so every
        // element that is read is inside the image. The index of each tap is below `len()`.
        unsafe {
            if xs.len() * ys.len() * zs.len() < kw * kh * kd {
                out.write_bytes(0, self.len());
            }
            for c in 0..self.channels {
                for (z, kz) in zs.clone().enumerate() {
                    for (y, ky) in ys.clone().enumerate() {
                        let to = out.add(((c * kd + kz) * kh + ky) * kw + xs.start);
                        let from = first
                            .wrapping_add(c * self.channel_stride + z * stride(2) + y * stride(1));
                        for x in 0..xs.len() {
                            let tap = from.wrapping_add(x * stride(0)).cast::<f32>();
                            to.add(x).write(tap.read());
                        }
                    }
                }
            }
        }
    }
}

/// Images at equal distances.
#[derive(Debug, Clone, Copy)]
pub(super) struct Images {
    pub(super) base: View,
    /// Bytes from one image to the next.
    pub(super) stride: usize,
}

impl Images {
    /// The first element of image `n`.
    pub(super) fn at(&self, n: usize) -> *const u8 {
        self.base.ptr().wrapping_add(n * self.stride)
    }
}
