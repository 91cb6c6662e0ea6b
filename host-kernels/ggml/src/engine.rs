//! The engine: a device of a backend, and what runs the nodes that the device cannot.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::info;
use vgpu_engine::work::Speed;
use vgpu_engine::{Engine, EngineError, FallbackUse, Memory, MemoryInfo, Placed, Plan};
use vgpu_ggml_abi as abi;
use vgpu_transport::ir::{Capabilities, Graph, GraphCounts, Node, Op, ValidGraph};

use crate::allocator::{Allocator, allocation_size, memory_of};
use crate::device::{Backend, BackendDevice, Failures};
use crate::library::{DeviceInfo, Library};
use crate::loader::LibraryError;
use crate::memory::GgmlMemory;
use crate::pace::Paces;
use crate::placement::{Placement, RunCounts};
use crate::plan::{GgmlPlan, compile_bytes};
use crate::repack::Layouts;
use crate::segments::{bytes_to_move, max_mappings};
use crate::staging::Staging;

/// The longest time of a node by estimate: a backend cannot stop in the middle of a node.
const MAX_NODE_TIME: Duration = Duration::from_secs(60);

/// What the estimates take a GPU to do in a second.
const SPEED: Speed = Speed {
    products: 2e10,
    steps: 2e9,
    bytes: 8e9,
    in_order: 5e5,
};

/// How a backend is used.
#[derive(Debug, Clone, Copy)]
pub struct BackendOptions<'a> {
    /// The device with this name; `None`: the first one.
    pub device: Option<&'a str>,
    /// Threads of a backend that computes on the CPU; 0: one per core.
    pub threads: usize,
    /// The most bytes of all buffers; `None`: what the device has.
    pub memory: Option<u64>,
    /// Whether products read copies of weights in layouts for which the backend has faster kernels,
    /// if it has any.
    pub repacks: bool,
    /// Whether guests with the same weights hold them once; `None`: if the backend computes on the
    /// CPU. On a GPU, a load that fits without that may not fit with it.
    pub shares_weights: Option<bool>,
}

impl Default for BackendOptions<'_> {
    fn default() -> Self {
        BackendOptions {
            device: None,
            threads: 0,
            memory: None,
            repacks: true,
            shares_weights: None,
        }
    }
}

/// Runs graphs on a device of a backend of ggml. Nodes that the device lacks run on `fallback`.
pub struct GgmlEngine {
    name: String,
    description: String,
    device: Arc<BackendDevice>,
    allocator: Arc<Allocator>,
    fallback: Arc<dyn Engine>,
    shares_weights: bool,
}

/// Memory of the host that the device copies from and to by itself. `None` if it has none.
///
/// # Safety
/// `device` must be a device of `library`.
unsafe fn staging_of(
    library: &'static Library,
    device: NonNull<abi::ggml_backend_device>,
) -> Option<Staging> {
    let device = device.as_ptr();
    // SAFETY: the device object is constant and never freed (this function's contract), and its
    // function takes the object itself. It gives a buffer type of the library, of the host's
    // memory, or null.
    unsafe {
        let buft = (*device).iface.get_host_buffer_type?(device);
        NonNull::new(buft).and_then(|buft| Staging::new(library.functions(), buft.as_ptr()))
    }
}

