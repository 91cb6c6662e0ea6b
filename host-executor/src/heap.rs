//! Memory that the allocator of the C library keeps after it was freed.

/// Gives the freed memory of all threads back to the kernel. The allocator would keep most of the
/// memory of graphs for later allocations, and no tenant is charged for it. Takes some milliseconds
/// for a heap of some hundred MiB. Inside the plugin it does nothing: the heap is the program's.
pub(crate) fn trim() {
    #[cfg(all(feature = "server", target_env = "gnu"))]
    // SAFETY: the function takes no pointer, locks each arena of the allocator, and moves no memory
    // that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
