//! The figures of all workers, added up by guest.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tracing::debug;

use super::drain;
use super::printable::shown;
use super::query::query_all;
use super::state::{Program, SupervisorState};
use super::totals::{GuestTotals, add_fallback, counted_as};
use crate::control::{self, QuestionOutcome};
use crate::gpu_monitor::GpuWatch;
use crate::status::{
    DrainStatus, EngineStatus, FallbackStatus, GuestStatus, Progress, Report, SessionEnds,
    SessionStatus, Status, StatusSource, TenantLatency, Usage, WeightsStatus,
};
use crate::version::version;

/// In the number of a session of a virtual machine, the number of the machine is shifted by this
/// many bits: the process of each machine counts its sessions from 1.
pub(super) const MACHINE_SHIFT: u32 = 32;

/// The main thread of a supervisor that has not run for this time hangs.
const LATE: Duration = Duration::from_secs(10);

/// A snapshot of all guests.
struct Snapshot {
    totals: BTreeMap<String, GuestTotals>,
    programs: BTreeMap<String, usize>,
    sessions: Vec<SessionStatus>,
    /// By device.
    engines: Vec<EngineTotals>,
    ended: SessionEnds,
    /// Sessions of virtual machines that were ended at the deadline of a drain.
    drained: u64,
    /// A process that has reported before and does so no longer.
    silent: Option<String>,
}

/// A device, whose engine each process has.
#[derive(Default)]
struct EngineTotals {
    weights: WeightsStatus,
    fallback: Option<FallbackStatus>,
    /// The longest present turn on an engine, in seconds.
    turn: Option<f64>,
    /// What an engine has not come back from for long.
    hang: Option<String>,
    /// Bytes of device memory in use.
    memory: u64,
    /// Bytes of memory of the largest engine of a worker. With a GPU, all workers share that
    /// memory.
    largest: u64,
    /// Bytes of the host's memory that the engines keep for their next graphs.
    kept_scratch: u64,
}

impl EngineTotals {
    fn add(&mut self, engine: &EngineStatus) {
        self.weights.add(&engine.weights);
        add_fallback(&mut self.fallback, engine.fallback.as_ref());
        let turn = engine.turn.filter(|turn| turn.is_finite());
        self.turn = self.turn.into_iter().chain(turn).reduce(f64::max);
        if let Some(hang) = &engine.hang {
            self.hang.get_or_insert_with(|| shown(hang));
        }
        self.largest = self.largest.max(engine.memory_total);
        self.kept_scratch = self.kept_scratch.saturating_add(engine.kept_scratch);
    }
}

impl SupervisorState {
    fn snapshot(&self) -> Snapshot {
        let processes = self.processes();
        let devices = self.resources.engines.len();
        let mut engines: Vec<EngineTotals> = Vec::new();
        engines.resize_with(devices, EngineTotals::default);
        for (engine, weights) in engines.iter_mut().zip(&processes.ended_workers.weights) {
            engine.weights = *weights;
        }
        for (engine, fallback) in engines.iter_mut().zip(&processes.ended_workers.fallback) {
            engine.fallback = *fallback;
        }
        let mut snapshot = Snapshot {
            totals: processes.ended_workers.guests.clone(),
            programs: BTreeMap::new(),
            sessions: Vec::new(),
            engines,
            ended: processes.ended_workers.ended,
            drained: 0,
            silent: None,
        };
        let limit = self.timeouts.silence;
        for (id, worker) in &processes.workers {
            let guest = worker.guest.as_deref().unwrap_or("-");
            let who = format_args!("the worker {id} of guest {guest}");
            snapshot.add_silence(worker.silent(), limit, who);
            let counted = counted_as(worker.guest.as_deref(), &self.registry);
            if !worker.is_rejection {
                *snapshot.programs.entry(counted.clone()).or_default() += worker.sessions.len();
            }
            let Some((report, _)) = &worker.report else {
                continue;
            };
            snapshot.add(&counted, &report.report);
            // The supervisor itself knows the peer. The worker reports the figures and the program
            // name.
            let mut seen = BTreeSet::new();
            for session in &report.report.status.sessions {
                if !seen.insert(session.id) {
                    continue;
                }
                if let Some(Program { peer, .. }) = worker.sessions.get(&session.id) {
                    let process = peer.process.as_ref();
                    snapshot.sessions.push(SessionStatus {
                        guest: counted.clone(),
                        device: session.device.min(devices.saturating_sub(1)),
                        endpoint: peer.endpoint.clone(),
                        pid: process.map(|process| process.pid),
                        uid: process.map(|process| process.uid),
                        program: session.program.as_deref().map(shown),
                        ..session.clone()
                    });
                }
            }
        }
        drop(processes);
        snapshot.add_machines(self);
        snapshot
    }
}

