//! Weights of running workers, as nice levels.
//!
//! All processes of a guest together have the guest's weight: each has a level for its part of it.
//! An unnamed guest has a process for each program.
//!
//! The supervisor has no capability, and the kernel then lets it only raise the level of a process.
//! Levels matter relative to each other. So where a worker would have to get a lower level, all
//! others get higher ones, as long as it runs. The highest level is 19.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::io;

use tracing::warn;

use super::partition::Partition;
use super::process::ProcFiles;
use super::state::{Processes, Worker};

/// The highest nice level.
const HIGHEST: i32 = 19;

/// How often the threads of a worker are listed at most: it may start threads meanwhile.
const MAX_LISTS: u32 = 10;

/// The level that a worker's part of the weight of its guest asks for. When other processes of the
/// guest end, the part stays: the kernel does not lower the level, and if all other workers got
/// higher ones instead, a guest could bring all to the highest.
fn wanted(partition: &Partition, worker: &Worker) -> i32 {
    partition.nice(worker.guest.as_deref(), worker.siblings)
}

/// How many levels all workers are above those that their weights ask for, so that none of them has
/// to get a lower one.
fn offset(processes: &Processes) -> i32 {
    let running = processes.workers.values().filter(|w| !w.is_closing);
    let above = running.map(|w| w.nice - wanted(&processes.partition, w));
    above.max().unwrap_or(0).max(0)
}

/// Gives a worker that is about to start its level, and the other ones of its guest theirs. One
/// that only rejects a guest takes no part of the guest's weight, and neither does one that ends:
/// it computes nothing.
pub(super) fn add(processes: &mut Processes, new: &mut Worker) {
    let offset = offset(processes);
    if !new.is_rejection {
        let workers = processes.workers.values_mut();
        let mut own: Vec<&mut Worker> = workers
            .filter(|worker| !worker.is_rejection && !worker.is_closing)
            .filter(|worker| worker.is_of_guest_of(new))
            .collect();
        new.siblings = u32::try_from(own.len() + 1).unwrap_or(u32::MAX);
        for worker in &mut own {
            worker.siblings = worker.siblings.max(new.siblings);
        }
    }
    new.nice = (wanted(&processes.partition, new) + offset).min(HIGHEST);
    raise_all(processes, offset);
}

/// Gives each running worker the level of its guest's weight.
pub(super) fn apply(processes: &mut Processes) {
    let offset = offset(processes);
    raise_all(processes, offset);
}

/// Raises each worker whose level is too low.
fn raise_all(processes: &mut Processes, offset: i32) {
    let Processes {
        workers, partition, ..
    } = processes;
    for worker in workers.values_mut().filter(|worker| !worker.is_closing) {
        let level = (wanted(partition, worker) + offset).min(HIGHEST);
        if level > worker.nice {
            worker.nice = level;
            set_level(worker);
        }
    }
}

/// Raises all threads of a worker, whose process has not been waited for, to its level. One that
/// has not started yet gets it when it has.
pub(super) fn set_level(worker: &mut Worker) {
    let Some(files) = &mut worker.files else {
        return;
    };
    if let Err(error) = raise(files, worker.nice) {
        warn!(
            pid = worker.pid,
            guest = worker.guest,
            "the worker keeps the part of the time that it had: {error}"
        );
    }
}

/// Raises all threads of a process to `nice` levels above this one. Threads that start later have
/// the level of the thread that starts them.
fn raise(files: &mut ProcFiles, nice: i32) -> io::Result<()> {
    let level = (rustix::process::getpriority_process(None)? + nice).min(HIGHEST);
    let mut done = HashSet::new();
    for _ in 0..MAX_LISTS {
        let before = done.len();
        for thread in files.threads()? {
            if !done.contains(&thread)
                // The thread may have ended.
                && rustix::process::getpriority_process(Some(thread)).is_ok_and(|now| now < level)
            {
                rustix::process::setpriority_process(Some(thread), level)?;
            }
            done.insert(thread);
        }
        if done.len() == before {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::ipc::IpcSocket;
    use super::super::restart_limit::KilledGuests;
    use super::super::totals::EndedWorkers;
    use super::*;
    use crate::policy::Policy;
    use crate::tenant_registry::{GuestRule, Rules};

    fn processes() -> Processes {
        let policy = |weight| Policy {
            weight,
            ..Policy::default()
        };
        Processes {
            partition: Partition {
                rules: Rules {
                    guests: vec![GuestRule {
                        name: "a".into(),
                        uids: Vec::new(),
                        cids: Vec::new(),
                        certificates: Vec::new(),
                        policy: policy(3),
                    }],
                    unnamed: Some(policy(1)),
                    overcommit: false,
                },
                max_unnamed: 64,
                unnamed_programs: 64,
                max_sessions: 64,
            },
            workers: BTreeMap::new(),
            machines: BTreeMap::new(),
            ended_workers: EndedWorkers::default(),
            killed_guests: KilledGuests::default(),
            certificates: None,
        }
    }

    fn start(processes: &mut Processes, id: u64, guest: Option<&str>, source: Option<&str>) {
        let (ipc, _) = IpcSocket::pair().unwrap();
        let mut worker = Worker::new(ipc, guest.map(str::to_owned), false);
        worker.source = source.map(str::to_owned);
        add(processes, &mut worker);
        processes.workers.insert(id, worker);
    }

    fn levels(processes: &Processes) -> Vec<i32> {
        processes.workers.values().map(|w| w.nice).collect()
    }

    #[test]
    fn all_processes_of_a_guest_have_the_weight_of_one() {
        let mut processes = processes();
        start(&mut processes, 0, Some("a"), Some("uid:7"));
        start(&mut processes, 1, None, Some("uid:2"));
        assert_eq!(levels(&processes), [0, 5], "weights of 3 and 1");
        for count in 1..=16 {
            start(&mut processes, 1 + count, None, Some("uid:1"));
            let levels = levels(&processes);
            assert_eq!(levels[..2], [0, 5], "others are unaffected");
            // Relative to a process of the weight 1.
            let parts = levels[2..].iter().map(|level| 1.25f64.powi(5 - level));
            let share: f64 = parts.sum();
            assert!((0.85..1.18).contains(&share), "{share} of {levels:?}");
        }
        // When most of them have ended, the rest stays where it is, and nobody else is raised.
        let highest = processes.workers[&2].nice;
        for ended in 4..=17 {
            processes.workers.remove(&ended);
        }
        start(&mut processes, 4, None, Some("uid:3"));
        start(&mut processes, 5, None, Some("uid:1"));
        assert_eq!(levels(&processes), [0, 5, highest, highest, 5, 10]);
        apply(&mut processes);
        assert_eq!(levels(&processes), [0, 5, highest, highest, 5, 10]);
    }

    /// A program may come while the worker of the last one still frees its memory.
    #[test]
    fn process_that_ends_takes_no_part_of_the_weight() {
        let mut processes = processes();
        start(&mut processes, 0, Some("a"), None);
        processes.workers.values_mut().for_each(Worker::close);
        start(&mut processes, 1, Some("a"), None);
        assert_eq!(processes.workers[&1].nice, 0);
        start(&mut processes, 2, Some("a"), None);
        assert_eq!(levels(&processes)[1..], [3, 3]);
    }

    #[test]
    fn guests_that_nothing_distinguishes_are_several() {
        let mut processes = processes();
        for id in 0..3 {
            start(&mut processes, id, None, None);
        }
        assert_eq!(levels(&processes), [5, 5, 5]);
    }
}
