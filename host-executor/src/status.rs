//! Snapshots of what an executor is doing, for `vgpu ps`, `vgpu top` and Prometheus.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vgpu_engine::FallbackUse;

use crate::histogram::{Distribution, add_seconds};
use crate::policy::permits;
use crate::session::END_KINDS;
use crate::stats::{Failures, Stats};

/// Takes snapshots of an executor, from any thread, without delaying its sessions.
#[derive(Clone)]
pub struct StatusHandle(Arc<dyn StatusSource>);

/// What snapshots are taken of: an executor in one process, or the supervisor of several.
pub(crate) trait StatusSource: Send + Sync {
    /// A snapshot without latencies.
    fn status(&self) -> Status;
    /// How long the graphs of each tenant waited and ran.
    fn latencies(&self) -> Vec<TenantLatency>;
    /// What everybody does now, as text for people. Answers while everything else hangs.
    fn dump(&self) -> String;
    /// Whether the executor can make progress. Takes no lock that another thread may keep.
    fn progress(&self) -> Progress;
    /// Whether the executor drains. Takes no lock that another thread may keep.
    fn draining(&self) -> Option<DrainStatus>;
}

/// Whether an executor can make progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// It can: what was looked at.
    Runs(String),
    /// It cannot: why.
    Stalled(String),
    /// A thread that looks after the others, or a process of a supervisor, has not run for some
    /// time. So it is in a process that was stopped, too, for a moment after it goes on.
    Late(String),
}

/// A snapshot of an executor, whose figures may be taken a request apart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the program.
    pub version: String,
    /// Seconds since the start.
    pub uptime: f64,
    /// The engine of the first device.
    pub engine: EngineStatus,
    /// The engines of the further devices, in their order.
    #[serde(default)]
    pub further_engines: Vec<EngineStatus>,
    /// Guests with names, and one that stands for all others.
    pub guests: Vec<GuestStatus>,
    /// The connected programs of the guests.
    pub sessions: Vec<SessionStatus>,
    /// Sessions that have ended.
    #[serde(default)]
    pub ended: SessionEnds,
    /// `None`: the executor accepts sessions.
    #[serde(default)]
    pub draining: Option<DrainStatus>,
}

/// An executor that accepts no new sessions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DrainStatus {
    /// Seconds since the drain began.
    pub age: f64,
    /// Seconds until the deadline, at which the open sessions are ended. `None`: no deadline.
    pub left: Option<f64>,
    /// Sessions that were ended at the deadline.
    pub ended: u64,
    /// The virtual machines whose processes do not know of the drain, and why.
    #[serde(default)]
    pub untold: Vec<String>,
}

impl Status {
    /// The engines, in the order of their devices.
    pub fn engines(&self) -> impl Iterator<Item = &EngineStatus> {
        std::iter::once(&self.engine).chain(&self.further_engines)
    }

    /// Bytes of memory that a guest can have on all of its devices: its quota on each, or what they
    /// have.
    pub fn memory_for(&self, guest: &GuestStatus) -> u64 {
        let engines = self.engines().enumerate();
        let own = engines.filter(|&(device, _)| permits(&guest.devices, device));
        own.map(|(_, engine)| guest.quota.unwrap_or(engine.memory_total))
            .fold(0, u64::saturating_add)
    }

    /// Whether there is more than one device.
    pub fn has_several_engines(&self) -> bool {
        !self.further_engines.is_empty()
    }

    /// The name of the engine of a session; empty if the status does not have the engine.
    pub fn engine_of(&self, session: &SessionStatus) -> &str {
        let engine = self.engines().nth(session.device);
        engine.map_or("", |engine| &engine.name)
    }

    /// What engines and guests have on each device: the engine, and each guest with its usage of
    /// the device.
    pub fn by_device(
        &self,
    ) -> impl Iterator<Item = (&EngineStatus, impl Iterator<Item = (&GuestStatus, &Usage)>)> {
        self.engines().enumerate().map(|(device, engine)| {
            let guests = self.guests.iter().filter_map(move |guest| {
                let usage = match guest.by_device.is_empty() {
                    true => (device == 0).then_some(&guest.usage),
                    false => guest.by_device.get(device),
                }?;
                // A guest may still have sessions on a device that was taken from it.
                let is_own = permits(&guest.devices, device);
                (is_own || *usage != Usage::default()).then_some((guest, usage))
            });
            (engine, guests)
        })
    }

