//! What a drain of a supervisor tells the processes of its guests.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use rustix::process::Pid;
use tracing::warn;

use super::ipc::Command;
use super::printable::shown;
use super::query::query_all;
use super::state::{SupervisorState, VmProcess};
use crate::control::{self, ControlError};

/// Makes workers accept sessions again that have ended theirs at the deadline of a drain.
pub(super) fn tell_workers(shared: &SupervisorState) {
    let processes = shared.processes();
    for worker in processes.workers.values().filter(|w| !w.is_closing) {
        if let Err(error) = worker.send(&Command::Undrain, None) {
            warn!(
                guest = worker.guest,
                "the worker is not told to accept sessions, and ends: {error}"
            );
            worker.ipc.close();
        }
    }
}

/// Queries the processes of virtual machines that are `wanted`, and passes each answer to `note`
/// with the name of the machine. The process is missing if another one has taken its place
/// meanwhile.
fn query_machines<T: Send>(
    shared: &SupervisorState,
    wanted: impl Fn(&VmProcess) -> bool,
    query: impl Fn(&Path, Duration) -> Result<T, ControlError> + Sync,
    mut note: impl FnMut(&str, Result<T, ControlError>, Option<&mut VmProcess>),
) {
    let processes = shared.processes();
    let wanted = processes.machines.iter().filter(|(_, vm)| wanted(vm));
    let (ids, machines): (Vec<(u64, Pid)>, Vec<_>) =
        wanted.map(|(&id, vm)| ((id, vm.pid), vm.address())).unzip();
    drop(processes);
    let answers = query_all(&machines, query);
    let mut processes = shared.processes();
    for ((id, pid), (name, answer)) in ids.into_iter().zip(answers) {
        let vm = processes.machines.get_mut(&id);
        note(&name, answer, vm.filter(|vm| vm.pid == pid));
    }
}

/// Tells the processes of virtual machines that do not know whether the supervisor drains. Returns
/// the names of those that do not answer, and why.
pub(super) fn tell_machines(shared: &SupervisorState) -> Vec<String> {
    // The last request that a process gets is that of the last change.
    let _telling = shared.telling.lock();
    // Before the list: a process that starts meanwhile is told by the next call.
    let (request, change) = shared.drain.request();
    let tell = |path: &Path, timeout| control::perform_within(path, &request, timeout);
    let mut silent = Vec::new();
    query_machines(
        shared,
        |vm| vm.told < change,
        tell,
        |name, answer, vm| {
            let reason = match answer {
                Ok(outcome) if outcome.ok => None,
                Ok(outcome) => Some(shown(&outcome.message)),
                Err(error) => Some(error.to_string()),
            };
            silent.extend(reason.as_ref().map(|reason| format!("{name}: {reason}")));
            if let Some(vm) = vm {
                if reason.is_none() {
                    vm.told = vm.told.max(change);
                }
                vm.untold = reason;
            }
        },
    );
    silent
}

/// Finds the processes of virtual machines whose executors have started again since they were told:
/// `vgpu fd-store` keeps its process and starts another executor.
fn find_restarted(shared: &SupervisorState) {
    let report = |path: &Path, timeout| control::report(path, timeout).answer;
    query_machines(
        shared,
        |_| true,
        report,
        |_, report, vm| {
            if let (Some(vm), Ok(report)) = (vm, report)
                && report.status.draining.is_some() != shared.drain.is_on()
            {
                vm.told = 0;
            }
        },
    );
}

/// Tells the processes of virtual machines that do not know, on a thread of its own, of which there
/// is one at most. Does nothing if no drain is on and all know that.
pub(super) fn tell_later(shared: &Arc<SupervisorState>) {
    let is_idle = !shared.drain.is_on() && untold(shared).is_empty();
    if is_idle || shared.is_telling.swap(true, Ordering::AcqRel) {
        return;
    }
    let own = Arc::clone(shared);
    let spawned = thread::Builder::new()
        .name("vgpu-drain".into())
        .spawn(move || {
            find_restarted(&own);
            tell_machines(&own);
            own.is_telling.store(false, Ordering::Release);
        });
    if spawned.is_err() {
        // The next call tries again.
        shared.is_telling.store(false, Ordering::Release);
    }
}

/// The virtual machines whose processes do not know whether the supervisor drains, and why.
pub(super) fn untold(shared: &SupervisorState) -> Vec<String> {
    let change = shared.drain.changes();
    let processes = shared.processes();
    let machines = processes.machines.values();
    let untold = machines.filter(|vm| vm.told < change).map(|vm| {
        let reason = vm.untold.as_deref().unwrap_or("it has just started");
        format!("{}: {reason}", vm.name)
    });
    untold.collect()
}
