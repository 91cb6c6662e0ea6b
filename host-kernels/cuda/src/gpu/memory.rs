//! Device memory and copies.

use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUresult};
use tracing::{error, warn};
use vgpu_engine::{EngineError, MemoryInfo};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{lock, lock_at};

use super::error::GpuError;
use super::host_memory::HostMemory;
use super::stream::Stream;
use crate::device::{Address, MappedHostMemory};
use crate::lock::Rank;

/// Bytes of page-locked memory that small uploads pass through, so that the caller need not wait
/// for the copy.
const STAGING_BYTES: usize = 4 << 20;

/// Uploads of at most this many bytes pass through the staging buffer.
const MAX_STAGED_UPLOAD: usize = 256 << 10;

/// The memory of a GPU: allocations, and copies in stream order.
pub(super) struct DeviceMemory {
    /// The name of the GPU, for the log.
    name: String,
    stream: Arc<Stream>,
    staging: Mutex<Staging>,
    /// Host memory that the GPU reads and writes, kept until the context is destroyed.
    mapped: Mutex<Vec<HostMemory>>,
}

/// The position in the staging buffer, which is used as a ring.
struct Staging {
    memory: HostMemory,
    /// The offset of the next upload.
    next: usize,
}

impl DeviceMemory {
    /// The memory of the GPU called `name`. The context of `stream` is current to the calling
    /// thread.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the staging buffer cannot be page-locked.
    pub(super) fn new(name: String, stream: Arc<Stream>) -> Result<DeviceMemory, GpuError> {
        let memory = HostMemory::new(stream.context(), STAGING_BYTES)?;
        Ok(DeviceMemory {
            name,
            stream,
            staging: Mutex::new(Staging { memory, next: 0 }),
            mapped: Mutex::default(),
        })
    }

    /// Bytes of the GPU's memory; both numbers are 0 if the driver does not answer.
    pub(super) fn info(&self) -> MemoryInfo {
        let (mut free, mut total) = (0, 0);
        let context = self.stream.context();
        let outcome = context.enter().and_then(|_entered| {
            // SAFETY: `free` and `total` are valid places for the results.
            let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
            context.check("cuMemGetInfo", code)
        });
        if let Err(reason) = outcome {
            warn!("{}: the size of the memory is unknown: {reason}", self.name);
        }
        MemoryInfo {
            total: total as u64,
            free: free as u64,
        }
    }

