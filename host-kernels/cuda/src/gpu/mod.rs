//! A GPU, through NVIDIA's driver, which is loaded at run time: this builds and starts without one.

mod completion;
mod graph;
mod timing;
mod vmm;

use std::alloc::Layout;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use tracing::{error, warn};
use vgpu_transport::bytes::{Bytes, BytesMut};

use crate::cubin::CubinLoader;
use crate::device::{Address, Device, Event, GraphExecId, KernelId, Launch, MappedHostMemory};
use crate::nvrtc::CompileError;
use crate::source::{GENERAL, architecture, sources_for};
use completion::Completion;
use graph::Graphs;
use timing::TimedEvent;
use vgpu_engine::{EngineError, MemoryInfo};

/// The oldest driver: that of CUDA 12.0.
const OLDEST_DRIVER: c_int = 12000;

/// The oldest compute capability: kernels use what came with A100.
const OLDEST_CARD: (c_int, c_int) = (8, 0);

/// Bytes of pinned memory through which small uploads go, so that they need not be waited for.
const STAGING_BYTES: usize = 4 << 20;

/// Uploads of at most so many bytes go through it.
const SMALL_UPLOAD: usize = 256 << 10;

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum GpuError {
    #[error("NVIDIA's driver (libcuda.so.1) is not installed")]
    NoDriver,
    #[error("NVIDIA's driver is for CUDA {}.{}; CUDA 12.0 or newer is needed", .version / 1000, .version % 1000 / 10)]
    OldDriver { version: i32 },
    #[error("there is no GPU {ordinal}: this machine has {count}")]
    NoDevice { ordinal: u32, count: i32 },
    #[error("{name} has compute capability {major}.{minor}; 8.0 or newer is needed")]
    OldCard {
        name: String,
        major: i32,
        minor: i32,
    },
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Engine(EngineError),
    #[error("{call} failed: {reason}")]
    Driver { call: &'static str, reason: String },
}

/// A GPU with its context, a stream and all kernels.
pub struct Gpu {
    name: String,
    description: String,
    architecture: String,
    sm_count: u32,
    max_shared_per_block: u32,
    shared_per_sm: u32,
    /// Bytes a second of its memory.
    memory_bandwidth: u64,
    /// Whether it runs launches of blocks that wait for each other.
    is_cooperative: bool,
    device: sys::CUdevice,
    granularity: u64,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Kernels by number: name and function.
    kernels: Vec<(&'static str, sys::CUfunction)>,
    staging: Mutex<Staging>,
    graphs: Mutex<Graphs>,
    events: Mutex<EventRing>,
    /// How it says that it is done, if it can.
    completion: Option<Completion>,
    /// Memory of this process that the GPU sees for as long as this lives.
    shared: Mutex<Vec<HostMemory>>,
    /// The first error that the context does not recover from.
    lost: OnceLock<String>,
    /// Whether the context was given up.
    is_gone: AtomicBool,
    /// Calls that are using the context.
    calls: AtomicUsize,
}

/// Errors after which the driver answers every call in the context with the same: what a kernel, the hardware or the
/// link to it did wrong. From cuda.h, by number, since releases of the driver add some.
const FINAL: [u32; 13] = [
    214, // ECC_UNCORRECTABLE
    220, // NVLINK_UNCORRECTABLE
    226, // CONTAINED
    700, // ILLEGAL_ADDRESS
    702, // LAUNCH_TIMEOUT
    709, // CONTEXT_IS_DESTROYED
    710, // ASSERT
    714, // HARDWARE_STACK_ERROR
    715, // ILLEGAL_INSTRUCTION
    716, // MISALIGNED_ADDRESS
    717, // INVALID_ADDRESS_SPACE
    718, // INVALID_PC
    719, // LAUNCH_FAILED
];

/// EventRing that can be told apart at a time. Whoever waits for an older one waits for a later one.
const EVENTS: u64 = 8;

/// EventRing in the stream, used round and round.
struct EventRing {
    events: [sys::CUevent; EVENTS as usize],
    last: u64,
}

// SAFETY: the driver's handles may be used from any thread, with the context made current first, which every
// method does; the staging memory is behind a lock.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// Pinned memory, used round and round.
struct Staging {
    memory: *mut u8,
    /// Where the next upload begins.
    next: usize,
}

impl Gpu {
    /// The same with the kernels for any GPU alone, none for its own architecture.
    #[must_use]
    pub fn with_general_kernels(mut self) -> Gpu {
        self.architecture = GENERAL.into();
        self
    }

    /// GPU number `ordinal`. Kernels that must be compiled are kept in `cache`.
    pub fn new(ordinal: u32, cache: Option<PathBuf>) -> Result<Gpu, GpuError> {
        // SAFETY: looks whether the library loads.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoDriver);
        }
        // SAFETY: plain calls of the driver with places for their results; the structures they fill in are ours.
        unsafe {
            let mut version = 0;
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&mut version))?;
            if version < OLDEST_DRIVER {
                return Err(GpuError::OldDriver { version });
            }
            check("cuInit", sys::cuInit(0))?;
            let mut count = 0;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
            let mut device = 0;
            if i64::from(ordinal) >= i64::from(count) {
                return Err(GpuError::NoDevice { ordinal, count });
            }
            check(
                "cuDeviceGet",
                sys::cuDeviceGet(&mut device, ordinal as c_int),
            )?;
            let mut text = [0; 128];
            check(
                "cuDeviceGetName",
                sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as c_int, device),
            )?;
            let model = CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned();
            let attribute = |attribute| {
                let mut value = 0;
                let code = sys::cuDeviceGetAttribute(&mut value, attribute, device);
                check("cuDeviceGetAttribute", code).map(|()| value)
            };
            let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            if (major, minor) < OLDEST_CARD {
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
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?
                    as u32;
            let is_cooperative = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0;
            // In kHz, with two transfers a cycle, and in bits. Unknown to some drivers: 0.
            let clock = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
            let width =
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
            let memory_bandwidth = clock.max(0) as u64 * 1000 * 2 * (width.max(0) as u64 / 8);

            // One of our own, not the process's primary one: it can be given up after an error.
            let mut context = ptr::null_mut();
            // Whoever waits longer than `Completion` looks sleeps.
            let flags = sys::CUctx_flags::CU_CTX_MAP_HOST as c_uint
                | sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as c_uint;
            check(
                "cuCtxCreate",
                sys::cuCtxCreate_v2(&mut context, flags, device),
            )?;
            let unfinished = Unfinished(context);
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            let mut stream = ptr::null_mut();
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
            check(
                "cuStreamCreate",
                sys::cuStreamCreate(&mut stream, non_blocking),
            )?;
            let mut events = [ptr::null_mut(); EVENTS as usize];
            for event in &mut events {
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint
                    | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint;
                check("cuEventCreate", sys::cuEventCreate(event, flags))?;
            }
            let architecture = architecture(major, minor);
            let kernels = load(&architecture, cache, max_shared_per_block)?;
            let staging = HostMemory::new(STAGING_BYTES)?;
            let memory = staging.start;
            std::mem::forget(unfinished);
            let mut gpu = Gpu {
                name: format!("cuda:{ordinal}"),
                description: format!("{model}, {sm_count} sm_count"),
                architecture,
                sm_count,
                max_shared_per_block,
                shared_per_sm,
                memory_bandwidth,
                is_cooperative,
                device,
                granularity: 0,
                context,
                stream,
                kernels,
                staging: Mutex::new(Staging { memory, next: 0 }),
                graphs: Mutex::default(),
                events: Mutex::new(EventRing { events, last: 0 }),
                completion: None,
                shared: Mutex::new(vec![staging]),
                lost: OnceLock::new(),
                is_gone: AtomicBool::new(false),
                calls: AtomicUsize::new(0),
            };
            gpu.granularity = gpu.unit().map_err(GpuError::Engine)?;
            let word = { gpu.alloc_mapped(size_of::<u32>()) }.map_err(GpuError::Engine)?;
            gpu.completion = Completion::new(word, stream);
            Ok(gpu)
        }
    }

    /// Makes the context that of this thread. It is not given up before what is returned is dropped.
    fn enter(&self) -> Result<Entered<'_>, EngineError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let entered = Entered(self);
        // Both in one order with those of `abandon`: either it waits for this call, or this call sees that it came first.
        if self.is_gone.load(Ordering::SeqCst) {
            let reason = self.lost.get().cloned().unwrap_or_default();
            return Err(EngineError::DeviceLost { reason });
        }
        // SAFETY: the context is there until it is given up, which waits for this call.
        let code = unsafe { sys::cuCtxSetCurrent(self.context) };
        self.done("cuCtxSetCurrent", code)?;
        Ok(entered)
    }

    /// What the driver says of a call.
    fn done(&self, call: &'static str, code: CUresult) -> Result<(), EngineError> {
        let outcome = check(call, code).map_err(|error| EngineError::Device {
            message: error.to_string(),
        });
        if outcome.is_err() && FINAL.contains(&(code as u32)) {
            self.lost
                .get_or_init(|| format!("{call}: {}", reason(code)));
        }
        outcome
    }

    fn graphs(&self) -> MutexGuard<'_, Graphs> {
        { self.graphs.lock() }.unwrap_or_else(PoisonError::into_inner)
    }

    fn events(&self) -> MutexGuard<'_, EventRing> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Destroys the context, with everything in it, when no call uses it any more.
    fn destroy(&self) {
        if self.is_gone.swap(true, Ordering::SeqCst) {
            return;
        }
        while self.calls.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        // SAFETY: ours, and nobody gets in any more. What the driver says of one that is broken changes nothing.
        unsafe { sys::cuCtxDestroy_v2(self.context) };
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// The context of a GPU that is being set up.
struct Unfinished(sys::CUcontext);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody else has it yet.
        unsafe { sys::cuCtxDestroy_v2(self.0) };
    }
}

