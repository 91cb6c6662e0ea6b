//! The device that the CUDA engine runs on: memory, copies and launches, in order.
//!
//! The engine and its plans know a device by the trait [`Device`] only. There are three: the GPU
//! ([`crate::gpu::Gpu`]), and in tests a device that runs the same kernels on the CPU and a device
//! that records what it is asked for.

use std::time::Instant;

use vgpu_transport::bytes::{Bytes, BytesMut};

use crate::source::GENERAL;
use vgpu_engine::{EngineError, MemoryInfo};

/// An address in device memory.
pub type Address = u64;

/// A kernel of a device, by a number that the device has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelId(pub u32);

/// A launch of a kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub kernel: KernelId,
    /// Blocks of the grid in each dimension, at least 1.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension, at least 1.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// The bytes of the parameter structure of the kernel.
    pub params: Vec<u8>,
    /// Whether the launch is cooperative: the blocks wait for each other, so all blocks have to be
    /// resident. The grid has dimension 0 only, with at most [`Device::max_cooperative_blocks`]
    /// blocks.
    pub cooperative: bool,
}

/// An instantiated graph of launches, by a number that the device has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphExecId(pub u64);

/// A position in the order of the work that the device was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event(pub u64);

/// Host memory that is mapped into the address space of the device.
#[derive(Debug, Clone, Copy)]
pub struct MappedHostMemory {
    /// The address for kernels.
    pub device: Address,
    /// The address for the host.
    pub host: *mut u8,
}

// SAFETY: the structure holds two addresses. Code that reads or writes at these addresses needs
// `unsafe` of its own, with an argument for that access.
unsafe impl Send for MappedHostMemory {}
// SAFETY: a reference gives the two addresses, and no access to the memory there.
unsafe impl Sync for MappedHostMemory {}

