//! A tensor as kernels see it: a pointer, lengths and strides.

use std::ops::Range;

use vgpu_transport::ir::{Shape, Type};

/// Bytes of a cache line.
const LINE: usize = 64;

/// A tensor in memory.
///
/// The contract of [`View::new`] is that every element lies inside memory that stays allocated
/// while kernels use the view, and that plain elements are aligned. How the lengths of the tensors
/// of a node fit each other is the contract of [`Operands`](crate::operands::Operands). Two views
/// may overlap in any way (operations in place, or a hostile graph). So a kernel never creates a
/// `&mut [T]` of one view while it reads another: where source and destination can be the same
/// memory, it uses raw pointers.
///
/// A guest that has mapped a buffer can write the buffer's bytes from another process at any time.
/// A kernel therefore takes nothing from a tensor's bytes that must stay true. An element that
/// leads to an address (a row id, an expert id) is read once, volatile, and the copy is checked
/// and used. Any other element is a number: every value of it gives a result or a reported failure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct View {
    ptr: *mut u8,
    pub(crate) ty: Type,
    pub(crate) ne: [usize; 4],
    pub(crate) nb: [usize; 4],
}

// SAFETY: a view is an address without access. Each kernel argues why its accesses do not race.
unsafe impl Send for View {}
// SAFETY: a reference to a view gives its address, and no access to the memory there.
unsafe impl Sync for View {}

impl View {
    /// The view of a tensor whose first element is at `ptr`. The strides of the view are plain
    /// ([`Shape::with_plain_strides`]), so that kernels may compute with them.
    ///
    /// # Safety
    /// - `shape` is valid, and its byte length from `ptr` on lies inside one allocation that
    ///   exists as long as kernels use the view or a copy of it;
    /// - `ptr` and the strides are aligned for the elements of plain types;
    /// - no code of this process but the plan that owns the view writes these bytes while its
    ///   kernels run. Another process may write them, if the memory is mapped there: a kernel
    ///   reads an index once, volatile, and uses only the value that it has checked.
    pub(crate) unsafe fn new(ptr: *mut u8, shape: &Shape) -> View {
        let shape = shape.with_plain_strides();
        View {
            ptr,
            ty: shape.ty,
            ne: shape.ne.map(|n| n as usize),
            nb: shape.nb.map(|n| n as usize),
        }
    }

    /// Number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.ne.iter().product()
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.ne[1..].iter().product()
    }

    /// The indices (i1, i2, i3) of row `row`, counted with i1 fastest.
    pub(crate) fn row_index(&self, row: usize) -> [usize; 3] {
        let (ne1, ne2) = (self.ne[1].max(1), self.ne[2].max(1));
        [row % ne1, row / ne1 % ne2, row / (ne1 * ne2)]
    }

    /// The address of the row with these indices. The indices must be below the lengths; the
    /// address is then inside the buffer.
    pub(crate) fn row_ptr(&self, [i1, i2, i3]: [usize; 3]) -> *mut u8 {
        debug_assert!(i1 < self.ne[1] && i2 < self.ne[2] && i3 < self.ne[3]);
        self.ptr
            .wrapping_add(i1 * self.nb[1] + i2 * self.nb[2] + i3 * self.nb[3])
    }

    /// Prefetches `count` dense rows, adjacent in dimension 1, into the level-2 cache.
    pub(crate) fn prefetch_rows(&self, [i1, i2, i3]: [usize; 3], count: usize) {
        let bytes = self.shape().row_bytes() as usize;
        for row in (i1..i1 + count).map(|i1| self.row_ptr([i1, i2, i3])) {
            // From the line of the first byte to the line of the last.
            let before = row.addr() % LINE;
            for line in (0..before + bytes).step_by(LINE) {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: every x86-64 processor has the instruction, and it accesses no memory.
                unsafe {
                    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
                    _mm_prefetch::<_MM_HINT_T1>(row.wrapping_sub(before).wrapping_add(line).cast());
                }
                #[cfg(not(target_arch = "x86_64"))]
                let _ = (row, line);
            }
        }
    }

    /// The address of the first element.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Whether the blocks of each row are adjacent.
    pub(crate) fn dense_rows(&self) -> bool {
        self.shape().has_dense_rows()
    }

    /// The addresses of the tensor, from its first byte to one past its last.
    pub(crate) fn span(&self) -> Range<usize> {
        let start = self.ptr.addr();
        let length = self.shape().byte_len().unwrap_or(0) as usize; // validated: there is one
        start..start + length
    }

    /// Whether the address ranges of both tensors intersect.
    pub(crate) fn overlaps(&self, other: &View) -> bool {
        let (a, b) = (self.span(), other.span());
        a.start < b.end && b.start < a.end
    }

    /// Whether no two rows can share memory: the stride of each dimension is at least the length of
    /// all dimensions with smaller strides. (Rows interleaved in other ways count as shared.)
    pub(crate) fn distinct_rows(&self) -> bool {
        let mut outer: Vec<(usize, usize)> = (1..4)
            .filter(|&d| self.ne[d] != 1)
            .map(|d| (self.nb[d], self.ne[d]))
            .collect();
        outer.sort_unstable();
        let mut reach = self.shape().row_bytes() as usize;
        outer.into_iter().all(|(stride, length)| {
            let fits = stride >= reach;
            reach = stride.saturating_mul(length);
            fits
        })
    }

    fn shape(&self) -> Shape {
        Shape {
            ty: self.ty,
            ne: self.ne.map(|n| n as u64),
            nb: self.nb.map(|n| n as u64),
        }
    }
}