    /// Bytes of memory that the guests use on a device. Weights that several guests share count
    /// once.
    pub fn memory_of_guests(&self, device: usize) -> u64 {
        let mut devices = self.by_device();
        let Some((_, guests)) = devices.nth(device) else {
            return 0;
        };
        let held = guests.map(|(_, usage)| usage.memory.saturating_sub(usage.weights_shared));
        held.fold(0, u64::saturating_add)
    }

    /// The programs that are connected, also those that have no session yet.
    pub fn programs(&self) -> usize {
        self.guests.iter().map(|guest| guest.sessions).sum()
    }

    /// Bytes of memory of a device that are neither free nor in a guest's buffers: scratch memory
    /// of plans, and on a GPU what its driver and other processes have.
    pub fn memory_of_others(&self, device: usize) -> u64 {
        let Some(engine) = self.engines().nth(device) else {
            return 0;
        };
        let used = engine.memory_total.saturating_sub(engine.memory_free);
        used.saturating_sub(self.memory_of_guests(device))
    }
}

/// How many sessions have ended, by the kind of end. Connections that got no session are counted,
/// too, except those that closed before their first message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct SessionEnds([u64; END_KINDS.len()]);

impl From<Vec<u64>> for SessionEnds {
    /// From the figures of an executor that may be older or newer, and have fewer or more kinds.
    fn from(counts: Vec<u64>) -> SessionEnds {
        SessionEnds::from_fn(|kind| counts.get(kind).copied().unwrap_or(0))
    }
}

impl From<SessionEnds> for Vec<u64> {
    fn from(ends: SessionEnds) -> Vec<u64> {
        ends.0.to_vec()
    }
}

impl SessionEnds {
    /// The number of each kind, by its index.
    pub(crate) fn from_fn(count: impl FnMut(usize) -> u64) -> SessionEnds {
        SessionEnds(std::array::from_fn(count))
    }

    /// Each kind of end with its number of sessions.
    pub fn by_kind(&self) -> impl Iterator<Item = (&'static str, u64)> {
        END_KINDS.into_iter().zip(self.0)
    }

    /// Adds the figures of another process.
    pub(crate) fn add(&mut self, other: &SessionEnds) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum = sum.saturating_add(count);
        }
    }
}

/// An engine.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct EngineStatus {
    /// `cpu` or `cuda:0`.
    pub name: String,
    /// The model of the device.
    pub description: String,
    /// Bytes of device memory that guests may use in all.
    pub memory_total: u64,
    /// Bytes that an allocation could still get.
    pub memory_free: u64,
    /// Bytes of the host's memory that the engine keeps for the next graph, and that no guest is
    /// charged for.
    #[serde(default)]
    pub kept_scratch: u64,
    /// The GPU of this machine that the engine does not use, and why, for people.
    #[serde(default)]
    pub unused_gpu: Option<String>,
    /// What the driver says of the GPU. `None`: the engine is not the CUDA engine, or the driver
    /// has not answered yet.
    #[serde(default)]
    pub gpu: Option<GpuStatus>,
    /// Seconds that the present turn on the engine has lasted. `None`: no graph runs.
    #[serde(default)]
    pub turn: Option<f64>,
    /// What the engine has not come back from for long, if the watchdog finds that it hangs.
    #[serde(default)]
    pub hang: Option<String>,
    /// What has run on the device, and what on the CPU engine in its place. `None`: the engine is
    /// not one over a backend of ggml.
    #[serde(default)]
    pub fallback: Option<FallbackStatus>,
    /// The store of shared weights.
    pub weights: WeightsStatus,
}

/// What an engine has run on its device, and on the CPU engine in place of the device.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct FallbackStatus {
    /// Nodes that ran on the device.
    pub device_nodes: u64,
    /// Nodes that ran on the CPU engine.
    pub cpu_nodes: u64,
    /// Seconds that the device had work.
    pub device_seconds: f64,
    /// Seconds of the CPU engine, copies from and to the device included.
    pub cpu_seconds: f64,
}

impl From<FallbackUse> for FallbackStatus {
    fn from(used: FallbackUse) -> FallbackStatus {
        FallbackStatus {
            device_nodes: used.device_nodes,
            cpu_nodes: used.other_nodes,
            device_seconds: used.device_time.as_secs_f64(),
            cpu_seconds: used.other_time.as_secs_f64(),
        }
    }
}

impl FallbackStatus {
    /// The part of the nodes that ran on the CPU engine, 0 to 1. `None`: none has run.
    pub fn cpu_nodes_ratio(&self) -> Option<f64> {
        let nodes = self.device_nodes.saturating_add(self.cpu_nodes);
        (nodes > 0).then(|| self.cpu_nodes as f64 / nodes as f64)
    }

