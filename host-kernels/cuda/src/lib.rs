//! The CUDA engine: plans of launches, on any [`Device`] that runs the kernels in `host-kernels/cuda/kernels/`.
//!
//! - [`device`]: what the engine needs of a device.
//! - `source`, `nvrtc`, `code`: the kernels' texts, their compiler, and machine code.
//! - `ops`: one file for each family of operators, from a node to launches.
//! - `host`: the few nodes that run on the CPU engine instead.
//! - `params`: the structures that kernels take.
//! - [`choices`]: which of several kernels was the fastest.
//! - `builder`: what operators' files see of a plan that is compiled.
//! - `emit`: what becomes one launch together (`vgpu_engine::fuse`); `kept`: activations rounded for several products.
//! - `plan`, `segment`: a graph as launches, and running them: one by one, then as recordings (CUDA graphs).
//! - `step`: runs of launches as one, whose blocks wait for each other.
//! - `layout`, `arranged`, `planes`: weights that lie as kernels like to read them.
//! - `stream`, `scratch`: what plans share. `pool`, `memory`: memory of the device; `gather`: small writes to it.

mod arranged;
mod builder;
pub mod choices;
mod code;
pub mod device;
mod emit;
mod gather;
mod host;
mod kept;
mod layout;
mod memory;
pub mod nvrtc;
mod ops;
mod params;
mod plan;
mod planes;
mod pool;
mod scratch;
mod segment;
pub mod source;
mod step;
mod stream;

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{error, info, warn};
use vgpu_transport::ir::{Capabilities, ValidGraph};
use vgpu_transport::window::memory::Window;

use choices::Choices;
use device::Device;
use memory::CudaMemory;
use plan::CudaPlan;
pub use segment::Pace;
use stream::Stream;
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan};

/// How long to leave a device alone that could not be set up anew.
const REST: Duration = Duration::from_secs(5);

/// So often it is tried before the device counts as beyond repair.
const ATTEMPTS: u32 = 3;

/// Sets a device up.
type Opener = Box<dyn Fn() -> Result<Arc<dyn Device>, EngineError> + Send + Sync>;

/// The engine that runs on a GPU.
pub struct CudaEngine {
    name: String,
    description: String,
    capabilities: Capabilities,
    pace: Pace,
    choices: Arc<Choices>,
    open: Option<Opener>,
    rest: Duration,
    current: Mutex<Current>,
}

/// The device as it is now.
struct Current {
    stream: Arc<Stream>,
    /// When it could not be set up anew, and why.
    failed: Option<(Instant, EngineError)>,
    /// How often that was tried.
    attempts: u32,
}

impl CudaEngine {
    /// An engine on `device`.
    pub fn new(device: Arc<dyn Device>) -> Result<CudaEngine, EngineError> {
        CudaEngine::at_pace(device, Pace::default())
    }

    /// The same with another pace, for devices that are not as fast as a GPU.
    pub fn at_pace(device: Arc<dyn Device>, pace: Pace) -> Result<CudaEngine, EngineError> {
        Ok(CudaEngine {
            name: device.name().to_owned(),
            description: device.description().to_owned(),
            capabilities: Capabilities::new(ops::rules()),
            pace,
            choices: Arc::default(),
            open: None,
            rest: REST,
            current: Mutex::new(Current {
                stream: Arc::new(Stream::new(device, pace)?),
                failed: None,
                attempts: 0,
            }),
        })
    }

    /// Whether there is anything to choose: products that several kernels can do.
    pub fn has_choices(&self) -> bool {
        let architecture = |stream: Arc<Stream>| stream.device.architecture() == source::HOPPER;
        self.stream().is_ok_and(architecture)
    }

    /// The same engine, which chooses among kernels so.
    #[must_use]
    pub fn choosing(self, choices: Choices) -> CudaEngine {
        let choices = Arc::new(choices);
        { self.current.lock() }
            .unwrap_or_else(PoisonError::into_inner)
            .stream
            .choose(&choices);
        CudaEngine { choices, ..self }
    }

    /// The same engine, which sets its device up anew with `open` when it is lost.
    #[must_use]
    pub fn reopened_by(
        self,
        open: impl Fn() -> Result<Arc<dyn Device>, EngineError> + Send + Sync + 'static,
    ) -> CudaEngine {
        CudaEngine {
            open: Some(Box::new(open)),
            ..self
        }
    }

    /// The same engine, which leaves a device that it could not set up anew alone for so long.
    #[must_use]
    pub fn resting(self, rest: Duration) -> CudaEngine {
        CudaEngine { rest, ..self }
    }

    /// The device, set up anew if it is lost.
    fn stream(&self) -> Result<Arc<Stream>, EngineError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(reason) = current.stream.device.lost() else {
            return Ok(Arc::clone(&current.stream));
        };
        if let Some((when, error)) = &current.failed
            && when.elapsed() < self.rest
        {
            return Err(error.clone());
        }
        let Some(open) = &self.open else {
            return Err(EngineError::Lost { reason });
        };
        warn!("{} is set up anew: {reason}", self.name);
        // Its memory must be free before somebody else can have it.
        current.stream.device.abandon();
        let opened = open().and_then(|device| Stream::new(device, self.pace));
        match opened.and_then(|stream| stream.probe().map(|()| stream)) {
            Ok(stream) => {
                info!("{} works again, for new sessions", self.name);
                stream.choose(&self.choices);
                current.stream = Arc::new(stream);
                current.failed = None;
                current.attempts = 0;
                Ok(Arc::clone(&current.stream))
            }
            Err(error) => {
                current.attempts += 1;
                error!(
                    "{} cannot be set up anew, attempt {} of {ATTEMPTS}: {error}",
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

    fn memory(&self) -> MemoryInfo {
        // A device that is lost has none.
        self.stream()
            .map_or_else(|_| MemoryInfo::default(), |stream| stream.pool.memory())
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        Ok(Arc::new(CudaMemory::new(&self.stream()?.pool, size)?))
    }

    fn beyond_repair(&self) -> Option<String> {
        let error = self.stream().err()?;
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        // One that nobody can set up anew is lost for good at once.
        (self.open.is_none() || current.attempts >= ATTEMPTS).then(|| error.to_string())
    }

    fn pin(&self, window: &Arc<Window>) -> Option<Box<dyn Any + Send>> {
        let device = Arc::clone(&self.stream().ok()?.device);
        // SAFETY: the window is mapped for as long as it lives, and `Pinned` holds on to it.
        match unsafe { device.pin(window.as_ptr(), window.size()) } {
            Ok(()) => Some(Box::new(Pinned {
                device,
                window: Arc::clone(window),
            })),
            Err(error) => {
                info!("what crosses the guest's window takes a detour in the driver: {error}");
                None
            }
        }
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
    ) -> Result<Box<dyn Plan>, EngineError> {
        let stream = self.stream()?;
        Ok(Box::new(CudaPlan::compile(
            graph.graph(),
            buffers,
            &stream,
        )?))
    }
}

/// A window that the device reaches by itself.
struct Pinned {
    device: Arc<dyn Device>,
    window: Arc<Window>,
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.device.unpin(self.window.as_ptr());
    }
}

// The shim's device, which the unit tests include, names this crate by its name.
#[cfg(test)]
extern crate self as vgpu_cuda;
