//! How the memory that the machine has left is divided among running workers.
//!
//! A process can only compare its allocations with what the machine has left, and does not see what
//! other processes have allocated and not touched. So the supervisor gives each worker a quota that
//! the machine can hold: what is left beside all that other running processes may still touch. Such
//! a quota may be less than the guest's part of the memory. It then grows, up to the part, as the
//! machine gets more memory.
#![forbid(unsafe_code)]

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
        let untouched = |guest, quota: Option<u64>, touched: u64| {
            let quota = devices(shared, partition, guest).saturating_mul(quota.unwrap_or(0));
            quota.saturating_sub(touched)
        };
        let of_workers = { processes.workers.values() }.map(|worker| {
            let touched = worker.files.as_ref().map_or(0, ProcFiles::touched);
            untouched(worker.guest.as_deref(), worker.memory, touched)
        });
        let of_machines = processes.machines.values().map(|machine| {
            let name = Some(machine.name.as_str());
            untouched(name, part(partition, name), touched_by_machine(machine))
        });
        Some(Division {
            left: left(),
            untouched: of_workers.chain(of_machines).fold(0, u64::saturating_add),
        })
    }

    /// Bytes that nobody may still touch.
    fn free(&self) -> u64 {
        self.left.saturating_sub(self.untouched)
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
/// may hide before its number is known: what its guests have allocated counts then, and nothing
/// until it has reported that.
fn touched_by_machine(machine: &VmProcess) -> u64 {
    let executor = machine.answers.executor();
    match executor.and_then(|pid| ProcFiles::open(pid).ok()) {
        Some(files) => files.touched(),
        None => machine.report.as_ref().map_or(0, |report| {
            let status = &report.status;
            let devices = 0..status.engines().count();
            devices.map(|device| status.memory_of_guests(device)).sum()
        }),
    }
}

/// Gives a worker that is about to start its quota. `guest`: its name, if it has one.
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
    let given = part.min(division.free() / devices(shared, &processes.partition, guest));
    worker.memory = Some(given);
    if given < part {
        let now = Instant::now();
        let lines = shared.session_log.of(worker.guest_or_source(), now);
        if lines.passes(now) {
            warn!(
                guest = worker.guest_or_source(),
                "the guest gets {} of its {} of memory until the machine has more: it has {} left, \
                 of which other guests may still use {}",
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
    for worker in processes.workers.values_mut() {
        // Without a rule the guest keeps what it has: the configuration names it no longer.
        if let Some(part) = part(&processes.partition, worker.guest.as_deref()) {
            worker.memory = worker.memory.map(|given| given.min(part)).or(Some(part));
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
    let short: Vec<(u64, u64)> = { processes.workers.iter() }
        .filter(|(_, worker)| !worker.is_closing && !worker.is_rejection)
        .filter_map(|(&id, worker)| {
            let part = part(&processes.partition, worker.guest.as_deref())?;
            (worker.memory? < part).then_some((id, part))
        })
        .collect();
    let mut grown = Vec::new();
    for (id, part) in short {
        let division = Division::of(shared, processes);
        let Some(worker) = processes.workers.get_mut(&id) else {
            continue;
        };
        let given = worker.memory.unwrap_or(0);
        let devices = devices(shared, &processes.partition, worker.guest.as_deref());
        let more = division.map_or(u64::MAX, |division| division.free() / devices);
        let wanted = part.min(given.saturating_add(more));
        let step = if in_steps { STEP.min(part - given) } else { 1 };
        if wanted - given >= step {
            worker.memory = Some(wanted);
            grown.push(id);
            if wanted == part {
                let guest = worker.guest_or_source();
                info!(guest, "the guest has its {} of memory now", shown(part));
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
    use super::super::state::Timeouts;
    use super::*;
    use crate::limits::Limits;
    use crate::policy::Policy;
    use crate::tenant_registry::{GuestRule, Rules};

    const MIB: u64 = 1 << 20;

    /// A supervisor on a machine that has as many MiB left as the counter says. Guest `a` has a
    /// part of 600 MiB, and each unnamed guest one of 400 MiB.
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
        let (ipc, theirs) = IpcSocket::pair().expect("a socket pair");
        let mut worker = Worker::new(ipc, guest.map(str::to_owned), false);
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
        assert_eq!(quotas(&shared), [400, 500, 0]);
        assert_eq!([&first, &second, &third].map(told), [400, 500, 0].map(Some));

        // Other programs of the machine end: the first that got too little is the first to get
        // more, and those without a change are not told.
        left.store(1050 * MIB, Ordering::Relaxed);
        grow_and_tell(&shared, &mut shared.processes());
        assert_eq!(quotas(&shared), [400, 600, 0], "less than a step is left");
        assert_eq!([&first, &second, &third].map(told), [None, Some(600), None]);

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
        let (shared, _) = supervisor(600, false, 1);
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
        let (shared, _) = supervisor(900, false, 2);
        let _workers = [start(&shared, 1, None), start(&shared, 2, Some("a"))];
        assert_eq!(quotas(&shared), [400, 50]);
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
}
