//! Host memory that the GPU reads and writes directly (mapped page-locked memory).

use std::alloc::Layout;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use tracing::warn;
use vgpu_transport::size::shown;

use super::context::Context;
use super::error::{GpuError, check};

/// Page-locked memory of this process, mapped into the GPU's address space. The process allocates
/// the memory, not the driver, so the memory outlives a context that is destroyed.
pub(super) struct HostMemory {
    context: Arc<Context>,
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the object owns its memory; `start` is only an address.
unsafe impl Send for HostMemory {}

impl HostMemory {
    /// Allocates `size` zero bytes, at least 1, and registers them with `context`, which is
    /// current.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver cannot lock the pages.
    pub(super) fn new(context: &Arc<Context>, size: usize) -> Result<HostMemory, GpuError> {
        const PAGE: usize = 4096;
        let layout = Layout::from_size_align(size.next_multiple_of(PAGE), PAGE);
        let layout = layout.expect("the size is a few pages");
        // SAFETY: the layout has at least one page, so its size is not 0.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the pages were allocated above. `drop` frees them only when they are not
        // registered any more.
        let code = unsafe { sys::cuMemHostRegister_v2(start.cast(), layout.size(), flags) };
        if let Err(error) = check("cuMemHostRegister", code) {
            // SAFETY: the pages were allocated above with this layout, and are not registered.
            unsafe { std::alloc::dealloc(start, layout) };
            return Err(error);
        }
        Ok(HostMemory {
            context: Arc::clone(context),
            start,
            layout,
        })
    }

    /// The address for the host.
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // A `Gpu` destroys its context before it drops this object, unless its construction fails.
        let unregister = || {
            let entered = self.context.enter();
            // SAFETY: `new` has registered the pages. Nothing uses them: their owner is gone.
            let code = entered.map(|_| unsafe { sys::cuMemHostUnregister(self.start.cast()) });
            code.is_ok_and(|code| code == CUresult::CUDA_SUCCESS)
        };
        if !self.context.is_gone() && !unregister() {
            // The GPU may still write to them, and they cannot be registered again.
            warn!(
                "{} of page-locked memory are leaked",
                shown(self.layout.size() as u64)
            );
            return;
        }
        // SAFETY: `new` has allocated this memory with this layout. The memory is not registered:
        // its registration has ended with the context, or above.
        unsafe { std::alloc::dealloc(self.start, self.layout) };
    }
}
