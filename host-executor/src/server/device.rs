//! A device of a server: an engine, and what belongs to it alone.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Mutex, OnceLock};

use vgpu_engine::Engine;
use vgpu_transport::lock::lock;

use crate::engine_monitor::EngineMonitor;
use crate::gpu_monitor::GpuWatch;
use crate::limits::Limits;
use crate::sched::Scheduler;
use crate::weights::WeightStore;

/// An engine with its queue, its weights, and those who watch it. No device waits for another.
pub(super) struct DeviceState {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) scheduler: Arc<Scheduler>,
    /// The limits of sessions on this device.
    pub(super) limits: Limits,
    /// What the driver says of the GPU of the engine.
    pub(super) gpu: OnceLock<GpuWatch>,
    pub(super) weights: OnceLock<WeightStore>,
    /// Asks the engine for its memory, and whether it still works.
    pub(super) monitor: Arc<EngineMonitor>,
    /// What the watchdog has found last.
    found: Mutex<Found>,
}

/// What the watchdog finds.
#[derive(Debug, Clone, Default)]
pub(super) struct Found {
    /// What the engine has not come back from for long.
    pub(super) hang: Option<String>,
    /// Who has waited long for an engine that nobody has.
    pub(super) starved: Option<String>,
}

impl DeviceState {
    /// # Errors
    /// No thread can be started.
    pub(super) fn new(engine: Arc<dyn Engine>, limits: Limits) -> io::Result<DeviceState> {
        let monitor = EngineMonitor::start(Arc::clone(&engine))?;
        let scheduler = Arc::new(Scheduler::new(engine.is_host_memory()));
        Ok(DeviceState {
            engine,
            scheduler,
            limits,
            gpu: OnceLock::new(),
            weights: OnceLock::new(),
            monitor,
            found: Mutex::default(),
        })
    }

    /// Publishes what the watchdog has found.
    pub(super) fn set_found(&self, found: Found) {
        *lock(&self.found) = found;
    }

    /// What the watchdog has found last.
    pub(super) fn found(&self) -> Found {
        lock(&self.found).clone()
    }

    /// Takes each lock that admission, status and shutdown need, and releases it.
    pub(super) fn probe_locks(&self) {
        self.scheduler.probe();
        self.monitor.probe();
    }
}