/// A call that uses the context.
struct Entered<'a>(&'a Gpu);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Loads all kernels.
///
/// # Safety
/// A context is current.
unsafe fn load(
    arch: &str,
    cache: Option<PathBuf>,
    max_shared_per_block: u32,
) -> Result<Vec<(&'static str, sys::CUfunction)>, GpuError> {
    let mut cubins = CubinLoader::new(arch.into(), cache);
    let mut kernels = Vec::new();
    for source in sources_for(arch) {
        let cubin = cubins.load(source)?;
        // SAFETY: machine code of our own, which the driver copies; modules stay as long as the context.
        unsafe {
            let mut module = ptr::null_mut();
            check(
                "cuModuleLoadData",
                sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()),
            )?;
            for name in source.kernels() {
                let symbol = CString::new(name).expect("names of kernels have no zero bytes");
                let mut function = ptr::null_mut();
                check(
                    "cuModuleGetFunction",
                    sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()),
                )?;
                let mut own = 0;
                use sys::CUfunction_attribute as Function;
                check(
                    "cuFuncGetAttribute",
                    sys::cuFuncGetAttribute(
                        &mut own,
                        Function::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                        function,
                    ),
                )?;
                check(
                    "cuFuncSetAttribute",
                    sys::cuFuncSetAttribute(
                        function,
                        Function::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        max_shared_per_block as c_int - own,
                    ),
                )?;
                kernels.push((name, function));
            }
        }
    }
    Ok(kernels)
}

