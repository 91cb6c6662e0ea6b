//! How the memory that the machine has left is divided among running workers.
//!
//! A process can only compare its allocations with what the machine has left, and does not see what
//! other processes have allocated and not touched. So the supervisor gives each worker a quota that
//! the machine can hold: what is left beside all that other running processes may still touch, and
//! for an unnamed guest beside the parts of all named ones. Such a quota may be less than the
//! guest's part of the memory. It then grows, up to the part, as the machine gets more memory.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::time::Instant;

use tracing::{info, warn};

use super::ipc::Command;
use super::partition::Partition;
use super::process::ProcFiles;
use super::state::{Processes, SupervisorState, VmProcess, Worker};
use crate::size::shown;

/// A quota grows by at least so many bytes at a time, unless the rest of the part is less.
const STEP: u64 = 64 << 20;

/// What the quotas of running processes and the machine allow.
struct Division {
    /// Bytes that the machine has left.
    left: u64,
    /// Bytes that running processes may still touch, without going beyond their quotas.
    untouched: u64,
    /// Bytes of the parts of named guests that no running process has been given. Unnamed guests
    /// get none of these.
    reserved: u64,
}

impl Division {
    /// `None`: the memory of the machine is not divided, or parts may exceed the memory.
    fn of(shared: &SupervisorState, processes: &Processes) -> Option<Division> {
        let left = shared.machine_memory.get()?;
        // Then the operator promises more than there is.
        if processes.partition.rules.overcommit {
            return None;
        }
        let partition = &processes.partition;
        let bytes = |guest, quota: Option<u64>| {
            devices(shared, partition, guest).saturating_mul(quota.unwrap_or(0))
        };
        let (mut untouched, mut given) = (0u64, BTreeMap::<&str, u64>::new());
        for worker in processes.workers.values() {
            // Another allocation is refused to a worker that ends.
            if worker.is_rejection || worker.is_closing {
                continue;
            }
            let guest = worker.guest.as_deref();
            let touched = worker.files.as_ref().map_or(0, ProcFiles::touched);
            let promised = bytes(guest, worker.memory);
            untouched = untouched.saturating_add(promised.saturating_sub(touched));
            if let Some(name) = guest {
                *given.entry(name).or_default() += promised;
            }
        }
        for machine in processes.machines.values() {
            let name = machine.name.as_str();
            let promised = bytes(Some(name), part(partition, Some(name)));
            let touched = touched_by_machine(machine);
            untouched = untouched.saturating_add(promised.saturating_sub(touched));
            *given.entry(name).or_default() += promised;
        }
        let reserved = partition.rules.guests.iter().map(|rule| {
            let name = rule.name.as_str();
            let given = given.get(name).copied().unwrap_or(0);
            bytes(Some(name), rule.policy.memory).saturating_sub(given)
        });
        Some(Division {
            left: left(),
            reserved: reserved.fold(0, u64::saturating_add),
            untouched,
        })
    }

    /// Bytes that a process of the guest can be given on all of its devices together.
    fn free(&self, guest: Option<&str>) -> u64 {
        let reserved = if guest.is_some() { 0 } else { self.reserved };
        self.left
            .saturating_sub(self.untouched)
            .saturating_sub(reserved)
    }

    /// A running process of the guest gets so many bytes more.
    fn give(&mut self, guest: Option<&str>, bytes: u64) {
        self.untouched = self.untouched.saturating_add(bytes);
        if guest.is_some() {
            self.reserved = self.reserved.saturating_sub(bytes);
        }
    }
}

/// The part of a guest on each of its devices, in bytes.
fn part(partition: &Partition, guest: Option<&str>) -> Option<u64> {
    partition.policy(guest)?.memory
}

/// How many devices the guest has its part on.
fn devices(shared: &SupervisorState, partition: &Partition, guest: Option<&str>) -> u64 {
    let permits = |device: &usize| {
        let policy = partition.policy(guest);
        policy.is_none_or(|policy| policy.permits(*device))
    };
    let engines = 0..shared.resources.engines.len();
    engines.filter(permits).count().max(1) as u64
}

/// Bytes that the executor of a virtual machine has touched. It is a child of `vgpu fd-store`, and
/// may hide before its number is known: what its guests had allocated when it has last reported
/// counts then, and nothing until somebody has asked it for its status.
fn touched_by_machine(machine: &VmProcess) -> u64 {
    let executor = machine.answers.executor();
    if let Some(files) = executor.and_then(|pid| ProcFiles::open(pid).ok()) {
        return files.touched();
    }
    machine.report.as_ref().map_or(0, |report| {
        let devices = 0..report.status.engines().count();
        devices
            .map(|device| report.status.memory_of_guests(device))
            .sum()
    })
}

