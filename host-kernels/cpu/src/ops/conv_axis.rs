//! One dimension of a convolution or of pooling: which elements a kernel covers.

use std::ops::Range;

use vgpu_transport::ir::{ConvGeometry, PoolWindow};

/// How a kernel moves along one dimension, in elements of the input.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvAxis {
    /// Elements from one position of the kernel to the next.
    pub(super) stride: usize,
    /// Zero elements before the input.
    pub(super) padding: usize,
    /// Elements from one tap of the kernel to the next.
    pub(super) dilation: usize,
}

impl ConvAxis {
    /// A dimension of length 1.
    pub(super) const UNIT: ConvAxis = ConvAxis {
        stride: 1,
        padding: 0,
        dilation: 1,
    };

    /// The axes of a geometry that the check of the IR has accepted: no parameter is negative.
    pub(super) fn all<const N: usize>(geometry: &ConvGeometry<N>) -> [ConvAxis; N] {
        std::array::from_fn(|dim| ConvAxis {
            stride: geometry.stride[dim] as usize,
            padding: geometry.padding[dim] as usize,
            dilation: geometry.dilation[dim] as usize,
        })
    }

    /// The taps of a kernel of `taps` at output `output` that are inside an input of `size`
    /// elements, and the element under the first of them. Without such a tap, the element has no
    /// meaning.
    pub(super) fn taps(&self, output: usize, taps: usize, size: usize) -> (Range<usize>, usize) {
        covered(
            output * self.stride,
            self.dilation,
            self.padding,
            taps,
            size,
        )
    }

    /// The outputs, of `outputs`, for which tap `tap` is inside an input of `size` elements, and
    /// the element under the tap at the first of them. Without such an output, the element has no
    /// meaning.
    pub(super) fn outputs(&self, tap: usize, outputs: usize, size: usize) -> (Range<usize>, usize) {
        covered(
            tap * self.dilation,
            self.stride,
            self.padding,
            outputs,
            size,
        )
    }

    /// The output, of `outputs`, for which tap `tap` is on element `element`.
    pub(super) fn output_at(&self, element: usize, tap: usize, outputs: usize) -> Option<usize> {
        let distance = (element + self.padding).checked_sub(tap * self.dilation)?;
        let output = distance / self.stride;
        (distance.is_multiple_of(self.stride) && output < outputs).then_some(output)
    }
}

/// The indices `i < count` for which element `start + i * step` of the padded axis is inside the
/// input, and the first such element as an index of the input. The input is the `size` elements
/// after the first `padding` elements.
fn covered(
    start: usize,
    step: usize,
    padding: usize,
    count: usize,
    size: usize,
) -> (Range<usize>, usize) {
    let first = padding.saturating_sub(start).div_ceil(step);
    let end = count.min((size + padding).saturating_sub(start).div_ceil(step));
    let element = (start + first * step).saturating_sub(padding);
    (first..end.max(first), element)
}

/// One dimension of a pooling window.
#[derive(Debug, Clone, Copy)]
pub(super) struct PoolAxis {
    pub(super) size: usize,
    axis: ConvAxis,
}

impl PoolAxis {
    /// The axes of a window that the check of the IR has accepted: no parameter is negative.
    pub(super) fn all<const N: usize>(window: &PoolWindow<N>) -> [PoolAxis; N] {
        let axes = ConvAxis::all(&window.geometry);
        std::array::from_fn(|dim| PoolAxis {
            size: window.size[dim] as usize,
            axis: axes[dim],
        })
    }

    /// The elements, of `length`, that the window covers at output `output`.
    pub(super) fn covers(&self, output: usize, length: usize) -> Range<usize> {
        let (taps, first) = self.axis.taps(output, self.size, length);
        first..first + taps.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every geometry against the definition: tap `t` of output `o` is on element
    /// `o * stride + t * dilation - padding`.
    #[test]
    fn taps_and_outputs_are_those_inside_the_input() {
        const COUNT: usize = 5;
        for size in 1..6 {
            for (stride, padding, dilation) in
                [(1, 0, 1), (2, 1, 1), (1, 2, 3), (3, 4, 2), (2, 7, 1)]
            {
                let axis = ConvAxis {
                    stride,
                    padding,
                    dilation,
                };
                let element = |output: usize, tap: usize| {
                    (output * stride + tap * dilation)
                        .checked_sub(padding)
                        .filter(|&element| element < size)
                };
                for fixed in 0..COUNT {
                    let (taps, first) = axis.taps(fixed, COUNT, size);
                    let expected: Vec<usize> = (0..COUNT)
                        .filter(|&tap| element(fixed, tap).is_some())
                        .collect();
                    assert_eq!(taps.clone().collect::<Vec<_>>(), expected);
                    if !taps.is_empty() {
                        assert_eq!(element(fixed, taps.start), Some(first));
                    }
                    let (outputs, first) = axis.outputs(fixed, COUNT, size);
                    let expected: Vec<usize> = (0..COUNT)
                        .filter(|&output| element(output, fixed).is_some())
                        .collect();
                    assert_eq!(outputs.clone().collect::<Vec<_>>(), expected);
                    if !outputs.is_empty() {
                        assert_eq!(element(outputs.start, fixed), Some(first));
                    }
                    for e in 0..size {
                        let expected = (0..COUNT).find(|&o| element(o, fixed) == Some(e));
                        assert_eq!(axis.output_at(e, fixed, COUNT), expected);
                    }
                }
            }
        }
    }
}