    /// The part of the time that the CPU engine took, 0 to 1. `None`: nothing has run.
    pub fn cpu_time_ratio(&self) -> Option<f64> {
        let seconds = self.device_seconds + self.cpu_seconds;
        (seconds > 0.0).then(|| self.cpu_seconds / seconds)
    }

    /// Adds the figures of another process.
    pub(crate) fn add(&mut self, other: &FallbackStatus) {
        let FallbackStatus {
            device_nodes,
            cpu_nodes,
            device_seconds,
            cpu_seconds,
        } = other;
        self.device_nodes = self.device_nodes.saturating_add(*device_nodes);
        self.cpu_nodes = self.cpu_nodes.saturating_add(*cpu_nodes);
        add_seconds(&mut self.device_seconds, *device_seconds);
        add_seconds(&mut self.cpu_seconds, *cpu_seconds);
    }
}

/// What NVML, the management library of NVIDIA's driver, says of a GPU. Other programs on the GPU
/// count, too.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The PCI address, such as `0000:01:00.0`.
    pub address: String,
    /// The part of the last sampling period of the driver in which a kernel ran, 0 to 1.
    pub busy: Option<f64>,
    /// Bytes of memory in use, by all programs and the driver.
    pub memory_used: Option<u64>,
    /// Bytes of memory in all.
    pub memory_total: Option<u64>,
    /// The temperature in degrees Celsius.
    pub temperature: Option<u32>,
    /// The power that the card takes, in watts.
    pub power: Option<f64>,
    /// Why figures are missing, for people; each reason once.
    pub missing: Vec<String>,
    /// Seconds since the figures were read. The figures are read once a second.
    pub age: f64,
}

impl GpuStatus {
    /// Whether every figure is missing.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn is_empty(&self) -> bool {
        let GpuStatus {
            busy,
            memory_total,
            temperature,
            power,
            ..
        } = self;
        busy.is_none() && memory_total.is_none() && temperature.is_none() && power.is_none()
    }
}

/// The store of shared weights, for all guests together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WeightsStatus {
    /// Bytes of known extents in device memory.
    pub bytes: u64,
    /// Bytes in the cache on disk.
    pub disk_bytes: u64,
    /// Bytes that guests did not have to send.
    pub not_sent: u64,
    /// Part of `not_sent` that came from the cache on disk.
    pub from_disk: u64,
    /// Bytes that were sent and turned out to be duplicates.
    pub merged: u64,
}

impl WeightsStatus {
    /// Adds the figures of another process.
    pub(crate) fn add(&mut self, other: &WeightsStatus) {
        let WeightsStatus {
            bytes,
            disk_bytes,
            not_sent,
            from_disk,
            merged,
        } = other;
        for (sum, count) in [
            (&mut self.bytes, bytes),
            (&mut self.disk_bytes, disk_bytes),
            (&mut self.not_sent, not_sent),
            (&mut self.from_disk, from_disk),
            (&mut self.merged, merged),
        ] {
            *sum = sum.saturating_add(*count);
        }
    }
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// The name in the configuration; `-` for all unnamed guests.
    pub name: String,
    /// Quota of memory in bytes, on each device. `None`: the memory that no quota reserves.
    pub quota: Option<u64>,
    /// Share of each device's time, relative to the other guests.
    pub weight: u32,
    /// Number of connected programs: of sessions on the device where the guest has most. Of a
    /// supervisor, the number of sessions.
    pub sessions: usize,
    /// What the programs of the guest use and have done, including programs that have disconnected,
    /// on all devices.
    #[serde(flatten)]
    pub usage: Usage,
    /// The same for each device, in their order. Empty if there is one device.
    #[serde(default)]
    pub by_device: Vec<Usage>,
    /// The devices that the guest may use. Empty: all.
    #[serde(default)]
    pub devices: Vec<usize>,
}

/// A session: a connected program of a guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// The number of the session.
    pub id: u64,
    /// The name of the guest.
    pub guest: String,
    /// The index of the device.
    #[serde(default)]
    pub device: usize,
    /// The listener and the position there.
    pub endpoint: String,
    /// The process id, where the link tells.
    pub pid: Option<i32>,
    /// The user id of the process.
    pub uid: Option<u32>,
    /// The name that the program gave in HELLO. `None` before HELLO.
    pub program: Option<String>,
    /// The version of the protocol that the program and the executor have agreed on. `None` before
    /// HELLO.
    #[serde(default)]
    pub protocol: Option<u32>,
    /// Seconds since the program connected.
    pub age: f64,
    /// What the program uses and has done.
    #[serde(flatten)]
    pub usage: Usage,
}

