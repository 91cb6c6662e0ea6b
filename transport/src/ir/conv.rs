//! The geometry of convolutions and of pooling: stride, padding and dilation in each dimension.

use super::graph::Shape;
use super::ops::Op;

/// The parameters of a convolution over `N` dimensions. Dimension 0 is the fastest one, as in
/// [`Shape::ne`]. The operators whose outputs are spread over a larger destination
/// (CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D, COL2IM_1D) have the geometry of the convolution that
/// they reverse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvGeometry<const N: usize> {
    /// The step of the kernel between two outputs, in input elements.
    pub stride: [i32; N],
    /// The zero elements before and behind the input.
    pub padding: [i32; N],
    /// The distance between two taps of the kernel, in input elements.
    pub dilation: [i32; N],
}

/// The parameters of pooling over `N` dimensions: the size of the window, and how the window moves.
/// A window has dilation 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolWindow<const N: usize> {
    /// The elements of the window in each dimension.
    pub size: [i32; N],
    /// How the window moves.
    pub geometry: ConvGeometry<N>,
}

impl PoolWindow<1> {
    /// The window of POOL_1D. `None` for every other operator.
    pub const fn of(op: &Op) -> Option<PoolWindow<1>> {
        let Op::Pool1d { k0, s0, p0, .. } = op else {
            return None;
        };
        Some(PoolWindow {
            size: [*k0],
            geometry: ConvGeometry {
                stride: [*s0],
                padding: [*p0],
                dilation: [1],
            },
        })
    }
}

impl PoolWindow<2> {
    /// The window of POOL_2D and POOL_2D_BACK. `None` for every other operator.
    pub const fn of(op: &Op) -> Option<PoolWindow<2>> {
        let (Op::Pool2d {
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
            ..
        }
        | Op::Pool2dBack {
            k0,
            k1,
            s0,
            s1,
            p0,
            p1,
            ..
        }) = op
        else {
            return None;
        };
        Some(PoolWindow {
            size: [*k0, *k1],
            geometry: ConvGeometry {
                stride: [*s0, *s1],
                padding: [*p0, *p1],
                dilation: [1, 1],
            },
        })
    }
}

impl ConvGeometry<1> {
    /// The geometry of COL2IM_1D and CONV_TRANSPOSE_1D. `None` for every other operator.
    pub const fn of(op: &Op) -> Option<ConvGeometry<1>> {
        let (stride, padding, dilation) = match op {
            Op::Col2im1d { s0, p0, .. } => (*s0, *p0, 1),
            Op::ConvTranspose1d { s0, p0, d0 } => (*s0, *p0, *d0),
            _ => return None,
        };
        Some(ConvGeometry {
            stride: [stride],
            padding: [padding],
            dilation: [dilation],
        })
    }
}

impl ConvGeometry<2> {
    /// The geometry of IM2COL, IM2COL_BACK, CONV_2D, CONV_2D_DW and CONV_TRANSPOSE_2D. `None` for
    /// every other operator.
    pub const fn of(op: &Op) -> Option<ConvGeometry<2>> {
        if let Op::ConvTranspose2d { stride } = op {
            return Some(ConvGeometry {
                stride: [*stride, *stride],
                padding: [0, 0],
                dilation: [1, 1],
            });
        }
        let (Op::Im2col {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            ..
        }
        | Op::Im2colBack {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
            ..
        }
        | Op::Conv2d {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        }
        | Op::Conv2dDw {
            s0,
            s1,
            p0,
            p1,
            d0,
            d1,
        }) = op
        else {
            return None;
        };
        Some(ConvGeometry {
            stride: [*s0, *s1],
            padding: [*p0, *p1],
            dilation: [*d0, *d1],
        })
    }
}

impl ConvGeometry<3> {
    /// The geometry of IM2COL_3D and CONV_3D. `None` for every other operator.
    pub const fn of(op: &Op) -> Option<ConvGeometry<3>> {
        let (Op::Im2col3d {
            s0,
            s1,
            s2,
            p0,
            p1,
            p2,
            d0,
            d1,
            d2,
            ..
        }
        | Op::Conv3d {
            s0,
            s1,
            s2,
            p0,
            p1,
            p2,
            d0,
            d1,
            d2,
            ..
        }) = op
        else {
            return None;
        };
        Some(ConvGeometry {
            stride: [*s0, *s1, *s2],
            padding: [*p0, *p1, *p2],
            dilation: [*d0, *d1, *d2],
        })
    }
}

impl<const N: usize> ConvGeometry<N> {
    /// The geometry of dimension `dim` alone.
    ///
    /// # Panics
    /// If `dim` is not below `N`.
    pub const fn axis(&self, dim: usize) -> ConvGeometry<1> {
        ConvGeometry {
            stride: [self.stride[dim]],
            padding: [self.padding[dim]],
            dilation: [self.dilation[dim]],
        }
    }

