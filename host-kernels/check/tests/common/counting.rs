//! An allocator that counts the bytes of each thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vgpu_engine::ALLOCATION_BYTES;

/// Passes every call to the allocator of the system.
pub(crate) struct Counting;

thread_local! {
    /// Bytes that this thread has allocated and not freed, and the most since it was last reset.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // The thread ends: nobody measures.
    let _ = HELD.try_with(|held| {
        let now = held.get().0 + bytes;
        held.set((now, held.get().1.max(now)));
    });
}

fn bytes(size: usize) -> isize {
    (size + ALLOCATION_BYTES) as isize
}

// SAFETY: every call is passed to the allocator of the system, which fulfils the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(bytes(layout.size()));
        // SAFETY: the caller fulfils the contract of `alloc`, which is that of the system's
        // allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-bytes(layout.size()));
        // SAFETY: the caller fulfils the contract of `dealloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks exist while the contents are copied.
        count(bytes(size));
        count(-bytes(layout.size()));
        // SAFETY: the caller fulfils the contract of `realloc`, and the system's allocator has
        // allocated `ptr`.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// What a call of `body` on this thread has allocated.
pub(crate) struct Allocated {
    /// The bytes that are still allocated.
    pub(crate) kept: u64,
    /// The most bytes at any time.
    pub(crate) most: u64,
}

/// Calls `body`, and counts. Without [`Counting`] as the allocator of the program, all is 0.
pub(crate) fn counted<T>(body: impl FnOnce() -> T) -> (T, Allocated) {
    let before = HELD.with(|held| {
        held.set((held.get().0, held.get().0));
        held.get().0
    });
    let value = body();
    let (now, most) = HELD.with(Cell::get);
    let allocated = Allocated {
        kept: u64::try_from(now - before).unwrap_or(0),
        most: u64::try_from(most - before).unwrap_or(0),
    };
    (value, allocated)
}