/// A device. All work happens in the order in which it was asked for, as on one CUDA stream.
/// Launches, fills and copies within the device may still be under way when their call returns,
/// until [`Device::synchronize`].
///
/// # Errors
/// Unless a method says otherwise, an error is [`EngineError::Device`] with the reason that the
/// device gives, or [`EngineError::DeviceLost`] after [`Device::abandon`]. An error of earlier work
/// may be reported by a later call.
pub trait Device: Send + Sync + 'static {
    /// A short name, such as `cuda:0`.
    fn name(&self) -> &str;

    /// The model, in one line for people.
    fn description(&self) -> &str;

    /// The memory of the device in bytes, now.
    fn memory(&self) -> MemoryInfo;

    /// The architecture that the kernels are compiled for. Some kernels exist for one architecture
    /// only.
    fn architecture(&self) -> &str {
        GENERAL
    }

    /// The number of SMs. A grid of as many blocks, or a few times as many, keeps the device busy.
    fn sm_count(&self) -> u32;

    /// The most bytes of dynamic shared memory of a block of `kernel`: the opt-in limit of the
    /// device less the static shared memory of the kernel.
    fn max_dynamic_shared(&self, kernel: KernelId) -> u32;

    /// Bytes of shared memory of an SM. The resident blocks of an SM share them, and each block
    /// takes 1 KiB more than it is given (CUDA programming guide, "Shared Memory" of compute
    /// capability 8.x).
    fn shared_per_sm(&self) -> u32;

    /// Bytes per second of the device's memory; 0 if unknown.
    fn memory_bandwidth(&self) -> u64;

    /// The most blocks of a cooperative launch of `kernel` with `threads` threads and `shared`
    /// bytes of dynamic shared memory a block. 0 if the device has no cooperative launches.
    fn max_cooperative_blocks(&self, kernel: KernelId, threads: u32, shared: u32) -> u32;

    /// The blocks of a kernel that an SM runs at a time, with this number of threads and `shared`
    /// bytes of dynamic shared memory.
    fn blocks_per_sm(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        let _ = (kernel, threads, shared);
        8
    }

    /// Whether small allocations are better made as parts of large ones. A device that detects
    /// accesses beyond the end of an allocation says no.
    fn prefers_suballocation(&self) -> bool {
        true
    }

    /// The error that has made the device unusable, if there was one.
    fn lost(&self) -> Option<String>;

    /// Gives up a lost device with all its memory. Later calls fail or do nothing.
    fn abandon(&self);

    /// Page-locks the `len` bytes of host memory at `start`, so that copies need no staging buffer.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver cannot lock the pages.
    ///
    /// # Safety
    /// The range is mapped, and stays mapped until [`Device::unpin`].
    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), EngineError>;

    /// Undoes [`Device::pin`], after all work that was asked for.
    ///
    /// # Safety
    /// [`Device::pin`] has locked a range at `start`, which nobody has unlocked since.
    unsafe fn unpin(&self, start: *mut u8);

    /// Allocates `size` zero bytes, at least 1, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has no such block left.
    fn alloc(&self, size: u64) -> Result<Address, EngineError>;

    /// Frees memory, after all work that was asked for.
    ///
    /// # Safety
    /// `address` is from [`Device::alloc`] with this `size`, and nothing uses the memory from now
    /// on.
    unsafe fn free(&self, address: Address, size: u64);

    /// The unit of [`Device::map_memory`] in bytes, a power of two.
    fn map_granularity(&self) -> u64;

    /// Reserves `size` bytes of addresses, a multiple of the granularity, without memory, for as
    /// long as the device exists.
    ///
    /// # Errors
    /// [`EngineError::Device`] if there is no such range.
    fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError>;

    /// Maps new memory of unknown content at reserved addresses.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has not that much left.
    ///
    /// # Safety
    /// The range is from [`Device::reserve_addresses`], a multiple of the granularity, and has no
    /// memory.
    unsafe fn map_memory(&self, address: Address, size: u64) -> Result<(), EngineError>;

    /// Unmaps and frees memory, after all work that was asked for.
    ///
    /// # Safety
    /// One call of [`Device::map_memory`] has mapped this range, and nothing uses the memory from
    /// now on.
    unsafe fn unmap_memory(&self, address: Address, size: u64);

    /// Allocates `size` zero bytes of mapped host memory, at least 1, for as long as the device
    /// exists.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver cannot lock or map the pages.
    fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError>;

    /// Copies `from` to the device. `from` may be reused when the call returns.
    ///
    /// # Errors
    /// As said for the trait.
    ///
    /// # Safety
    /// There are `from.len()` bytes of device memory at `to`.
    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError>;

    /// Copies from the device to `to`, after all work that was asked for, and waits for the copy.
    ///
    /// # Errors
    /// As said for the trait.
    ///
    /// # Safety
    /// There are `to.len()` bytes of device memory at `from`.
    unsafe fn download(&self, from: Address, to: BytesMut<'_>) -> Result<(), EngineError>;

    /// Sets `size` bytes to `value`.
    ///
    /// # Errors
    /// As said for the trait.
    ///
    /// # Safety
    /// There are `size` bytes of device memory at `to`.
    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError>;

    /// Copies `size` bytes within the device.
    ///
    /// # Errors
    /// As said for the trait.
    ///
    /// # Safety
    /// There are `size` bytes of device memory at both addresses, and they do not overlap.
    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError>;

    /// The kernel called `name`.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device has no such kernel.
    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError>;

    /// The name of a kernel that [`Device::kernel`] has returned.
    fn kernel_name(&self, kernel: KernelId) -> &'static str;

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if a [`cooperative`](Launch::cooperative) launch has more
    /// blocks than fit on the device; nothing of it has run then.
    ///
    /// # Safety
    /// The addresses in the parameters are of device memory that the kernel may use as it does,
    /// until the next [`Device::synchronize`] has returned.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError>;

    /// Runs launches one after the other, waits for the last, and returns the seconds that each
    /// took.
    ///
    /// # Errors
    /// As for [`Device::launch`].
    ///
    /// # Safety
    /// As for [`Device::launch`], for each of them.
    unsafe fn time_launches(&self, launches: &[Launch]) -> Result<Vec<f64>, EngineError> {
        self.synchronize()?;
        let time = |launch| {
            let start = Instant::now();
            // SAFETY: `launch` is one of the `launches`, for each of which the caller guarantees
            // that the addresses in its parameters are of device memory that its kernel may use
            // until the next `synchronize`, which follows.
            unsafe { self.launch(launch)? };
            self.synchronize()?;
            Ok(start.elapsed().as_secs_f64())
        };
        launches.iter().map(time).collect()
    }

    /// Instantiates a graph of launches, each after the one before.
    ///
    /// # Errors
    /// As said for the trait.
    fn create_graph(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError>;

    /// Replaces the parameters of node `index` of a graph by those of `launch`, of the same kernel.
    /// A launch of the graph that is under way keeps the old parameters.
    ///
    /// # Errors
    /// As said for the trait.
    fn update_graph_node(
        &self,
        graph: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError>;

    /// Launches a graph.
    ///
    /// # Errors
    /// As said for the trait.
    ///
    /// # Safety
    /// As for [`Device::launch`], for each node with its current parameters.
    unsafe fn launch_graph(&self, graph: GraphExecId) -> Result<(), EngineError>;

    /// Destroys a graph, which is not used again.
    fn destroy_graph(&self, graph: GraphExecId);

    /// Records an event behind all work that was asked for.
    ///
    /// # Errors
    /// As said for the trait.
    fn record_event(&self) -> Result<Event, EngineError>;

    /// Waits for the work that was asked for before `event` was recorded.
    ///
    /// # Errors
    /// As said for the trait.
    fn wait_event(&self, event: Event) -> Result<(), EngineError>;

    /// Waits for all work that was asked for.
    ///
    /// # Errors
    /// As said for the trait; also an error of a kernel.
    fn synchronize(&self) -> Result<(), EngineError>;
}
