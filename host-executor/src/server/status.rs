//! Snapshots of a server.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use vgpu_engine::Placed;

use super::device::{DeviceState, Found};
use super::shared::{Entry, ServerState};
use crate::activity::{EngineFigures, ProcessFigures, SessionActivity, dump};
use crate::gpu_monitor::GpuWatch;
use crate::histogram::Distribution;
use crate::service;
use crate::size::shown;
use crate::stats::Stats;
use crate::status::{
    DrainStatus, EngineStatus, GuestStatus, Progress, SessionEnds, SessionStatus, Status,
    StatusSource, TenantLatency, Usage, WeightsStatus,
};
use crate::tenant_registry::{GuestTenants, on_first_device};
use crate::version::version;
use crate::weights::{HashingNow, WeightStore};

/// The operators of which an engine leaves nodes to the CPU engine, with the numbers of these nodes
/// and of all. `None`: there are none.
fn left_to_the_cpu(placement: &BTreeMap<&str, Placed>) -> Option<String> {
    let left: Vec<String> = { placement.iter() }
        .filter(|(_, placed)| placed.fallback > 0)
        .map(|(op, &Placed { device, fallback })| {
            format!("{op} {fallback} of {}", device + fallback)
        })
        .collect();
    (!left.is_empty()).then(|| left.join(", "))
}

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
                    false => unnamed[0].name().to_owned(),
                },
                device: entry.device,
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
        let usages = shared.usages(&named, unnamed, &entries);
        let mut counts = vec![vec![0; shared.devices.len()]; usages.len()];
        for entry in entries.values() {
            counts[place_of(&named, entry)][entry.device] += 1;
        }
        // A program has a session on each device that it uses.
        let counts = counts.into_iter();
        let counts = counts.map(|counts| counts.into_iter().max().unwrap_or(0));
        drop(entries);
        let guests = named.iter().chain([unnamed]).zip(usages).zip(counts);
        let guests = guests.map(|((tenants, by_device), sessions)| {
            let tenant = on_first_device(tenants);
            let policy = match tenant.is_named() {
                true => tenant.policy(),
                false => shared.registry.unnamed_policy(),
            };
            let mut usage = Usage::default();
            by_device.iter().for_each(|of_device| usage.add(of_device));
            GuestStatus {
                name: tenant.name().to_owned(),
                quota: policy.memory,
                weight: policy.weight,
                sessions,
                usage,
                by_device: match by_device.len() {
                    1 => Vec::new(),
                    _ => by_device,
                },
                devices: policy.devices,
            }
        });
        let guests = guests.collect();
        let turns = shared.activities.snapshot();
        let mut engines = { shared.devices.iter().enumerate() }
            .map(|(at, device)| engine_status(device, at, &turns));
        // There is at least one device.
        let mut engine = engines.next().unwrap_or_default();
        engine.unused_gpu = shared.unused_gpu.get().cloned();
        Status {
            version: version().into(),
            uptime: shared.since.elapsed().as_secs_f64(),
            engine,
            further_engines: engines.collect(),
            guests,
            sessions,
            ended: SessionEnds::from_fn(|kind| shared.ended[kind].load(Ordering::Relaxed)),
            draining: shared.drain.status(),
        }
    }

    fn dump(&self) -> String {
        let mut more = Vec::new();
        let threads = [
            ("the watchdog", &self.watchdog),
            ("the main thread", &self.main),
        ];
        more.extend(threads.into_iter().filter_map(|(what, heartbeat)| {
            let age = heartbeat.age()?;
            Some(format!("thread: {what} has last run {age:.1?} ago"))
        }));
        for device in &self.devices {
            if let Some(weights) = device.weights.get() {
                let which = self.which(device);
                let backlog = match weights.backlog() {
                    Some((extents, bytes)) => {
                        format!("{extents} extents of {} wait to be hashed", shown(bytes))
                    }
                    None => "the queue of the hashing thread is locked now".into(),
                };
                more.push(format!("weights{which}: {backlog}; {}", hashing(weights)));
            }
        }
        more.extend(self.devices.iter().filter_map(|device| {
            let left = left_to_the_cpu(&device.engine.placement())?;
            let name = device.engine.name();
            Some(format!(
                "{name} leaves these nodes of compiled graphs to the engine cpu: {left}"
            ))
        }));
        more.extend(self.machines.dump());
        more.extend(service::dump());
        let engines = self.devices.iter().map(|device| EngineFigures {
            name: device.engine.name(),
            description: device.engine.description(),
            unanswered: device.monitor.call().map(|(_, age)| age),
            hold: device.scheduler.hold(),
        });
        let engines: Vec<_> = engines.collect();
        let process = ProcessFigures {
            uptime: self.since.elapsed(),
            slow: self.limits.slow,
            more,
        };
        dump(&self.activities, &engines, &process)
    }

    fn progress(&self) -> Progress {
        for device in &self.devices {
            let Found { hang, starved } = device.found();
            let which = self.which(device);
            if let Some(why) = device.monitor.fatal_error() {
                return Progress::Stalled(format!("the engine{which} is lost: {why}"));
            }
            if let Some(hang) = hang {
                return Progress::Stalled(format!("the engine{which} hangs: {hang}"));
            }
            if let Some(starved) = starved {
                return Progress::Stalled(starved);
            }
        }
        let slow = self.limits.slow;
        let watchdog = self.watchdog.late("the watchdog", slow);
        if let Some(why) = watchdog.or_else(|| self.main.late("the main thread", slow)) {
            return Progress::Late(why);
        }
        let names: Vec<&str> = { self.devices.iter() }
            .map(|device| device.engine.name())
            .collect();
        Progress::Runs(match names[..] {
            [name] => format!("the engine {name} answers"),
            _ => format!("the engines {} answer", names.join(", ")),
        })
    }

    fn draining(&self) -> Option<DrainStatus> {
        self.drain.status()
    }

    fn latencies(&self) -> Vec<TenantLatency> {
        let (named, unnamed) = self.registry.tenants();
        let guests = named.iter().chain([unnamed]);
        guests
            .map(|tenants| {
                let mut latency = TenantLatency {
                    guest: tenants[0].name().to_owned(),
                    queued: Distribution::default(),
                    ran: Distribution::default(),
                };
                for tenant in tenants {
                    latency.queued.add(&tenant.latency.queued.read());
                    latency.ran.add(&tenant.latency.ran.read());
                }
                latency
            })
            .collect()
    }
}

