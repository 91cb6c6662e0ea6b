//! The CUDA engine's device on a GPU, through NVIDIA's driver.
//!
//! The driver library is loaded at run time, so this program builds and starts without one.
//!
//! - `context`: the CUDA context, entering it, and sticky errors.
//! - `stream`, `completion`: the one stream, its events, and waiting.
//! - `kernels`, `launch`, `graph`: modules and functions, launches, CUDA graphs.
//! - `memory`, `host_memory`, `vmm`: device memory and copies, mapped host memory, address ranges.

mod completion;
mod context;
mod error;
mod graph;
mod host_memory;
mod kernels;
mod launch;
mod memory;
mod stream;
mod vmm;

use std::ffi::{CStr, c_int};
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use vgpu_engine::{EngineError, MemoryInfo};
use vgpu_transport::bytes::{Bytes, BytesMut};

use crate::device::{Address, Device, Event, GraphExecId, KernelId, Launch, MappedHostMemory};
use crate::source::{GENERAL, architecture};
use context::Context;
pub use error::GpuError;
use error::check;
use graph::Graphs;
use kernels::Kernels;
use launch::Launcher;
use memory::DeviceMemory;
use stream::Stream;
use vmm::AddressSpace;

/// The oldest driver that is supported: that of CUDA 12.0, in the form of `cuDriverGetVersion`.
const MIN_DRIVER: c_int = 12000;

/// The oldest compute capability: kernels use instructions that came with sm_80 (A100).
const MIN_COMPUTE_CAPABILITY: (c_int, c_int) = (8, 0);

/// The first compute capability with programmatic dependent launch, and the first driver with such
/// edges in graphs, that of CUDA 12.3.
const PROGRAMMATIC_LAUNCH: (c_int, c_int) = (9, 12030);

/// A GPU with its context, its stream and all kernels.
pub struct Gpu {
    name: String,
    description: String,
    architecture: String,
    /// The model, its compute capability, the driver, and a hash of the machine code.
    identity: String,
    sm_count: u32,
    shared_per_sm: u32,
    /// Bytes per second; 0 if the driver does not know.
    memory_bandwidth: u64,
    context: Arc<Context>,
    stream: Arc<Stream>,
    kernels: Arc<Kernels>,
    launcher: Launcher,
    graphs: Graphs,
    memory: Arc<DeviceMemory>,
    addresses: AddressSpace,
}

impl Gpu {
    /// The same GPU with the kernels for any GPU only, none for its own architecture.
    #[must_use]
    pub fn with_general_kernels(mut self) -> Gpu {
        self.architecture = GENERAL.into();
        self
    }

    /// A hash of what the results of kernels depend on: the model, its compute capability, the
    /// driver, the machine code of all kernels, and which of them are used.
    pub fn fingerprint(&self) -> String {
        let text = format!("{}, kernels for {}", self.identity, self.architecture);
        blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
    }

