//! Copies of elements of any type without conversion.

use vgpu_transport::ir::Type;

use super::walk::Walk;
use crate::formats::{f32_to_bf16, f32_to_f16};
use crate::kernel::Kernel;
use crate::view::View;

/// Bytes that one piece of work moves.
const GRAIN_BYTES: usize = 1 << 15;

/// Elements on a side of the tiles in which matrices are transposed: a few cache lines.
const TILE_SIDE: usize = 32;

/// Copies `n` elements (of quantised types: blocks) of `size` bytes that lie `dst_step` and
/// `src_step` bytes apart.
///
/// # Safety
/// All are in readable or writable memory. They may overlap; then an element may be read after it was
/// written.
pub(super) unsafe fn copy_line(
    dst: *mut u8,
    dst_step: usize,
    src: *const u8,
    src_step: usize,
    n: usize,
    size: usize,
) {
    // SAFETY: the caller guarantees `n` elements on both sides.
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
/// As [`copy_line`], with elements as large as a `T`.
unsafe fn copy_each<T>(dst: *mut u8, dst_step: usize, src: *const u8, src_step: usize, n: usize) {
    for i in 0..n {
        let (to, from) = (
            dst.wrapping_add(i * dst_step),
            src.wrapping_add(i * src_step),
        );
        // SAFETY: the caller guarantees `n` elements on both sides.
        unsafe {
            to.cast::<T>()
                .write_unaligned(from.cast::<T>().read_unaligned())
        };
    }
}

/// The bytes of one element of a plain type; those behind its size are 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Element {
    bytes: [u8; 8],
    size: usize,
}

impl Element {
    /// Zero, which is zero bytes in every type.
    pub(super) fn zero(ty: Type) -> Element {
        Element {
            bytes: [0; 8],
            size: ty.block_bytes() as usize,
        }
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

    /// Writes it `n` times, `step` bytes apart.
    ///
    /// # Safety
    /// There are `n` elements of its type in writable memory.
    pub(super) unsafe fn fill(&self, dst: *mut u8, step: usize, n: usize) {
        // SAFETY: copies of one element, which is no tensor memory; the caller guarantees the
        // others.
        unsafe { copy_line(dst, step, self.bytes.as_ptr(), 0, n, self.size) }
    }
}

/// Copies `src` to `dst`, of the same type. A source with smaller extents repeats.
pub(super) fn copy(dst: View, src: View) -> Kernel {
    let walk = Walk::new(dst, [src]);
    let line = *walk.line();
    let size = dst.ty.block_bytes() as usize;
    if let Some(across) = walk.dense_elsewhere(0) {
        // A transposition: in tiles, so that every cache line of the source is read once.
        let other = *walk.outer(across);
        return Box::new(move |w| {
            walk.tiles(w, across, TILE_SIDE, |dst, [src], n, m| {
                for i in 0..m {
                    let (to, from) = (dst.wrapping_add(i * other.dst), src.wrapping_add(i * size));
                    // SAFETY: the walk stays inside both tensors.
                    unsafe { copy_line(to, line.dst, from, line.src[0], n, size) };
                }
            });
            Ok(())
        });
    }
    Box::new(move |w| {
        walk.pieces(w, GRAIN_BYTES / size, |dst, [src], n| {
            // SAFETY: the walk stays inside both tensors.
            unsafe { copy_line(dst, line.dst, src, line.src[0], n, size) };
        });
        Ok(())
    })
}

/// Writes one element everywhere.
pub(super) fn fill(dst: View, element: Element) -> Kernel {
    let walk = Walk::new(dst, []);
    let step = walk.line().dst;
    Box::new(move |w| {
        walk.pieces(w, GRAIN_BYTES / element.size, |dst, [], n| {
            // SAFETY: the walk stays inside the tensor.
            unsafe { element.fill(dst, step, n) };
        });
        Ok(())
    })
}

/// Calls `body` with the indices of each row of `dst` in this worker's share, and with its place.
pub(super) fn each_row(
    dst: View,
    body: impl Fn([usize; 3], *mut u8) + Send + Sync + 'static,
) -> Kernel {
    Box::new(move |w| {
        for row in w.share(dst.rows()) {
            let index = dst.row_index(row);
            body(index, dst.row_ptr(index));
        }
        Ok(())
    })
}
