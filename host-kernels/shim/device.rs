//! A device for the CUDA engine that runs the kernels on the CPU.

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use vgpu_cuda::device::{Address, Device, Event, GraphExecId, KernelId, Launch, MappedHostMemory};
use vgpu_cuda::source::sources_for;
use vgpu_cuda_shim::{DeviceModel, Kernel, ShimError, Stale};
use vgpu_engine::{EngineError, MemoryInfo};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{self, LockRank, lock, lock_at};

const PAGE: usize = 4096;

/// Bytes that are compared at a time to find what a launch has written.
const UNIT: usize = 4;

/// The place of a lock in the order, lowest first. The other locks are innermost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// Held while a graph runs.
    Graphs,
    /// Held while all memory is read.
    Mappings,
}

impl LockRank for Rank {
    fn level(self) -> usize {
        lock::DEVICES + self as usize
    }
}

/// What a kernel does wrong, in tests of what finds that out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code)] // most tests have no faulty kernels
pub(crate) enum Fault {
    /// It writes nothing.
    NoResults,
    /// It makes the device unusable.
    IllegalAddress,
    /// It never ends.
    Hang,
    /// It ends the process.
    Abort,
}

/// The device. A guard page follows each allocation, so that a kernel that accesses memory beyond
/// the end crashes.
pub(crate) struct Shim {
    /// The GPU whose limits the device has. The device has neither the SMs nor the bandwidth of the
    /// model.
    model: DeviceModel,
    kernels: Mutex<Vec<(&'static str, Kernel)>>,
    /// The start and the length of the mapping of each allocation.
    mappings: Mutex<HashMap<Address, (usize, usize)>>,
    /// The length of the memory at each reserved address.
    mapped: Mutex<HashMap<Address, u64>>,
    graphs: Mutex<HashMap<u64, Vec<Launch>>>,
    /// The most blocks of a cooperative launch; 0: [`BLOCKS`].
    pub(crate) blocks: AtomicU32,
    /// Bytes of shared memory of an SM; 0: those of a small GPU.
    pub(crate) room: AtomicU32,
    /// The seed of the order of blocks in a cooperative launch, counted up by each launch.
    pub(crate) seed: AtomicU64,
    /// Whether the launches of a CUDA graph begin before those before them are complete, as far as
    /// their kernels do not wait (programmatic dependent launch). Nobody else uses the device
    /// while a graph runs.
    pub(crate) launches_ahead: bool,
    /// The launches that began while memory was as before those before them.
    pub(crate) launched_ahead: AtomicU64,
    /// The kernels that are faulty.
    pub(crate) faults: Vec<(&'static str, Fault)>,
    lost: OnceLock<&'static str>,
}

/// The error of a driver after an illegal access.
const ILLEGAL_ADDRESS: &str = "an illegal memory access was encountered";

/// The most blocks of a cooperative launch: a prime number, so that work is distributed unevenly.
const BLOCKS: u32 = 5;

/// A value of `blocks`: the device has no cooperative launches.
pub(crate) const NO_BLOCKS: u32 = u32::MAX;

fn device_error(error: ShimError) -> EngineError {
    EngineError::Device {
        message: error.to_string(),
    }
}

impl Default for Shim {
    /// A device with the limits of the supported GPU that has the least shared memory.
    fn default() -> Shim {
        Shim::of(DeviceModel::L4)
    }
}

impl Shim {
    /// A device with the limits of a GPU.
    pub(crate) fn of(model: DeviceModel) -> Shim {
        Shim {
            model,
            kernels: Mutex::default(),
            mappings: Mutex::default(),
            mapped: Mutex::default(),
            graphs: Mutex::default(),
            blocks: AtomicU32::default(),
            room: AtomicU32::default(),
            seed: AtomicU64::default(),
            launches_ahead: false,
            launched_ahead: AtomicU64::default(),
            faults: Vec::new(),
            lost: OnceLock::new(),
        }
    }

    /// A device with the kernels for sm_90a.
    #[allow(dead_code)] // in the tests that have no operators
    pub(crate) fn sm90() -> Shim {
        Shim::of(DeviceModel::H100)
    }

    /// Fills all memory at reserved addresses, which is working memory, with a word. Returns how
    /// many bytes there are. Nobody may use the device meanwhile.
    #[allow(dead_code)] // in tests of what one tenant leaves to the next
    pub(crate) fn fill_working_memory(&self, word: u32) -> u64 {
        let mapped = lock(&self.mapped);
        for (&address, &size) in mapped.iter() {
            let words = size as usize / size_of::<u32>();
            // SAFETY: `map_memory` has made these pages accessible, the lock keeps them so, and the
            // caller promises that nobody else uses the device. Pages are aligned for words.
            let words = unsafe { std::slice::from_raw_parts_mut(address as *mut u32, words) };
            words.fill(word);
        }
        mapped.values().sum()
    }

    /// The content of all memory.
    fn contents(&self) -> Vec<Stale> {
        let mappings = lock_at(Rank::Mappings, &self.mappings);
        let allocated = { mappings.iter() }
            .map(|(&address, &(start, len))| (address, start + len - PAGE - address as usize));
        let mapped = lock(&self.mapped);
        let mapped = { mapped.iter() }.map(|(&address, &size)| (address, size as usize));
        { allocated.chain(mapped) }
            .map(|(address, size)| {
                // SAFETY: `map` and `map_memory` have made these bytes readable, and the locks keep
                // them mapped. A graph runs, and nobody else uses the device.
                let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, size) };
                Stale {
                    address,
                    before: bytes.to_vec(),
                }
            })
            .collect()
    }

