//! What an executor is doing, for `vgpu ps`, `vgpu top` and Prometheus: one snapshot for all of them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::histogram::Distribution;
use crate::server::Shared;
use crate::stats::Stats;
use crate::tenant::Tenant;
use crate::weights::Weights;

/// Reads what an executor is doing, from any thread, without holding it up.
#[derive(Clone)]
pub struct Watch(Arc<dyn Look>);

/// What can be looked at: an executor in one process, or the supervisor of several.
pub(crate) trait Look: Send + Sync {
    fn status(&self) -> Status;
    fn waits(&self) -> Vec<Waits>;
}

/// An executor at some moment. Figures may be a request apart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Of the program.
    pub version: String,
    /// Seconds since it started.
    pub uptime: f64,
    /// What does the arithmetic.
    pub engine: EngineStatus,
    /// Guests with names, and one that stands for all others.
    pub guests: Vec<GuestStatus>,
    /// Programs of guests that are connected.
    pub sessions: Vec<SessionStatus>,
}

/// An engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// `cpu` or `cuda:0`.
    pub name: String,
    /// For people.
    pub description: String,
    /// Bytes that guests may use.
    pub memory_total: u64,
    /// What an allocation could still get.
    pub memory_free: u64,
    /// Weights that are held by content.
    pub weights: WeightsStatus,
}

/// Weights that are held by content, for all guests together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WeightsStatus {
    /// Bytes known and in memory.
    pub bytes: u64,
    /// Bytes in the cache on disk.
    pub disk_bytes: u64,
    /// Bytes that guests did not have to send.
    pub not_sent: u64,
    /// Of these, bytes that came from the cache on disk.
    pub from_disk: u64,
    /// Bytes that were sent and found to be there already.
    pub merged: u64,
}

impl WeightsStatus {
    /// Adds those of another process.
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

/// A guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// As the configuration calls it; `-` for all that it does not name.
    pub name: String,
    /// Bytes it may use; none: what nobody has reserved.
    pub quota: Option<u64>,
    /// Its part of the device's time, against the others.
    pub weight: u32,
    /// Programs that are connected.
    pub sessions: usize,
    /// What it has done, its programs of earlier included.
    #[serde(flatten)]
    pub work: Work,
}

/// A program of a guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Its number.
    pub id: u64,
    /// Whose it is.
    pub guest: String,
    /// Where it came in.
    pub endpoint: String,
    /// Its process, where the link tells.
    pub pid: Option<i32>,
    /// The user of that.
    pub uid: Option<u32>,
    /// What it calls itself; none until it has said hello.
    pub program: Option<String>,
    /// Seconds since it connected.
    pub age: f64,
    /// What it has done.
    #[serde(flatten)]
    pub work: Work,
}

/// What somebody has and has done.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Work {
    /// Bytes of device memory held.
    pub memory: u64,
    /// Graphs run. A program that decodes runs one a token, as long as no other part of the model is elsewhere.
    pub graphs: u64,
    /// Nodes of all graphs run.
    pub nodes: u64,
    /// Seconds that graphs had the device.
    pub busy: f64,
    /// Seconds that graphs waited for the device.
    pub queued: f64,
    /// Turns that the graphs took.
    pub turns: u64,
    /// Bytes of messages and payloads that came.
    pub bytes_in: u64,
    /// Bytes of messages and payloads that went.
    pub bytes_out: u64,
    /// Requests that were refused or failed.
    pub failures: u64,
    /// Bytes of weights that did not have to be sent.
    pub weights_not_sent: u64,
    /// Bytes of the memory held that are held once for several buffers, and for another one first.
    pub weights_shared: u64,
}

impl From<&Stats> for Work {
    fn from(stats: &Stats) -> Work {
        Work {
            memory: stats.buffer_bytes,
            graphs: stats.graphs_run,
            nodes: stats.nodes_run,
            busy: stats.busy.as_secs_f64(),
            queued: stats.queued.as_secs_f64(),
            turns: stats.turns,
            bytes_in: stats.bytes_in,
            bytes_out: stats.bytes_out,
            failures: stats.failures,
            weights_not_sent: stats.weights_not_sent,
            weights_shared: stats.weights_shared,
        }
    }
}

