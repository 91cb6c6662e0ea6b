//! The CUDA engine.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing::{error, info, warn};
use vgpu_transport::bytes::Mapped;
use vgpu_transport::ir::{Capabilities, Graph, GraphCounts, Node, ValidGraph};
use vgpu_transport::lock::lock_at;

use crate::autotune::TuningTable;
use crate::batch::MAX_BATCH;
use crate::context::ExecutionContext;
use crate::cpu_fallback::CpuFallback;
use crate::device::Device;
use crate::kernel_set::KernelSet;
use crate::launch::policy::LaunchPolicy;
use crate::launch::policy::SPEED;
use crate::lock::Rank;
use crate::memory::CudaMemory;
use crate::plan::{CudaPlan, compile_bytes, parts};
use crate::source::SM_90A;
use crate::weights::WeightMemory;
use vgpu_engine::fuse;
use vgpu_engine::work::{Launches, Speed};
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, Turn};

/// The pause after a failed attempt to reopen a lost device.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// The number of failed attempts after which the engine reports a fatal error.
const MAX_ATTEMPTS: u32 = 3;

/// Opens the device again.
type Opener = Box<dyn Fn() -> Result<Arc<dyn Device>, EngineError> + Send + Sync>;

/// The engine that runs on a GPU.
pub struct CudaEngine {
    name: String,
    description: String,
    capabilities: Capabilities,
    policy: LaunchPolicy,
    kernels: Arc<KernelSet>,
    tuning: Arc<TuningTable>,
    open: Option<Opener>,
    retry_delay: Duration,
    current: Mutex<Current>,
}

/// The device in use.
struct Current {
    context: Arc<ExecutionContext>,
    /// When the last attempt to reopen it has failed, and why.
    failed: Option<(Instant, EngineError)>,
    /// The number of failed attempts in a row.
    attempts: u32,
}

impl CudaEngine {
    /// An engine on `device` with the default policy.
    ///
    /// # Errors
    /// As for [`CudaEngine::with_kernels`].
    pub fn new(device: Arc<dyn Device>) -> Result<CudaEngine, EngineError> {
        CudaEngine::with_policy(device, LaunchPolicy::default())
    }

    /// An engine on `device` with `policy`.
    ///
    /// # Errors
    /// As for [`CudaEngine::with_kernels`].
    pub fn with_policy(
        device: Arc<dyn Device>,
        policy: LaunchPolicy,
    ) -> Result<CudaEngine, EngineError> {
        CudaEngine::with_kernels(device, policy, Arc::default())
    }

    /// An engine on `device` with `policy`, which uses the kernels of the device that are in
    /// `kernels`.
    ///
    /// # Errors
    /// [`EngineError`] of the device, if it has no memory for the engine's own buffers.
    pub fn with_kernels(
        device: Arc<dyn Device>,
        policy: LaunchPolicy,
        kernels: Arc<KernelSet>,
    ) -> Result<CudaEngine, EngineError> {
        let context = ExecutionContext::new(device.clone(), policy, Arc::clone(&kernels))?;
        Ok(CudaEngine {
            name: device.name().to_owned(),
            description: device.description().to_owned(),
            capabilities: Capabilities::new(crate::ops::rules()),
            policy,
            kernels,
            tuning: Arc::default(),
            open: None,
            retry_delay: RETRY_DELAY,
            current: Mutex::new(Current {
                context: Arc::new(context),
                failed: None,
                attempts: 0,
            }),
        })
    }

    /// Whether there is anything to tune: matrix products that several kernel variants can run.
    pub fn is_tunable(&self) -> bool {
        let architecture = |context: Arc<ExecutionContext>| context.device.architecture() == SM_90A;
        self.context().is_ok_and(architecture)
    }

    /// The same engine with a tuning table.
    #[must_use]
    pub fn with_tuning(self, tuning: TuningTable) -> CudaEngine {
        let tuning = Arc::new(tuning);
        lock_at(Rank::Context, &self.current)
            .context
            .set_tuning(&tuning);
        CudaEngine { tuning, ..self }
    }

    /// The same engine, which reopens a lost device with `open`.
    #[must_use]
    pub fn with_reopen(
        self,
        open: impl Fn() -> Result<Arc<dyn Device>, EngineError> + Send + Sync + 'static,
    ) -> CudaEngine {
        CudaEngine {
            open: Some(Box::new(open)),
            ..self
        }
    }

    /// The same engine with another pause after a failed attempt to reopen the device.
    #[must_use]
    pub fn with_retry_delay(self, rest: Duration) -> CudaEngine {
        CudaEngine {
            retry_delay: rest,
            ..self
        }
    }