/// What the hashing thread does.
fn hashing(weights: &WeightStore) -> String {
    match weights.hashing() {
        Some(HashingNow {
            domain,
            done,
            size,
            age,
        }) => format!(
            "hashes an extent of {size} bytes of {domain}, {done} of them before, for {age:.1?}"
        ),
        None => "the hashing thread waits".into(),
    }
}

impl ServerState {
    /// The name of a device's engine behind a space, where there are several.
    fn which(&self, device: &DeviceState) -> String {
        match self.devices.len() {
            1 => String::new(),
            _ => format!(" {}", device.engine.name()),
        }
    }

    /// What each guest uses and has done on each device. The last guest stands for all unnamed
    /// ones.
    fn usages(
        &self,
        named: &[GuestTenants],
        unnamed: &GuestTenants,
        entries: &BTreeMap<u64, Entry>,
    ) -> Vec<Vec<Usage>> {
        let guests = named.iter().chain([unnamed]);
        let mut stats: Vec<Vec<Stats>> = guests
            .map(|tenants| tenants.iter().map(|tenant| tenant.ended()).collect())
            .collect();
        for entry in entries.values() {
            let sum = &mut stats[place_of(named, entry)][entry.device];
            let own = entry.counters.snapshot();
            sum.add(&own);
            sum.buffer_bytes += own.buffer_bytes;
            sum.weights_shared += own.weights_shared;
        }
        let usages = stats.iter().map(|guest| guest.iter().map(Usage::from));
        usages.map(Iterator::collect).collect()
    }
}

/// The place of a session's guest among the named ones, or the one behind them. Tenants that are
/// named no longer count with the unnamed ones.
fn place_of(named: &[GuestTenants], entry: &Entry) -> usize {
    let id = entry.tenant.id();
    let place = named.iter().position(|tenants| tenants[0].id() == id);
    place.unwrap_or(named.len())
}

/// The engine of device `at`. `turns`: what all sessions do.
fn engine_status(device: &DeviceState, at: usize, turns: &[SessionActivity]) -> EngineStatus {
    let memory = device.monitor.memory();
    let own = turns.iter().filter(|session| session.device == at);
    let own = own.filter_map(|session| session.turn.as_ref());
    let turn = own.map(|turn| turn.age.as_secs_f64()).reduce(f64::max);
    let weights = { device.weights.get() }
        .map(WeightStore::stats)
        .unwrap_or_default();
    EngineStatus {
        name: device.engine.name().into(),
        description: device.engine.description().into(),
        memory_total: memory.total,
        memory_free: memory.free,
        kept_scratch: device.engine.kept_scratch_bytes(),
        unused_gpu: None,
        gpu: device.gpu.get().and_then(GpuWatch::status),
        turn,
        hang: device.found().hang,
        fallback: device.engine.fallback_use().map(Into::into),
        weights: WeightsStatus {
            bytes: weights.bytes,
            // All devices have one cache.
            disk_bytes: match at {
                0 => weights.disk_bytes,
                _ => 0,
            },
            not_sent: weights.not_sent,
            from_disk: weights.from_disk,
            merged: weights.merged,
        },
    }
}
