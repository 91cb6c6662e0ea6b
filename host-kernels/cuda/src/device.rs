//! What the CUDA engine needs of a device: memory, copies, launches, in order.
//!
//! Engine and plans know devices by this trait alone. Besides the GPU itself there are, in tests, a device that
//! runs the same kernels on the CPU, and one that only writes down what it is asked for.

use std::time::Instant;

use vgpu_transport::bytes::{Bytes, BytesMut};

use crate::source::GENERAL;
use vgpu_engine::{EngineError, MemoryInfo};

/// An address in device memory.
pub type Address = u64;

/// A kernel of a device: a number that the device chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelId(pub u32);

/// A kernel to run, with everything it needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// What to run.
    pub kernel: KernelId,
    /// Blocks in each dimension, at least 1.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension, at least 1.
    pub threads: [u32; 3],
    /// Bytes of shared memory of a block, beyond what the kernel declares.
    pub shared: u32,
    /// The structure the kernel takes.
    pub params: Vec<u8>,
    /// Whether blocks wait for each other, so that all must run at the same time (a cooperative launch): not more than
    /// [`Device::max_cooperative_blocks`], in dimension 0 of the grid.
    pub cooperative: bool,
}

/// Launches that a device keeps to do again as one: a number that the device chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GraphExecId(pub u64);

/// A place in the order of what a device was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Event(pub u64);

/// Memory that device and host both see: where it is for either.
#[derive(Debug, Clone, Copy)]
pub struct MappedHostMemory {
    /// For kernels.
    pub device: Address,
    /// For the host.
    pub host: *mut u8,
}

// SAFETY: a place, not access to it.
unsafe impl Send for MappedHostMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedHostMemory {}

/// A device. All that it is asked for happens in order, as if one after the other; launches and fills may
/// still be under way when the call returns, until [`Device::synchronize`].
pub trait Device: Send + Sync + 'static {
    /// A short name, `cuda:0`.
    fn name(&self) -> &str;

    /// One line for people: the model.
    fn description(&self) -> &str;

    /// Memory in bytes, as it is now.
    fn memory(&self) -> MemoryInfo;

    /// The architecture that its kernels are compiled for: some are for one alone.
    fn architecture(&self) -> &str {
        GENERAL
    }

    /// Multiprocessors: so many blocks, or a few times as many, keep the device busy.
    fn sm_count(&self) -> u32;

    /// Most bytes of shared memory that a block can have.
    fn max_shared_per_block(&self) -> u32;

    /// Bytes of shared memory of a multiprocessor, which the blocks on it share; a block takes 1 KiB more than it is given.
    fn shared_per_sm(&self) -> u32;

    /// Bytes a second of the device's memory, as far as it is known.
    fn memory_bandwidth(&self) -> u64;

    /// How many blocks of a kernel run at the same time, of so many threads and bytes of shared memory beyond what the
    /// kernel declares: 0 if the device has no launches of blocks that wait for each other.
    fn max_cooperative_blocks(&self, kernel: KernelId, threads: u32, shared: u32) -> u32;

    /// Whether small allocations are better made as parts of large ones. Devices that look for accesses beyond the end
    /// of an allocation say no.
    fn prefers_suballocation(&self) -> bool {
        true
    }

    /// Why nothing on the device works any more, if so: an error that it does not recover from.
    fn lost(&self) -> Option<String>;

    /// Gives up a device that is lost, with all memory: every call fails from now on, or does nothing.
    fn abandon(&self);

    /// Prepares memory of this process for copies.
    ///
    /// # Safety
    ///
    /// It is mapped, and stays so until [`Device::unpin`].
    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), EngineError>;

    /// Undoes [`Device::pin`], after all that was asked for before.
    fn unpin(&self, start: *mut u8);

    /// `size` bytes, all zero, at least 256-byte aligned. `size` is not 0.
    fn alloc(&self, size: u64) -> Result<Address, EngineError>;

    /// Takes memory back, after all that was asked for before.
    ///
    /// # Safety
    ///
    /// `address` is from [`Device::alloc`] with this size, and nothing uses it from now on.
    unsafe fn free(&self, address: Address, size: u64);

    /// The unit in which [`Device::back`] puts memory behind addresses: a power of two.
    fn map_granularity(&self) -> u64;

    /// Addresses for `size` bytes, a multiple of the granularity, with no memory behind them. Nobody else gets them for
    /// as long as the device lives.
    fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError>;

    /// Puts memory behind reserved addresses. Nothing is known of its content.
    ///
    /// # Safety
    ///
    /// The addresses, whole units, are from [`Device::reserve`], and have no memory.
    unsafe fn map_memory(&self, address: Address, size: u64) -> Result<(), EngineError>;

    /// Takes this memory away again, after all that was asked for before.
    ///
    /// # Safety
    ///
    /// One call of [`Device::back`] has put it behind these addresses, and nothing uses it from now on.
    unsafe fn unmap_memory(&self, address: Address, size: u64);

    /// `size` zero bytes that both sides see, for as long as the device lives.
    fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError>;

    /// Writes `from` and returns when it has been read.
    ///
    /// # Safety
    ///
    /// There is device memory for it at `to`.
    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError>;

    /// Reads into `to` what is there after all that was asked for before.
    ///
    /// # Safety
    ///
    /// There is as much device memory at `from`.
    unsafe fn download(&self, from: Address, to: BytesMut<'_>) -> Result<(), EngineError>;

    /// Sets `size` bytes to `value`.
    ///
    /// # Safety
    ///
    /// There is as much device memory at `to`.
    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError>;

    /// Copies `size` bytes, which do not overlap.
    ///
    /// # Safety
    ///
    /// There is as much device memory at both.
    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError>;

    /// The kernel called `name`.
    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError>;

    /// Runs a kernel. A launch of more blocks [`cooperative`](Launch::cooperative) than the device has room for is
    /// [`EngineError::Unsupported`], and nothing of it happens.
    ///
    /// # Safety
    ///
    /// The addresses in its parameters are of device memory that the kernel may use as it does, until the next
    /// [`Device::synchronize`] has returned.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError>;

    /// Runs launches one after the other, waits for the last, and returns the seconds that each took.
    ///
    /// # Safety
    ///
    /// As for [`Device::launch`], for each of them.
    unsafe fn time_launches(&self, launches: &[Launch]) -> Result<Vec<f64>, EngineError> {
        self.synchronize()?;
        let time = |launch| {
            let start = Instant::now();
            // SAFETY: the caller's promise.
            unsafe { self.launch(launch)? };
            self.synchronize()?;
            Ok(start.elapsed().as_secs_f64())
        };
        launches.iter().map(time).collect()
    }

    /// Prepares launches to be done again and again as one, each after the one before.
    fn create_graph(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError>;

    /// Puts `launch` in the place of the one at `index`, of the same kernel. Replays under way do not see it.
    fn update_graph_node(
        &self,
        graph: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError>;

    /// Runs the launches of a recording.
    ///
    /// # Safety
    ///
    /// As for [`Device::launch`], for each of them as it is now.
    unsafe fn launch_graph(&self, graph: GraphExecId) -> Result<(), EngineError>;

    /// Gives a recording up, which is not used again.
    fn destroy_graph(&self, graph: GraphExecId);

    /// The place behind all that was asked for so far.
    fn record_event(&self) -> Result<Event, EngineError>;

    /// Waits for what was asked for before a mark.
    fn wait_event(&self, event: Event) -> Result<(), EngineError>;

    /// Waits for all that was asked for.
    fn synchronize(&self) -> Result<(), EngineError>;
}
