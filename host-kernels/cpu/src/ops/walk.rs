//! Loops over the elements of a destination and its sources.

use vgpu_transport::ir::Shape;

use crate::kernel::Worker;
use crate::view::View;

/// Visits the elements of a destination, and with each the element of every source that belongs to
/// it. Sources with smaller extents repeat.
///
/// The four dimensions are taken apart and put together again as few, long loops: dimensions that
/// follow each other in all tensors become one, so that a dense operation of any shape is one line.
///
/// For quantised types the unit is the block instead of the element; all tensors are of one type
/// then.
#[derive(Debug, Clone)]
pub(super) struct Walk<const N: usize> {
    dst: View,
    src: [View; N],
    line: Loop<N>,
    /// The other loops, innermost first.
    outer: Vec<Loop<N>>,
    /// How many lines the outer loops make.
    lines: usize,
}

/// How often, and how many bytes each tensor moves on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loop<const N: usize> {
    pub(super) count: usize,
    pub(super) dst: usize,
    pub(super) src: [usize; N],
}

/// Lines shorter than this are not worth being the innermost loop, if there is a longer one.
const SHORT_LINE: usize = 8;

/// Loops that four dimensions can become: each a loop over a source and one over its repetitions.
const MAX_LOOPS: usize = 8;

impl<const N: usize> Walk<N> {
    /// The loops of an operation. Each extent of a source divides that of the destination.
    pub(super) fn new(dst: View, src: [View; N]) -> Walk<N> {
        let mut loops: Vec<Loop<N>> = Vec::new();
        for d in 0..4 {
            let count = units(&dst, d);
            let part = src.iter().map(|s| units(s, d)).fold(count, usize::min);
            if part == 0 {
                loops.clear();
                loops.push(Loop {
                    count: 0,
                    dst: 0,
                    src: [0; N],
                });
                break;
            }
            let once = Loop {
                count: part,
                dst: dst.nb[d],
                src: src.map(|s| s.nb[d]),
            };
            push(&mut loops, once);
            let again = Loop {
                count: count / part,
                dst: dst.nb[d].wrapping_mul(part),
                src: src.map(|s| {
                    if units(&s, d) == count {
                        s.nb[d].wrapping_mul(part)
                    } else {
                        0
                    }
                }),
            };
            push(&mut loops, again);
        }
        if loops.is_empty() {
            // A single element. Its steps are never taken; these are those of a dense line.
            let size = |v: &View| v.ty.block_bytes() as usize;
            loops.push(Loop {
                count: 1,
                dst: size(&dst),
                src: src.map(|s| size(&s)),
            });
        }
        if loops[0].count < SHORT_LINE {
            let longest = (0..loops.len())
                .max_by_key(|&i| loops[i].count)
                .unwrap_or(0);
            loops.swap(0, longest);
        }
        let line = loops.remove(0);
        let lines = loops.iter().map(|l| l.count).product();
        Walk {
            dst,
            src,
            line,
            outer: loops,
            lines,
        }
    }

    /// The innermost loop.
    pub(super) fn line(&self) -> &Loop<N> {
        &self.line
    }

    /// The innermost loop in which this source is dense, if the line is not it.
    pub(super) fn dense_elsewhere(&self, source: usize) -> Option<usize> {
        let size = self.src[source].ty.block_bytes() as usize;
        let dense = |l: &Loop<N>| l.src[source] == size;
        if dense(&self.line) {
            None
        } else {
            self.outer.iter().position(dense)
        }
    }

    /// One of the loops around the line.
    pub(super) fn outer(&self, i: usize) -> &Loop<N> {
        &self.outer[i]
    }

    /// Calls `body` with the places of tiles, for this worker's share of all elements: neighbours
    /// of the line, at most `side`, times neighbours of the loop `across`, as many at most.
    pub(super) fn tiles(
        &self,
        w: &Worker<'_>,
        across: usize,
        side: usize,
        mut body: impl FnMut(*mut u8, [*const u8; N], usize, usize),
    ) {
        let (line, other) = (&self.line, &self.outer[across]);
        let (along, beside) = (line.count.div_ceil(side), other.count.div_ceil(side));
        let planes = self.lines.checked_div(other.count).unwrap_or(0);
        for unit in w.share(along * beside * planes) {
            let start = unit % along * side;
            let first = unit / along % beside * side;
            let mut plane = unit / (along * beside);
            let mut dst = self
                .dst
                .ptr()
                .wrapping_add(start * line.dst + first * other.dst);
            let mut src = self.src.map(|s| s.ptr().cast_const());
            src = advance(advance(src, line.src, start), other.src, first);
            for (_, l) in self.outer.iter().enumerate().filter(|(i, _)| *i != across) {
                dst = dst.wrapping_add(plane % l.count * l.dst);
                src = advance(src, l.src, plane % l.count);
                plane /= l.count;
            }
            body(
                dst,
                src,
                side.min(line.count - start),
                side.min(other.count - first),
            );
        }
    }

