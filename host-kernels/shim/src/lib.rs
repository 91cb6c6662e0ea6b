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
    fn vgpu_shim_set_stale(ranges: *const StaleRange, count: usize);
    fn vgpu_shim_launch_cooperative(
        name: *const c_char,
        blocks: u32,
        threads: *const u32,
        shared: usize,
        params: *const c_void,
        seed: u64,
    ) -> *const c_char;
}

/// A range of memory for the C code.
#[repr(C)]
struct StaleRange {
    at: *mut u8,
    bytes: usize,
    before: *mut u8,
}

/// A range of memory that launches before another one have written.
#[derive(Debug)]
pub struct Stale {
    /// The address.
    pub address: u64,
    /// The content before these launches.
    pub before: Vec<u8>,
}

/// Why a launch failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShimError {
    /// A block of the launch has no threads, or more than the kernel is made for.
    #[error("{kernel:?} in blocks of {threads} threads, made for {max}")]
    Threads {
        /// The name of the kernel.
        kernel: CString,
        /// Threads of a block of the launch.
        threads: u32,
        /// The most threads of a block that the kernel is made for.
        max: u32,
    },
    /// The size of the parameters is not that of the kernel's structure.
    #[error("{kernel:?} with {given} bytes of parameters, it has {expected}")]
    Parameters {
        /// The name of the kernel.
        kernel: CString,
        /// Bytes of parameters of the launch.
        given: usize,
        /// Bytes of the kernel's structure.
        expected: usize,
    },
    /// The kernel has done something invalid, such as an unaligned access, or its blocks wait for
    /// each other for ever.
    #[error("{kernel:?}: {reason}")]
    Kernel {
        /// The name of the kernel.
        kernel: CString,
        /// What the shim has detected.
        reason: String,
    },
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

    /// The most threads of a block that the kernel is made for.
    pub fn max_threads(&self) -> u32 {
        self.threads
    }

    /// The size of the kernel's structure of parameters.
    pub fn parameter_bytes(&self) -> usize {
        self.params
    }

    /// Runs the kernel synchronously with `grid` blocks of `threads`, and `shared` bytes of dynamic
    /// shared memory each.
    ///
    /// # Errors
    ///
    /// - [`ShimError::Threads`] and [`ShimError::Parameters`] if `threads` or the size of `params`
    ///   do not fit the kernel. Nothing has run.
    /// - [`ShimError::Kernel`] if the kernel does something invalid that the shim detects.
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
    ) -> Result<(), ShimError> {
        let params = self.check(threads, params)?;
        // SAFETY: `check` has compared the size of `params` with that of the kernel's structure;
        // the caller guarantees the memory that the kernel accesses.
        let error = unsafe {
            vgpu_shim_launch(
                self.name.as_ptr(),
                grid.as_ptr(),
                threads.as_ptr(),
                shared,
                params.as_ptr().cast(),
            )
        };
        // SAFETY: the launch on this thread has just returned `error`.
        unsafe { self.outcome(error) }
    }

    /// [`launch`](Kernel::launch) of a kernel that begins before the launches before it are
    /// complete (programmatic dependent launch). Each block finds `stale` as it was before them,
    /// until its threads have called `grid_dependency_wait` or wait for one that has. What a block
    /// writes there before is lost. A write before the wait to memory that launches before it only
    /// read is not seen.
    ///
    /// # Errors
    ///
    /// As for [`Kernel::launch`].
    ///
    /// # Safety
    ///
    /// As for [`Kernel::launch`]. The ranges of `stale` are memory that nobody else uses, and do
    /// not overlap.
    pub unsafe fn launch_ahead(
        &self,
        grid: [u32; 3],
        threads: [u32; 3],
        shared: usize,
        params: &[u8],
        stale: &mut [Stale],
    ) -> Result<(), ShimError> {
        let ranges: Vec<StaleRange> = { stale.iter_mut() }
            .map(|range| StaleRange {
                at: range.address as *mut u8,
                bytes: range.before.len(),
                before: range.before.as_mut_ptr(),
            })
            .collect();
        // SAFETY: the C code copies `ranges.len()` elements.
        unsafe { vgpu_shim_set_stale(ranges.as_ptr(), ranges.len()) };
        // SAFETY: the caller guarantees the memory that the kernel accesses, and that of the
        // ranges, whose contents `stale` holds until this call returns.
        let outcome = unsafe { self.launch(grid, threads, shared, params) };
        // SAFETY: no element is read.
        unsafe { vgpu_shim_set_stale(ranges.as_ptr(), 0) };
        outcome
    }

    /// Runs the blocks of a one-dimensional grid concurrently, so that they can wait for each
    /// other. `seed` selects the interleaving.
    ///
    /// # Errors
    ///
    /// As for [`Kernel::launch`], and [`ShimError::Kernel`] if the blocks deadlock.
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
    ) -> Result<(), ShimError> {
        let params = self.check(threads, params)?;
        // SAFETY: `check` has compared `params` with the parameters of the kernel. The caller
        // guarantees that the addresses in them are valid until this synchronous call returns.
        let error = unsafe {
            vgpu_shim_launch_cooperative(
                self.name.as_ptr(),
                blocks,
                threads.as_ptr(),
                shared,
                params.as_ptr().cast(),
                seed,
            )
        };
        // SAFETY: the launch on this thread has just returned `error`.
        unsafe { self.outcome(error) }
    }

    /// The parameters at their alignment, after a check of their size and of the number of threads.
    fn check(&self, threads: [u32; 3], params: &[u8]) -> Result<Vec<u64>, ShimError> {
        let count = threads.iter().product::<u32>();
        if count == 0 || count > self.threads {
            return Err(ShimError::Threads {
                kernel: self.name.clone(),
                threads: count,
                max: self.threads,
            });
        }
        if params.len() != self.params {
            return Err(ShimError::Parameters {
                kernel: self.name.clone(),
                given: params.len(),
                expected: self.params,
            });
        }
        let words = { params.chunks(8) }.map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        });
        Ok(words.collect())
    }

    /// Converts the error string of a launch; null if there was no error.
    ///
    /// # Safety
    ///
    /// `error` is null, or was returned by the last launch of this thread.
    unsafe fn outcome(&self, error: *const c_char) -> Result<(), ShimError> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a launch returns a NUL-terminated string that is valid until this thread's next
        // launch. The caller guarantees that there was none, and the string is copied here.
        let reason = unsafe { CStr::from_ptr(error) }.to_string_lossy();
        Err(ShimError::Kernel {
            kernel: self.name.clone(),
            reason: reason.into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result of the first thread of `shim_check_group` with a mistake of `checks.cpp`, or none.
    fn check(mistake: u64) -> Result<f32, ShimError> {
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
    fn launches_that_do_not_fit_the_kernel_are_refused() {
        let kernel = Kernel::find("shim_check_group").expect("it is compiled in");
        let (size, max) = (kernel.params, kernel.threads);
        // SAFETY: neither launch runs the kernel.
        let launch = |threads, params: &[u8]| unsafe { kernel.launch([1; 3], threads, 0, params) };
        for threads in [0, max + 1] {
            let error = ShimError::Threads {
                kernel: c"shim_check_group".into(),
                threads,
                max,
            };
            assert_eq!(launch([threads, 1, 1], &vec![0; size]), Err(error));
        }
        let error = launch([max, 1, 1], &vec![0; size + 1]).expect_err("a byte too many");
        assert_eq!(
            error.to_string(),
            format!(
                "\"shim_check_group\" with {} bytes of parameters, it has {size}",
                size + 1
            )
        );
    }

    /// The results of `shim_check_ahead` with a mistake, behind a launch that has written 1 to its
    /// source and 2 to its destination.
    fn check_ahead(mistake: u64) -> Vec<f32> {
        let kernel = Kernel::find("shim_check_ahead").expect("it is compiled in");
        let (mut from, mut to) = ([1f32; 64 + 4], [2f32; 64]);
        let lead = from.as_ptr().align_offset(16);
        let from = from[lead..].as_mut_ptr();
        let params = [from as u64, to.as_mut_ptr() as u64, mistake];
        let bytes: Vec<u8> = params.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut stale: Vec<Stale> = { params[..2].iter() }
            .map(|&address| Stale {
                address,
                before: vec![0; 64 * 4],
            })
            .collect();
        // SAFETY: the kernel reads and writes one float for each of 64 threads, and the ranges of
        // `stale` are these floats.
        unsafe { kernel.launch_ahead([1; 3], [64, 1, 1], 0, &bytes, &mut stale) }
            .expect("the kernel runs");
        to.to_vec()
    }

    #[test]
    fn accesses_before_earlier_launches_are_complete_are_seen() {
        assert_eq!(check_ahead(0), [1.0; 64]);
        for early_read in [1, 2] {
            assert_eq!(check_ahead(early_read), [0.0; 64], "mistake {early_read}");
        }
        assert_eq!(check_ahead(3), [2.0; 64], "the write is lost");
    }

    #[test]
    fn invalid_asynchronous_accesses_are_detected() {
        for (mistake, expected) in [
            (3, "a bulk copy to what a product under way reads"),
            (6, "a product that was not begun"),
            (7, "wait for each other for ever"),
        ] {
            let Err(ShimError::Kernel { kernel, reason }) = check(mistake) else {
                panic!("mistake {mistake} is not detected");
            };
            assert_eq!(kernel.to_bytes(), b"shim_check_group");
            assert!(reason.contains(expected), "{reason}");
        }
        let right = check(0).expect("it is right");
        for mistake in [1, 2, 4, 5] {
            // An error or a wrong result, depending on the order of threads.
            let wrong = check(mistake).unwrap_or(f32::NAN);
            assert!(wrong != right, "mistake {mistake} gives {wrong}");
        }
    }
}