    /// The context of the device, which is reopened if it is lost.
    ///
    /// # Errors
    /// [`EngineError::DeviceLost`] if the device is lost and cannot be reopened, or the
    /// [`EngineError`] of the last attempt to reopen it.
    fn context(&self) -> Result<Arc<ExecutionContext>, EngineError> {
        let mut current = lock_at(Rank::Context, &self.current);
        let Some(reason) = current.context.device.lost() else {
            return Ok(Arc::clone(&current.context));
        };
        if let Some((when, error)) = &current.failed
            && when.elapsed() < self.retry_delay
        {
            return Err(error.clone());
        }
        let Some(open) = &self.open else {
            return Err(EngineError::DeviceLost { reason });
        };
        warn!(
            "{}: reopening the device, which is lost: {reason}",
            self.name
        );
        // The memory of the lost device has to be free before the new one allocates.
        current.context.device.abandon();
        let opened = open().and_then(|device| {
            ExecutionContext::new(device, self.policy, Arc::clone(&self.kernels))
        });
        match opened.and_then(|context| context.probe().map(|()| context)) {
            Ok(context) => {
                info!("{}: the device works again, for new sessions", self.name);
                context.set_tuning(&self.tuning);
                current.context = Arc::new(context);
                current.failed = None;
                current.attempts = 0;
                Ok(Arc::clone(&current.context))
            }
            Err(error) => {
                current.attempts += 1;
                error!(
                    "{}: reopening the device failed, attempt {} of {MAX_ATTEMPTS}: {error}",
                    self.name, current.attempts
                );
                let error = EngineError::Device {
                    message: format!(
                        "it is lost ({reason}) and cannot be set up anew ({error}); \
                         the host's administrator has to restart vgpu serve"
                    ),
                };
                current.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

impl Engine for CudaEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> &str {
        &self.description
    }

    fn kept_scratch_bytes(&self) -> u64 {
        self.context()
            .map_or(0, |context| context.cpu_fallback.kept_scratch_bytes())
    }

    fn memory(&self) -> MemoryInfo {
        // A lost device has no memory.
        self.context().map_or_else(
            |_| MemoryInfo::default(),
            |context| context.allocator.memory(),
        )
    }

    fn is_host_memory(&self) -> bool {
        false
    }

    fn allocation_size(&self, size: u64) -> u64 {
        self.context()
            .map_or(size, |context| context.allocator.allocation_size(size))
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn kernel_families(&self) -> &'static [&'static str] {
        let context = self.context();
        match context.is_ok_and(|context| context.device.architecture() == SM_90A) {
            true => &["vg_fattn_sm90_", "vg_gemm_sm90_"],
            false => &[],
        }
    }

    fn speed(&self) -> Speed {
        SPEED
    }

    fn speed_of(&self, graph: &Graph, node: &Node) -> Speed {
        match self.context() {
            Ok(context) if CpuFallback::takes(graph, node) || context.kernels.lacks_simple() => {
                context.cpu_fallback.speed()
            }
            _ => self.speed(),
        }
    }

    /// A minute: a kernel that runs cannot be stopped.
    fn max_node_time(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn launches_of(&self, graph: &Graph, node: &Node, estimate: Duration) -> Option<Launches> {
        let limit = self.policy.longest_whole;
        // Another engine can stop in the middle of a node.
        let is_of_cpu = || {
            // Nothing runs on a device that is lost.
            let lacks_simple = |context: Arc<ExecutionContext>| context.kernels.lacks_simple();
            CpuFallback::takes(graph, node) || self.context().map_or(true, lacks_simple)
        };
        if estimate <= limit || is_of_cpu() {
            return None;
        }
        // A division has at least half as many parts as are wanted, so its launches take at most
        // twice `longest_launch`, on average: by default, `longest_whole`, the limit.
        let wanted = parts(graph, node, self.policy.longest_launch);
        let count = fuse::most_parts(graph, node).min(wanted);
        Some(Launches { count, limit })
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        Ok(Arc::new(CudaMemory::new(&self.context()?.allocator, size)?))
    }

    fn supports_weights(&self) -> bool {
        true
    }

    fn alloc_weights(
        &self,
        instead: &Arc<dyn Memory>,
    ) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        let allocator = &self.context()?.allocator;
        let size = instead.size();
        match instead.as_any().downcast_ref::<CudaMemory>() {
            Some(memory) if memory.is_of(allocator) => {}
            _ => return Err(EngineError::ForeignMemory),
        }
        if size == 0 {
            return Ok(None);
        }
        Ok(Some(Arc::new(WeightMemory::new(allocator, size))))
    }

    fn fatal_error(&self) -> Option<String> {
        let error = self.context().err()?;
        let current = lock_at(Rank::Context, &self.current);
        // Without a way to reopen the device, a lost device is a fatal error at once.
        (self.open.is_none() || current.attempts >= MAX_ATTEMPTS).then(|| error.to_string())
    }

    fn pin(&self, memory: Arc<dyn Mapped>) -> Option<Box<dyn Any + Send>> {
        let device = Arc::clone(&self.context().ok()?.device);
        // SAFETY: the bytes are mapped until `memory` is dropped (the contract of `Mapped`), and
        // `Pinned` holds `memory` until it has called `unpin`.
        match unsafe { device.pin(memory.as_ptr(), memory.size()) } {
            Ok(()) => Some(Box::new(Pinned { device, memory })),
            Err(error) => {
                info!("shared memory is not page-locked, copies are slower: {error}");
                None
            }
        }
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        compile_bytes(counts)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        let context = self.context()?;
        Ok(Box::new(CudaPlan::compile(
            graph.graph(),
            buffers,
            &context,
            is_cancelled,
        )?))
    }

    fn max_batch(&self) -> usize {
        MAX_BATCH
    }

    fn launch_batch(
        &self,
        plans: &mut [&mut dyn Plan],
        turn: &Turn,
    ) -> Vec<Result<RunStatus, RunError>> {
        let ours: Option<Vec<&mut CudaPlan>> = plans
            .iter_mut()
            .map(|plan| plan.as_any_mut()?.downcast_mut())
            .collect();
        let ran = ours.and_then(|mut ours| CudaPlan::launch_batch(&mut ours, turn));
        // Plans that cannot run as a batch run one after the other.
        ran.unwrap_or_else(|| {
            plans
                .iter_mut()
                .map(|plan| match plan.launch(turn)? {
                    // The next plan gets the device when this one is done.
                    RunStatus::InFlight => plan.wait().map(|()| RunStatus::Done),
                    status => Ok(status),
                })
                .collect()
        })
    }
}

/// Memory that is page-locked for the device.
struct Pinned {
    device: Arc<dyn Device>,
    memory: Arc<dyn Mapped>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: a `Pinned` is made when its range is locked, and unlocks it once, here.
        unsafe { self.device.unpin(self.memory.as_ptr()) };
    }
}