/// Gives a worker that is about to start its quota.
pub(super) fn add(shared: &SupervisorState, processes: &Processes, worker: &mut Worker) {
    let guest = worker.guest.as_deref();
    let part = part(&processes.partition, guest);
    worker.memory = part;
    let (Some(part), false) = (part, worker.is_rejection) else {
        return;
    };
    let Some(division) = Division::of(shared, processes) else {
        return;
    };
    let given = part.min(division.free(guest) / devices(shared, &processes.partition, guest));
    worker.memory = Some(given);
    if given < part {
        let now = Instant::now();
        let lines = shared.session_log.of(worker.guest_or_source(), now);
        if lines.passes(now) {
            let kept = match guest {
                Some(_) => String::new(),
                None => format!(
                    ", and {} are kept for named guests",
                    shown(division.reserved)
                ),
            };
            warn!(
                guest = worker.guest_or_source(),
                "the guest gets {} of its {} of memory until the machine has more: it has {} left, \
                 of which running guests may still use {}{kept}",
                shown(given),
                shown(part),
                shown(division.left),
                shown(division.untouched)
            );
        }
    }
}

/// Changes the quotas of running workers after their parts have changed, and tells the workers.
pub(super) fn apply(shared: &SupervisorState, processes: &mut Processes) {
    let partition = &processes.partition;
    for worker in processes.workers.values_mut() {
        // A guest that the configuration names no longer keeps what it has.
        if let Some(policy) = partition.policy(worker.guest.as_deref()) {
            worker.memory = match (worker.memory, policy.memory) {
                (given, Some(part)) => Some(given.unwrap_or(0).min(part)),
                (_, None) => None,
            };
        }
    }
    grow(shared, processes, false);
    let workers = processes.workers.values();
    for worker in workers.filter(|w| !w.is_closing) {
        tell_or_log(&processes.partition, worker);
    }
}

/// Lets quotas grow that are less than the parts of their guests, in the order in which the workers
/// have started, and tells these workers.
pub(super) fn grow_and_tell(shared: &SupervisorState, processes: &mut Processes) {
    for id in grow(shared, processes, true) {
        if let Some(worker) = processes.workers.get(&id) {
            tell_or_log(&processes.partition, worker);
        }
    }
}

/// Returns the workers whose quotas have grown.
fn grow(shared: &SupervisorState, processes: &mut Processes, in_steps: bool) -> Vec<u64> {
    let is_short = |worker: &Worker| {
        let part = part(&processes.partition, worker.guest.as_deref())?;
        let is_short = !worker.is_closing && !worker.is_rejection && worker.memory? < part;
        is_short.then_some(part)
    };
    let short: Vec<(u64, u64)> = { processes.workers.iter() }
        .filter_map(|(&id, worker)| Some((id, is_short(worker)?)))
        .collect();
    if short.is_empty() {
        return Vec::new();
    }
    let mut division = Division::of(shared, processes);
    let mut grown = Vec::new();
    for (id, part) in short {
        let Some(worker) = processes.workers.get_mut(&id) else {
            continue;
        };
        let guest = worker.guest.as_deref();
        let given = worker.memory.unwrap_or(0);
        let devices = devices(shared, &processes.partition, guest);
        let more = match &division {
            Some(division) => division.free(guest) / devices,
            None => u64::MAX,
        };
        let wanted = part.min(given.saturating_add(more));
        let step = if in_steps { STEP.min(part - given) } else { 1 };
        if wanted - given < step {
            continue;
        }
        if let Some(division) = &mut division {
            division.give(guest, devices.saturating_mul(wanted - given));
        }
        worker.memory = Some(wanted);
        grown.push(id);
        if wanted == part {
            let (who, now) = (worker.guest_or_source(), Instant::now());
            if shared.session_log.of(who, now).passes(now) {
                info!(
                    guest = who,
                    "the guest has its {} of memory now",
                    shown(part)
                );
            }
        }
    }
    grown
}

/// Sends a worker the rules of its guest, with its quota.
///
/// # Errors
/// Of the socket.
pub(super) fn tell(partition: &Partition, worker: &Worker) -> io::Result<()> {
    let Some(mut rules) = partition.rules_of(worker.guest.as_deref()) else {
        return Ok(()); // The configuration names the guest no longer. Its programs stay.
    };
    let named = rules.guests.iter_mut().map(|rule| &mut rule.policy);
    for policy in named.chain(&mut rules.unnamed) {
        policy.memory = worker.memory.or(policy.memory);
    }
    worker.send(&Command::Rules(rules), None)
}

