//! Host memory that the GPU reads and writes directly (mapped page-locked memory).

use std::alloc::Layout;

use cudarc::driver::sys;

use super::error::{GpuError, check};

/// Page-locked memory of this process, mapped into the GPU's address space. The process allocates
/// the memory, not the driver, so the memory outlives a context that is destroyed.
pub(super) struct HostMemory {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the object owns its memory; `start` is only an address.
unsafe impl Send for HostMemory {}

impl HostMemory {
    /// Allocates `size` zero bytes, at least 1, and registers them with the current context.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver cannot lock the pages.
    pub(super) fn new(size: usize) -> Result<HostMemory, GpuError> {
        const PAGE: usize = 4096;
        let layout = Layout::from_size_align(size.next_multiple_of(PAGE), PAGE);
        let layout = layout.expect("the size is a few pages");
        // SAFETY: the layout has at least one page, so its size is not 0.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        let memory = HostMemory { start, layout };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the pages were allocated above and are freed only by `drop`, which the owner runs
        // after the context is destroyed, so the registration never outlives the pages.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(start.cast(), layout.size(), flags)
        })?;
        Ok(memory)
    }

    /// The address for the host.
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: `new` has allocated this memory with this layout. A `Gpu` destroys its context
        // before it drops this object. If the construction of a `Gpu` fails, the context may still
        // exist, but nothing was launched in it that uses this memory.
        unsafe { std::alloc::dealloc(self.start, self.layout) };
    }
}