    /// The parts of `before` that have changed since.
    fn changed(&self, before: &[Stale]) -> Vec<Stale> {
        let now = self.contents();
        let mut changed: Vec<Stale> = Vec::new();
        for old in before {
            let new = now.iter().find(|new| new.address == old.address);
            let Some(new) = new else { continue };
            let parts = old.before.chunks(UNIT).zip(new.before.chunks(UNIT));
            for (index, (part, _)) in parts.enumerate().filter(|(_, (a, b))| a != b) {
                let address = old.address + (index * UNIT) as u64;
                match changed.last_mut() {
                    Some(last) if last.address + last.before.len() as u64 == address => {
                        last.before.extend(part);
                    }
                    _ => changed.push(Stale {
                        address,
                        before: part.to_vec(),
                    }),
                }
            }
        }
        changed
    }

    /// Runs a launch. `stale` is what launches before it have written, if it begins before they are
    /// complete.
    ///
    /// # Errors
    /// As for [`Device::launch`].
    ///
    /// # Safety
    /// As for [`Device::launch`]. `stale` are parts of the memory of this device that nobody else
    /// uses.
    unsafe fn launch_with(&self, launch: &Launch, stale: &mut [Stale]) -> Result<(), EngineError> {
        let kernel = lock(&self.kernels)[launch.kernel.0 as usize].1.clone();
        let Launch {
            grid,
            threads,
            shared,
            ref params,
            ..
        } = *launch;
        let name = self.kernel_name(launch.kernel);
        let fault = self.faults.iter().find(|(faulty, _)| *faulty == name);
        match fault.map(|(_, fault)| fault) {
            None => {}
            Some(Fault::NoResults) => return Ok(()),
            Some(Fault::IllegalAddress) => {
                let message = (*self.lost.get_or_init(|| ILLEGAL_ADDRESS)).into();
                return Err(EngineError::Device { message });
            }
            Some(Fault::Hang) => loop {
                std::thread::park();
            },
            Some(Fault::Abort) => std::process::abort(),
        }
        // As a driver does (`CUDA_ERROR_INVALID_VALUE`).
        let limit = self.max_dynamic_shared(launch.kernel);
        if shared > limit {
            let message = format!("{name}: {shared} bytes of dynamic shared memory of {limit}");
            return Err(EngineError::Device { message });
        }
        if launch.cooperative {
            let most = self.max_cooperative_blocks(launch.kernel, threads[0], shared);
            if grid[0] > most || grid[1..] != [1, 1] {
                let message = format!("a grid of {grid:?} blocks, of which {most} are resident");
                let op = "a cooperative launch";
                return Err(EngineError::Unsupported { op, why: message });
            }
            let seed = self.seed.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the caller guarantees that every address in `params` points to
            // memory that the kernel may access, until the call returns: the shim is synchronous.
            return unsafe {
                kernel.launch_cooperative(grid[0], threads, shared as usize, params, seed)
            }
            .map_err(device_error);
        }
        // SAFETY: the caller guarantees that every address in `params` points to memory that the
        // kernel may access, until this synchronous call returns, and that `stale` is memory of
        // this device that nobody else uses.
        unsafe { kernel.launch_ahead(grid, threads, shared as usize, params, stale) }
            .map_err(device_error)
    }