    /// Calls `body` with the places of neighbouring elements, and their number, at most `grain`,
    /// for this worker's share of all elements.
    pub(super) fn pieces(
        &self,
        w: &Worker<'_>,
        grain: usize,
        mut body: impl FnMut(*mut u8, [*const u8; N], usize),
    ) {
        let per_line = self.line.count.div_ceil(grain);
        let units = w.share(self.lines * per_line);
        if units.is_empty() {
            return;
        }
        let (mut line, mut piece) = (units.start / per_line, units.start % per_line);
        let mut index = [0; MAX_LOOPS];
        let (mut dst, mut src) = (self.dst.ptr(), self.src.map(|s| s.ptr().cast_const()));
        for (i, l) in index.iter_mut().zip(&self.outer) {
            *i = line % l.count;
            line /= l.count;
            dst = dst.wrapping_add(*i * l.dst);
            src = advance(src, l.src, *i);
        }
        for _ in units {
            let start = piece * grain;
            let n = grain.min(self.line.count - start);
            body(
                dst.wrapping_add(start * self.line.dst),
                advance(src, self.line.src, start),
                n,
            );
            piece += 1;
            if piece < per_line {
                continue;
            }
            piece = 0;
            for (i, l) in index.iter_mut().zip(&self.outer) {
                *i += 1;
                if *i < l.count {
                    dst = dst.wrapping_add(l.dst);
                    src = advance(src, l.src, 1);
                    break;
                }
                let back = *i - 1;
                *i = 0;
                dst = dst.wrapping_sub(back * l.dst);
                for (s, step) in src.iter_mut().zip(l.src) {
                    *s = s.wrapping_sub(back * step);
                }
            }
        }
    }
}

fn advance<const N: usize>(
    mut src: [*const u8; N],
    steps: [usize; N],
    count: usize,
) -> [*const u8; N] {
    for (s, step) in src.iter_mut().zip(steps) {
        *s = s.wrapping_add(count * step);
    }
    src
}

/// Extent of dimension `d` in elements, in blocks for rows of blocks.
fn units(view: &View, d: usize) -> usize {
    match d {
        0 => view.ne[0] / view.ty.block_elements() as usize,
        _ => view.ne[d],
    }
}

/// Adds a loop around the others, or makes the outermost longer if it goes on where that ends.
fn push<const N: usize>(loops: &mut Vec<Loop<N>>, new: Loop<N>) {
    if new.count == 1 {
        return;
    }
    if let Some(last) = loops.last_mut() {
        let follows = |step: usize, next: usize| step.wrapping_mul(last.count) == next;
        if follows(last.dst, new.dst) && (0..N).all(|i| follows(last.src[i], new.src[i])) {
            last.count *= new.count;
            return;
        }
    }
    loops.push(new);
}

/// A part of `view`: `ne` elements in each dimension, from index `start` on. Parts of quantised
/// rows begin and end with blocks.
pub(super) fn window(view: View, start: [usize; 4], ne: [usize; 4]) -> View {
    let blocks = start[0] / view.ty.block_elements() as usize;
    let steps = [blocks, start[1], start[2], start[3]];
    let offset: usize = steps.iter().zip(view.nb).map(|(n, nb)| n * nb).sum();
    laid_out(view, offset, ne, view.nb)
}

/// Other extents and strides in the memory of `view`, from a byte `offset` on.
pub(super) fn laid_out(view: View, offset: usize, ne: [usize; 4], nb: [usize; 4]) -> View {
    let shape = Shape {
        ty: view.ty,
        ne: ne.map(|n| n as u64),
        nb: nb.map(|n| n as u64),
    };
    let extent = shape
        .extent()
        .and_then(|extent| usize::try_from(extent).ok());
    let end = extent.and_then(|extent| extent.checked_add(offset));
    assert!(
        extent == Some(0) || end.is_some_and(|end| end <= view.span().len()),
        "a view of bytes {offset}.. with shape {shape:?} does not lie inside its tensor"
    );
    // SAFETY: the bytes lie inside those of `view`, whose contract covers them. The strides are
    // those of `view` or multiples of its elements.
    unsafe { View::new(view.ptr().wrapping_add(offset), &shape) }
}
