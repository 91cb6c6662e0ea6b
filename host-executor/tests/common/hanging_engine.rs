//! An engine whose calls hang on command, as the calls of a driver do whose device is gone.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex};

use vgpu_engine::{
    BatchKey, Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, Turn,
};
use vgpu_transport::bytes::{Bytes, BytesMut, Mapped};
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};
use vgpu_transport::lock;

use super::scripted_engine::ScriptedEngine;

/// A call of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Memory,
    Alloc,
    /// Freeing memory of the engine.
    Free,
    Write,
    Read,
    Fill,
    Copy,
    Pin,
    Compile,
    Launch,
    /// A turn of several plans.
    Batch,
    Wait,
}

/// The calls that hang, and those that do so now.
type Calls = (Vec<Call>, Vec<Call>);

#[derive(Default)]
struct Gate {
    state: Mutex<Calls>,
    changed: Condvar,
}

impl Gate {
    /// Hangs if calls of this kind do. The caller holds no lock of the executor: others would hang
    /// with the call.
    fn pass(&self, call: Call) {
        lock::expect_unlocked(lock::EXECUTOR, &format!("{call:?}"));
        let mut state = lock::lock(&self.state);
        if !state.0.contains(&call) {
            return;
        }
        state.1.push(call);
        self.changed.notify_all();
        while state.0.contains(&call) {
            state = lock::wait(&self.changed, state);
        }
        state.1.retain(|&other| other != call);
    }
}

/// A [`ScriptedEngine`] whose calls hang on command.
pub(crate) struct HangingEngine {
    inner: Arc<ScriptedEngine>,
    gate: Arc<Gate>,
    /// How many plans can run as one batch.
    max_batch: usize,
}

impl HangingEngine {
    pub(crate) fn new() -> Arc<HangingEngine> {
        HangingEngine::with_batches(1)
    }

    /// An engine that runs up to `max_batch` plans as one batch.
    pub(crate) fn with_batches(max_batch: usize) -> Arc<HangingEngine> {
        Arc::new(HangingEngine {
            inner: ScriptedEngine::new(),
            gate: Arc::default(),
            max_batch,
        })
    }

    /// From now on, these calls hang.
    pub(crate) fn hang(&self, calls: &[Call]) {
        lock::lock(&self.gate.state).0 = calls.to_vec();
        self.gate.changed.notify_all();
    }

    /// Waits until a call of this kind hangs.
    pub(crate) fn wait_until_hanging(&self, call: Call) {
        let state = lock::lock(&self.gate.state);
        let waits = |state: &mut Calls| !state.1.contains(&call);
        let state = lock::wait_timeout_while(&self.gate.changed, state, super::TIMEOUT, waits);
        let (_, hanging) = &*state;
        assert!(
            hanging.contains(&call),
            "{call:?} does not hang, {hanging:?} do"
        );
    }
}

impl Engine for HangingEngine {
    fn name(&self) -> &str {
        "hanging"
    }

    fn description(&self) -> &str {
        "an engine for tests"
    }

    fn memory(&self) -> MemoryInfo {
        self.gate.pass(Call::Memory);
        self.inner.memory()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn alloc(&self, size: u64) -> Result<Arc<dyn Memory>, EngineError> {
        self.gate.pass(Call::Alloc);
        let memory = self.inner.alloc(size)?;
        let gate = Arc::clone(&self.gate);
        Ok(Arc::new(HangingMemory { memory, gate }))
    }

    fn allocation_size(&self, size: u64) -> u64 {
        self.inner.allocation_size(size)
    }

    fn pin(&self, _: Arc<dyn Mapped>) -> Option<Box<dyn Any + Send>> {
        self.gate.pass(Call::Pin);
        None
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
        self.gate.pass(Call::Compile);
        let plan = self.inner.compile(graph, buffers, is_cancelled)?;
        let gate = Arc::clone(&self.gate);
        let is_batchable = self.max_batch > 1;
        Ok(Box::new(HangingPlan {
            plan,
            gate,
            is_batchable,
        }))
    }

    fn max_batch(&self) -> usize {
        self.max_batch
    }

    fn launch_batch(
        &self,
        plans: &mut [&mut dyn Plan],
        turn: &Turn,
    ) -> Vec<Result<RunStatus, RunError>> {
        self.gate.pass(Call::Batch);
        plans.iter_mut().map(|plan| finish(*plan, turn)).collect()
    }
}

/// Runs a plan to the end of its turn.
fn finish(plan: &mut dyn Plan, turn: &Turn) -> Result<RunStatus, RunError> {
    match plan.launch(turn)? {
        RunStatus::InFlight => plan.wait().map(|()| RunStatus::Done),
        other => Ok(other),
    }
}

/// Memory whose bytes cannot be reached, or that cannot be freed, while these calls hang.
struct HangingMemory {
    memory: Arc<dyn Memory>,
    gate: Arc<Gate>,
}

impl Drop for HangingMemory {
    fn drop(&mut self) {
        self.gate.pass(Call::Free);
    }
}

impl Memory for HangingMemory {
    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        self.gate.pass(Call::Write);
        self.memory.write(offset, data)
    }

    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        self.gate.pass(Call::Read);
        self.memory.read(offset, out)
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        self.gate.pass(Call::Fill);
        self.memory.fill(offset, len, value)
    }

    fn copy_from(
        &self,
        offset: u64,
        src: &dyn Memory,
        src_offset: u64,
        len: u64,
    ) -> Result<(), EngineError> {
        self.gate.pass(Call::Copy);
        let src = src.as_any().downcast_ref::<HangingMemory>();
        let src = src.ok_or(EngineError::ForeignMemory)?;
        { &self.memory }.copy_from(offset, src.memory.as_ref(), src_offset, len)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct HangingPlan {
    plan: Box<dyn Plan>,
    gate: Arc<Gate>,
    /// Whether the plan may run with all others.
    is_batchable: bool,
}

impl Plan for HangingPlan {
    fn batch_key(&self) -> Option<BatchKey> {
        let key = BatchKey {
            products: 1,
            position: (0, 0),
        };
        self.is_batchable.then_some(key)
    }

    fn plan_bytes(&self) -> u64 {
        self.plan.plan_bytes()
    }

    fn launch(&mut self, turn: &Turn) -> Result<RunStatus, RunError> {
        self.gate.pass(Call::Launch);
        match self.plan.launch(turn)? {
            RunStatus::Done => Ok(RunStatus::InFlight),
            other => Ok(other),
        }
    }

    fn wait(&mut self) -> Result<(), RunError> {
        self.gate.pass(Call::Wait);
        self.plan.wait()
    }
}
