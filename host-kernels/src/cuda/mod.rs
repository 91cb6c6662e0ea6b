//! The CUDA engine: plans of launches, on any [`Device`] that runs the kernels in `host-kernels/cuda/`.
//!
//! - [`device`]: what the engine needs of a device.
//! - `source`, `nvrtc`, `code`: the kernels' texts, their compiler, and machine code.
//! - `ops`: one file for each family of operators, from a node to launches.
//! - `host`: the few nodes that run on the CPU engine instead.
//! - `params`: the structures that kernels take.
//! - `plan`: a graph as launches, and running them.

mod code;
pub mod device;
mod host;
mod memory;
pub mod nvrtc;
mod ops;
mod params;
mod plan;
pub mod source;

use std::sync::Arc;

use vgpu_transport::ir::{Capabilities, ValidGraph};

use crate::engine::{Engine, EngineError, Memory, MemoryInfo, Plan};
use device::Device;
use memory::CudaMemory;
use plan::{CudaPlan, Stream};

/// The engine that runs on a GPU.
pub struct CudaEngine {
    capabilities: Capabilities,
    stream: Arc<Stream>,
}

impl CudaEngine {
    /// An engine on `device`.
    pub fn new(device: Arc<dyn Device>) -> Result<CudaEngine, EngineError> {
        Ok(CudaEngine {
            capabilities: Capabilities::new(ops::rules()),
            stream: Arc::new(Stream::new(device)?),
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
