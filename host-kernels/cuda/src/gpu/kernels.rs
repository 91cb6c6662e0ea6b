//! The kernels of a GPU: loading their modules, and looking functions up.
//!
//! A kernel that does not load is absent: the engine does its work with other kernels.

use std::ffi::{CString, c_int};
use std::path::PathBuf;
use std::ptr;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use tracing::warn;
use vgpu_engine::EngineError;

use super::error::{GpuError, check};
use crate::cubin::CubinLoader;
use crate::device::KernelId;
use crate::nvrtc::CompileError;
use crate::source::{Source, sources_for};

/// All kernels of a context, by [`KernelId`].
pub(super) struct Kernels {
    kernels: Vec<Kernel>,
    /// A hash of the machine code of all modules.
    code_hash: blake3::Hash,
}

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
    /// Kernels that do not load are left out, with a warning that names them.
    ///
    /// # Errors
    /// [`GpuError::Compile`] if a module has to be compiled and there is no compiler. If no kernel
    /// loads at all, the [`GpuError`] of the first one.
    ///
    /// # Safety
    /// A context is current to the calling thread, and the result is used in this context only.
    pub(super) unsafe fn load(
        arch: &str,
        cache: Option<PathBuf>,
        max_shared: u32,
    ) -> Result<Kernels, GpuError> {
        let mut cubins = CubinLoader::new(arch.into(), cache);
        let mut hasher = blake3::Hasher::new();
        let load_module = |source: &Source| -> Result<sys::CUmodule, GpuError> {
            let cubin = cubins.load(source)?;
            hasher.update(&cubin);
            let mut module = ptr::null_mut();
            // SAFETY: `cubin` is a whole ELF image that NVRTC made, which the driver copies. The
            // caller guarantees that a context is current. The module is never unloaded: it goes
            // with the context.
            let code = unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) };
            check("cuModuleLoadData", code)?;
            Ok(module)
        };
        // SAFETY: `load_module` has loaded `module` into the current context.
        let find = |module, name| unsafe { find_function(module, name, max_shared) };
        let kernels = load_all(sources_for(arch), load_module, find)?;
        Ok(Kernels {
            kernels,
            code_hash: hasher.finalize(),
        })
    }

    /// A hash of the machine code of all modules.
    pub(super) fn code_hash(&self) -> blake3::Hash {
        self.code_hash
    }

    /// The kernel called `name`.
    ///
    /// # Errors
    /// [`EngineError::Device`] if there is no such kernel for the architecture.
    pub(super) fn find(&self, name: &str) -> Result<KernelId, EngineError> {
        let found = self.kernels.iter().position(|kernel| kernel.name == name);
        found
            .map(|id| KernelId(id as u32))
            .ok_or_else(|| EngineError::Device {
                message: format!("there is no kernel {name}"),
            })
    }

    /// The driver's handle of a kernel that [`find`](Kernels::find) has returned.
    pub(super) fn function(&self, kernel: KernelId) -> sys::CUfunction {
        self.kernels[kernel.0 as usize].function
    }

    /// The name of a kernel.
    pub(super) fn name(&self, kernel: KernelId) -> &'static str {
        self.kernels[kernel.0 as usize].name
    }

    /// The most bytes of dynamic shared memory of a block of a kernel.
    pub(super) fn max_dynamic_shared(&self, kernel: KernelId) -> u32 {
        self.kernels[kernel.0 as usize].max_dynamic_shared
    }
}

/// The kernels of these sources that load.
///
/// # Errors
/// As for [`Kernels::load`].
fn load_all<M: Copy, K>(
    sources: impl Iterator<Item = &'static Source>,
    mut load_module: impl FnMut(&Source) -> Result<M, GpuError>,
    find: impl Fn(M, &'static str) -> Result<K, GpuError>,
) -> Result<Vec<K>, GpuError> {
    let mut kernels = Vec::new();
    let mut first_error = None;
    for source in sources {
        let module = match load_module(source) {
            // Of all modules, not of this one.
            Err(error @ GpuError::Compile(CompileError::NoCompiler { .. })) => return Err(error),
            Err(error) => {
                let names: Vec<_> = source.kernels().collect();
                warn!("these kernels do not load: {}: {error}", names.join(", "));
                first_error.get_or_insert(error);
                continue;
            }
            Ok(module) => module,
        };
        for name in source.kernels() {
            match find(module, name) {
                Ok(kernel) => kernels.push(kernel),
                Err(error) => {
                    warn!("the kernel {name} does not load: {error}");
                    first_error.get_or_insert(error);
                }
            }
        }
    }
    match first_error {
        Some(error) if kernels.is_empty() => Err(error),
        _ => Ok(kernels),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(call: &'static str) -> GpuError {
        GpuError::Driver {
            call,
            reason: "no binary for this GPU".into(),
        }
    }

    /// The kernels for sm_90a, without the modules and kernels that `fails` names.
    fn load(fails: impl Fn(&str) -> bool) -> Result<Vec<&'static str>, GpuError> {
        let module = |source: &Source| match fails(source.name) {
            true => Err(refused("cuModuleLoadData")),
            false => Ok(()),
        };
        let find = |(), name| match fails(name) {
            true => Err(refused("cuModuleGetFunction")),
            false => Ok(name),
        };
        load_all(sources_for("sm_90a"), module, find)
    }

    #[test]
    fn kernels_that_do_not_load_are_left_out() {
        let all = load(|_| false).expect("all load");
        let of_module = |name: &&str| name.starts_with("vg_fattn_sm90_");
        let loaded = load(|name| ["fattn_sm90", "vg_rope_cache"].contains(&name));
        let loaded = loaded.expect("the others load");
        let expected: Vec<_> = { all.iter().copied() }
            .filter(|name| !of_module(name) && *name != "vg_rope_cache")
            .collect();
        assert_eq!(loaded, expected);
        assert_eq!(all.len() - loaded.len(), 4);
    }

    #[test]
    fn a_device_without_any_kernel_is_an_error() {
        let error = load(|_| true).expect_err("nothing loads");
        assert!(error.to_string().contains("cuModuleLoadData"), "{error}");
        let without_compiler = |_: &Source| {
            let reason = "libnvrtc.so: not found".into();
            Err::<(), _>(CompileError::NoCompiler { reason }.into())
        };
        let found = load_all(sources_for("sm_80"), without_compiler, |(), name| Ok(name));
        assert!(matches!(found, Err(GpuError::Compile(_))));
    }
}