    fn map(&self, size: u64) -> Address {
        let bytes = (size as usize).next_multiple_of(256);
        let len = bytes.next_multiple_of(PAGE) + PAGE;
        // SAFETY: a new private mapping overlaps nothing; the page that is protected is its last
        // one.
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
        lock_at(Rank::Mappings, &self.mappings).insert(address, (start, len));
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
            // Each device reserves as many addresses, and a process has 2^47.
            total: 1 << 36,
            free: 1 << 36,
        }
    }

    fn sm_count(&self) -> u32 {
        3 // so that work is shared out, and unevenly
    }

    fn architecture(&self) -> &str {
        self.model.architecture
    }

    /// The limit of a kernel without static shared memory: the shim does not know the static shared
    /// memory of kernels.
    fn max_dynamic_shared(&self, _: KernelId) -> u32 {
        self.model.shared_per_block
    }

    fn shared_per_sm(&self) -> u32 {
        match self.room.load(Ordering::Relaxed) {
            0 => self.model.shared_per_sm,
            room => room,
        }
    }

    fn memory_bandwidth(&self) -> u64 {
        1 << 34
    }

    fn max_cooperative_blocks(&self, _: KernelId, _: u32, _: u32) -> u32 {
        match self.blocks.load(Ordering::Relaxed) {
            0 => BLOCKS,
            NO_BLOCKS => 0,
            blocks => blocks,
        }
    }

    fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        Ok(self.map(size))
    }

    unsafe fn free(&self, address: Address, _: u64) {
        let mut mappings = lock_at(Rank::Mappings, &self.mappings);
        let (start, len) = mappings.remove(&address).expect("it was allocated");
        // SAFETY: `map` has made this mapping, and the caller no longer uses it.
        unsafe { libc::munmap(start as *mut libc::c_void, len) };
    }

    fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError> {
        let device = self.map(size as u64);
        Ok(MappedHostMemory {
            device,
            host: device as *mut u8,
        })
    }

    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller of `upload` guarantees that `from.len()` bytes at `to` are memory that
        // `map` or `map_memory` has mapped; `from` borrows as many readable bytes.
        unsafe { from.as_ptr().copy_to(to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: Address, mut to: BytesMut<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller of `download` guarantees that `to.len()` bytes at `from` are memory
        // that `map` or `map_memory` has mapped; `to` borrows as many writable bytes.
        unsafe { (from as *const u8).copy_to(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        // SAFETY: the caller of `fill` guarantees that `size` bytes at `to` are memory that `map`
        // or `map_memory` has mapped.
        unsafe { (to as *mut u8).write_bytes(value, size as usize) };
        Ok(())
    }

    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError> {
        // SAFETY: the caller of `copy` guarantees that `size` bytes at `from` and `size` bytes at
        // `to` are memory that `map` or `map_memory` has mapped, and do not overlap.
        unsafe { (from as *const u8).copy_to_nonoverlapping(to as *mut u8, size as usize) };
        Ok(())
    }

    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        let mut kernels = lock(&self.kernels);
        let known = kernels.iter().position(|(known, _)| *known == name);
        let id = match known {
            Some(id) => id,
            None => {
                // The shim has the kernels for all architectures, a module those for one.
                let mut sources = sources_for(self.model.architecture);
                let is_in_module = sources.any(|source| source.kernels().any(|own| own == name));
                let kernel = Kernel::find(name).filter(|_| is_in_module);
                let kernel = kernel.ok_or_else(|| EngineError::Device {
                    message: format!("there is no kernel {name}"),
                })?;
                kernels.push((name, kernel));
                kernels.len() - 1
            }
        };
        Ok(KernelId(id as u32))
    }

    fn kernel_name(&self, kernel: KernelId) -> &'static str {
        lock(&self.kernels)[kernel.0 as usize].0
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees what `launch_with` needs; no memory is stale.
        unsafe { self.launch_with(launch, &mut []) }
    }

    fn prefers_suballocation(&self) -> bool {
        false
    }

    fn lost(&self) -> Option<String> {
        self.lost.get().map(|reason| (*reason).to_owned())
    }

    fn abandon(&self) {}

    unsafe fn pin(&self, _: *mut u8, _: usize) -> Result<(), EngineError> {
        Ok(())
    }

    unsafe fn unpin(&self, _: *mut u8) {}

    fn map_granularity(&self) -> u64 {
        PAGE as u64
    }

    fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError> {
        // SAFETY: a new private mapping overlaps nothing, and is never unmapped.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED, "{size} addresses");
        Ok(start as Address)
    }

    unsafe fn map_memory(&self, address: Address, size: u64) -> Result<(), EngineError> {
        let read_and_write = libc::PROT_READ | libc::PROT_WRITE;
        // What nobody wrote must not look like zeros.
        // SAFETY: the caller of `map_memory` guarantees that the `size` bytes at `address` are
        // whole pages of a mapping that `reserve_addresses` has made and that is never unmapped.
        unsafe {
            let at = address as *mut u8;
            assert_eq!(libc::mprotect(at.cast(), size as usize, read_and_write), 0);
            at.write_bytes(0xff, size as usize);
        }
        lock(&self.mapped).insert(address, size);
        Ok(())
    }

    unsafe fn unmap_memory(&self, address: Address, size: u64) {
        let (at, len) = (address as *mut libc::c_void, size as usize);
        lock(&self.mapped).remove(&address);
        // SAFETY: `map_memory` has made these pages of a mapping of `reserve_addresses` accessible,
        // and the caller no longer uses them.
        unsafe {
            assert_eq!(libc::madvise(at, len, libc::MADV_DONTNEED), 0);
            assert_eq!(libc::mprotect(at, len, libc::PROT_NONE), 0);
        }
    }

    fn create_graph(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError> {
        let mut graphs = lock_at(Rank::Graphs, &self.graphs);
        let id = graphs.keys().max().map_or(0, |last| last + 1);
        graphs.insert(id, launches.to_vec());
        Ok(GraphExecId(id))
    }

    fn update_graph_node(
        &self,
        graph: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        let mut graphs = lock_at(Rank::Graphs, &self.graphs);
        let held = graphs.get_mut(&graph.0).expect("the graph exists");
        assert_eq!(
            held[index].kernel, launch.kernel,
            "the kernel of a node is fixed"
        );
        held[index] = launch.clone();
        Ok(())
    }

    unsafe fn launch_graph(&self, graph: GraphExecId) -> Result<(), EngineError> {
        let graphs = lock_at(Rank::Graphs, &self.graphs);
        let before = match self.launches_ahead {
            true => self.contents(),
            false => Vec::new(),
        };
        for launch in &graphs[&graph.0] {
            let mut stale = match self.launches_ahead {
                true => self.changed(&before),
                false => Vec::new(),
            };
            let is_ahead = u64::from(!stale.is_empty());
            self.launched_ahead.fetch_add(is_ahead, Ordering::Relaxed);
            // SAFETY: the caller of `launch_graph` guarantees the memory that the parameters of the
            // graph's launches name, until the call returns. `stale` are parts of mapped
            // allocations, which do not overlap; with `launches_ahead` nobody else uses the device
            // while a graph runs.
            unsafe { self.launch_with(launch, &mut stale) }?;
        }
        Ok(())
    }

    fn destroy_graph(&self, graph: GraphExecId) {
        let mut graphs = lock_at(Rank::Graphs, &self.graphs);
        graphs.remove(&graph.0).expect("the graph exists");
    }

    fn record_event(&self) -> Result<Event, EngineError> {
        Ok(Event(0))
    }

    fn wait_event(&self, _: Event) -> Result<(), EngineError> {
        Ok(())
    }

    fn synchronize(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