/// The sessions that the process of machine `id` reports, each once. A process that was taken over
/// may report any number: a number with a machine in its upper half is left out, so that nobody
/// ends a session of another machine by it.
fn sessions_of_machine(
    id: u64,
    guest: &str,
    reported: &[SessionStatus],
    devices: usize,
) -> Vec<SessionStatus> {
    let mut seen = BTreeSet::new();
    let own = { reported.iter() }
        .filter(|session| session.id >> MACHINE_SHIFT == 0 && seen.insert(session.id));
    own.map(|session| SessionStatus {
        id: session.id | id << MACHINE_SHIFT,
        guest: guest.to_owned(),
        device: session.device.min(devices.saturating_sub(1)),
        program: session.program.as_deref().map(shown),
        endpoint: shown(&session.endpoint),
        ..session.clone()
    })
    .collect()
}

impl Snapshot {
    /// Asks the processes of virtual machines.
    fn add_machines(&mut self, shared: &SupervisorState) {
        let processes = shared.processes();
        let machines = processes.machines.iter();
        let (ids, machines): (Vec<u64>, Vec<(String, PathBuf)>) = machines
            .map(|(&id, machine)| (id, machine.address()))
            .unzip();
        drop(processes);
        let at = Instant::now();
        let report = |path: &Path, timeout| Ok(control::report(path, timeout));
        let reports = query_all(&machines, report);
        for (id, (name, asked)) in ids.into_iter().zip(reports) {
            let mut asked = asked.unwrap_or_else(|error| QuestionOutcome {
                process: None,
                answer: Err(error),
                open: None,
            });
            let mut last = None;
            if let Some(machine) = shared.processes().machines.get_mut(&id) {
                machine.answers.note(at, &mut asked);
                let silent = machine.answers.silent();
                let who = format_args!("the process of the virtual machine {name}");
                self.add_silence(silent, shared.timeouts.silence, who);
                match &asked.answer {
                    Ok(report) => machine.report = Some(report.clone()),
                    Err(_) if silent.is_none() => machine.report = None,
                    Err(_) => last = machine.report.clone(),
                }
            }
            if let Err(error) = &asked.answer {
                debug!(vm = name, "the machine's process does not report: {error}");
            }
            // While an executor is late, its last report counts: its programs are still there, and
            // counters do not fall.
            if let Some(report) = asked.answer.ok().or(last) {
                let counted = counted_as(Some(&name), &shared.registry);
                let reported = &report.status.sessions;
                let sessions = sessions_of_machine(id, &counted, reported, self.engines.len());
                *self.programs.entry(counted.clone()).or_default() += sessions.len();
                self.sessions.extend(sessions);
                self.add(&counted, &report);
                let drained = report.status.draining.map_or(0, |status| status.ended);
                self.drained = self.drained.saturating_add(drained);
            }
        }
    }

    /// `silent`: the time for which a process that has reported before does so no longer.
    fn add_silence(&mut self, silent: Option<Duration>, limit: Duration, who: fmt::Arguments<'_>) {
        if let Some(silent) = silent.filter(|silent| *silent > limit) {
            self.silent
                .get_or_insert_with(|| format!("{who} has reported nothing for {silent:.0?}"));
        }
    }

    fn add(&mut self, counted: &str, report: &Report) {
        let devices = self.engines.len();
        let totals = self.totals.entry(counted.into()).or_default();
        totals.add(report, devices);
        self.ended.add(&report.status.ended);
        for (sum, (engine, guests)) in self.engines.iter_mut().zip(report.status.by_device()) {
            sum.add(engine);
            for (_, usage) in guests {
                let held = usage.memory.saturating_sub(usage.weights_shared);
                sum.memory = sum.memory.saturating_add(held);
            }
        }
    }

    /// The engines, in the order of their devices.
    fn engine_statuses(&self, shared: &SupervisorState) -> Vec<EngineStatus> {
        let named = { self.engines.iter() }
            .zip(&shared.resources.engines)
            .zip(&shared.gpus);
        let engines = named.map(|((engine, name), gpu)| {
            let total = shared.resources.memory.unwrap_or(engine.largest);
            EngineStatus {
                name: name.clone(),
                description: "a process for each guest".into(),
                memory_total: total,
                memory_free: total.saturating_sub(engine.memory),
                kept_scratch: engine.kept_scratch,
                unused_gpu: None,
                // The supervisor reads them itself: those of a worker may be a guest's.
                gpu: gpu.get().and_then(GpuWatch::status),
                turn: engine.turn,
                hang: engine.hang.clone(),
                fallback: engine.fallback,
                weights: engine.weights,
            }
        });
        engines.collect()
    }
}

