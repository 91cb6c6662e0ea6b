//! The CPU engine: SIMD kernels on a team of threads.
//!
//! - [`formats`]: block formats, to and from f32.
//! - [`gemm`]: matrix products with rows of blocks.
//! - `isa`: the instruction sets (levels) that kernels are compiled for.
//! - `simd`, `math`: vectors of f32 for every level, and elementary functions of them.
//! - `kernel`, `operands`, `view`: what threads execute, and what an operator sees of a node.
//! - `ops`: one module for each family of operators, which compiles a node into kernels.
//! - `topology`, `thread_team`: the machine's cores, and the threads on them.
//! - `plan`, `barrier_schedule`, `runner`: a graph is compiled into phases. Threads enter a graph
//!   once and meet at a barrier after each phase.
//! - `batch`: which plans run together, so that each weight is read once.
//! - `memory`, `region`, `weights`: allocations, mappings, and weights shared between buffers.
//! - `system_memory`: what the machine and the control groups have left.

// A build for one processor leaves out what only the kernels of other levels use.
#![cfg_attr(
    not(all(feature = "avx2", feature = "avx-vnni", feature = "avx512")),
    allow(
        dead_code,
        unreachable_code,
        unused_imports,
        unused_macros,
        unused_variables
    )
)]

mod barrier_schedule;
mod batch;
mod convert;
pub mod formats;
pub mod gemm;
mod gemm_rows;
mod isa;
mod kernel;
mod lock;
mod math;
mod memory;
mod operands;
mod ops;
mod plan;
mod region;
mod resident;
mod runner;
mod simd;
mod system_memory;
mod thread_team;
mod topology;
mod view;
mod weights;

use std::sync::Arc;

use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};

use memory::CpuMemory;
use region::Budget;
use runner::Runner;
use topology::Topology;
use vgpu_engine::work::Speed;
use vgpu_engine::{
    Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, SharedMemory, Turn,
};

/// The engine that runs on the host's processors.
pub struct CpuEngine {
    description: String,
    capabilities: Capabilities,
    budget: Arc<Budget>,
    /// The size of the largest buffer that guests may map, in bytes.
    max_shared: u64,
    runner: Arc<Runner>,
    fuses: bool,
}

/// The bytes of memory that this machine has, or the smallest limit of the control groups of this
/// process, if that is less. 0 if the kernel does not tell.
pub fn machine_memory() -> u64 {
    system_memory::SystemMemory::of_this_machine().total()
}

/// The threads of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Threads {
    /// Number of threads; 0 for one per core that this process may use.
    pub count: usize,
    /// Whether each thread is pinned to a core.
    pub pin: bool,
}

impl From<usize> for Threads {
    /// `count` threads, not pinned.
    fn from(count: usize) -> Threads {
        Threads { count, pin: false }
    }
}

impl CpuEngine {
    /// An engine with `threads` threads (0: one per core that this process may use) that allocates
    /// at most `memory_limit` bytes (`None`: the memory of the machine or the limit of the control
    /// group).
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if a thread cannot be created.
    pub fn new(threads: usize, memory_limit: Option<u64>) -> Result<CpuEngine, EngineError> {
        CpuEngine::with(threads.into(), memory_limit)
    }

    /// As [`new`](CpuEngine::new), with threads that may be pinned.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if a thread cannot be created or pinned.
    pub fn with(threads: Threads, memory_limit: Option<u64>) -> Result<CpuEngine, EngineError> {
        // The level asks Linux for tiles once, which a sandbox may forbid later.
        let level = isa::Level::best();
        tracing::info!("the CPU engine has kernels for {}", level.name());
        let topology = Topology::of_this_process();
        let count = match threads.count {
            // Two threads of one core share its arithmetic units. A control group can allow fewer.
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

    /// The same engine with `memory` bytes, whatever the machine has left. To ask for the memory
    /// then reads no file of the kernel: for fuzzers, which ask for it before every allocation.
    pub fn with_fixed_memory(mut self, memory: u64) -> CpuEngine {
        let mut budget = Budget::fixed(memory);
        budget.has_guards = self.budget.has_guards;
        self.budget = Arc::new(budget);
        self
    }

    /// The same engine with checks for tests: the kernel ends the process at an access before the
    /// first page of a buffer or beyond its last page, and working memory has other contents in
    /// each run, so that a result depends on them if a kernel reads what it has not written.
    ///
    /// # Panics
    /// If the engine has allocated memory or compiled a plan.
    pub fn with_checks(mut self) -> CpuEngine {
        let budget = Arc::get_mut(&mut self.budget);
        budget.expect("no memory is allocated").has_guards = true;
        let runner = Arc::get_mut(&mut self.runner);
        runner.expect("no plan is compiled").fills_scratch = true;
        self
    }

    /// Sets whether nodes are fused. Without, the engine runs node by node, for comparisons.
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

    fn knows_its_memory(&self) -> bool {
        true
    }

    fn kept_scratch_bytes(&self) -> u64 {
        self.runner.kept_bytes() as u64
    }

    fn allocation_size(&self, size: u64) -> u64 {
        region::whole_pages(size)
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn speed(&self) -> Speed {
        isa::Level::best().speed().times(self.runner.workers())
    }

    fn stops_within_nodes(&self) -> bool {
        true
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

    fn alloc_weights(
        &self,
        instead: &Arc<dyn Memory>,
    ) -> Result<Option<Arc<dyn Memory>>, EngineError> {
        let instead = instead.as_any().downcast_ref::<CpuMemory>();
        let new = instead.ok_or(EngineError::ForeignMemory)?.for_weights()?;
        Ok(new.map(|memory| Arc::new(memory) as _))
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        plan::compile_bytes(counts)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        if !graph.is_validated_with(&self.capabilities) {
            return Err(EngineError::ForeignGraph);
        }
        Ok(Box::new(plan::CpuPlan::compile(
            graph,
            buffers,
            &self.runner,
            self.fuses,
            is_cancelled,
        )?))
    }

    fn max_batch(&self) -> usize {
        batch::MAX_BATCH
    }

    fn launch_batch(
        &self,
        plans: &mut [&mut dyn Plan],
        turn: &Turn,
    ) -> Vec<Result<RunStatus, RunError>> {
        let ours = plans
            .iter_mut()
            .map(|plan| plan.as_any_mut()?.downcast_mut::<plan::CpuPlan>());
        let ours: Option<Vec<&mut plan::CpuPlan>> = ours.collect();
        let ran = ours.and_then(|mut ours| plan::CpuPlan::launch_batch(&mut ours, turn));
        // Plans that cannot run as a batch run one after the other.
        ran.unwrap_or_else(|| plans.iter_mut().map(|plan| plan.launch(turn)).collect())
    }
}