    /// The number of outputs in dimension `dim`, for an input of `input` elements and a kernel of
    /// `kernel` elements. `None` when a parameter is out of range or the kernel does not fit.
    pub fn output_length(&self, dim: usize, input: u64, kernel: u64) -> Option<u64> {
        let (stride, padding) = (self.stride[dim], self.padding[dim]);
        output_length(input, kernel, stride, padding, self.dilation[dim])
    }

    /// The number of outputs in each dimension. `None` when a parameter is out of range or the
    /// kernel does not fit.
    pub fn output_lengths(&self, input: &Shape, kernel: &Shape) -> Option<[u64; N]> {
        let mut lengths = [0; N];
        for (dim, length) in lengths.iter_mut().enumerate() {
            *length = self.output_length(dim, input.ne[dim], kernel.ne[dim])?;
        }
        Some(lengths)
    }
}

/// The number of outputs of a kernel on a padded line (`ggml_calc_conv_output_size`).
///
/// The division rounds towards zero, as in ggml: a kernel that is slightly longer than the padded
/// input still has one output.
fn output_length(input: u64, kernel: u64, stride: i32, padding: i32, dilation: i32) -> Option<u64> {
    if stride <= 0 || padding < 0 || dilation <= 0 {
        return None;
    }
    let room = i128::from(input) + 2 * i128::from(padding)
        - i128::from(dilation) * (i128::from(kernel) - 1)
        - 1;
    u64::try_from(room / i128::from(stride) + 1).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::ops::PoolKind;

    #[test]
    fn geometry_comes_from_the_operator() {
        let op = Op::Conv2d {
            s0: 1,
            s1: 2,
            p0: 3,
            p1: 4,
            d0: 5,
            d1: 6,
        };
        let geometry = ConvGeometry::<2>::of(&op).unwrap();
        assert_eq!(geometry.stride, [1, 2]);
        assert_eq!(geometry.padding, [3, 4]);
        assert_eq!(geometry.dilation, [5, 6]);
        let height = ConvGeometry {
            stride: [2],
            padding: [4],
            dilation: [6],
        };
        assert_eq!(geometry.axis(1), height);
        assert_eq!(ConvGeometry::<1>::of(&op), None);
        assert_eq!(ConvGeometry::<3>::of(&op), None);
        assert_eq!(ConvGeometry::<2>::of(&Op::Add {}), None);
    }

    #[test]
    fn reversed_convolutions_have_a_geometry() {
        let line = |stride, padding, dilation| {
            Some(ConvGeometry {
                stride: [stride],
                padding: [padding],
                dilation: [dilation],
            })
        };
        let col2im = Op::Col2im1d {
            s0: 2,
            oc: 7,
            p0: 3,
        };
        assert_eq!(ConvGeometry::<1>::of(&col2im), line(2, 3, 1));
        let transposed = Op::ConvTranspose1d {
            s0: 2,
            p0: 3,
            d0: 4,
        };
        assert_eq!(ConvGeometry::<1>::of(&transposed), line(2, 3, 4));
        let plane = ConvGeometry::<2>::of(&Op::ConvTranspose2d { stride: 5 }).unwrap();
        assert_eq!(
            (Some(plane.axis(0)), plane.axis(1)),
            (line(5, 0, 1), plane.axis(0))
        );
    }

    #[test]
    fn windows_come_from_the_operator() {
        let kind = PoolKind::Max;
        let line = Op::Pool1d {
            kind,
            k0: 1,
            s0: 2,
            p0: 3,
        };
        let window = PoolWindow::<1>::of(&line).unwrap();
        assert_eq!(window.size, [1]);
        assert_eq!(
            (window.geometry.stride, window.geometry.padding),
            ([2], [3])
        );
        assert_eq!(window.geometry.dilation, [1]);
        assert_eq!(PoolWindow::<2>::of(&line), None);
        let plane = Op::Pool2dBack {
            kind,
            k0: 1,
            k1: 2,
            s0: 3,
            s1: 4,
            p0: 5,
            p1: 6,
        };
        let window = PoolWindow::<2>::of(&plane).unwrap();
        assert_eq!(window.size, [1, 2]);
        assert_eq!(window.geometry.stride, [3, 4]);
        assert_eq!(window.geometry.padding, [5, 6]);
        assert_eq!(window.geometry.dilation, [1, 1]);
        assert_eq!(PoolWindow::<1>::of(&plane), None);
    }

    #[test]
    fn output_sizes_match_ggml() {
        // input, kernel, stride, padding, dilation
        assert_eq!(output_length(5, 3, 1, 0, 1), Some(3));
        assert_eq!(output_length(5, 3, 2, 1, 1), Some(3));
        assert_eq!(output_length(5, 3, 1, 0, 2), Some(1));
        assert_eq!(output_length(5, 6, 2, 0, 1), Some(1), "rounds towards zero");
        assert_eq!(output_length(5, 9, 1, 0, 1), None);
        for (stride, padding, dilation) in [(0, 0, 1), (1, -1, 1), (1, 0, 0)] {
            assert_eq!(output_length(5, 3, stride, padding, dilation), None);
        }
    }
}
