//! The CUDA kernels compiled for the CPU, for tests.
//!
//! The kernels are C++ plus the features of a GPU: threads in blocks, barriers, warp shuffles,
//! tensor-core instructions. `shim.h` provides these with fibers, so that tests run the kernel
//! sources on any machine: index arithmetic, tails, strides, shared-memory layouts. The shim does
//! not show performance, nor weak memory order between threads. The blocks of a cooperative launch
//! run in many interleavings.

mod models;

use std::ffi::{CStr, CString, c_char, c_void};

pub use models::DeviceModel;

unsafe extern "C" {
    fn vgpu_shim_find(name: *const c_char, params: *mut usize) -> u32;
    fn vgpu_shim_launch(
        name: *const c_char,
        grid: *const u32,
        threads: *const u32,
        shared: usize,
        params: *const c_void,
    ) -> *const c_char;
    fn vgpu_shim_launch_cooperative(
        name: *const c_char,
        blocks: u32,
        threads: *const u32,
        shared: usize,
        params: *const c_void,
        seed: u64,
    ) -> *const c_char;
}

/// A kernel, found by name.
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
        // SAFETY: `name` is NUL-terminated, and `params` is valid for a write.
        let threads = unsafe { vgpu_shim_find(name.as_ptr(), &mut params) };
        (threads != 0).then_some(Kernel {
            name,
            threads,
            params,
        })
    }

    /// Runs the kernel synchronously with `grid` blocks of `threads`, and `shared` bytes of dynamic
    /// shared memory each.
    ///
    /// # Errors
    ///
    /// If `threads` or the size of `params` do not fit the kernel, or the kernel does something
    /// invalid that the shim detects.
    ///
    /// # Safety
    ///
    /// Addresses in `params` must point to memory that the kernel may access as it does.
    pub unsafe fn launch(
        &self,
        grid: [u32; 3],
        threads: [u32; 3],
        shared: usize,
        params: &[u8],
    ) -> Result<(), String> {
        let params = self.check(threads, params)?;
        // SAFETY: `check` has compared the size of `params` with that of the kernel's structure;
        // the caller guarantees the memory that the kernel accesses.
        self.outcome(unsafe {
            vgpu_shim_launch(
                self.name.as_ptr(),
                grid.as_ptr(),
                threads.as_ptr(),
                shared,
                params.as_ptr().cast(),
            )
        })
    }

    /// Runs the blocks of a one-dimensional grid concurrently, so that they can wait for each
    /// other. `seed` selects the interleaving.
    ///
    /// # Errors
    ///
    /// As for [`Kernel::launch`], and if the blocks deadlock.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::launch`].
    pub unsafe fn launch_cooperative(
        &self,
        blocks: u32,
        threads: [u32; 3],
        shared: usize,
        params: &[u8],
        seed: u64,
    ) -> Result<(), String> {
        let params = self.check(threads, params)?;
        // SAFETY: as in `launch`.
        self.outcome(unsafe {
            vgpu_shim_launch_cooperative(
                self.name.as_ptr(),
                blocks,
                threads.as_ptr(),
                shared,
                params.as_ptr().cast(),
                seed,
            )
        })
    }

    /// The parameters at their alignment, after a check of their size and of the number of threads.
    fn check(&self, threads: [u32; 3], params: &[u8]) -> Result<Vec<u64>, String> {
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
        let words = { params.chunks(8) }.map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        });
        Ok(words.collect())
    }

    /// Converts the error string of a launch.
    fn outcome(&self, error: *const c_char) -> Result<(), String> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a NUL-terminated string that is valid until this thread's next launch.
        let error = unsafe { CStr::from_ptr(error) }.to_string_lossy();
        Err(format!("{:?}: {error}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result of the first thread of `shim_check_group` with a mistake of `checks.cpp`, or none.
    fn check(mistake: u64) -> Result<f32, String> {
        // Column `c` has ones in its first `c` elements; 16-byte units are swizzled within rows of
        // an atom.
        let mut matrix = vec![0u16; 64 * 64];
        for c in 0..64 {
            for k in 0..c {
                matrix[c * 64 + ((k / 8) ^ (c % 8)) * 8 + k % 8] = 0x3c00;
            }
        }
        // Bulk copies require 16-byte alignment.
        let mut aligned = vec![0u128; matrix.len() / 8];
        let mut sums = vec![0f32; 128];
        let kernel = Kernel::find("shim_check_group").expect("it is compiled in");
        // SAFETY: the kernel reads the matrix of 8 KiB and writes one float for each of 128
        // threads.
        unsafe {
            std::ptr::copy_nonoverlapping(matrix.as_ptr(), aligned.as_mut_ptr().cast(), 64 * 64);
            let params = [aligned.as_ptr() as u64, sums.as_mut_ptr() as u64, mistake];
            let bytes: Vec<u8> = params.iter().flat_map(|word| word.to_ne_bytes()).collect();
            kernel.launch([1; 3], [128, 1, 1], 10 << 10, &bytes)?;
        }
        Ok(sums[0])
    }

    #[test]
    fn groups_multiply_the_copied_tiles() {
        // The first thread has columns 0 and 1 of every eight, in two equal rows.
        let expected: usize = (0..8).map(|j| 2 * (8 * j + 8 * j + 1)).sum();
        assert_eq!(check(0), Ok(expected as f32));
    }

    #[test]
    fn invalid_asynchronous_accesses_are_detected() {
        for (mistake, expected) in [
            (3, "a bulk copy to what a product under way reads"),
            (6, "a product that was not begun"),
            (7, "wait for each other for ever"),
        ] {
            let error = check(mistake).expect_err("it is wrong");
            assert!(error.contains(expected), "{error}");
        }
        let right = check(0).expect("it is right");
        for mistake in [1, 2, 4, 5] {
            // An error or a wrong result, depending on the order of threads.
            let wrong = check(mistake).unwrap_or(f32::NAN);
            assert!(wrong != right, "mistake {mistake} gives {wrong}");
        }
    }
}
