//! A device that records its calls, runs kernels or not, and fails on command.

use std::sync::{Arc, Mutex};

use vgpu_cuda::device::{Address, Device, Event, GraphExecId, KernelId, Launch, MappedHostMemory};
use vgpu_cuda_shim::DeviceModel;
use vgpu_engine::{EngineError, MemoryInfo};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{Guard, lock};

use crate::shim::Shim;

/// The shim device with a log of its calls.
pub(crate) struct Spy {
    pub(crate) shim: Shim,
    /// Whether kernels run.
    runs: bool,
    /// Bytes of memory, for a device that suballocates like a GPU.
    limit: Option<u64>,
    /// The device lacks kernels whose names begin with this.
    lacks: Option<&'static str>,
    state: Mutex<SpyState>,
}

#[derive(Default)]
struct SpyState {
    names: Vec<(KernelId, &'static str)>,
    log: Vec<Call>,
    fails: Option<Fails>,
    lost: Option<String>,
    /// Bytes that are allocated.
    used: u64,
    /// Bytes that were copied within the device.
    copied: u64,
    /// Called by each allocation of the device.
    on_alloc: Option<OnAlloc>,
}

/// What an allocation calls.
pub(crate) type OnAlloc = Arc<dyn Fn() + Send + Sync>;

/// A failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fails {
    /// Graphs cannot be created.
    Graphs,
    /// There is no memory left.
    Memory,
    /// The launch after this many others makes the device unusable.
    Launch(usize),
    /// A megakernel fails after some of its blocks have counted up.
    Megakernel,
    /// Host memory cannot be page-locked.
    Pinning,
}

/// A call of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Launch(&'static str),
    CreateGraph(usize),
    UpdateNode(usize),
    LaunchGraph,
    DestroyGraph,
    Map(u64),
    Unmap(u64),
    Alloc(u64),
    Free(u64),
    Abandon,
    Pin(usize),
    Unpin,
    /// A launch for several small uploads.
    UploadBatch,
    Upload(usize),
    Download(usize),
    Wait,
}

/// The kernels that a log launches, in order.
pub(crate) fn launched(log: &[Call]) -> Vec<&'static str> {
    { log.iter() }
        .filter_map(|call| match call {
            Call::Launch(name) => Some(*name),
            _ => None,
        })
        .collect()
}

impl Call {
    /// Whether the call is about data, not about launches and memory.
    fn is_traffic(&self) -> bool {
        matches!(
            self,
            Call::UploadBatch | Call::Upload(_) | Call::Download(_) | Call::Wait
        )
    }
}

impl Spy {
    /// A device that runs kernels on the CPU.
    pub(crate) fn running() -> Spy {
        Spy::new(true, None)
    }

    /// A device that only records its calls.
    pub(crate) fn logging() -> Spy {
        Spy::new(false, None)
    }

    /// A device that runs kernels and has this much memory.
    pub(crate) fn with_memory(limit: u64) -> Spy {
        Spy::new(true, Some(limit))
    }

    /// A device for sm_90a that only records its calls.
    pub(crate) fn on_sm90() -> Spy {
        Spy::on(DeviceModel::H100)
    }

    /// A device with the limits of a GPU that only records its calls.
    pub(crate) fn on(model: DeviceModel) -> Spy {
        Spy {
            shim: Shim::of(model),
            ..Spy::logging()
        }
    }

    /// The same device without the kernels whose names begin with `prefix`.
    pub(crate) fn without(self, prefix: &'static str) -> Spy {
        Spy {
            lacks: Some(prefix),
            ..self
        }
    }

    fn new(runs: bool, limit: Option<u64>) -> Spy {
        Spy {
            shim: Shim::default(),
            runs,
            limit,
            lacks: None,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> Guard<'_, SpyState> {
        lock(&self.state)
    }

    /// The calls since the last one of this function, without data.
    pub(crate) fn take_log(&self) -> Vec<Call> {
        let mut log = self.take_whole_log();
        log.retain(|call| !call.is_traffic());
        log
    }

    /// The same with data.
    pub(crate) fn take_whole_log(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().log)
    }

    /// Makes this fail from now on, or nothing.
    pub(crate) fn fail(&self, fails: impl Into<Option<Fails>>) {
        self.state().fails = fails.into();
    }

    /// Bytes that were copied within the device since the last call.
    pub(crate) fn take_copied(&self) -> u64 {
        std::mem::take(&mut self.state().copied)
    }