impl StatusSource for SupervisorState {
    fn status(&self) -> Status {
        let snapshot = self.snapshot();
        let (named, unnamed) = self.registry.first_tenants();
        let guests = named.iter().chain([&unnamed]).map(|tenant| {
            let policy = match tenant.is_named() {
                true => tenant.policy(),
                false => self.registry.unnamed_policy(),
            };
            let name = tenant.name().to_owned();
            GuestStatus {
                quota: policy.memory,
                weight: policy.weight,
                sessions: snapshot.programs.get(&name).copied().unwrap_or_default(),
                usage: snapshot
                    .totals
                    .get(&name)
                    .map_or_else(Usage::default, |a| a.usage),
                by_device: match (snapshot.engines.len(), snapshot.totals.get(&name)) {
                    (1, _) => Vec::new(),
                    (_, Some(totals)) if !totals.by_device.is_empty() => totals.by_device.clone(),
                    (devices, _) => vec![Usage::default(); devices],
                },
                devices: policy.devices,
                name,
            }
        });
        let mut engines = snapshot.engine_statuses(self).into_iter();
        // There is at least one engine.
        let mut engine = engines.next().unwrap_or_default();
        engine.unused_gpu = self.resources.unused_gpu.clone();
        Status {
            version: version().into(),
            uptime: self.since.elapsed().as_secs_f64(),
            engine,
            further_engines: engines.collect(),
            guests: guests.collect(),
            sessions: snapshot.sessions,
            ended: snapshot.ended,
            draining: self.drain.status().map(|own| DrainStatus {
                ended: own.ended.saturating_add(snapshot.drained),
                untold: drain::untold(self),
                ..own
            }),
        }
    }

    fn dump(&self) -> String {
        super::dump::dump(self)
    }

    fn progress(&self) -> Progress {
        // The main thread takes the lock of the processes about once a second.
        if let Some(why) = self.main.late("the main thread", LATE) {
            return Progress::Late(why);
        }
        let Snapshot {
            engines, silent, ..
        } = self.snapshot();
        let names = &self.resources.engines;
        let mut hanging = { engines.into_iter().zip(names) }
            .filter_map(|(engine, name)| Some((engine.hang?, name)));
        if let Some((hang, name)) = hanging.next() {
            let which = match names.len() {
                1 => String::new(),
                _ => format!(" {name}"),
            };
            return Progress::Stalled(format!("the engine{which} hangs: {hang}"));
        }
        // All processes may have been stopped, and this one may be the first that runs again.
        if let Some(silent) = silent {
            return Progress::Late(silent);
        }
        Progress::Runs(format!(
            "the engines {} of the processes answer",
            self.resources.engines.join(", ")
        ))
    }

    fn draining(&self) -> Option<DrainStatus> {
        self.drain.status()
    }

    fn latencies(&self) -> Vec<TenantLatency> {
        let mut totals = self.snapshot().totals;
        let (named, unnamed) = self.registry.first_tenants();
        let tenants = named.iter().chain([&unnamed]);
        tenants
            .map(|tenant| {
                let counted = totals.remove(tenant.name()).unwrap_or_default();
                TenantLatency {
                    guest: tenant.name().to_owned(),
                    queued: counted.queued,
                    ran: counted.ran,
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_reports_no_session_of_another_machine() {
        let session = |id| SessionStatus {
            id,
            guest: "vm3".into(),
            device: 0,
            endpoint: "vm#0".into(),
            pid: None,
            uid: None,
            program: None,
            protocol: None,
            age: 0.0,
            usage: Usage::default(),
        };
        // Machine 1 says that it has session 5 of machine 3, and one of its own twice.
        let reported = [
            2 << MACHINE_SHIFT | 5,
            7,
            7,
            3 << MACHINE_SHIFT | 5,
            u64::MAX,
        ];
        let shown = sessions_of_machine(1, "vm1", &reported.map(session), 1);
        let found: Vec<_> = { shown.iter() }
            .map(|session| (session.id, &session.guest[..]))
            .collect();
        assert_eq!(found, [(1 << MACHINE_SHIFT | 7, "vm1")]);
    }
}
