//! Address ranges whose physical memory is mapped later (CUDA programming guide, "Virtual Memory
//! Management").

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use tracing::error;
use vgpu_engine::EngineError;

use super::memory::DeviceMemory;
use super::stream::Stream;
use crate::device::Address;
use vgpu_engine::MemoryInfo;

/// Reserves address ranges, and maps physical memory of the GPU into them.
pub(super) struct AddressSpace {
    /// The name of the GPU, for the log.
    name: String,
    stream: Arc<Stream>,
    memory: Arc<DeviceMemory>,
    device: sys::CUdevice,
    granularity: u64,
}

impl AddressSpace {
    /// The address space of `device`, in the context of `stream`.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver does not tell the granularity.
    pub(super) fn new(
        name: String,
        stream: Arc<Stream>,
        memory: Arc<DeviceMemory>,
        device: sys::CUdevice,
    ) -> Result<AddressSpace, EngineError> {
        let mut granularity = 0;
        let properties = properties(device);
        let kind = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let entered = stream.context().enter()?;
        // SAFETY: `granularity` is a valid place for the result; `properties` is fully initialised.
        let code =
            unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &properties, kind) };
        let outcome = stream
            .context()
            .check("cuMemGetAllocationGranularity", code);
        drop(entered);
        outcome?;
        Ok(AddressSpace {
            name,
            stream,
            memory,
            device,
            granularity: granularity as u64,
        })
    }

    /// The unit of mappings, in bytes.
    pub(super) fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Reserves `size` bytes of addresses, for as long as the context exists.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver has no such range.
    pub(super) fn reserve(&self, size: u64) -> Result<Address, EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: `address` is a valid place for the result. With address 0 the driver chooses a
        // free range.
        let code = unsafe { sys::cuMemAddressReserve(&mut address, size as usize, 0, 0, 0) };
        context.check("cuMemAddressReserve", code)?;
        Ok(address)
    }

    /// Maps new physical memory of unknown content at `at`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the GPU has not that much left.
    ///
    /// # Safety
    /// The range is reserved, has no memory, and is a multiple of the granularity.
    pub(super) unsafe fn map(&self, at: Address, size: u64) -> Result<(), EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        let bytes = size as usize;
        let properties = properties(self.device);
        let mut handle = 0;
        // SAFETY: `handle` is a valid place for the result; `properties` is fully initialised.
        let code = unsafe { sys::cuMemCreate(&mut handle, bytes, &properties, 0) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let MemoryInfo { total, free } = self.memory.info();
            return Err(EngineError::OutOfMemory {
                wanted: size,
                free,
                total,
            });
        }
        context.check("cuMemCreate", code)?;
        let access = sys::CUmemAccessDesc {
            location: location(self.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the caller guarantees that the `bytes` bytes at `at` are reserved, have no memory
        // and are a multiple of the granularity. `handle` was created above with `bytes` bytes. A
        // mapping holds a reference to its memory, so the handle is released at once, whether the
        // mapping was made or not. If access cannot be set, the mapping is undone.
        unsafe {
            let mapped = context.check("cuMemMap", sys::cuMemMap(at, bytes, 0, handle, 0));
            let released = context.check("cuMemRelease", sys::cuMemRelease(handle));
            mapped.and(released)?;
            let usable =
                context.check("cuMemSetAccess", sys::cuMemSetAccess(at, bytes, &access, 1));
            if usable.is_err() {
                sys::cuMemUnmap(at, bytes);
            }
            usable
        }
    }

    /// Unmaps and frees memory once the stream has finished.
    ///
    /// # Safety
    /// One call of [`AddressSpace::map`] has mapped this range, and nothing uses it from now on.
    pub(super) unsafe fn unmap(&self, at: Address, size: u64) {
        let context = self.stream.context();
        if context.lost().is_some() {
            // Mappings belong to the process, not to the context. A failure here changes nothing.
            // SAFETY: `map` has mapped exactly this range once, as the caller guarantees. In a lost
            // context no kernel runs that could use it.
            unsafe { sys::cuMemUnmap(at, size as usize) };
            return;
        }
        let outcome = self.stream.synchronize().and_then(|()| {
            let _entered = context.enter()?;
            // SAFETY: `map` has mapped exactly this range once, as the caller guarantees. The
            // stream, which may have used the memory, was synchronised above, and the context is
            // entered.
            context.check("cuMemUnmap", unsafe { sys::cuMemUnmap(at, size as usize) })
        });
        if let Err(reason) = outcome {
            error!("{}: scratch memory is leaked: {reason}", self.name);
        }
    }
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

/// Physical memory of `device`.
fn properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: the structure consists of integers, an enum that has the value 0, and a pointer that
    // may be null, so all zeros are a valid value.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(device);
    properties
}