    /// `size` zero bytes, at least 1.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the GPU has no such block left.
    pub(super) fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: `address` is a valid place for the result.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, size as usize) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let MemoryInfo { total, free } = self.info();
            return Err(EngineError::OutOfMemory {
                wanted: size,
                free,
                total,
            });
        }
        context.check("cuMemAlloc", code)?;
        // SAFETY: `cuMemAlloc` has returned `size` bytes at `address`.
        unsafe { self.fill(address, size, 0) }?;
        Ok(address)
    }

    /// Frees memory once the stream has finished.
    ///
    /// # Safety
    /// `address` is from [`DeviceMemory::alloc`], and nothing uses it from now on.
    pub(super) unsafe fn free(&self, address: Address) {
        let context = self.stream.context();
        // The memory of a lost context is freed with the context.
        if context.lost().is_some() {
            return;
        }
        // SAFETY: `cuMemAlloc` has returned `address` and nothing has freed it, as the caller
        // guarantees. The stream, which may have used the memory, is synchronised first.
        let outcome = self
            .stream
            .synchronize()
            .and_then(|()| context.check("cuMemFree", unsafe { sys::cuMemFree_v2(address) }));
        if let Err(reason) = outcome {
            error!("{}: device memory is leaked: {reason}", self.name);
        }
    }

    /// `size` zero bytes of host memory, at least 1, that the GPU reads and writes. The bytes stay
    /// until the context is destroyed.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver cannot lock or map the pages.
    pub(super) fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        let failed = |error: GpuError| EngineError::Device {
            message: error.to_string(),
        };
        let memory = HostMemory::new(context, size).map_err(failed)?;
        let host = memory.start();
        // The memory is registered, so it is kept even if the next call fails.
        let mut mapped = lock(&self.mapped);
        mapped.push(memory);
        let mut device = 0;
        // SAFETY: `host` was registered with DEVICEMAP above, in the context that is entered.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host.cast(), 0) };
        context.check("cuMemHostGetDevicePointer", code)?;
        Ok(MappedHostMemory { device, host })
    }

    /// Page-locks memory of this process.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver cannot lock the pages.
    ///
    /// # Safety
    /// The `len` bytes at `start` are mapped, and stay so until [`DeviceMemory::unpin`].
    pub(super) unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        // SAFETY: the caller guarantees that the `len` bytes at `start` stay mapped until `unpin`,
        // which removes the registration. The context is entered.
        context.check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(start.cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE)
        })
    }

    /// Undoes [`DeviceMemory::pin`].
    ///
    /// # Safety
    /// [`DeviceMemory::pin`] has registered a range at `start`, which nobody has unregistered
    /// since.
    pub(super) unsafe fn unpin(&self, start: *mut u8) {
        let context = self.stream.context();
        // A context that is destroyed has no registrations.
        let Ok(_entered) = context.enter() else {
            return;
        };
        // SAFETY: the caller guarantees that `start` is registered in this context. No copy still
        // uses the range: `upload` and `download` return when the copy has ended.
        let code = unsafe { sys::cuMemHostUnregister(start.cast()) };
        if let Err(error) = context.check("cuMemHostUnregister", code) {
            error!(
                "{}: a shared memory region stays page-locked: {error}",
                self.name
            );
        }
    }

    /// Copies `from` to the device. `from` may be reused when the call returns.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver reports an error.
    ///
    /// # Safety
    /// There are `from.len()` bytes of device memory at `to`.
    pub(super) unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        let len = from.len();
        if len > MAX_STAGED_UPLOAD {
            // SAFETY: `from` has `len` bytes and outlives the copy, since this call synchronises
            // before it returns. The caller guarantees `len` bytes of device memory at `to`.
            context.check("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), len, self.stream.raw())
            })?;
            return self.stream.synchronize();
        }
        let mut staging = lock_at(Rank::Staging, &self.staging);
        if staging.next + len > STAGING_BYTES {
            // Copies may still read the buffer.
            self.stream.synchronize()?;
            staging.next = 0;
        }
        // SAFETY: `next + len` is at most STAGING_BYTES, so the bytes are inside the buffer; copies
        // under way read only bytes below `next`, and the lock keeps other threads out. The buffer
        // lives until the context is destroyed. The caller guarantees `len` bytes of device memory
        // at `to`.
        let code = unsafe {
            let slot = staging.memory.start().add(staging.next);
            slot.copy_from_nonoverlapping(from.as_ptr(), len);
            sys::cuMemcpyHtoDAsync_v2(to, slot.cast(), len, self.stream.raw())
        };
        staging.next = (staging.next + len).next_multiple_of(64);
        context.check("cuMemcpyHtoDAsync", code)
    }

    /// Copies from the device to `to`, after all work that was asked for, and waits for the copy.
    ///
    /// # Errors
    /// As for [`DeviceMemory::upload`].
    ///
    /// # Safety
    /// There are `to.len()` bytes of device memory at `from`.
    pub(super) unsafe fn download(
        &self,
        from: Address,
        mut to: BytesMut<'_>,
    ) -> Result<(), EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        let len = to.len();
        // SAFETY: `to` has `len` bytes and outlives the copy, since this call synchronises before
        // it returns. The caller guarantees `len` bytes of device memory at `from`.
        context.check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, len, self.stream.raw())
        })?;
        self.stream.synchronize()
    }

    /// Sets bytes, in stream order.
    ///
    /// # Errors
    /// As for [`DeviceMemory::upload`].
    ///
    /// # Safety
    /// There are `size` bytes of device memory at `to`.
    pub(super) unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        // SAFETY: the caller guarantees `size` bytes of device memory at `to`. The context of the
        // stream is entered.
        context.check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(to, value, size as usize, self.stream.raw())
        })
    }

    /// Copies within the device, in stream order.
    ///
    /// # Errors
    /// As for [`DeviceMemory::upload`].
    ///
    /// # Safety
    /// There are `size` bytes of device memory at both addresses, and they do not overlap.
    pub(super) unsafe fn copy(
        &self,
        to: Address,
        from: Address,
        size: u64,
    ) -> Result<(), EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        // SAFETY: the caller guarantees `size` bytes of device memory at `to` and at `from`,
        // without overlap. The context of the stream is entered.
        context.check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, size as usize, self.stream.raw())
        })
    }
}
