//! The memory of a device, and how much of it is taken.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_engine::EngineError;
use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{ROW_UNIT, Type};
use vgpu_transport::lock::lock;

use crate::library::Functions;
use crate::staging::Staging;

/// Bytes behind the end of a buffer. Kernels of ggml read the last row of quantised weights up to
/// the next [`ROW_UNIT`] elements, also if the guest has not left them behind the row.
const SLACK: u64 = 4096;

const _: () = {
    let mut at = 0;
    while at < Type::ALL.len() {
        let ty = Type::ALL[at];
        assert!(ty.block_bytes() * (ROW_UNIT / ty.block_elements()) <= SLACK);
        at += 1;
    }
};

/// What the buffers of one device share.
pub(crate) struct Allocator {
    /// The library's functions, which outlive every buffer.
    functions: &'static Functions,
    buft: abi::ggml_backend_buffer_type_t,
    /// The device, if its driver knows how much memory is free. `None` for ggml's CPU device.
    device: Option<NonNull<abi::ggml_backend_device>>,
    /// The most bytes that buffers may have together.
    total: u64,
    used: AtomicU64,
    /// The buffers of the device that all engines of the process have, or have reserved.
    allocations: Arc<AtomicU64>,
    /// How many of them its driver allows.
    max_allocations: AtomicU64,
    /// Whether the memory is the host's.
    is_host: bool,
    /// Whether a buffer that a graph has used was freed since
    /// [`has_freed`](Allocator::has_freed) was called.
    has_freed: AtomicBool,
    /// Through which small copies go in the order of the backend's queue, if the device can do
    /// that.
    staging: Option<Arc<Staging>>,
}

// SAFETY: the buffer type and the device are constant objects of the backend, and their functions
// may be called by any thread.
unsafe impl Send for Allocator {}
// SAFETY: the buffer type and the device are constant, and the other fields are atomic or do not
// change.
unsafe impl Sync for Allocator {}

/// The bytes that an allocation of `size` bytes takes.
pub(crate) fn allocation_size(size: u64) -> u64 {
    size.saturating_add(SLACK).next_multiple_of(4096)
}

/// The allocations that a driver of Vulkan allows at least (`maxMemoryAllocationCount`). ggml does
/// not say how many a driver allows.
const MAX_ALLOCATIONS: u64 = 4096;

/// The number of buffers of a device, which the engines of a process have together: the driver
/// counts for all of them.
fn allocations_of(buft: abi::ggml_backend_buffer_type_t) -> Arc<AtomicU64> {
    static COUNTS: Mutex<BTreeMap<usize, Arc<AtomicU64>>> = Mutex::new(BTreeMap::new());
    Arc::clone(lock(&COUNTS).entry(buft.addr()).or_default())
}

/// What the driver of a GPU rounds an allocation up to, as far as this engine counts: the unit of
/// CUDA's physical memory (`CU_MEM_ALLOC_GRANULARITY_MINIMUM`).
const GPU_UNIT: u64 = 2 << 20;

/// What the host rounds an allocation up to: a page.
const HOST_UNIT: u64 = 4096;

/// The free and the total bytes of a device by its driver (`get_memory`). 0: it does not know.
///
/// # Safety
/// The device must be one of a loaded backend.
pub(crate) unsafe fn memory_of(device: NonNull<abi::ggml_backend_device>) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the device exists and is constant (this function's contract), and its function takes
    // the object itself and writes the two numbers.
    unsafe {
        if let Some(get_memory) = (*device.as_ptr()).iface.get_memory {
            get_memory(device.as_ptr(), &raw mut free, &raw mut total);
        }
    }
    (free as u64, total as u64)
}

impl Allocator {
    /// `total`: the most bytes that buffers may have together. `device`: the device, if its driver
    /// knows how much memory is free. `is_host`: the memory is the host's.
    ///
    /// # Safety
    /// The buffer type and the device must be objects of the library of `functions`.
    pub(crate) unsafe fn new(
        functions: &'static Functions,
        buft: abi::ggml_backend_buffer_type_t,
        device: Option<NonNull<abi::ggml_backend_device>>,
        total: u64,
        is_host: bool,
    ) -> Allocator {
        Allocator {
            functions,
            buft,
            device,
            total,
            used: AtomicU64::new(0),
            allocations: allocations_of(buft),
            max_allocations: AtomicU64::new(match is_host {
                true => u64::MAX,
                false => MAX_ALLOCATIONS,
            }),
            is_host,
            has_freed: AtomicBool::new(false),
            staging: None,
        }
    }

