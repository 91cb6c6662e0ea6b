//! Copies of elements of any type without conversion.

use std::ops::Range;

use vgpu_transport::ir::Type;

use super::walk::Walk;
use crate::formats::{f32_to_bf16, f32_to_f16};
use crate::kernel::Kernel;
use crate::view::View;

/// Bytes of a unit of work.
const GRAIN_BYTES: usize = 1 << 15;

/// The side of the tiles in which matrices are transposed, in elements: a few cache lines.
const TILE_SIDE: usize = 32;

/// Copies `n` elements (blocks, for quantised types) of `size` bytes, `src_step` bytes apart in the
/// source and `dst_step` bytes apart in the destination.
///
/// # Safety
/// The elements are readable at `src` and writable at `dst`. The two may overlap: then an element
/// may be read after it was written.
pub(super) unsafe fn copy_strided(
    dst: *mut u8,
    dst_step: usize,
    src: *const u8,
    src_step: usize,
    n: usize,
    size: usize,
) {
    // SAFETY: the caller guarantees `n` elements of `size` bytes at `src` and `dst`, with these
    // strides.
    unsafe {
        if dst_step == size && src_step == size {
            std::ptr::copy(src, dst, n * size);
            return;
        }
        match size {
            1 => copy_each::<u8>(dst, dst_step, src, src_step, n),
            2 => copy_each::<u16>(dst, dst_step, src, src_step, n),
            4 => copy_each::<u32>(dst, dst_step, src, src_step, n),
            8 => copy_each::<u64>(dst, dst_step, src, src_step, n),
            _ => {
                for i in 0..n {
                    let from = src.wrapping_add(i * src_step);
                    std::ptr::copy(from, dst.wrapping_add(i * dst_step), size);
                }
            }
        }
    }
}

/// # Safety
/// As [`copy_strided`], with elements of the size of `T`.
unsafe fn copy_each<T>(dst: *mut u8, dst_step: usize, src: *const u8, src_step: usize, n: usize) {
    for i in 0..n {
        let (to, from) = (
            dst.wrapping_add(i * dst_step),
            src.wrapping_add(i * src_step),
        );
        // SAFETY: `i < n`: the caller guarantees the element at both addresses. The accesses are
        // unaligned.
        unsafe {
            to.cast::<T>()
                .write_unaligned(from.cast::<T>().read_unaligned())
        };
    }
}

/// The bytes of one element of a plain type. Bytes after `size` are 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Element {
    bytes: [u8; 8],
    size: usize,
}

impl Element {
    /// Zero. All its bytes are 0 in every type.
    ///
    /// # Panics
    /// If the type is quantised.
    pub(super) fn zero(ty: Type) -> Element {
        let (bytes, size) = ([0; 8], ty.block_bytes() as usize);
        assert!(size <= bytes.len(), "an element of {ty:?} is a block");
        Element { bytes, size }
    }

    /// A value of a floating-point type.
    pub(super) fn of(ty: Type, value: f32) -> Element {
        let mut element = Element::zero(ty);
        match ty {
            Type::F32 => element.bytes[..4].copy_from_slice(&value.to_ne_bytes()),
            Type::F16 => element.bytes[..2].copy_from_slice(&f32_to_f16(value).to_ne_bytes()),
            Type::Bf16 => element.bytes[..2].copy_from_slice(&f32_to_bf16(value).to_ne_bytes()),
            _ => unreachable!("the rules claim no {ty:?}"),
        }
        element
    }

    /// Writes the element `n` times, `step` bytes apart.
    ///
    /// # Safety
    /// `dst` is writable for `n` elements of this size, `step` bytes apart.
    pub(super) unsafe fn fill(&self, dst: *mut u8, step: usize, n: usize) {
        // SAFETY: the source is one element of `size <= 8` bytes, repeated with stride 0. The
        // caller guarantees `n` elements at `dst`.
        unsafe { copy_strided(dst, step, self.bytes.as_ptr(), 0, n, self.size) }
    }
}

/// Copies `src` to `dst`, of the same type. A source with smaller lengths is broadcast.
///
/// # Panics
/// If the types differ.
pub(super) fn copy(dst: View, src: View) -> Kernel {
    assert_eq!(dst.ty, src.ty, "a copy converts nothing");
    let walk = Walk::new(dst, [src]);
    let inner = *walk.inner();
    let size = dst.ty.block_bytes() as usize;
    if let Some(crossed) = walk.dense_elsewhere(0) {
        // A transposition: in tiles, so that every cache line of the source is read once.
        let other = *walk.outer(crossed);
        return Box::new(move |w| {
            walk.tiles(w, crossed, TILE_SIDE, |dst, [src], n, m| {
                for i in 0..m {
                    let (to, from) = (dst.wrapping_add(i * other.dst), src.wrapping_add(i * size));
                    // SAFETY: the walk returns a tile of `n` by `m` elements that is inside both
                    // tensors, with the strides of the two loops.
                    unsafe { copy_strided(to, inner.dst, from, inner.src[0], n, size) };
                }
            });
            Ok(())
        });
    }
    Box::new(move |w| {
        walk.strips(w, GRAIN_BYTES / size, |dst, [src], n| {
            // SAFETY: the walk returns `n` elements of both tensors with the strides of `inner`.
            unsafe { copy_strided(dst, inner.dst, src, inner.src[0], n, size) };
        });
        Ok(())
    })
}

/// Sets every element of `dst`.
///
/// # Panics
/// If the element has another size.
pub(super) fn fill(dst: View, element: Element) -> Kernel {
    assert_eq!(dst.ty.block_bytes() as usize, element.size);
    let walk = Walk::new(dst, []);
    let step = walk.inner().dst;
    Box::new(move |w| {
        walk.strips(w, GRAIN_BYTES / element.size, |dst, [], n| {
            // SAFETY: the walk returns `n` elements of the tensor, `step` bytes apart, which no
            // other worker writes.
            unsafe { element.fill(dst, step, n) };
        });
        Ok(())
    })
}

/// Calls `body` for parts of up to `grain` elements of the rows of `dst`, with the indices and the
/// address of the row, and the indices of the elements.
pub(super) fn each_part(
    dst: View,
    grain: usize,
    body: impl Fn([usize; 3], *mut u8, Range<usize>) + Send + Sync + 'static,
) -> Kernel {
    let (n, grain) = (dst.ne[0], grain.max(1));
    let parts = n.div_ceil(grain);
    Box::new(move |w| {
        for unit in w.range_of(dst.rows() * parts) {
            let (row, start) = (unit / parts, unit % parts * grain);
            let index = dst.row_index(row);
            body(index, dst.row_ptr(index), start..n.min(start + grain));
        }
        Ok(())
    })
}

/// Calls `body` for each row of `dst` in this worker's range, with the indices and the address of
/// the row.
pub(super) fn each_row(
    dst: View,
    body: impl Fn([usize; 3], *mut u8) + Send + Sync + 'static,
) -> Kernel {
    Box::new(move |w| {
        for row in w.range_of(dst.rows()) {
            let index = dst.row_index(row);
            body(index, dst.row_ptr(index));
        }
        Ok(())
    })
}
