//! The CPU engine: SIMD kernels on a pool of threads.
//!
//! - [`formats`]: block formats, to and from f32.
//! - [`gemm`]: dot products and matrix products on rows of blocks.
//! - `simd`, `math`: vectors of f32 at every level, and elementary functions of them.
//! - `ops`: one file for each family of operators, from a node to steps.
//! - `topology`, `team`: the machine's cores, and the threads on them.
//! - `plan`, `stages`, `pool`: a graph is a list of steps; threads enter once per graph and meet at a barrier
//!   after each step.

mod barrier_schedule;
mod convert;
pub mod formats;
pub mod gemm;
mod gemm_rows;
mod isa;
mod kernel;
mod math;
mod memory;
mod operands;
mod ops;
mod plan;
mod region;
mod runner;
mod simd;
mod thread_team;
mod topology;
mod view;
mod weights;

use std::sync::Arc;

use vgpu_transport::ir::{Capabilities, ValidGraph};

use memory::CpuMemory;
use region::Budget;
use runner::Runner;
use topology::Topology;
use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, SharedMemory};

/// The engine that runs on the processors of the host.
pub struct CpuEngine {
    description: String,
    capabilities: Capabilities,
    budget: Arc<Budget>,
    /// The largest buffer that guests may map.
    max_shared: u64,
    runner: Arc<Runner>,
    fuses: bool,
}

/// The threads of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Threads {
    /// How many; 0 for one on each core that this process may use.
    pub count: usize,
    /// Whether each stays on its core.
    pub pin: bool,
}

impl From<usize> for Threads {
    /// So many, not pinned.
    fn from(count: usize) -> Threads {
        Threads { count, pin: false }
    }
}

impl CpuEngine {
    /// An engine with `threads` threads (0: one for each core this process may use) that hands out at
    /// most `memory_limit` bytes (`None`: what the machine or the control group has).
    pub fn new(threads: usize, memory_limit: Option<u64>) -> Result<CpuEngine, EngineError> {
        CpuEngine::with(threads.into(), memory_limit)
    }

    /// The same, with more to say about the threads.
    pub fn with(threads: Threads, memory_limit: Option<u64>) -> Result<CpuEngine, EngineError> {
        let topology = Topology::of_this_process();
        let count = match threads.count {
            // A second thread on a core finds its arithmetic taken. What a control group allows can be less.
            0 => std::thread::available_parallelism().map_or(1, |n| n.get().min(topology.cores())),
            n => n,
        };
        let places = match threads.pin {
            true => topology.places(),
            false => Vec::new(),
        };
        let runner = Runner::new(count, &places)?;
        let pinned = if threads.pin { ", each on a core" } else { "" };
        Ok(CpuEngine {
            description: format!("{}, {count} threads{pinned}", memory::processor_name()),
            capabilities: Capabilities::new(ops::rules()),
            budget: Arc::new(Budget::new(memory_limit)),
            max_shared: memory::max_shared(),
            runner: Arc::new(runner),
            fuses: true,
        })
    }

    /// The same engine; without `fuses`, it runs one node after the other, for comparisons.
    pub fn fusing(mut self, fuses: bool) -> CpuEngine {
        self.fuses = fuses;
        self
    }
}

impl Engine for CpuEngine {
    fn name(&self) -> &str {
        "cpu"
    }

    fn description(&self) -> &str {
        &self.description
    }

    fn memory(&self) -> MemoryInfo {
        self.budget.info()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        Ok(Arc::new(CpuMemory::new(size, &self.budget)?))
    }

    fn alloc_shared(&self, size: u64) -> Result<Option<SharedMemory>, EngineError> {
        match size > self.max_shared {
            true => Ok(None),
            false => CpuMemory::shared(size, &self.budget).map(Some),
        }
    }

    fn supports_weights(&self) -> bool {
        true
    }

    fn alloc_weights(&self, size: u64) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        match size {
            0 => Ok(None),
            size => Ok(Some(Arc::new(CpuMemory::weights(size, &self.budget)?))),
        }
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
    ) -> Result<Box<dyn Plan>, EngineError> {
        Ok(Box::new(plan::CpuPlan::compile(
            graph.graph(),
            buffers,
            &self.runner,
            self.fuses,
        )?))
    }
}
