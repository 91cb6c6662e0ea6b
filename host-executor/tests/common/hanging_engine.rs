//! An engine whose calls hang on command, as the calls of a driver do whose device is gone.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex};

use vgpu_engine::{Engine, EngineError, Memory, MemoryInfo, Plan, RunError, RunStatus, Turn};
use vgpu_transport::bytes::Mapped;
use vgpu_transport::ir::{Capabilities, GraphCounts, ValidGraph};

use super::scripted_engine::ScriptedEngine;

/// A call of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Memory,
    Alloc,
    Pin,
    Launch,
    Wait,
}

/// The calls that hang, and those that do so now.
#[derive(Default)]
struct Gate {
    state: Mutex<(Vec<Call>, Vec<Call>)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self, call: Call) {
        let mut state = self.state.lock().unwrap();
        if !state.0.contains(&call) {
            return;
        }
        state.1.push(call);
        self.changed.notify_all();
        state = { &self.changed }
            .wait_while(state, |state| state.0.contains(&call))
            .unwrap();
        state.1.retain(|&other| other != call);
    }
}

/// A [`ScriptedEngine`] whose calls hang on command.
pub(crate) struct HangingEngine {
    inner: Arc<ScriptedEngine>,
    gate: Arc<Gate>,
}

impl HangingEngine {
    pub(crate) fn new() -> Arc<HangingEngine> {
        Arc::new(HangingEngine {
            inner: ScriptedEngine::new(),
            gate: Arc::default(),
        })
    }

    /// From now on, these calls hang.
    pub(crate) fn hang(&self, calls: &[Call]) {
        self.gate.state.lock().unwrap().0 = calls.to_vec();
        self.gate.changed.notify_all();
    }

    /// Waits until a call of this kind hangs.
    pub(crate) fn wait_until_hanging(&self, call: Call) {
        let state = self.gate.state.lock().unwrap();
        let (state, waited) = { &self.gate.changed }
            .wait_timeout_while(state, super::TIMEOUT, |state| !state.1.contains(&call))
            .unwrap();
        assert!(
            !waited.timed_out(),
            "{call:?} does not hang, {:?} do",
            state.1
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
        self.inner.alloc(size)
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
        let plan = self.inner.compile(graph, buffers, is_cancelled)?;
        let gate = Arc::clone(&self.gate);
        Ok(Box::new(HangingPlan { plan, gate }))
    }
}

struct HangingPlan {
    plan: Box<dyn Plan>,
    gate: Arc<Gate>,
}

impl Plan for HangingPlan {
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
