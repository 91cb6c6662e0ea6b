//! The elements of a tensor in order.

use crate::view::View;

/// The elements of a tensor in order, whatever its strides: lines of equal length, each with one
/// distance between its elements.
///
/// Positions and lengths count elements, of quantised types blocks.
pub(super) struct Sequence {
    view: View,
    line: usize,
    step: usize,
    /// The loops around the line, innermost first: how often, how far.
    outer: Vec<(usize, usize)>,
}

impl Sequence {
    /// The elements of `view`.
    pub(super) fn new(view: View) -> Sequence {
        let blocks = view.ne[0] / view.ty.block_elements() as usize;
        let mut line = blocks;
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
            if outer.is_empty() && line == 1 && !view.ty.is_quantized() {
                (line, step) = (count, stride); // rows of one element are no lines
            } else if outer.is_empty() && stride == line.wrapping_mul(step) {
                line *= count;
            } else {
                outer.push((count, stride));
            }
        }
        Sequence {
            view,
            line,
            step,
            outer,
        }
    }

    /// Bytes from one element of a line to the next.
    pub(super) fn step(&self) -> usize {
        self.step
    }

    /// The place of position `i`, and how many lie on the same line from there on.
    fn seek(&self, i: usize) -> (*mut u8, usize) {
        let (mut rest, on_line) = (i / self.line, i % self.line);
        let mut place = self.view.ptr().wrapping_add(on_line * self.step);
        for &(count, stride) in &self.outer {
            place = place.wrapping_add(rest % count * stride);
            rest /= count;
        }
        (place, self.line - on_line)
    }

    /// Calls `body` with the pieces that positions `start..start + n` fall into: where they are,
    /// which of the `n` it is, how many.
    pub(super) fn pieces(
        &self,
        start: usize,
        n: usize,
        mut body: impl FnMut(*mut u8, usize, usize),
    ) {
        let mut done = 0;
        while done < n {
            let (place, left) = self.seek(start + done);
            let len = left.min(n - done);
            body(place, done, len);
            done += len;
        }
    }
}