impl Work {
    /// Adds what somebody else has and has done.
    pub(crate) fn add(&mut self, other: &Work) {
        let Work {
            memory,
            graphs,
            nodes,
            busy,
            queued,
            turns,
            bytes_in,
            bytes_out,
            failures,
            weights_not_sent,
            weights_shared,
        } = other;
        for (sum, count) in [
            (&mut self.memory, memory),
            (&mut self.graphs, graphs),
            (&mut self.nodes, nodes),
            (&mut self.turns, turns),
            (&mut self.bytes_in, bytes_in),
            (&mut self.bytes_out, bytes_out),
            (&mut self.failures, failures),
            (&mut self.weights_not_sent, weights_not_sent),
            (&mut self.weights_shared, weights_shared),
        ] {
            *sum = sum.saturating_add(*count);
        }
        self.busy += busy;
        self.queued += queued;
    }
}

/// All that an executor in a process of its own tells its supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) status: Status,
    pub(crate) waits: Vec<Waits>,
}

/// How long graphs of a guest waited and ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Waits {
    pub(crate) guest: String,
    pub(crate) queued: Distribution,
    pub(crate) ran: Distribution,
}

impl Watch {
    pub(crate) fn new(executor: Arc<dyn Look>) -> Watch {
        Watch(executor)
    }

    /// What the executor is doing now.
    pub fn status(&self) -> Status {
        self.0.status()
    }

    pub(crate) fn waits(&self) -> Vec<Waits> {
        self.0.waits()
    }

    pub(crate) fn report(&self) -> Report {
        Report {
            status: self.status(),
            waits: self.waits(),
        }
    }
}

impl Look for Shared {
    fn status(&self) -> Status {
        let shared = self;
        // Guests and sessions under one lock: a session that ends is seen once.
        let entries = shared.sessions();
        let (named, unnamed) = shared.roster.tenants();
        let sessions: Vec<SessionStatus> = entries
            .iter()
            .map(|(&id, entry)| SessionStatus {
                id,
                guest: match entry.tenant.is_named() {
                    true => entry.tenant.name().to_owned(),
                    false => unnamed.name().to_owned(),
                },
                endpoint: entry.peer.endpoint.clone(),
                pid: entry.peer.process.as_ref().map(|process| process.pid),
                uid: entry.peer.process.as_ref().map(|process| process.uid),
                program: entry.counters.guest.get().cloned(),
                age: entry.since.elapsed().as_secs_f64(),
                work: Work::from(&entry.counters.snapshot()),
            })
            .collect();
        let mut guests: Vec<(Arc<Tenant>, Stats)> = named
            .into_iter()
            .chain([unnamed])
            .map(|tenant| {
                let ended = tenant.ended();
                (tenant, ended)
            })
            .collect();
        let mut counts = vec![0; guests.len()];
        for entry in entries.values() {
            // Sessions of guests that are named no longer count with the unnamed.
            let whose = guests
                .iter()
                .position(|(t, _)| Arc::ptr_eq(t, &entry.tenant));
            let whose = whose.unwrap_or(guests.len() - 1);
            let stats = entry.counters.snapshot();
            guests[whose].1.add(&stats);
            guests[whose].1.buffer_bytes += stats.buffer_bytes;
            guests[whose].1.weights_shared += stats.weights_shared;
            counts[whose] += 1;
        }
        drop(entries);
        let guests = guests.iter().zip(counts);
        let memory = shared.engine.memory();
        let weights = shared.weights.get().map(Weights::stats).unwrap_or_default();
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            uptime: shared.since.elapsed().as_secs_f64(),
            engine: EngineStatus {
                name: shared.engine.name().into(),
                description: shared.engine.description().into(),
                memory_total: memory.total,
                memory_free: memory.free,
                weights: WeightsStatus {
                    bytes: weights.bytes,
                    disk_bytes: weights.disk_bytes,
                    not_sent: weights.not_sent,
                    from_disk: weights.from_disk,
                    merged: weights.merged,
                },
            },
            guests: guests
                .map(|((tenant, stats), sessions)| {
                    let policy = match tenant.is_named() {
                        true => tenant.policy(),
                        false => shared.roster.unnamed_policy(),
                    };
                    GuestStatus {
                        name: tenant.name().to_owned(),
                        quota: policy.memory,
                        weight: policy.weight,
                        sessions,
                        work: Work::from(stats),
                    }
                })
                .collect(),
            sessions,
        }
    }

    fn waits(&self) -> Vec<Waits> {
        let (named, unnamed) = self.roster.tenants();
        let tenants = named.into_iter().chain([unnamed]);
        tenants
            .map(|tenant| Waits {
                guest: tenant.name().to_owned(),
                queued: tenant.measures.queued.read(),
                ran: tenant.measures.ran.read(),
            })
            .collect()
    }
}
