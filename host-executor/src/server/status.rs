//! Snapshots of a server.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::shared::{Found, ServerState};
use crate::activity::{EngineFigures, dump};
use crate::gpu_monitor::GpuWatch;
use crate::service;
use crate::stats::Stats;
use crate::status::{
    DrainStatus, EngineStatus, GuestStatus, Progress, SessionEnds, SessionStatus, Status,
    StatusSource, TenantLatency, Usage, WeightsStatus,
};
use crate::tenant::Tenant;
use crate::version::version;
use crate::weights::WeightStore;

impl StatusSource for ServerState {
    fn status(&self) -> Status {
        let shared = self;
        // One lock for tenants and sessions: a session that ends meanwhile is counted once.
        let entries = shared.sessions();
        let (named, unnamed) = shared.registry.tenants();
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
                protocol: entry
                    .counters
                    .protocol
                    .get()
                    .map(|version| version.number()),
                age: entry.since.elapsed().as_secs_f64(),
                usage: Usage::from(&entry.counters.snapshot()),
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
            // Tenants that are named no longer count with the unnamed ones.
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
        let memory = shared.monitor.memory();
        let turns = shared.activities.snapshot();
        let turns = turns.iter().filter_map(|session| session.turn.as_ref());
        let turn = turns.map(|turn| turn.age.as_secs_f64()).reduce(f64::max);
        let weights = shared
            .weights
            .get()
            .map(WeightStore::stats)
            .unwrap_or_default();
        Status {
            version: version().into(),
            uptime: shared.since.elapsed().as_secs_f64(),
            engine: EngineStatus {
                name: shared.engine.name().into(),
                description: shared.engine.description().into(),
                memory_total: memory.total,
                memory_free: memory.free,
                unused_gpu: shared.unused_gpu.get().cloned(),
                gpu: shared.gpu.get().and_then(GpuWatch::status),
                turn,
                hang: shared.found().hang,
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
                        false => shared.registry.unnamed_policy(),
                    };
                    GuestStatus {
                        name: tenant.name().to_owned(),
                        quota: policy.memory,
                        weight: policy.weight,
                        sessions,
                        usage: Usage::from(stats),
                    }
                })
                .collect(),
            sessions,
            ended: SessionEnds::from_fn(|kind| shared.ended[kind].load(Ordering::Relaxed)),
            draining: shared.drain.status(),
        }
    }

    fn dump(&self) -> String {
        let mut more = Vec::new();
        if let Some(weights) = self.weights.get() {
            more.push(match weights.backlog() {
                Some((extents, bytes)) => {
                    format!("weights: {extents} extents of {bytes} bytes wait to be hashed")
                }
                None => "weights: the queue of the hashing thread is locked now".into(),
            });
        }
        more.extend(service::dump());
        let unanswered = self.monitor.call().map(|(_, age)| age);
        let figures = EngineFigures {
            name: self.engine.name(),
            description: self.engine.description(),
            unanswered,
            hold: self.scheduler.hold(),
            uptime: self.since.elapsed(),
            more,
        };
        dump(&self.activities, &figures)
    }

    fn progress(&self) -> Progress {
        let Found { hang, starved } = self.found();
        if let Some(why) = self.monitor.fatal_error() {
            return Progress::Stalled(format!("the engine is lost: {why}"));
        }
        if let Some(hang) = hang {
            return Progress::Stalled(format!("the engine hangs: {hang}"));
        }
        if let Some(starved) = starved {
            return Progress::Stalled(starved);
        }
        let slow = self.limits.slow;
        let watchdog = self.watchdog.late("the watchdog", slow);
        if let Some(why) = watchdog.or_else(|| self.main.late("the main thread", slow)) {
            return Progress::Late(why);
        }
        Progress::Runs(format!("the engine {} answers", self.engine.name()))
    }

    fn draining(&self) -> Option<DrainStatus> {
        self.drain.status()
    }

    fn latencies(&self) -> Vec<TenantLatency> {
        let (named, unnamed) = self.registry.tenants();
        let tenants = named.into_iter().chain([unnamed]);
        tenants
            .map(|tenant| TenantLatency {
                guest: tenant.name().to_owned(),
                queued: tenant.latency.queued.read(),
                ran: tenant.latency.ran.read(),
            })
            .collect()
    }
}
