//! Loops over the elements of a destination and its sources.

use vgpu_transport::ir::Shape;

use crate::kernel::Worker;
use crate::view::View;

/// Visits the elements of a destination together with the corresponding element of every source.
/// Sources with smaller lengths are broadcast.
///
/// The four dimensions become few, long loops: dimensions that are contiguous in all tensors are
/// merged, so that a dense operation of any shape is one loop.
///
/// For quantised types the unit is the block instead of the element, and all tensors have the same
/// type.
#[derive(Debug, Clone)]
pub(super) struct Walk<const N: usize> {
    dst: View,
    src: [View; N],
    inner: Loop<N>,
    /// The other loops, innermost first.
    outer: Vec<Loop<N>>,
    /// How often the innermost loop runs: the product of the counts of the outer loops.
    outer_count: usize,
}

/// The count of a loop, and the stride of each tensor in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loop<const N: usize> {
    pub(super) count: usize,
    pub(super) dst: usize,
    pub(super) src: [usize; N],
}

/// If the innermost loop is shorter than this, the longest loop becomes the innermost one.
const SHORT_LOOP: usize = 8;

/// The bytes of the pages that a strip has at most: the kernel may have to clear each of them
/// first, which takes about as long as a part of a node may.
const PAGES_OF_STRIP: usize = 1 << 20;

/// The bytes of a page.
const PAGE: usize = 4096;

/// The most loops: for each of four dimensions, a loop over the source and a loop over its
/// repetitions.
const MAX_LOOPS: usize = 8;