fn tell_or_log(partition: &Partition, worker: &Worker) {
    if let Err(error) = tell(partition, worker) {
        let guest = worker.guest.as_deref();
        warn!(guest, "the worker cannot be sent its limits: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command as Program;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::ipc::{IpcSocket, ReceiveOutcome};
    use super::super::partition::Resources;
    use super::super::state::{Timeouts, VmAnswers};
    use super::*;
    use crate::limits::Limits;
    use crate::policy::Policy;
    use crate::tenant_registry::{GuestRule, Rules};

    const MIB: u64 = 1 << 20;

    /// A supervisor on a machine that has as many MiB left as the counter says. Guest `a` has a
    /// part of 600 MiB, which is kept for it, and each unnamed guest one of 400 MiB.
    fn supervisor(
        left: u64,
        overcommit: bool,
        engines: usize,
    ) -> (SupervisorState, Arc<AtomicU64>) {
        let policy = |mib: u64| Policy {
            memory: Some(mib * MIB),
            ..Policy::default()
        };
        let partition = Partition {
            rules: Rules {
                guests: vec![GuestRule {
                    name: "a".into(),
                    uids: Vec::new(),
                    cids: Vec::new(),
                    certificates: Vec::new(),
                    policy: policy(600),
                }],
                unnamed: Some(policy(400)),
                overcommit,
            },
            max_unnamed: 16,
            unnamed_programs: 16,
            max_sessions: 16,
        };
        let resources = Resources {
            engines: vec!["cpu".into(); engines],
            unused_gpu: None,
            memory: Some(4096 * MIB),
        };
        let shared = SupervisorState::new(
            Box::new(|_| Program::new("true")),
            resources,
            partition,
            Limits::default().handshakes,
            Timeouts::default(),
        );
        let shared = shared.expect("room for the quotas");
        let left = Arc::new(AtomicU64::new(left * MIB));
        let counter = Arc::clone(&left);
        let read = move || counter.load(Ordering::Relaxed);
        assert!(shared.machine_memory.set(Box::new(read)).is_ok());
        (shared, left)
    }

    /// Starts a worker without a process. Returns its end of the socket.
    fn start(shared: &SupervisorState, id: u64, guest: Option<&str>) -> IpcSocket {
        start_worker(shared, id, guest, false)
    }

    fn start_worker(
        shared: &SupervisorState,
        id: u64,
        guest: Option<&str>,
        is_rejection: bool,
    ) -> IpcSocket {
        let (ipc, theirs) = IpcSocket::pair().expect("a socket pair");
        let mut worker = Worker::new(ipc, guest.map(str::to_owned), is_rejection);
        let mut processes = shared.processes();
        add(shared, &processes, &mut worker);
        tell(&processes.partition, &worker).expect("a worker that is there");
        processes.workers.insert(id, worker);
        IpcSocket::new(theirs)
    }

    /// The quotas in MiB.
    fn quotas(shared: &SupervisorState) -> Vec<u64> {
        let processes = shared.processes();
        let quotas = processes.workers.values().map(|worker| worker.memory);
        quotas.map(|quota| quota.expect("a quota") / MIB).collect()
    }

    /// The last quota in MiB that a worker has been told.
    fn told(socket: &IpcSocket) -> Option<u64> {
        let mut last = None;
        while let Ok(ReceiveOutcome::Message(command, _)) =
            socket.receive::<Command>(Some(std::time::Duration::ZERO))
        {
            let Command::Rules(rules) = command else {
                panic!("{command:?}");
            };
            let named = rules.guests.first().map(|rule| &rule.policy);
            last = named
                .or(rules.unnamed.as_ref())
                .and_then(|policy| policy.memory);
        }
        last.map(|bytes| bytes / MIB)
    }

    #[test]
    fn quotas_of_workers_are_together_no_more_than_the_machine_has() {
        let (shared, left) = supervisor(900, false, 1);
        let first = start(&shared, 1, None);
        let second = start(&shared, 2, Some("a"));
        let third = start(&shared, 3, None);
        assert_eq!(quotas(&shared), [300, 600, 0], "600 are kept for a");
        assert_eq!([&first, &second, &third].map(told), [300, 600, 0].map(Some));

        // Other programs of the machine end: the first that got too little is the first to get
        // more, and those without a change are not told.
        left.store(1050 * MIB, Ordering::Relaxed);
        grow_and_tell(&shared, &mut shared.processes());
        assert_eq!(quotas(&shared), [400, 600, 0], "less than a step is left");
        assert_eq!([&first, &second, &third].map(told), [Some(400), None, None]);

        // A worker ends.
        shared.processes().workers.remove(&1);
        grow_and_tell(&shared, &mut shared.processes());
        assert_eq!(quotas(&shared), [600, 400]);
        assert_eq!(told(&third), Some(400));

        // Nothing is taken away: the engines compare their allocations with what is left.
        left.store(0, Ordering::Relaxed);
        grow_and_tell(&shared, &mut shared.processes());
        assert_eq!(quotas(&shared), [600, 400]);
    }

    #[test]
    fn touched_memory_of_a_worker_is_not_promised_once_more() {
        let (shared, _) = supervisor(1200, false, 1);
        let _first = start(&shared, 1, None);
        // This process counts as the worker: it has touched at least the bytes of this vector.
        let touched = std::hint::black_box(vec![1u8; 100 << 20]);
        if let Some(worker) = shared.processes().workers.get_mut(&1) {
            worker.files = ProcFiles::open(std::process::id()).ok();
        }
        let _second = start(&shared, 2, None);
        let quota = quotas(&shared)[1];
        assert!((300..=400).contains(&quota), "{quota} of {}", touched.len());
    }

    #[test]
    fn parts_that_may_exceed_the_memory_are_given_whole() {
        let (shared, _) = supervisor(500, true, 1);
        let _workers = [start(&shared, 1, None), start(&shared, 2, Some("a"))];
        assert_eq!(quotas(&shared), [400, 600]);
    }

    #[test]
    fn each_device_has_an_equal_share_of_what_is_left() {
        let (shared, _) = supervisor(1300, false, 2);
        let _workers = [start(&shared, 1, Some("a")), start(&shared, 2, None)];
        assert_eq!(quotas(&shared), [600, 50]);
    }

    #[test]
    fn changed_parts_are_given_as_the_machine_has_them() {
        let (shared, left) = supervisor(900, false, 1);
        let first = start(&shared, 1, None);
        let second = start(&shared, 2, Some("a"));
        let mut processes = shared.processes();
        if let Some(policy) = &mut processes.partition.rules.unnamed {
            policy.memory = Some(100 * MIB);
        }
        processes.partition.rules.guests[0].policy.memory = Some(1000 * MIB);
        apply(&shared, &mut processes);
        drop(processes);
        assert_eq!(quotas(&shared), [100, 800]);
        assert_eq!([&first, &second].map(told), [100, 800].map(Some));
        left.store(2000 * MIB, Ordering::Relaxed);
        grow_and_tell(&shared, &mut shared.processes());
        assert_eq!(told(&second), Some(1000));
    }

    #[test]
    fn parts_of_named_guests_are_kept_from_unnamed_ones() {
        let (shared, left) = supervisor(600, false, 1);
        let _unnamed = start(&shared, 1, None);
        assert_eq!(quotas(&shared), [0]);
        // The rest of a part, too.
        left.store(500 * MIB, Ordering::Relaxed);
        let _named = start(&shared, 2, Some("a"));
        assert_eq!(quotas(&shared), [0, 500]);
        left.store(700 * MIB, Ordering::Relaxed);
        grow_and_tell(&shared, &mut shared.processes());
        assert_eq!(quotas(&shared), [100, 600]);
        // Bytes that a named guest has been given are kept once.
        left.store(900 * MIB, Ordering::Relaxed);
        grow_and_tell(&shared, &mut shared.processes());
        assert_eq!(quotas(&shared), [300, 600]);
    }

    #[test]
    fn workers_that_reject_guests_or_end_are_promised_nothing() {
        let (shared, _) = supervisor(1000, false, 1);
        let _rejecting = start_worker(&shared, 1, None, true);
        let _ending = start(&shared, 2, None);
        if let Some(worker) = shared.processes().workers.get_mut(&2) {
            worker.close();
        }
        let _worker = start(&shared, 3, None);
        assert_eq!(quotas(&shared)[2], 400);
    }

    #[test]
    fn a_part_that_is_taken_away_is_no_limit_any_more() {
        let (shared, _) = supervisor(500, false, 1);
        let socket = start(&shared, 1, Some("a"));
        assert_eq!(told(&socket), Some(500));
        let mut processes = shared.processes();
        processes.partition.rules.guests[0].policy.memory = None;
        apply(&shared, &mut processes);
        assert_eq!(processes.workers[&1].memory, None);
        assert_eq!(told(&socket), None);
        // A guest that the configuration names no longer keeps what it has.
        processes.partition.rules.guests[0].policy.memory = Some(300 * MIB);
        apply(&shared, &mut processes);
        processes.partition.rules.guests.clear();
        apply(&shared, &mut processes);
        assert_eq!(processes.workers[&1].memory, Some(300 * MIB));
    }

    #[test]
    fn the_part_of_a_virtual_machine_is_promised_once() {
        let (shared, _) = supervisor(900, false, 1);
        let machine = VmProcess {
            name: "a".into(),
            pid: rustix::process::getpid(),
            control: "/nonexistent".into(),
            answers: VmAnswers::default(),
            told: 0,
            untold: None,
            report: None,
        };
        shared.processes().machines.insert(1, machine);
        let _worker = start(&shared, 2, None);
        assert_eq!(quotas(&shared), [300]);
    }
}