    /// With memory through which small copies go in the order of the backend's queue.
    pub(crate) fn with_staging(self, staging: Option<Staging>) -> Allocator {
        Allocator {
            staging: staging.map(Arc::new),
            ..self
        }
    }

    /// Through which small copies go in the order of the backend's queue, if the device can do
    /// that.
    pub(crate) fn staging(&self) -> Option<&Arc<Staging>> {
        self.staging.as_ref()
    }

    /// A buffer was freed in which a graph had tensors.
    pub(crate) fn freed_used(&self) {
        self.has_freed.store(true, Ordering::Relaxed);
    }

    /// Whether a buffer that a graph has used was freed since the last call.
    pub(crate) fn has_freed(&self) -> bool {
        self.has_freed.swap(false, Ordering::Relaxed)
    }

    /// Whether the memory is the host's.
    pub(crate) fn is_host(&self) -> bool {
        self.is_host
    }

    fn unit(&self) -> u64 {
        match self.is_host {
            true => HOST_UNIT,
            false => GPU_UNIT,
        }
    }

    /// The bytes that the buffer of a segment with `size` bytes takes of the device: the driver
    /// rounds them up.
    pub(crate) fn segment_bytes(&self, size: u64) -> u64 {
        allocation_size(size).next_multiple_of(self.unit())
    }

    /// The size of the largest buffer that takes no more than one of `size` bytes.
    pub(crate) fn largest_alike(&self, size: u64) -> u64 {
        self.segment_bytes(size) - SLACK
    }

    /// What the buffer of a segment takes besides its size, at most.
    pub(crate) fn max_besides(&self) -> u64 {
        SLACK + self.unit()
    }

    /// The least extent: a smaller one would take more memory besides than it has bytes.
    pub(crate) fn min_extent(&self) -> u64 {
        match self.is_host {
            true => 1,
            false => GPU_UNIT,
        }
    }

    /// The bytes that the backend wants for a tensor (`ggml_backend_buft_get_alloc_size`).
    ///
    /// # Safety
    /// The tensor and those that it points to must be valid.
    pub(crate) unsafe fn tensor_bytes(&self, tensor: *const abi::ggml_tensor) -> u64 {
        // SAFETY: the buffer type is a constant object of the backend, and the tensor is valid: the
        // contract of this function.
        unsafe { (self.functions.buft_get_alloc_size)(self.buft, tensor) as u64 }
    }

    /// The capacity, and what can be allocated: what is not allocated, and on a GPU no more than
    /// its driver says is free. Other programs of the host may use the GPU, too. Calls the driver.
    ///
    /// Nothing is free if the driver says what cannot be: more than all, which ggml's Vulkan
    /// backend says if others take what this process has (`ggml_backend_vk_get_device_memory`: a
    /// subtraction wraps), or nothing of nothing, which ggml's CUDA backend says of a lost GPU.
    pub(crate) fn free(&self) -> (u64, u64) {
        let used = self.used.load(Ordering::Relaxed);
        let rest = self.total.saturating_sub(used);
        let driver = self.device.map(|device| {
            // SAFETY: the device is one of the library's (the contract of `new`).
            let (free, total) = unsafe { memory_of(device) };
            if free > total { 0 } else { free }
        });
        (self.total, driver.map_or(rest, |free| rest.min(free)))
    }

    /// The largest buffer that the backend makes, in bytes.
    pub(crate) fn max_buffer(&self) -> u64 {
        // SAFETY: the buffer type is a constant object of the backend.
        unsafe { (self.functions.buft_get_max_size)(self.buft) as u64 }
    }

    /// A new buffer of so many bytes.
    pub(crate) fn alloc_buffer(&self, bytes: u64) -> Option<NonNull<abi::ggml_backend_buffer>> {
        // SAFETY: the buffer type is a constant object of the backend.
        NonNull::new(unsafe { (self.functions.buft_alloc_buffer)(self.buft, bytes as usize) })
    }