impl<const N: usize> Walk<N> {
    /// The loops of an operation. Each length of a source divides that of the destination: a loop
    /// over the destination is one over the shortest source, repeated. Otherwise the loops leave
    /// out elements, and stay inside all tensors.
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
            // A single element, whose strides are not used, and have the values of a dense loop.
            let size = |v: &View| v.ty.block_bytes() as usize;
            loops.push(Loop {
                count: 1,
                dst: size(&dst),
                src: src.map(|s| size(&s)),
            });
        }
        if loops[0].count < SHORT_LOOP {
            let longest = (0..loops.len())
                .max_by_key(|&i| loops[i].count)
                .unwrap_or(0);
            loops.swap(0, longest);
        }
        let inner = loops.remove(0);
        let outer_count = loops.iter().map(|l| l.count).product();
        Walk {
            dst,
            src,
            inner,
            outer: loops,
            outer_count,
        }
    }

    /// The innermost loop.
    pub(super) fn inner(&self) -> &Loop<N> {
        &self.inner
    }

    /// The innermost outer loop in which this source is dense. `None` if the source is dense in the
    /// innermost one.
    pub(super) fn dense_elsewhere(&self, source: usize) -> Option<usize> {
        let size = self.src[source].ty.block_bytes() as usize;
        let dense = |l: &Loop<N>| l.src[source] == size;
        if dense(&self.inner) {
            None
        } else {
            self.outer.iter().position(dense)
        }
    }

    /// Outer loop `i`.
    pub(super) fn outer(&self, i: usize) -> &Loop<N> {
        &self.outer[i]
    }

    /// Calls `body` for each tile of this worker's range of all elements, with the addresses of its
    /// first element: at most `side` adjacent elements of the innermost loop, in at most `side`
    /// adjacent iterations of outer loop `crossed`.
    pub(super) fn tiles(
        &self,
        w: &Worker<'_>,
        crossed: usize,
        side: usize,
        mut body: impl FnMut(*mut u8, [*const u8; N], usize, usize),
    ) {
        let (inner, other) = (&self.inner, &self.outer[crossed]);
        let (along, beside) = (inner.count.div_ceil(side), other.count.div_ceil(side));
        let planes = self.outer_count.checked_div(other.count).unwrap_or(0);
        for unit in w.range_of(along * beside * planes) {
            let start = unit % along * side;
            let first = unit / along % beside * side;
            let mut plane = unit / (along * beside);
            let mut dst = self
                .dst
                .ptr()
                .wrapping_add(start * inner.dst + first * other.dst);
            let mut src = self.src.map(|s| s.ptr().cast_const());
            src = advance(advance(src, inner.src, start), other.src, first);
            for (_, l) in self.outer.iter().enumerate().filter(|(i, _)| *i != crossed) {
                dst = dst.wrapping_add(plane % l.count * l.dst);
                src = advance(src, l.src, plane % l.count);
                plane /= l.count;
            }
            body(
                dst,
                src,
                side.min(inner.count - start),
                side.min(other.count - first),
            );
        }
    }

    /// The elements of a strip, at most `most`.
    fn grain(&self, most: usize) -> usize {
        let steps = self.inner.src.iter().chain([&self.inner.dst]);
        let pages: usize = steps.map(|step| PAGE.min(*step)).sum();
        most.min(PAGES_OF_STRIP / pages.max(1))
    }

    /// Calls `body` for each strip of this worker's range of all elements, with the addresses of
    /// its first element and its number of elements: at most `grain` adjacent ones of the innermost
    /// loop, and fewer if they are far apart.
    pub(super) fn strips(
        &self,
        w: &Worker<'_>,
        grain: usize,
        mut body: impl FnMut(*mut u8, [*const u8; N], usize),
    ) {
        let grain = self.grain(grain);
        let strips_per_loop = self.inner.count.div_ceil(grain);
        let units = w.range_of(self.outer_count * strips_per_loop);
        let rest = units.rest();
        if rest.is_empty() {
            return;
        }
        let (mut outer, mut strip) = (rest.start / strips_per_loop, rest.start % strips_per_loop);
        let mut index = [0; MAX_LOOPS];
        let (mut dst, mut src) = (self.dst.ptr(), self.src.map(|s| s.ptr().cast_const()));
        for (i, l) in index.iter_mut().zip(&self.outer) {
            *i = outer % l.count;
            outer /= l.count;
            dst = dst.wrapping_add(*i * l.dst);
            src = advance(src, l.src, *i);
        }
        for _ in units {
            let start = strip * grain;
            let n = grain.min(self.inner.count - start);
            body(
                dst.wrapping_add(start * self.inner.dst),
                advance(src, self.inner.src, start),
                n,
            );
            strip += 1;
            if strip < strips_per_loop {
                continue;
            }
            strip = 0;
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

/// The length of dimension `d` in elements; in blocks for dimension 0 of a quantised type.
fn units(view: &View, d: usize) -> usize {
    match d {
        0 => view.ne[0] / view.ty.block_elements() as usize,
        _ => view.ne[d],
    }
}

/// Adds an outermost loop, or merges it with the outermost loop if both are contiguous.
fn push<const N: usize>(loops: &mut Vec<Loop<N>>, new: Loop<N>) {
    if new.count == 1 {
        return;
    }
    if let Some(last) = loops.last_mut() {
        let is_contiguous = |step: usize, next: usize| step.wrapping_mul(last.count) == next;
        if is_contiguous(last.dst, new.dst)
            && (0..N).all(|i| is_contiguous(last.src[i], new.src[i]))
        {
            last.count *= new.count;
            return;
        }
    }
    loops.push(new);
}

/// A part of `view`: `ne` elements in each dimension, from index `start` on. A part of a quantised
/// row consists of whole blocks.
pub(super) fn window(view: View, start: [usize; 4], ne: [usize; 4]) -> View {
    let blocks = start[0] / view.ty.block_elements() as usize;
    let steps = [blocks, start[1], start[2], start[3]];
    let offset: usize = steps.iter().zip(view.nb).map(|(n, nb)| n * nb).sum();
    laid_out(view, offset, ne, view.nb)
}

/// A view with other lengths and strides in the memory of `view`, at byte `offset`.
///
/// # Panics
/// If the view does not lie inside `view`, or has plain elements that are not aligned.
pub(super) fn laid_out(view: View, offset: usize, ne: [usize; 4], nb: [usize; 4]) -> View {
    let shape = Shape {
        ty: view.ty,
        ne: ne.map(|n| n as u64),
        nb: nb.map(|n| n as u64),
    };
    let length = shape
        .byte_len()
        .and_then(|length| usize::try_from(length).ok());
    let end = length.and_then(|length| length.checked_add(offset));
    assert!(
        length == Some(0) || end.is_some_and(|end| end <= view.span().len()),
        "a view of bytes {offset}.. with shape {shape:?} does not lie inside its tensor"
    );
    let element = view.ty.block_bytes() as usize;
    assert!(
        view.ty.is_quantized()
            || nb
                .iter()
                .chain([&offset])
                .all(|n| n.is_multiple_of(element)),
        "a view of bytes {offset}.. with shape {shape:?} is not aligned"
    );
    // SAFETY: the assertions above keep the bytes inside the memory of `view`, for which the
    // contract of `View::new` holds, and plain elements as aligned as those of `view`.
    unsafe { View::new(view.ptr().wrapping_add(offset), &shape) }
}

#[cfg(test)]
mod tests {
    use vgpu_transport::ir::Type;

    use super::*;

    #[test]
    fn strips_of_elements_in_many_pages_are_short() {
        let mut memory = vec![0_u32; 64 << 10];
        let view = |memory: &mut Vec<u32>, step: usize| {
            let shape = Shape {
                ty: Type::F32,
                ne: [50, 1, 1, 1],
                nb: [4 * step as u64, 4, 4, 4],
            };
            // SAFETY: 50 elements that are `step` elements apart lie in the memory, which outlives
            // the view and is accessed by nothing else.
            unsafe { View::new(memory.as_mut_ptr().cast(), &shape) }
        };
        let [dense, near, far] = [1, 256, 1200].map(|step| view(&mut memory, step));
        for (dst, src, most) in [
            (dense, dense, 1 << 17),
            (near, near, PAGES_OF_STRIP / 2048),
            (dense, far, PAGES_OF_STRIP / 4100),
            // However far, an element is in one page.
            (far, far, PAGES_OF_STRIP / 8192),
        ] {
            let walk = Walk::new(dst, [src]);
            assert_eq!(walk.grain(1 << 20), most);
            assert_eq!(walk.grain(40), 40);
        }
        assert_eq!(Walk::new(far, []).grain(1 << 20), PAGES_OF_STRIP / 4096);
    }
}