    /// Opens GPU number `ordinal`. Kernels that have to be compiled are kept in the folder `cache`.
    ///
    /// # Errors
    /// [`GpuError`] says whether the driver, the GPU or the kernel compiler is missing or too old,
    /// or which call of the driver has failed.
    pub fn new(ordinal: u32, cache: Option<PathBuf>) -> Result<Gpu, GpuError> {
        let (device, model, driver) = find(ordinal)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` is a valid place for the result; `device` is from `cuDeviceGet`.
            let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", code).map(|()| value)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if (major, minor) < MIN_COMPUTE_CAPABILITY {
            return Err(GpuError::OldCard {
                name: model,
                major,
                minor,
            });
        }
        let sm_count = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let max_shared_per_block =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32;
        let shared_per_sm =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)? as u32;
        let is_cooperative = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0;
        // The clock is in kHz, the memory transfers twice a cycle, and the bus width is in bits.
        // Drivers that do not know them give 0 or an error.
        let clock = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
        let width = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
        let memory_bandwidth = clock.max(0) as u64 * 1000 * 2 * (width.max(0) as u64 / 8);

        let name = format!("cuda:{ordinal}");
        let context = Arc::new(Context::new(device)?);
        let stream = Arc::new(Stream::new(Arc::clone(&context))?);
        let architecture = architecture(major, minor);
        // SAFETY: `Context::new` has made the context current to this thread; the kernels stay in
        // the `Gpu` that owns the context.
        let kernels =
            Arc::new(unsafe { Kernels::load(&architecture, cache, max_shared_per_block) }?);
        let memory = Arc::new(DeviceMemory::new(name.clone(), Arc::clone(&stream))?);
        let addresses = AddressSpace::new(
            name.clone(),
            Arc::clone(&stream),
            Arc::clone(&memory),
            device,
        )
        .map_err(GpuError::Engine)?;
        let word = { memory.alloc_mapped(size_of::<u32>()) }.map_err(GpuError::Engine)?;
        // SAFETY: the context is current to this thread; `word` stays until the context is
        // destroyed.
        unsafe { stream.set_completion(word) };
        Ok(Gpu {
            identity: format!(
                "{model}, compute capability {major}.{minor}, CUDA {driver}, {}, code {}",
                kernel_module_version(),
                kernels.code_hash()
            ),
            description: format!("{model}, {sm_count} SMs"),
            architecture,
            sm_count,
            shared_per_sm,
            memory_bandwidth,
            launcher: Launcher::new(
                Arc::clone(&stream),
                Arc::clone(&kernels),
                sm_count,
                is_cooperative,
            ),
            graphs: Graphs::new(
                Arc::clone(&stream),
                Arc::clone(&kernels),
                major >= PROGRAMMATIC_LAUNCH.0 && driver >= PROGRAMMATIC_LAUNCH.1,
            ),
            name,
            context,
            stream,
            kernels,
            memory,
            addresses,
        })
    }
}

/// What the driver's kernel module says about its version, if it says something. The version of
/// CUDA alone is that of many drivers.
fn kernel_module_version() -> String {
    std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default()
}

/// Loads the driver: its version, and the number of its GPUs.
///
/// # Errors
/// [`GpuError`] if there is no driver, or the driver is too old.
fn load_driver() -> Result<(c_int, c_int), GpuError> {
    // SAFETY: loads libcuda.so.1 if it is there, which runs the library's own initialisation only.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is present, as checked above; `version` is a valid place for the result.
    let code = unsafe { sys::cuDriverGetVersion(&mut version) };
    check("cuDriverGetVersion", code)?;
    if version < MIN_DRIVER {
        return Err(GpuError::OldDriver { version });
    }
    // SAFETY: the flags have to be 0. The call may be repeated, from any thread.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: `count` is a valid place for the result; `cuInit` has succeeded.
    let code = unsafe { sys::cuDeviceGetCount(&mut count) };
    check("cuDeviceGetCount", code)?;
    Ok((version, count))
}

/// Loads the driver, and finds a GPU: its handle, the name of its model, and the driver's version.
///
/// # Errors
/// [`GpuError`] if there is no driver, the driver is too old, or it has no GPU of this number.
fn find(ordinal: u32) -> Result<(sys::CUdevice, String, c_int), GpuError> {
    let (version, count) = load_driver()?;
    if i64::from(ordinal) >= i64::from(count) {
        return Err(GpuError::NoDevice { ordinal, count });
    }
    let mut device = 0;
    // SAFETY: `device` is a valid place for the result, and `ordinal` is below the count.
    let code = unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) };
    check("cuDeviceGet", code)?;
    let mut text = [0; 128];
    // SAFETY: the driver writes at most `text.len()` bytes, a zero byte at the end included.
    let code = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as c_int, device) };
    check("cuDeviceGetName", code)?;
    // SAFETY: the call above has succeeded, so `text` has a zero byte.
    let model = unsafe { CStr::from_ptr(text.as_ptr()) };
    Ok((device, model.to_string_lossy().into_owned(), version))
}

/// The models of all GPUs, by their number. Opens nothing on a GPU.
///
/// # Errors
/// [`GpuError`] if there is no driver, the driver is too old, or it has no GPU.
pub fn models() -> Result<Vec<String>, GpuError> {
    let (_, count) = load_driver()?;
    let count = u32::try_from(count).unwrap_or_default();
    // Without a GPU, the error of the first one.
    (0..count.max(1))
        .map(|ordinal| Ok(find(ordinal)?.1))
        .collect()
}

/// The PCI address of GPU number `ordinal`, such as `0000:01:00.0`. Opens nothing on the GPU.
///
/// # Errors
/// [`GpuError`] if there is no driver, the driver is too old, or it has no GPU of this number.
pub fn address(ordinal: u32) -> Result<String, GpuError> {
    let (device, ..) = find(ordinal)?;
    let mut text = [0; 32];
    // SAFETY: the driver writes at most `text.len()` bytes, a zero byte at the end included;
    // `device` is from `cuDeviceGet`.
    let code = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as c_int, device) };
    check("cuDeviceGetPCIBusId", code)?;
    // SAFETY: the call above has succeeded, so `text` has a zero byte.
    let address = unsafe { CStr::from_ptr(text.as_ptr()) };
    Ok(address.to_string_lossy().into_owned())
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Before the host memory that is registered with the context is freed.
        self.context.destroy();
    }
}

impl Device for Gpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> &str {
        &self.description
    }

    fn memory(&self) -> MemoryInfo {
        self.memory.info()
    }

    fn architecture(&self) -> &str {
        &self.architecture
    }

    fn sm_count(&self) -> u32 {
        self.sm_count
    }

    fn max_dynamic_shared(&self, kernel: KernelId) -> u32 {
        self.kernels.max_dynamic_shared(kernel)
    }

    fn shared_per_sm(&self) -> u32 {
        self.shared_per_sm
    }

    fn memory_bandwidth(&self) -> u64 {
        self.memory_bandwidth
    }

    fn max_cooperative_blocks(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        self.launcher
            .max_cooperative_blocks(kernel, threads, shared)
    }

    fn blocks_per_sm(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        self.launcher.blocks_per_sm(kernel, threads, shared).max(1)
    }

    fn lost(&self) -> Option<String> {
        self.context.lost().map(str::to_owned)
    }

    fn abandon(&self) {
        self.context.abandon();
    }

    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), EngineError> {
        // SAFETY: the caller of `Device::pin` guarantees that the `len` bytes at `start` stay
        // mapped until `unpin`, which calls `DeviceMemory::unpin` with this `start`.
        unsafe { self.memory.pin(start, len) }
    }

    unsafe fn unpin(&self, start: *mut u8) {
        // SAFETY: `pin` calls `DeviceMemory::pin` with each range that it locks, and the caller
        // names one of them.
        unsafe { self.memory.unpin(start) };
    }

    fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        self.memory.alloc(size)
    }

    unsafe fn free(&self, address: Address, _: u64) {
        // SAFETY: `Device::alloc` of this object has returned the `address` of
        // `DeviceMemory::alloc`. The caller guarantees that nothing uses the memory from now on.
        unsafe { self.memory.free(address) };
    }

    fn map_granularity(&self) -> u64 {
        self.addresses.granularity()
    }

    fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError> {
        self.addresses.reserve(size)
    }

    unsafe fn map_memory(&self, address: Address, size: u64) -> Result<(), EngineError> {
        // SAFETY: the range is from `reserve_addresses`, which calls `AddressSpace::reserve`. The
        // caller guarantees that the range has no memory and is a multiple of the granularity.
        unsafe { self.addresses.map(address, size) }
    }

    unsafe fn unmap_memory(&self, address: Address, size: u64) {
        // SAFETY: `map_memory` has mapped exactly this range by `AddressSpace::map`. The caller
        // guarantees that nothing uses the range from now on.
        unsafe { self.addresses.unmap(address, size) };
    }

    fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError> {
        self.memory.alloc_mapped(size)
    }

    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees `from.len()` bytes of device memory at `to`.
        unsafe { self.memory.upload(to, from) }
    }

    unsafe fn download(&self, from: Address, to: BytesMut<'_>) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees `to.len()` bytes of device memory at `from`.
        unsafe { self.memory.download(from, to) }
    }

    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees `size` bytes of device memory at `to`.
        unsafe { self.memory.fill(to, size, value) }
    }

    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees `size` bytes of device memory at `to` and at `from`,
        // without overlap.
        unsafe { self.memory.copy(to, from, size) }
    }

    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        self.kernels.find(name)
    }

    fn kernel_name(&self, kernel: KernelId) -> &'static str {
        self.kernels.name(kernel)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees that the addresses in `launch.params` are of device memory
        // that the kernel may use until `synchronize`, which synchronises the stream of the
        // launcher.
        unsafe { self.launcher.launch(launch) }
    }

    unsafe fn time_launches(&self, launches: &[Launch]) -> Result<Vec<f64>, EngineError> {
        // SAFETY: the caller guarantees that the addresses in the parameters of all `launches` are
        // of device memory that their kernels may use. `time` synchronises the stream before it
        // returns.
        unsafe { self.launcher.time(launches) }
    }

    fn create_graph(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError> {
        self.graphs.create(launches)
    }

    fn update_graph_node(
        &self,
        graph: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        self.graphs.update(graph, index, launch)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId) -> Result<(), EngineError> {
        // SAFETY: the caller guarantees that the addresses in the parameters of all nodes are of
        // device memory that their kernels may use until `synchronize`, which synchronises the
        // stream of the graphs.
        unsafe { self.graphs.launch(graph) }
    }

    fn destroy_graph(&self, graph: GraphExecId) {
        self.graphs.destroy(graph);
    }

    fn record_event(&self) -> Result<Event, EngineError> {
        self.stream.record_event()
    }

    fn wait_event(&self, event: Event) -> Result<(), EngineError> {
        self.stream.wait_event(event)
    }

    fn synchronize(&self) -> Result<(), EngineError> {
        self.stream.synchronize()
    }
}
