//! The CUDA kernels compiled for the CPU.
//!
//! The kernels of the CUDA engine are ordinary C++ but for what a GPU adds: threads in blocks, barriers,
//! exchanges between the lanes of a warp. `shim.h` provides those, with fibers. So the very source that runs on
//! a GPU is tested on any machine: index arithmetic, tails, strides, the layout of shared memory. What it cannot
//! show is speed, races between blocks, and the order of memory accesses between threads.

use std::ffi::{CStr, CString, c_char, c_void};

unsafe extern "C" {
    fn vgpu_shim_find(name: *const c_char, params: *mut usize) -> u32;
    fn vgpu_shim_launch(
        name: *const c_char,
        grid: *const u32,
        threads: *const u32,
        shared: usize,
        params: *const c_void,
    ) -> *const c_char;
}

/// A kernel, by name.
#[derive(Debug, Clone)]
pub struct Kernel {
    name: CString,
    threads: u32,
    params: usize,
}

impl Kernel {
    /// The kernel called `name`.
    pub fn find(name: &str) -> Option<Kernel> {
        let name = CString::new(name).ok()?;
        let mut params = 0;
        // SAFETY: a string that ends with a zero, and a place for the size.
        let threads = unsafe { vgpu_shim_find(name.as_ptr(), &mut params) };
        (threads != 0).then_some(Kernel {
            name,
            threads,
            params,
        })
    }

    /// Runs the kernel in `grid` blocks of `threads` with `shared` bytes of shared memory each, and returns
    /// when it is over. What a kernel must not do, and this can see, is an error.
    ///
    /// # Safety
    ///
    /// Addresses in `params` must be of memory that the kernel may use as it does.
    pub unsafe fn launch(
        &self,
        grid: [u32; 3],
        threads: [u32; 3],
        shared: usize,
        params: &[u8],
    ) -> Result<(), String> {
        let count = threads.iter().product::<u32>();
        if count == 0 || count > self.threads {
            return Err(format!(
                "{:?} in blocks of {count} threads, made for {}",
                self.name, self.threads
            ));
        }
        if params.len() != self.params {
            return Err(format!(
                "{:?} with {} bytes of parameters, it has {}",
                self.name,
                params.len(),
                self.params
            ));
        }
        // Parameters are structures: they need their alignment.
        let mut aligned = vec![0u64; params.len().div_ceil(8)];
        // SAFETY: the vector has as many bytes; the caller answers for what the kernel does with them; an
        // error is a string that lives until this thread's next launch.
        unsafe {
            std::ptr::copy_nonoverlapping(
                params.as_ptr(),
                aligned.as_mut_ptr().cast::<u8>(),
                params.len(),
            );
            let error = vgpu_shim_launch(
                self.name.as_ptr(),
                grid.as_ptr(),
                threads.as_ptr(),
                shared,
                aligned.as_ptr().cast(),
            );
            if error.is_null() {
                Ok(())
            } else {
                let error = CStr::from_ptr(error).to_string_lossy();
                Err(format!("{:?}: {error}", self.name))
            }
        }
    }
}
