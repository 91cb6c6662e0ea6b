//! A device for the CUDA engine that runs its kernels on the CPU.

use std::collections::HashMap;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use vgpu_kernels::cuda::device::{Address, Device, KernelId, Launch, SharedMemory};
use vgpu_kernels::{EngineError, MemoryInfo};
use vgpu_kernels_shim::Kernel;
use vgpu_transport::bytes::{Bytes, BytesMut};

const PAGE: usize = 4096;

/// Memory is mapped with a page behind it that nobody may touch, so that a kernel that runs past an end is
/// caught.
#[derive(Default)]
pub(crate) struct Shim {
    kernels: Mutex<Vec<(&'static str, Kernel)>>,
    /// Where each allocation was mapped, and how much.
    mappings: Mutex<HashMap<Address, (usize, usize)>>,
}

impl Shim {
    fn map(&self, size: u64) -> Address {
        let bytes = (size as usize).next_multiple_of(256);
        let len = bytes.next_multiple_of(PAGE) + PAGE;
        // SAFETY: a new private mapping touches nothing that exists; its last page is inside.
        let start = unsafe {
            let start = libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(start, libc::MAP_FAILED, "{size} bytes");
            assert_eq!(
                libc::mprotect(start.add(len - PAGE), PAGE, libc::PROT_NONE),
                0
            );
            start as usize
        };
        let address = (start + len - PAGE - bytes) as Address;
        self.mappings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(address, (start, len));
        address
    }
}

impl Device for Shim {
    fn name(&self) -> &str {
        "shim"
    }

    fn description(&self) -> &str {
        "CUDA kernels on the CPU"
    }

    fn memory(&self) -> MemoryInfo {
        MemoryInfo {
            total: 1 << 40,
            free: 1 << 40,
        }
    }

    fn multiprocessors(&self) -> u32 {
        1
    }

    fn most_shared(&self) -> u32 {
        96 << 10 // what GPUs from sm_80 on have at least
    }

    fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        Ok(self.map(size))
    }

    unsafe fn free(&self, address: Address, _: u64) {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, len) = mappings.remove(&address).expect("it was allocated");
        // SAFETY: mapped in `map`; the caller no longer uses it.
        unsafe { libc::munmap(start as *mut libc::c_void, len) };
    }

    fn alloc_shared(&self, size: usize) -> Result<SharedMemory, EngineError> {
        let device = self.map(size as u64);
        Ok(SharedMemory {
            device,
            host: device as *mut u8,
        })
    }

    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { from.as_ptr().copy_to(to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: Address, mut to: BytesMut<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { (from as *const u8).copy_to(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { (to as *mut u8).write_bytes(value, size as usize) };
        Ok(())
    }

    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { (from as *const u8).copy_to_nonoverlapping(to as *mut u8, size as usize) };
        Ok(())
    }

    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let known = kernels.iter().position(|(known, _)| *known == name);
        let id = match known {
            Some(id) => id,
            None => {
                let kernel = Kernel::find(name).ok_or_else(|| EngineError::Device {
                    message: format!("there is no kernel {name}"),
                })?;
                kernels.push((name, kernel));
                kernels.len() - 1
            }
        };
        Ok(KernelId(id as u32))
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        let kernel = self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
            [launch.kernel.0 as usize]
            .1
            .clone();
        let Launch {
            grid,
            threads,
            shared,
            ref params,
            ..
        } = *launch;
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(grid, threads, shared as usize, params) }
            .map_err(|message| EngineError::Device { message })
    }

    fn synchronize(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