    /// Frees a buffer.
    ///
    /// # Safety
    /// The buffer must be one of [`alloc_buffer`](Allocator::alloc_buffer) that nothing uses.
    pub(crate) unsafe fn free_buffer(&self, buffer: NonNull<abi::ggml_backend_buffer>) {
        // SAFETY: the contract of this function.
        unsafe { (self.functions.buffer_free)(buffer.as_ptr()) };
    }

    /// Why a buffer of `size` bytes cannot be allocated.
    pub(crate) fn refusal(&self, size: u64) -> EngineError {
        let (total, free) = self.free();
        EngineError::OutOfMemory {
            wanted: size,
            free: free.min(self.max_buffer()),
            total,
        }
    }

    /// The driver allows so many allocations.
    pub(crate) fn limit_allocations(&self, most: u64) {
        self.max_allocations.store(most, Ordering::Relaxed);
    }

    /// How many allocations there may be for a segment to be a further one: three quarters of what
    /// the driver allows. The rest is for buffers of other kinds, and for what the backend
    /// allocates for itself.
    fn max_for_segments(&self) -> u64 {
        self.max_allocations.load(Ordering::Relaxed) / 4 * 3
    }

    /// Reserves `bytes` and `allocations`. `None` if there are fewer bytes left. The allocations
    /// are counted, and the driver refuses those beyond its limit.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64, allocations: u64) -> Option<Reservation> {
        let more = |used: u64| { used.checked_add(bytes) }.filter(|&used| used <= self.total);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .ok()?;
        self.allocations.fetch_add(allocations, Ordering::Relaxed);
        Some(Reservation {
            allocator: Arc::clone(self),
            bytes,
            allocations,
        })
    }

    /// The same for segments, which stay below the limit of the driver.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if there are fewer bytes left, and [`EngineError::Device`] if
    /// there would be too many allocations.
    pub(crate) fn reserve_segments(
        self: &Arc<Self>,
        bytes: u64,
        allocations: u64,
    ) -> Result<Reservation, EngineError> {
        let most = self.max_for_segments();
        let more = |count: u64| { count.checked_add(allocations) }.filter(|&count| count <= most);
        let counted = { &self.allocations }
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map_err(|count| EngineError::Device {
                message: format!(
                    "the device has {count} buffers, and may have {most} with {allocations} more \
                     for weights"
                ),
            });
        // Without allocations, their number does not matter.
        if allocations > 0 {
            counted?;
        }
        let reserved = self.reserve(bytes, 0);
        match reserved {
            Some(mut reserved) => {
                reserved.allocations = allocations;
                Ok(reserved)
            }
            None => {
                self.allocations.fetch_sub(allocations, Ordering::Relaxed);
                Err(self.refusal(bytes))
            }
        }
    }
}

/// Bytes of the device and numbers of allocations, which are given back when this is dropped.
pub(crate) struct Reservation {
    allocator: Arc<Allocator>,
    bytes: u64,
    allocations: u64,
}

impl Reservation {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Takes `bytes` and `allocations` of the reservation, or all if it has fewer.
    pub(crate) fn split(&mut self, bytes: u64, allocations: u64) -> Reservation {
        let bytes = bytes.min(self.bytes);
        let allocations = allocations.min(self.allocations);
        self.bytes -= bytes;
        self.allocations -= allocations;
        Reservation {
            allocator: Arc::clone(&self.allocator),
            bytes,
            allocations,
        }
    }

    /// Adds a reservation of the same allocator.
    pub(crate) fn join(&mut self, mut other: Reservation) {
        debug_assert!(Arc::ptr_eq(&self.allocator, &other.allocator));
        self.bytes += std::mem::take(&mut other.bytes);
        self.allocations += std::mem::take(&mut other.allocations);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Allocator {
            used, allocations, ..
        } = &*self.allocator;
        used.fetch_sub(self.bytes, Ordering::Relaxed);
        allocations.fetch_sub(self.allocations, Ordering::Relaxed);
    }
}
