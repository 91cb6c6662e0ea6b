//! The kernels of a GPU: loading their modules, and looking functions up.

use std::ffi::{CString, c_int};
use std::path::PathBuf;
use std::ptr;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use vgpu_engine::EngineError;

use super::error::{GpuError, check};
use crate::cubin::CubinLoader;
use crate::device::KernelId;
use crate::source::sources_for;

/// All kernels of a context, by [`KernelId`].
pub(super) struct Kernels(Vec<Kernel>);

/// A kernel that is loaded.
struct Kernel {
    name: &'static str,
    function: sys::CUfunction,
    /// The most bytes of dynamic shared memory of a block.
    max_dynamic_shared: u32,
}

// SAFETY: a `CUfunction` is a driver handle, which any thread may use with the context current.
unsafe impl Send for Kernels {}
// SAFETY: the table of handles does not change after `load`; launches change nothing in it.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the modules for `arch` into the current context. The kernels may use up to
    /// `max_shared` bytes of shared memory a block, static and dynamic together.
    ///
    /// More than 48 KiB is opt-in for each function (CUDA programming guide, "Shared Memory" of the
    /// compute capability).
    ///
    /// # Errors
    /// [`GpuError::Compile`] if a module has to be compiled and cannot be, [`GpuError::Driver`] if
    /// the driver refuses one.
    ///
    /// # Safety
    /// A context is current to the calling thread, and the result is used in this context only.
    pub(super) unsafe fn load(
        arch: &str,
        cache: Option<PathBuf>,
        max_shared: u32,
    ) -> Result<Kernels, GpuError> {
        let mut cubins = CubinLoader::new(arch.into(), cache);
        let mut kernels = Vec::new();
        for source in sources_for(arch) {
            let cubin = cubins.load(source)?;
            let mut module = ptr::null_mut();
            // SAFETY: `cubin` is a whole ELF image that NVRTC made, which the driver copies. The
            // caller guarantees that a context is current. The module is never unloaded: it goes
            // with the context.
            let code = unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) };
            check("cuModuleLoadData", code)?;
            for name in source.kernels() {
                // SAFETY: `module` was loaded into the current context above.
                let kernel = unsafe { find_function(module, name, max_shared)? };
                kernels.push(kernel);
            }
        }
        Ok(Kernels(kernels))
    }

    /// The kernel called `name`.
    ///
    /// # Errors
    /// [`EngineError::Device`] if there is no such kernel for the architecture.
    pub(super) fn find(&self, name: &str) -> Result<KernelId, EngineError> {
        let found = self.0.iter().position(|kernel| kernel.name == name);
        found
            .map(|id| KernelId(id as u32))
            .ok_or_else(|| EngineError::Device {
                message: format!("there is no kernel {name}"),
            })
    }

    /// The driver's handle of a kernel that [`find`](Kernels::find) has returned.
    pub(super) fn function(&self, kernel: KernelId) -> sys::CUfunction {
        self.0[kernel.0 as usize].function
    }

    /// The name of a kernel.
    pub(super) fn name(&self, kernel: KernelId) -> &'static str {
        self.0[kernel.0 as usize].name
    }

    /// The most bytes of dynamic shared memory of a block of a kernel.
    pub(super) fn max_dynamic_shared(&self, kernel: KernelId) -> u32 {
        self.0[kernel.0 as usize].max_dynamic_shared
    }
}

/// The function `name` of a module, opted in to `max_shared` bytes of shared memory.
///
/// # Errors
/// [`GpuError::Driver`] if the module has no such function, or the function needs more static
/// shared memory than `max_shared`.
///
/// # Safety
/// `module` belongs to the context that is current to the calling thread.
unsafe fn find_function(
    module: sys::CUmodule,
    name: &'static str,
    max_shared: u32,
) -> Result<Kernel, GpuError> {
    let symbol = CString::new(name).expect("a kernel's name has no zero byte");
    let mut function = ptr::null_mut();
    // SAFETY: the caller guarantees that `module` is of the current context. `symbol` ends with a
    // zero byte, and `function` is a valid place for the handle.
    let code = unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) };
    check("cuModuleGetFunction", code)?;
    let mut of_kernel = 0;
    // SAFETY: `function` is valid, from the call above; `of_kernel` is a place for the result.
    let code = unsafe {
        sys::cuFuncGetAttribute(
            &mut of_kernel,
            Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            function,
        )
    };
    check("cuFuncGetAttribute", code)?;
    // The static shared memory of a kernel counts towards the limit of the block.
    let max_dynamic = max_shared as c_int - of_kernel;
    // SAFETY: `function` is valid, from the call above.
    let code = unsafe {
        sys::cuFuncSetAttribute(
            function,
            Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            max_dynamic,
        )
    };
    check("cuFuncSetAttribute", code)?;
    Ok(Kernel {
        name,
        function,
        max_dynamic_shared: max_dynamic as u32,
    })
}
