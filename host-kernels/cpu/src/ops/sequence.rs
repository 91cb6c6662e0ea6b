//! The elements of a tensor in order.

use crate::view::View;

/// The elements of a tensor in order, for any strides: an innermost loop over elements at equal
/// distances, and the loops around it.
///
/// Positions and lengths are in elements; in blocks for quantised types.
pub(super) struct Sequence {
    view: View,
    /// The count of the innermost loop.
    inner: usize,
    step: usize,
    /// The other loops, innermost first: count, and stride in bytes.
    outer: Vec<(usize, usize)>,
}

impl Sequence {
    /// The elements of `view`.
    pub(super) fn new(view: View) -> Sequence {
        let blocks = view.ne[0] / view.ty.block_elements() as usize;
        let mut inner = blocks;
        let mut step = if blocks == 1 {
            view.ty.block_bytes() as usize
        } else {
            view.nb[0]
        };
        let mut outer = Vec::new();
        for (&count, &stride) in view.ne[1..].iter().zip(&view.nb[1..]) {
            if count == 1 {
                continue;
            }
            if outer.is_empty() && inner == 1 && !view.ty.is_quantized() {
                // Rows have one element: the innermost loop is over the next dimension.
                (inner, step) = (count, stride);
            } else if outer.is_empty() && stride == inner.wrapping_mul(step) {
                inner *= count;
            } else {
                outer.push((count, stride));
            }
        }
        Sequence {
            view,
            inner,
            step,
            outer,
        }
    }

    /// Bytes from one element of the innermost loop to the next.
    pub(super) fn step(&self) -> usize {
        self.step
    }

    /// The address of position `i`, and the number of positions from `i` to the end of the loop.
    fn seek(&self, i: usize) -> (*mut u8, usize) {
        let (mut rest, at) = (i / self.inner, i % self.inner);
        let mut address = self.view.ptr().wrapping_add(at * self.step);
        for &(count, stride) in &self.outer {
            address = address.wrapping_add(rest % count * stride);
            rest /= count;
        }
        (address, self.inner - at)
    }

    /// Calls `body` for each strip of the positions `start..start + n` that is in one innermost
    /// loop, with its address, its offset from `start`, and its length.
    pub(super) fn strips(
        &self,
        start: usize,
        n: usize,
        mut body: impl FnMut(*mut u8, usize, usize),
    ) {
        let mut done = 0;
        while done < n {
            let (address, left) = self.seek(start + done);
            let len = left.min(n - done);
            body(address, done, len);
            done += len;
        }
    }
}
