//! Where the launches of a plan have memory of the engine.

use std::sync::{Arc, Mutex};

use vgpu_engine::{EngineError, Memory as _};
use vgpu_transport::lock::lock;

use crate::allocator::Allocator;
use crate::device::{Address, Device, MappedHostMemory};
use crate::memory::CudaMemory;
use crate::params::VgFault;

/// Where the launches of a plan have scratch memory, and where they report faults.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// The first address of scratch memory, and its bytes.
    pub(crate) scratch: Address,
    pub(crate) bytes: u64,
    /// Bytes at its start that the activation cache may use.
    pub(crate) cache_bytes: u64,
    /// The address of the fault cell (`VgFault`).
    pub(crate) fault: Address,
}

impl Place {
    /// Whether an address is one of scratch memory.
    pub(crate) fn has(&self, address: Address) -> bool {
        (self.scratch..self.scratch + self.bytes).contains(&address)
    }
}

/// The number of fault cells. Plans that find none left do not run in batches.
const FAULT_CELLS: usize = 1024;

/// The cells where kernels report faults: one for all plans that run alone only, and one for each
/// plan that may run in a batch.
pub(crate) struct FaultCells {
    memory: MappedHostMemory,
    free: Mutex<Vec<usize>>,
}

/// A fault cell. Its index is free again when it is dropped.
pub(crate) struct FaultCell {
    cells: Arc<FaultCells>,
    index: usize,
}

impl FaultCells {
    /// Cells in mapped host memory of `device`.
    ///
    /// # Errors
    /// [`EngineError`] of the device, if it maps no host memory.
    pub(crate) fn new(device: &dyn Device) -> Result<FaultCells, EngineError> {
        Ok(FaultCells {
            memory: device.alloc_mapped(FAULT_CELLS * size_of::<VgFault>())?,
            free: Mutex::new((1..FAULT_CELLS).rev().collect()),
        })
    }

    /// The address of the cell that plans share which run alone only.
    pub(crate) fn shared(&self) -> Address {
        self.memory.device
    }

    /// A cell for one plan, if there is one left.
    fn take(self: &Arc<Self>) -> Option<FaultCell> {
        let index = lock(&self.free).pop()?;
        Some(FaultCell {
            cells: Arc::clone(self),
            index,
        })
    }

    /// The fault in `cell`, or in the shared one, since the last call.
    ///
    /// # Safety
    /// No kernel runs, and no other thread calls this function.
    pub(crate) unsafe fn take_fault(&self, cell: Option<&FaultCell>) -> Option<VgFault> {
        let index = cell.map_or(0, |cell| cell.index);
        // SAFETY: `alloc_mapped` has returned memory for `FAULT_CELLS` of `VgFault`, mapped while
        // the device exists, and `index` is below. The caller guarantees that no kernel runs, so
        // none writes the cell, and that no other thread reads it.
        unsafe {
            let cell = self.memory.host.cast::<VgFault>().add(index);
            let found = cell.read_volatile();
            if found.taken == 0 {
                return None;
            }
            cell.write_volatile(VgFault::default());
            Some(found)
        }
    }
}

impl Drop for FaultCell {
    fn drop(&mut self) {
        lock(&self.cells.free).push(self.index);
    }
}

/// A place that a plan shares with no other: other plans may run between any two of its launches.
pub(crate) struct OwnPlace {
    memory: CudaMemory,
    cache_bytes: u64,
    pub(crate) cell: FaultCell,
}

impl OwnPlace {
    /// A place with `cache_bytes` for the activation cache, and `bytes` of other scratch memory.
    /// `None` if there is no cell left, or no memory.
    pub(crate) fn new(
        allocator: &Arc<Allocator>,
        cells: &Arc<FaultCells>,
        (cache_bytes, bytes): (u64, u64),
    ) -> Option<OwnPlace> {
        let cache_bytes = cache_bytes.next_multiple_of(256);
        Some(OwnPlace {
            memory: CudaMemory::new(allocator, (cache_bytes + bytes).max(1)).ok()?,
            cache_bytes,
            cell: cells.take()?,
        })
    }

    /// Bytes of device memory.
    pub(crate) fn size(&self) -> u64 {
        self.memory.size()
    }

    pub(crate) fn place(&self) -> Place {
        Place {
            scratch: self.memory.address(),
            bytes: self.memory.size(),
            cache_bytes: self.cache_bytes,
            fault: self.cell.cells.shared() + (self.cell.index * size_of::<VgFault>()) as u64,
        }
    }
}