/// Memory of this process that the GPU sees, too. It is ours and not the driver's, so that it stays when a context goes.
struct HostMemory {
    start: *mut u8,
    layout: Layout,
}

impl HostMemory {
    /// `size` bytes, not 0, all zero, in the current context.
    fn new(size: usize) -> Result<HostMemory, GpuError> {
        const PAGE: usize = 4096;
        let layout = Layout::from_size_align(size.next_multiple_of(PAGE), PAGE);
        let layout = layout.expect("a few pages");
        // SAFETY: the size is not 0.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        let memory = HostMemory { start, layout };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: whole pages of ours, which stay until the context is gone.
        check("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(start.cast(), layout.size(), flags)
        })?;
        Ok(memory)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`. A `Gpu` has destroyed its context by now; one that was never made still has it, but
        // nothing runs there.
        unsafe { std::alloc::dealloc(self.start, self.layout) };
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
        let (mut free, mut total) = (0, 0);
        let outcome = self.enter().and_then(|_entered| {
            // SAFETY: places for the results.
            let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
            self.done("cuMemGetInfo", code)
        });
        if let Err(reason) = outcome {
            warn!("the memory of {} is unknown: {reason}", self.name);
        }
        MemoryInfo {
            total: total as u64,
            free: free as u64,
        }
    }

    fn architecture(&self) -> &str {
        &self.architecture
    }

    fn sm_count(&self) -> u32 {
        self.sm_count
    }

    fn max_shared_per_block(&self) -> u32 {
        // Some is kept for what kernels declare themselves.
        self.max_shared_per_block - (16 << 10)
    }

    fn shared_per_sm(&self) -> u32 {
        self.shared_per_sm
    }

    fn memory_bandwidth(&self) -> u64 {
        self.memory_bandwidth
    }

    fn max_cooperative_blocks(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        let (true, Ok(_entered)) = (self.is_cooperative, self.enter()) else {
            return 0;
        };
        let (_, function) = self.kernels[kernel.0 as usize];
        let mut each = 0;
        // SAFETY: a place for the result, and a function of ours.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut each,
                function,
                threads as c_int,
                shared as usize,
            )
        };
        match self.done("cuOccupancyMaxActiveBlocksPerMultiprocessor", code) {
            Ok(()) => each.max(0) as u32 * self.sm_count,
            Err(error) => {
                warn!("blocks that run at the same time are not known: {error}");
                0
            }
        }
    }

    fn alloc(&self, size: u64) -> Result<Address, EngineError> {
        let _entered = self.enter()?;
        let mut address = 0;
        // SAFETY: a place for the result.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, size as usize) };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let MemoryInfo { total, free } = self.memory();
            return Err(EngineError::OutOfMemory {
                wanted: size,
                free,
                total,
            });
        }
        self.done("cuMemAlloc", code)?;
        // SAFETY: memory of this size, just allocated.
        unsafe { self.fill(address, size, 0) }?;
        Ok(address)
    }

    unsafe fn free(&self, address: Address, _: u64) {
        // What is in a context that is lost goes with it.
        if self.lost.get().is_some() {
            return;
        }
        // SAFETY: the caller has it from `alloc`; the stream has finished with it.
        let outcome = self
            .synchronize()
            .and_then(|()| self.done("cuMemFree", unsafe { sys::cuMemFree_v2(address) }));
        if let Err(reason) = outcome {
            error!("memory of {} is lost: {reason}", self.name);
        }
    }

    fn alloc_mapped(&self, size: usize) -> Result<MappedHostMemory, EngineError> {
        let _entered = self.enter()?;
        let failed = |error: GpuError| EngineError::Device {
            message: error.to_string(),
        };
        let memory = HostMemory::new(size).map_err(failed)?;
        let host = memory.start;
        // ActivationCache from here on: it is registered.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.push(memory);
        let mut device = 0;
        // SAFETY: registered for the device.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host.cast(), 0) };
        self.done("cuMemHostGetDevicePointer", code)?;
        Ok(MappedHostMemory { device, host })
    }

    fn lost(&self) -> Option<String> {
        self.lost.get().cloned()
    }

    fn abandon(&self) {
        self.lost.get_or_init(|| "it was given up".into());
        self.destroy();
    }

    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        // SAFETY: mapped memory, by the caller's promise.
        self.done("cuMemHostRegister", unsafe {
            sys::cuMemHostRegister_v2(start.cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE)
        })
    }

    fn unpin(&self, start: *mut u8) {
        // In a context that is gone nothing is registered.
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: registered by `pin`; copies have ended when the calls that asked for them returned.
        let code = unsafe { sys::cuMemHostUnregister(start.cast()) };
        if let Err(error) = self.done("cuMemHostUnregister", code) {
            error!("a window stays registered with {}: {error}", self.name);
        }
    }

    unsafe fn upload(&self, to: Address, from: Bytes<'_>) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let len = from.len();
        if len > SMALL_UPLOAD {
            // SAFETY: the caller's memory on both sides, for as long as it takes.
            self.done("cuMemcpyHtoDAsync", unsafe {
                sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), len, self.stream)
            })?;
            return self.synchronize();
        }
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if staging.next + len > STAGING_BYTES {
            // What lies there must have been copied.
            self.synchronize()?;
            staging.next = 0;
        }
        // SAFETY: `len` bytes from `next` on are inside the staging memory, and no copy under way reads them; the
        // caller has device memory for them.
        let code = unsafe {
            let place = staging.memory.add(staging.next);
            place.copy_from_nonoverlapping(from.as_ptr(), len);
            sys::cuMemcpyHtoDAsync_v2(to, place.cast(), len, self.stream)
        };
        staging.next = (staging.next + len).next_multiple_of(64);
        self.done("cuMemcpyHtoDAsync", code)
    }

    unsafe fn download(&self, from: Address, mut to: BytesMut<'_>) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let len = to.len();
        // SAFETY: the caller's memory on both sides, for as long as it takes.
        self.done("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, len, self.stream)
        })?;
        self.synchronize()
    }

    unsafe fn fill(&self, to: Address, size: u64, value: u8) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        // SAFETY: the caller has as much device memory there.
        self.done("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(to, value, size as usize, self.stream)
        })
    }

    unsafe fn copy(&self, to: Address, from: Address, size: u64) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        // SAFETY: the caller has as much device memory at both.
        self.done("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to, from, size as usize, self.stream)
        })
    }

    fn kernel(&self, name: &'static str) -> Result<KernelId, EngineError> {
        let found = self.kernels.iter().position(|(known, _)| *known == name);
        found
            .map(|id| KernelId(id as u32))
            .ok_or_else(|| EngineError::Device {
                message: format!("there is no kernel {name}"),
            })
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        let (_, function) = self.kernels[launch.kernel.0 as usize];
        let ([gx, gy, gz], [tx, ty, tz]) = (launch.grid, launch.threads);
        if launch.cooperative {
            // Kernels have one parameter, a structure, which the driver copies. It knows its size.
            let mut params: [*mut c_void; 1] = [launch.params.as_ptr().cast_mut().cast()];
            // SAFETY: a function of ours with its parameters; the caller answers for the addresses.
            let code = unsafe {
                sys::cuLaunchCooperativeKernel(
                    function,
                    gx,
                    gy,
                    gz,
                    tx,
                    ty,
                    tz,
                    launch.shared,
                    self.stream,
                    params.as_mut_ptr(),
                )
            };
            return match code {
                CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
                | CUresult::CUDA_ERROR_NOT_SUPPORTED => Err(EngineError::Unsupported {
                    op: "a step",
                    why: reason(code),
                }),
                code => self.done("cuLaunchCooperativeKernel", code),
            };
        }
        let mut size = launch.params.len();
        let mut extra = [
            sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut c_void,
            launch.params.as_ptr().cast_mut().cast(),
            sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut c_void,
            ptr::from_mut(&mut size).cast(),
            ptr::null_mut(), // CU_LAUNCH_PARAM_END,
        ];
        // SAFETY: a function of ours with its parameters, which the driver copies; the caller answers for the addresses.
        self.done("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                tx,
                ty,
                tz,
                launch.shared,
                self.stream,
                ptr::null_mut(),
                extra.as_mut_ptr(),
            )
        })
    }

    unsafe fn time_launches(&self, launches: &[Launch]) -> Result<Vec<f64>, EngineError> {
        let _entered = self.enter()?;
        let mut events = Vec::with_capacity(launches.len() + 1);
        events.push(TimedEvent::new(self)?);
        events[0].record()?;
        for launch in launches {
            // SAFETY: the caller's promise.
            unsafe { self.launch(launch)? };
            let event = TimedEvent::new(self)?;
            event.record()?;
            events.push(event);
        }
        self.synchronize()?;
        events.windows(2).map(|two| two[1].since(&two[0])).collect()
    }

    fn map_granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve_addresses(&self, size: u64) -> Result<Address, EngineError> {
        self.reserve_addresses(size)
    }

    unsafe fn map_memory(&self, address: Address, size: u64) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { self.map_memory(address, size) }
    }

    unsafe fn unmap_memory(&self, address: Address, size: u64) {
        if self.lost.get().is_some() {
            // This memory belongs to no context. Whether the driver takes it back now changes nothing here.
            // SAFETY: the caller's promise; nothing runs any more.
            unsafe { sys::cuMemUnmap(address, size as usize) };
            return;
        }
        // SAFETY: the caller's promise; the stream has finished with it.
        let outcome = self
            .synchronize()
            .and_then(|()| unsafe { self.unmap_memory(address, size) });
        if let Err(reason) = outcome {
            error!("working memory of {} is lost: {reason}", self.name);
        }
    }

    fn create_graph(&self, launches: &[Launch]) -> Result<GraphExecId, EngineError> {
        self.graph_create(launches)
    }

    fn update_graph_node(
        &self,
        graph: GraphExecId,
        index: usize,
        launch: &Launch,
    ) -> Result<(), EngineError> {
        self.graph_update(graph, index, launch)
    }

    unsafe fn launch_graph(&self, graph: GraphExecId) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { self.graph_launch(graph) }
    }

    fn destroy_graph(&self, graph: GraphExecId) {
        self.graph_destroy(graph);
    }

    fn record_event(&self) -> Result<Event, EngineError> {
        let _entered = self.enter()?;
        let mut events = self.events();
        let next = events.last + 1;
        let event = events.events[(next % EVENTS) as usize];
        // SAFETY: event and stream live as long as the device.
        self.done("cuEventRecord", unsafe {
            sys::cuEventRecord(event, self.stream)
        })?;
        events.last = next;
        Ok(Event(next))
    }

    fn wait_event(&self, event: Event) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        // The event of the mark, or of one behind it.
        let event = self.events().events[(event.0 % EVENTS) as usize];
        // SAFETY: the event lives as long as the device.
        self.done("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(event)
        })
    }

    fn synchronize(&self) -> Result<(), EngineError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current, and stays until this call is over.
        let is_done =
            { self.completion.as_ref() }.is_some_and(|it| unsafe { it.wait(self.stream) });
        if is_done {
            return Ok(());
        }
        // SAFETY: the stream lives as long as the device.
        self.done("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.stream)
        })
    }
}

/// The driver's words for an error.
fn reason(code: CUresult) -> String {
    let mut text = ptr::null();
    // SAFETY: a place for the result, a string that the driver keeps.
    let known = unsafe { sys::cuGetErrorString(code, &mut text) } == CUresult::CUDA_SUCCESS;
    if known && !text.is_null() {
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) };
        return text.to_string_lossy().into_owned();
    }
    format!("{code:?}")
}

fn check(call: &'static str, code: CUresult) -> Result<(), GpuError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(GpuError::Driver {
        call,
        reason: reason(code),
    })
}
