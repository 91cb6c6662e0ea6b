//! The CUDA engine: plans of launches, on any [`Device`] that runs the kernels in `host-kernels/cuda/`.
//!
//! - [`device`]: what the engine needs of a device.
//! - `source`, `nvrtc`, `code`: the kernels' texts, their compiler, and machine code.
//! - `ops`: one file for each family of operators, from a node to launches.
//! - `host`: the few nodes that run on the CPU engine instead.
//! - `params`: the structures that kernels take.
//! - `builder`: what operators' files see of a plan that is compiled.
//! - `plan`, `segment`: a graph as launches, and running them: one by one, then as recordings (CUDA graphs).
//! - `stream`, `scratch`: what plans share.

mod builder;
mod code;
pub mod device;
mod host;
mod memory;
pub mod nvrtc;
mod ops;
mod params;
mod plan;
mod scratch;
mod segment;
pub mod source;
mod stream;

use std::sync::Arc;

use vgpu_transport::ir::{Capabilities, ValidGraph};

use crate::engine::{Engine, EngineError, Memory, MemoryInfo, Plan};
use device::Device;
use memory::CudaMemory;
use plan::CudaPlan;
pub use segment::Pace;
use stream::Stream;

/// The engine that runs on a GPU.
pub struct CudaEngine {
    capabilities: Capabilities,
    stream: Arc<Stream>,
}

impl CudaEngine {
    /// An engine on `device`.
    pub fn new(device: Arc<dyn Device>) -> Result<CudaEngine, EngineError> {
        CudaEngine::at_pace(device, Pace::default())
    }

    /// The same with another pace, for devices that are not as fast as a GPU.
    pub fn at_pace(device: Arc<dyn Device>, pace: Pace) -> Result<CudaEngine, EngineError> {
        Ok(CudaEngine {
            capabilities: Capabilities::new(ops::rules()),
            stream: Arc::new(Stream::new(device, pace)?),
        })
    }
}

impl Engine for CudaEngine {
    fn name(&self) -> &str {
        self.stream.device.name()
    }

    fn description(&self) -> &str {
        self.stream.device.description()
    }

    fn memory(&self) -> MemoryInfo {
        self.stream.device.memory()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        Ok(Arc::new(CudaMemory::new(&self.stream.device, size)?))
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
    ) -> Result<Box<dyn Plan>, EngineError> {
        Ok(Box::new(CudaPlan::compile(
            graph.graph(),
            buffers,
            &self.stream,
        )?))
    }
}
