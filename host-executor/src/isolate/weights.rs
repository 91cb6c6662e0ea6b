//! Weights of running workers, as nice levels.
//!
//! The supervisor has no capability, and the kernel then lets it only raise the level of a process.
//! Levels matter relative to each other. So where a worker would have to get a lower level, all
//! others get higher ones, as long as it runs. The highest level is 19.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::io;

use rustix::process::Pid;
use tracing::warn;

use super::state::{Processes, Worker};

/// The highest nice level.
const HIGHEST: i32 = 19;

/// How often the threads of a worker are listed at most: it may start threads meanwhile.
const MAX_LISTS: u32 = 10;

/// How many levels all workers are above those that their weights ask for, so that none of them has
/// to get a lower one.
fn offset(processes: &Processes) -> i32 {
    let running = processes.workers.values().filter(|w| !w.is_closing);
    let above = running.map(|w| w.nice - processes.partition.nice(w.guest.as_deref()));
    above.max().unwrap_or(0).max(0)
}

/// The level of a worker that is about to start.
pub(super) fn level_of_new(processes: &Processes, guest: Option<&str>) -> i32 {
    (processes.partition.nice(guest) + offset(processes)).min(HIGHEST)
}

/// Gives each running worker the level of its guest's weight.
pub(super) fn apply(processes: &mut Processes) {
    let offset = offset(processes);
    let Processes {
        workers, partition, ..
    } = processes;
    for worker in workers.values_mut().filter(|worker| !worker.is_closing) {
        let level = (partition.nice(worker.guest.as_deref()) + offset).min(HIGHEST);
        if level > worker.nice {
            worker.nice = level;
            set_level(worker);
        }
    }
}

/// Raises all threads of a worker, whose process has not been waited for, to its level. One that
/// has not started yet gets it when it has.
pub(super) fn set_level(worker: &Worker) {
    let Some(pid) = worker.pid.and_then(|pid| i32::try_from(pid).ok()) else {
        return;
    };
    if let Err(error) = raise(pid, worker.nice) {
        warn!(
            pid,
            guest = worker.guest,
            "the worker keeps the part of the time that it had: {error}"
        );
    }
}

/// Raises all threads of a process to `nice` levels above this one. Threads that start later have
/// the level of the thread that starts them.
fn raise(pid: i32, nice: i32) -> io::Result<()> {
    let level = (rustix::process::getpriority_process(None)? + nice).min(HIGHEST);
    let mut done = BTreeSet::new();
    for _ in 0..MAX_LISTS {
        let before = done.len();
        for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
            let Some(thread) = entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            if let Some(id) = Pid::from_raw(thread).filter(|_| !done.contains(&thread))
                // The thread may have ended.
                && rustix::process::getpriority_process(Some(id)).is_ok_and(|now| now < level)
            {
                rustix::process::setpriority_process(Some(id), level)?;
            }
            done.insert(thread);
        }
        if done.len() == before {
            break;
        }
    }
    Ok(())
}