    /// Calls this in each allocation of the device from now on, before there is memory.
    pub(crate) fn on_alloc(&self, call: Option<OnAlloc>) {
        self.state().on_alloc = call;
    }

    fn note(&self, call: Call) {
        self.state().log.push(call);
    }

    /// Fails if the device is unusable.
    fn check_there(&self) -> Result<(), EngineError> {
        match &self.state().lost {
            None => Ok(()),
            Some(reason) => Err(EngineError::Device {
                message: reason.clone(),
            }),
        }
    }

    fn check(&self, what: Fails) -> Result<(), EngineError> {
        self.check_there()?;
        let mut state = self.state();
        match &mut state.fails {
            Some(Fails::Launch(after)) if what == Fails::Launch(0) => {
                if *after > 0 {
                    *after -= 1;
                    return Ok(());
                }
                let reason = "an illegal memory access was encountered";
                state.lost = Some(reason.into());
                Err(EngineError::Device {
                    message: reason.into(),
                })
            }
            Some(Fails::Memory) if what == Fails::Memory => Err(EngineError::OutOfMemory {
                wanted: 1,
                free: 0,
                total: 0,
            }),
            Some(fails) if *fails == what => Err(EngineError::Device {
                message: format!("{what:?} fails on command"),
            }),
            _ => Ok(()),
        }
    }
}

impl Device for Spy {
    fn name(&self) -> &str {
        "spy"
    }

    fn description(&self) -> &str {
        "a device that is watched"
    }

    fn memory(&self) -> MemoryInfo {
        match self.limit {
            None => self.shim.memory(),
            Some(total) => MemoryInfo {
                total,
                free: total - self.state().used,
            },
        }
    }

    fn prefers_suballocation(&self) -> bool {
        self.limit.is_some()
    }

    fn lost(&self) -> Option<String> {
        self.state().lost.clone()
    }

    fn abandon(&self) {
        assert!(self.lost().is_some(), "a device that works is not given up");
        self.note(Call::Abandon);
    }

    unsafe fn pin(&self, _: *mut u8, len: usize) -> Result<(), EngineError> {
        self.check(Fails::Pinning)?;
        self.note(Call::Pin(len));
        Ok(())
    }

    unsafe fn unpin(&self, _: *mut u8) {
        self.note(Call::Unpin);
    }

    fn sm_count(&self) -> u32 {
        if self.runs { 1 } else { 132 }
    }

    fn architecture(&self) -> &str {
        self.shim.architecture()
    }

    fn max_dynamic_shared(&self, kernel: KernelId) -> u32 {
        self.shim.max_dynamic_shared(kernel)
    }

    fn shared_per_sm(&self) -> u32 {
        self.shim.shared_per_sm()
    }

    fn memory_bandwidth(&self) -> u64 {
        self.shim.memory_bandwidth()
    }

    fn max_cooperative_blocks(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        self.shim.max_cooperative_blocks(kernel, threads, shared)
    }

    fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        self.check(Fails::Memory)?;
        let call = self.state().on_alloc.clone();
        if let Some(call) = call {
            call();
        }
        let MemoryInfo { total, free } = self.memory();
        if size > free {
            let wanted = size;
            return Err(EngineError::OutOfMemory {
                wanted,
                free,
                total,
            });
        }
        self.state().used += size;
        self.note(Call::Alloc(size));
        self.shim.alloc(size)
    }

    unsafe fn free(&self, address: Address, size: u64) {
        self.state().used -= size;
        self.note(Call::Free(size));
        // SAFETY: the caller guarantees that `address` is from `alloc`, which is the shim's, with
        // this `size`, and that nothing uses the memory from now on.
        unsafe { self.shim.free(address, size) };
    }

    fn map_granularity(&self) -> u64 {
        self.shim.map_granularity()
    }

    fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError> {
        self.shim.reserve_addresses(size)
    }

    unsafe fn map_memory(&self, address: Address, size: u64) -> Result<(), EngineError> {
        self.check(Fails::Memory)?;
        self.note(Call::Map(size));
        // SAFETY: the caller guarantees that the range is from `reserve_addresses`, which is the
        // shim's, and has no memory.
        unsafe { self.shim.map_memory(address, size) }
    }

    unsafe fn unmap_memory(&self, address: Address, size: u64) {
        self.note(Call::Unmap(size));
        // SAFETY: the caller guarantees that one call of `map_memory` has mapped this range, and
        // that nothing uses the memory from now on.
        unsafe { self.shim.unmap_memory(address, size) };
    }

    fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError> {
        self.shim.alloc_mapped(size)
    }

    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        self.check_there()?;
        self.note(Call::Upload(from.len()));
        // SAFETY: the caller guarantees `from.len()` bytes of memory at `to`, all of it the shim's.
        unsafe { self.shim.upload(to, from) }
    }

    unsafe fn download(&self, from: Address, to: BytesMut<'_>) -> Result<(), EngineError> {
        self.check_there()?;
        self.note(Call::Download(to.len()));
        // SAFETY: the caller guarantees `to.len()` bytes of memory at `from`, all of it the shim's.
        unsafe { self.shim.download(from, to) }
    }

    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        self.check_there()?;
        // SAFETY: the caller guarantees `size` bytes of memory at `to`, all of it the shim's.
        unsafe { self.shim.fill(to, size, value) }
    }

    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError> {
        self.check_there()?;
        self.state().copied += size;
        // SAFETY: the caller guarantees `size` bytes of the shim's memory at both addresses, which
        // do not overlap.
        unsafe { self.shim.copy(to, from, size) }
    }

    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        if self.lacks.is_some_and(|prefix| name.starts_with(prefix)) {
            let message = format!("there is no kernel {name}");
            return Err(EngineError::Device { message });
        }
        let id = self.shim.kernel(name)?;
        let mut state = self.state();
        if !state.names.contains(&(id, name)) {
            state.names.push((id, name));
        }
        Ok(id)
    }

    fn kernel_name(&self, kernel: KernelId) -> &'static str {
        self.shim.kernel_name(kernel)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        let name = {
            let state = self.state();
            let known = { state.names.iter() }.find(|(id, _)| *id == launch.kernel);
            known.expect("kernels are looked up by name").1
        };
        if name == "vg_upload" {
            self.check_there()?;
            self.note(Call::UploadBatch);
            // SAFETY: the caller guarantees that the addresses in the parameters are of memory that
            // the kernel may use as it does, until `synchronize` has returned.
            return unsafe { self.shim.launch(launch) };
        }
        self.check(Fails::Launch(0))?;
        let mut state = self.state();
        state.log.push(Call::Launch(name));
        drop(state);
        if launch.cooperative && self.check(Fails::Megakernel).is_err() {
            let counters = u64::from_ne_bytes(launch.params[8..16].try_into().expect("an address"));
            for stage in [0, 3, 4] {
                // SAFETY: the counters are memory of the shim, which is this process.
                unsafe { *(counters as *mut u32).add(32 * stage) += 2 };
            }
            return Err(EngineError::Device {
                message: "the step has ended".into(),
            });
        }
        match self.runs {
            // SAFETY: the caller guarantees that the addresses in the parameters are of memory that
            // the kernel may use as it does, until `synchronize` has returned.
            true => unsafe { self.shim.launch(launch) },
            false => Ok(()),
        }
    }

    fn create_graph(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError> {
        self.check(Fails::Graphs)?;
        self.note(Call::CreateGraph(launches.len()));
        self.shim.create_graph(launches)
    }

    fn update_graph_node(
        &self,
        graph: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        self.check(Fails::Graphs)?;
        self.note(Call::UpdateNode(index));
        self.shim.update_graph_node(graph, index, launch)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId) -> Result<(), EngineError> {
        self.check(Fails::Launch(0))?;
        self.note(Call::LaunchGraph);
        match self.runs {
            // SAFETY: the caller guarantees that the addresses in the parameters of the graph's
            // nodes are of memory that the kernels may use as they do, until `synchronize` has
            // returned.
            true => unsafe { self.shim.launch_graph(graph) },
            false => Ok(()),
        }
    }

    fn destroy_graph(&self, graph: GraphExecId) {
        self.note(Call::DestroyGraph);
        self.shim.destroy_graph(graph);
    }

    fn record_event(&self) -> Result<Event, EngineError> {
        self.shim.record_event()
    }

    fn wait_event(&self, call: Event) -> Result<(), EngineError> {
        self.shim.wait_event(call)
    }

    fn synchronize(&self) -> Result<(), EngineError> {
        self.check_there()?;
        self.note(Call::Wait);
        self.shim.synchronize()
    }
}