impl GgmlEngine {
    /// Starts the backend at `path`. `fallback` is an engine of the host's memory that has every
    /// operator.
    ///
    /// # Errors
    /// [`LibraryError`] says why the backend cannot be used.
    pub fn start(
        path: &Path,
        options: &BackendOptions<'_>,
        fallback: Arc<dyn Engine>,
    ) -> Result<GgmlEngine, LibraryError> {
        let BackendOptions {
            device,
            threads,
            memory,
            repacks,
            shares_weights,
        } = *options;
        // A backend is never unloaded, so its description may live as long.
        let library: &'static Library = Box::leak(Box::new(Library::load(path)?));
        let infos = library.device_infos();
        let devices: Vec<(&DeviceInfo, NonNull<abi::ggml_backend_device>)> =
            infos.iter().zip(library.devices()).collect();
        let path = || library.path().to_owned();
        let (info, found) = match device {
            None => devices.first(),
            Some(wanted) => devices.iter().find(|(info, _)| info.name == wanted),
        }
        .copied()
        .ok_or_else(|| match device {
            Some(wanted) if !devices.is_empty() => LibraryError::UnknownDevice {
                path: path(),
                wanted: wanted.to_owned(),
                known: infos.iter().map(|info| info.name.clone()).collect(),
            },
            _ => LibraryError::NoDevice { path: path() },
        })?;
        let DeviceInfo {
            name,
            description,
            is_cpu,
            ..
        } = info.clone();
        let failed = || LibraryError::Device {
            path: path(),
            device: name.clone(),
        };
        let raw = found.as_ptr();
        // SAFETY: the device is one of the library's, whose objects are constant and never freed,
        // and its functions take the object itself.
        let (buft, (_, known)) = unsafe {
            let buft = { (*raw).iface.get_buffer_type }.map_or(ptr::null_mut(), |get| get(raw));
            (buft, memory_of(found))
        };
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, NonZero::get),
            count => count,
        };
        // SAFETY: the device is one of the library's.
        let backend = unsafe { Backend::new(library, found, threads) };
        let backend = backend.filter(|_| !buft.is_null()).ok_or_else(failed)?;
        let total = match known {
            0 => fallback.memory().total, // the backend does not know
            known => known,
        };
        info!(
            "ggml {} from {}: device {name} ({description})",
            library.release(),
            library.path().display()
        );
        let layouts = match repacks && is_cpu {
            // SAFETY: the device is one of the library's.
            true => unsafe { Layouts::of(library, found) },
            false => Layouts::none(library),
        };
        if layouts.len() > 0 {
            info!(
                "products read copies of weights that ggml repacks, where there is memory for them"
            );
        }
        let total = memory.map_or(total, |memory| memory.min(total));
        let gpu = (!is_cpu && known > 0).then_some(found);
        // SAFETY: both objects are the library's.
        let allocator = unsafe { Allocator::new(library.functions(), buft, gpu, total, is_cpu) };
        let copies_in_order = !is_cpu && backend.copies_in_order();
        // SAFETY: the device is one of the library's.
        let staging = copies_in_order.then(|| unsafe { staging_of(library, found) });
        if let Some(Some(_)) = staging {
            info!("small copies go through pinned memory, in the order of the backend's graphs");
        }
        let allocator = Arc::new(allocator.with_staging(staging.flatten()));
        // Drivers of other interfaces have no such limit.
        if !name.starts_with("Vulkan") {
            allocator.limit_allocations(u64::MAX);
        }
        let speed = match is_cpu {
            true => fallback.speed(),
            false => SPEED,
        };
        Ok(GgmlEngine {
            description,
            shares_weights: shares_weights.unwrap_or(is_cpu),
            allocator: Arc::clone(&allocator),
            device: Arc::new(BackendDevice {
                ggml: library,
                device: found,
                backend: Mutex::new(backend),
                allocator,
                is_cpu,
                threads,
                renews_backend: name.starts_with("Vulkan"),
                has_idle_work_buffer: AtomicBool::new(false),
                failures: Failures::default(),
                name: name.clone(),
                placement: Placement::default(),
                layouts,
                used: RunCounts::default(),
                speed,
                paces: Paces::default(),
                waits: AtomicU64::new(0),
            }),
            name: format!("ggml:{name}"),
            fallback,
        })
    }

    /// The bytes of copies of weights in layouts of the backend.
    pub fn repacked_bytes(&self) -> u64 {
        self.device.layouts.bytes()
    }

    /// The driver of the device allows so many allocations in this process; otherwise 4,096 for a
    /// backend of Vulkan, the least that Vulkan prescribes. Weights are divided into fewer segments
    /// when three quarters of them exist. For other backends there is no limit unless this is
    /// called.
    pub fn limit_allocations(&self, most: u64) {
        self.allocator.limit_allocations(most);
    }

    /// How often a run has waited for the backend so far (`ggml_backend_synchronize`).
    pub fn waits(&self) -> u64 {
        self.device.waits.load(Ordering::Relaxed)
    }
}

impl Engine for GgmlEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> &str {
        &self.description
    }

    fn memory(&self) -> MemoryInfo {
        let (total, free) = self.allocator.free();
        MemoryInfo { total, free }
    }

    fn is_host_memory(&self) -> bool {
        self.device.is_cpu
    }

    fn kept_scratch_bytes(&self) -> u64 {
        self.fallback.kept_scratch_bytes()
    }

    fn allocation_size(&self, size: u64) -> u64 {
        allocation_size(size)
    }

    fn capabilities(&self) -> &Capabilities {
        // The fallback runs what the device does not.
        self.fallback.capabilities()
    }

    fn speed(&self) -> Speed {
        self.device.speed
    }

    fn speed_of(&self, _: &Graph, node: &Node) -> Speed {
        match node.op {
            // Every backend has the products, but for some types of operands.
            Op::MulMat { .. } | Op::MulMatId { .. } | Op::FlashAttnExt { .. } => self.speed(),
            // Which of the others the device leaves to the fallback is known at compilation only.
            _ => self.speed().slower(self.fallback.speed()),
        }
    }

    fn fallback_use(&self) -> Option<FallbackUse> {
        Some(self.device.used.read())
    }

    fn placement(&self) -> BTreeMap<&'static str, Placed> {
        self.device.placement.by_operator()
    }

    fn max_node_time(&self) -> Duration {
        MAX_NODE_TIME
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        let memory = GgmlMemory::alloc(&self.allocator, size, self.device.is_cpu)?;
        Ok(Arc::new(memory))
    }

    fn supports_weights(&self) -> bool {
        self.shares_weights
    }

    fn alloc_weights(
        &self,
        instead: &Arc<dyn Memory>,
    ) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        if !self.shares_weights {
            return Ok(None);
        }
        let new = GgmlMemory::for_weights(&self.allocator, &**instead)?;
        Ok(new.map(|new| Arc::new(new) as Arc<dyn Memory>))
    }

    fn weight_mappings(&self, size: u64) -> usize {
        match self.device.is_cpu {
            true => max_mappings(&self.allocator, size),
            // Buffers of a GPU's memory are no mappings of the process.
            false => 0,
        }
    }

    fn fatal_error(&self) -> Option<String> {
        self.device.failures.reason()
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        let to_move = match self.shares_weights {
            true => bytes_to_move(counts.tensors, self.device.is_cpu),
            false => 0,
        };
        compile_bytes(counts, to_move)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        let (device, fallback) = (Arc::clone(&self.device), Arc::clone(&self.fallback));
        let plan = GgmlPlan::compile(device, fallback, graph, buffers, is_cancelled)?;
        Ok(Box::new(plan))
    }
}
