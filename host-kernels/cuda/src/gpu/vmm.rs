//! Addresses that get memory when it is needed: the driver's virtual memory management.

use cudarc::driver::sys;

use super::Gpu;
use crate::device::Address;
use vgpu_engine::{EngineError, MemoryInfo};

impl Gpu {
    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.device,
        }
    }

    /// Memory of this GPU.
    fn memory_properties(&self) -> sys::CUmemAllocationProp {
        // SAFETY: plain numbers and a pointer that may be null.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = self.location();
        properties
    }

    /// The unit of memory that can be mapped.
    pub(crate) fn unit(&self) -> Result<u64, EngineError> {
        let _entered = self.enter()?;
        let mut unit = 0;
        let properties = self.memory_properties();
        let kind = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: a place for the result, and a whole structure.
        let code = unsafe { sys::cuMemGetAllocationGranularity(&mut unit, &properties, kind) };
        self.done("cuMemGetAllocationGranularity", code)?;
        Ok(unit as u64)
    }

    pub(crate) fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError> {
        let _entered = self.enter()?;
        let mut address = 0;
        // SAFETY: a place for the result; the driver chooses where.
        let code = unsafe { sys::cuMemAddressReserve(&mut address, size as usize, 0, 0, 0) };
        self.done("cuMemAddressReserve", code)?;
        Ok(address)
    }

    /// # Safety
    /// The addresses are reserved and have no memory.
    pub(crate) unsafe fn map_memory(&self, at: Address, size: u64) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let bytes = size as usize;
        let properties = self.memory_properties();
        let mut memory = 0;
        // SAFETY: a place for the result, and a whole structure.
        let code = unsafe { sys::cuMemCreate(&mut memory, bytes, &properties, 0) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let MemoryInfo { total, free } = crate::device::Device::memory(self);
            let wanted = size;
            return Err(EngineError::OutOfMemory {
                wanted,
                free,
                total,
            });
        }
        self.done("cuMemCreate", code)?;
        let access = sys::CUmemAccessDesc {
            location: self.location(),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the caller's addresses, this memory, all of it. The handle is not needed once the memory is mapped,
        // and must not stay if it could not be.
        unsafe {
            let mapped = self.done("cuMemMap", sys::cuMemMap(at, bytes, 0, memory, 0));
            let released = self.done("cuMemRelease", sys::cuMemRelease(memory));
            mapped.and(released)?;
            let usable = self.done("cuMemSetAccess", sys::cuMemSetAccess(at, bytes, &access, 1));
            if usable.is_err() {
                sys::cuMemUnmap(at, bytes);
            }
            usable
        }
    }

    /// # Safety
    /// One call of `map_memory` has put the memory there, and nothing uses it any more.
    pub(crate) unsafe fn unmap_memory(&self, at: Address, size: u64) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        // SAFETY: the caller's promise.
        self.done("cuMemUnmap", unsafe { sys::cuMemUnmap(at, size as usize) })
    }
}
