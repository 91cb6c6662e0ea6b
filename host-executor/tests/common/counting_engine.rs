//! An engine that counts the turns of each plan.

use std::sync::{Arc, Mutex};

use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, Turn};
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};

/// Another engine, and how many turns its plans have begun.
pub(crate) struct CountingEngine {
    inner: Arc<dyn Engine>,
    /// By the number of the plan, in the order of compilation.
    begun: Arc<Mutex<Vec<u64>>>,
}

impl CountingEngine {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Arc<CountingEngine> {
        Arc::new(CountingEngine {
            inner,
            begun: Arc::default(),
        })
    }

    /// The turns that the plan of this number has begun.
    pub(crate) fn begun(&self, plan: usize) -> u64 {
        self.begun.lock().unwrap()[plan]
    }
}

impl Engine for CountingEngine {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn description(&self) -> &str {
        self.inner.description()
    }

    fn memory(&self) -> MemoryInfo {
        self.inner.memory()
    }

    fn is_host_memory(&self) -> bool {
        self.inner.is_host_memory()
    }

    fn allocation_size(&self, size: u64) -> u64 {
        self.inner.allocation_size(size)
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn stops_within_nodes(&self) -> bool {
        self.inner.stops_within_nodes()
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        self.inner.alloc(size)
    }

    fn compile_bytes(&self, counts: &GraphCounts) -> u64 {
        self.inner.compile_bytes(counts)
    }

    fn compile(
        &self,
        graph: &ValidGraph,
        buffers: &[Arc<dyn Memory>],
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Box<dyn Plan>, EngineError> {
        let inner = self.inner.compile(graph, buffers, is_cancelled)?;
        let mut begun = self.begun.lock().unwrap();
        begun.push(0);
        Ok(Box::new(CountedPlan {
            inner,
            number: begun.len() - 1,
            begun: Arc::clone(&self.begun),
        }))
    }
}

struct CountedPlan {
    inner: Box<dyn Plan>,
    number: usize,
    begun: Arc<Mutex<Vec<u64>>>,
}

impl Plan for CountedPlan {
    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        self.begun.lock().unwrap()[self.number] += 1;
        self.inner.launch(turn)
    }

    fn wait(&mut self) -> Result<(), RunError> {
        self.inner.wait()
    }

    fn plan_bytes(&self) -> u64 {
        self.inner.plan_bytes()
    }

    fn allocate(&mut self) -> Result<(), EngineError> {
        self.inner.allocate()
    }

    fn working_bytes(&self) -> u64 {
        self.inner.working_bytes()
    }
}