/// Resources that are in use, and work that has been done.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of device memory in use.
    pub memory: u64,
    /// Graphs run. A program that decodes runs one graph per token if the whole model is on the
    /// vGPU.
    pub graphs: u64,
    /// Nodes of all graphs run.
    pub nodes: u64,
    /// Tokens of all graphs run: for each graph, the most columns of its products.
    #[serde(default)]
    pub tokens: u64,
    /// Seconds that graphs had the device.
    pub busy: f64,
    /// Seconds that graphs waited for the device.
    pub queued: f64,
    /// Turns of the scheduler that the graphs took.
    pub turns: u64,
    /// The graphs that ran in these turns, the own and others in one batch. Divided by `turns`, it
    /// is the mean size of a batch.
    #[serde(default)]
    pub batch_members: u64,
    /// Bytes of messages and payloads received.
    pub bytes_in: u64,
    /// Bytes of messages and payloads sent.
    pub bytes_out: u64,
    /// Requests that were refused or failed.
    pub failures: u64,
    /// The same by the reason.
    #[serde(default)]
    pub failure_reasons: Failures,
    /// Bytes of weights that the guest did not have to send.
    pub weights_not_sent: u64,
    /// Part of `memory` that is a shared copy, first uploaded to another buffer.
    pub weights_shared: u64,
}

impl From<&Stats> for Usage {
    fn from(stats: &Stats) -> Usage {
        Usage {
            memory: stats.buffer_bytes,
            graphs: stats.graphs_run,
            nodes: stats.nodes_run,
            tokens: stats.tokens_run,
            busy: stats.busy.as_secs_f64(),
            queued: stats.queued.as_secs_f64(),
            turns: stats.turns,
            batch_members: stats.batch_members,
            bytes_in: stats.bytes_in,
            bytes_out: stats.bytes_out,
            failures: stats.failures.total(),
            failure_reasons: stats.failures,
            weights_not_sent: stats.weights_not_sent,
            weights_shared: stats.weights_shared,
        }
    }
}

impl Usage {
    /// Adds the figures of another session or process.
    pub(crate) fn add(&mut self, other: &Usage) {
        let Usage {
            memory,
            graphs,
            nodes,
            tokens,
            busy,
            queued,
            turns,
            batch_members,
            bytes_in,
            bytes_out,
            failures,
            failure_reasons,
            weights_not_sent,
            weights_shared,
        } = other;
        for (sum, count) in [
            (&mut self.memory, memory),
            (&mut self.graphs, graphs),
            (&mut self.nodes, nodes),
            (&mut self.tokens, tokens),
            (&mut self.turns, turns),
            (&mut self.batch_members, batch_members),
            (&mut self.bytes_in, bytes_in),
            (&mut self.bytes_out, bytes_out),
            (&mut self.failures, failures),
            (&mut self.weights_not_sent, weights_not_sent),
            (&mut self.weights_shared, weights_shared),
        ] {
            *sum = sum.saturating_add(*count);
        }
        self.failure_reasons.add(failure_reasons);
        add_seconds(&mut self.busy, *busy);
        add_seconds(&mut self.queued, *queued);
    }
}

/// The complete snapshot that a worker sends to its supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) status: Status,
    pub(crate) latencies: Vec<TenantLatency>,
}

/// How long the graphs of a tenant waited and ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TenantLatency {
    pub(crate) guest: String,
    pub(crate) queued: Distribution,
    pub(crate) ran: Distribution,
}

impl StatusHandle {
    pub(crate) fn new(executor: Arc<dyn StatusSource>) -> StatusHandle {
        StatusHandle(executor)
    }

    /// Takes a snapshot.
    pub fn status(&self) -> Status {
        self.0.status()
    }

    /// What everybody does now, as text for people. Answers while everything else hangs.
    pub fn dump(&self) -> String {
        self.0.dump()
    }

    /// Whether the executor can make progress.
    pub fn progress(&self) -> Progress {
        self.0.progress()
    }

    /// Whether the executor drains.
    pub fn draining(&self) -> Option<DrainStatus> {
        self.0.draining()
    }

    pub(crate) fn latencies(&self) -> Vec<TenantLatency> {
        self.0.latencies()
    }

    pub(crate) fn report(&self) -> Report {
        Report {
            status: self.status(),
            latencies: self.latencies(),
        }
    }
}
