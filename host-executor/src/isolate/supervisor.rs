//! The supervisor: accepts guests on its listeners, and ends all processes at a shutdown.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tracing::{error, warn};
use vgpu_transport::link::stream::tls::CertificateFiles;

use super::drain;
use super::kill::{self, KillError};
use super::partition::{Partition, Resources};
use super::state::{MakeCommand, MakeMachine, Processes, SupervisorState, Timeouts, Worker};
use super::thread_limit::EngineThreads;
use super::vm_process::{StartVmError, StartingVm};
use super::{admission, certificates, ipc, machine_memory, vm_process, weights, worker_process};
#[cfg(feature = "cuda")]
use crate::engine::AddressError;
#[cfg(feature = "cuda")]
use crate::gpu_monitor::GpuMonitor;
use crate::limits::HandshakeLimits;
use crate::listener::threads::ListenerThreads;
use crate::listener::{ListenerId, SocketListener};
use crate::session_log::SessionLog;
use crate::status::StatusHandle;
use crate::tenant_registry::RulesError;

/// How long a shutdown waits for processes that were killed. One that is in a call of the kernel
/// ends when the call does.
const AFTER_KILL: Duration = Duration::from_secs(2);

/// Starts a worker for each guest.
pub struct Supervisor {
    shared: Arc<SupervisorState>,
    listeners: ListenerThreads,
    /// Processes that [`wait_for_vms`](Supervisor::wait_for_vms) has not waited for.
    starting: Vec<StartingVm>,
    is_stopped: bool,
}

impl Supervisor {
    /// A supervisor without listeners, with limits on connections whose handshake is not complete.
    /// `command` makes the command of a worker, which has to call
    /// [`serve`](super::serve) with [`take_socket`](super::take_socket).
    ///
    /// # Errors
    /// [`RulesError`] if the quotas exceed the memory or a guest is given a device that there is
    /// not.
    pub fn new(
        command: MakeCommand,
        resources: Resources,
        partition: Partition,
        handshakes: HandshakeLimits,
    ) -> Result<Supervisor, RulesError> {
        Supervisor::with_timeouts(
            command,
            resources,
            partition,
            handshakes,
            Timeouts::default(),
        )
    }

    /// As [`new`](Supervisor::new), with other timeouts.
    pub(super) fn with_timeouts(
        command: MakeCommand,
        resources: Resources,
        partition: Partition,
        handshakes: HandshakeLimits,
        timeouts: Timeouts,
    ) -> Result<Supervisor, RulesError> {
        let shared = SupervisorState::new(command, resources, partition, handshakes, timeouts)?;
        Ok(Supervisor {
            shared: Arc::new(shared),
            listeners: ListenerThreads::default(),
            starting: Vec::new(),
            is_stopped: false,
        })
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &SupervisorState {
        &self.shared
    }

    #[cfg(test)]
    pub(super) fn shared_copy(&self) -> Arc<SupervisorState> {
        Arc::clone(&self.shared)
    }

    /// Reads once a second, on a thread of its own, what the driver says of the GPU of the engine
    /// of a device, by its index. `find` returns the PCI address of the GPU, or says why there is
    /// none. Later calls for the device have no effect.
    ///
    /// # Errors
    /// No thread can be started.
    #[cfg(feature = "cuda")]
    pub fn watch_gpu(
        &self,
        device: usize,
        find: impl FnMut() -> Result<String, AddressError> + Send + 'static,
    ) -> io::Result<()> {
        if let Some(gpu) = self.shared.gpus.get(device) {
            let _ = gpu.set(GpuMonitor::of_cuda(find)?);
        }
        Ok(())
    }

    /// Applies a partition, and gives each worker its new limits and its new weight.
    ///
    /// # Errors
    /// [`RulesError`] if the quotas exceed the memory or a guest is given a device that there is
    /// not: nothing has changed.
    pub fn apply(&self, partition: Partition) -> Result<(), RulesError> {
        let mut processes = self.shared.processes();
        let devices = self.shared.resources.engines.len();
        partition.rules.check_devices(devices)?;
        self.shared.registry.apply(partition.rules.clone())?;
        processes.partition = partition;
        machine_memory::apply(&self.shared, &mut processes);
        weights::apply(&mut processes);
        Ok(())
    }

    /// Accepts no new sessions from now on, and makes the processes of virtual machines do the
    /// same. [`SupervisorHealth::end_drained`] ends those that are open at `deadline`, if there is
    /// one. Returns the virtual machines whose processes do not answer, and why:
    /// [`SupervisorHealth::tell_machines`] asks them again.
    pub fn drain(&self, deadline: Option<Duration>) -> Vec<String> {
        self.shared.drain.begin(deadline);
        drain::tell_machines(&self.shared)
    }

    /// Accepts sessions again. Returns whether the supervisor did drain, and the virtual machines
    /// whose processes do not answer, and why.
    pub fn undrain(&self) -> (bool, Vec<String>) {
        let did = self.shared.drain.undo();
        drain::tell_workers(&self.shared);
        (did, drain::tell_machines(&self.shared))
    }

    /// Ends a session, because an operator wants it. Returns the name of its guest.
    ///
    /// # Errors
    /// [`KillError`]: the number is wrong, or the process of the session does not take the request.
    pub fn kill_session(&self, id: u64) -> Result<String, KillError> {
        kill::kill_session(&self.shared, id)
    }

    /// Ends the sessions of a guest that the rules name no longer, and its processes. One that does
    /// not end is killed after some seconds. Returns how many programs the processes had. Nothing
    /// happens if the rules name the guest.
    pub fn end_removed(&self, guest: &str) -> usize {
        let mut processes = self.shared.processes();
        if processes.partition.policy(Some(guest)).is_some() {
            return 0;
        }
        let of_guest = |worker: &&mut Worker| worker.guest.as_deref() == Some(guest);
        let mut count = 0;
        let workers = processes.workers.values_mut();
        for worker in workers.filter(of_guest).filter(|worker| !worker.is_closing) {
            count += worker.sessions.len();
            if let Err(error) = worker.send(&ipc::Command::Removed, None) {
                warn!(
                    guest,
                    "the worker cannot be told that its guest was removed, and ends: {error}"
                );
            }
            // The worker reads what was sent before it sees the end of the connection.
            worker.close();
        }
        count
    }

    /// Sets the certificates of TCP links. Workers end the sessions whose guests could not connect
    /// with their certificates any more.
    ///
    /// # Errors
    /// No memory for the certificates: nothing has changed.
    pub fn set_certificates(&self, files: &CertificateFiles) -> io::Result<()> {
        let file = certificates::pack(files)?;
        self.shared.processes().set_certificates(file);
        Ok(())
    }

    /// Gives workers quotas that the machine can hold together, unless the parts of the guests may
    /// exceed the memory. `left` returns the bytes that the machine has left. Later calls have no
    /// effect.
    pub fn divide_machine_memory(&self, left: impl Fn() -> u64 + Send + Sync + 'static) {
        let _ = self.shared.machine_memory.set(Box::new(left));
    }

    /// Kills workers that do not report within `limit` of their start. The first limit stays.
    pub fn limit_starts(&self, limit: Duration) {
        // Fails only if there is a limit.
        let _ = self.shared.start_limit.set(limit);
    }

    /// Kills workers with too many threads, when
    /// [`end_workers_of_many_threads`](SupervisorHealth::end_workers_of_many_threads) finds them.
    /// Later calls have no effect.
    pub fn limit_threads(&self, engines: EngineThreads) {
        // Fails only if there is a limit.
        let _ = self.shared.thread_limit.set(engines);
    }

    /// Kills processes that say nothing for `limit`. The first limit stays.
    pub fn limit_hangs(&self, limit: Duration) {
        // Fails only if there is a limit.
        let _ = self.shared.hang_limit.set(limit);
    }

    /// A handle that takes snapshots of the workers on any thread.
    pub fn status_handle(&self) -> StatusHandle {
        StatusHandle::new(Arc::clone(&self.shared) as _)
    }

    /// Accepts guests on a listener. With a name, everyone who connects to the listener is that
    /// guest.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn listen_for(
        &mut self,
        guest: Option<String>,
        listener: impl SocketListener,
    ) -> io::Result<ListenerId> {
        let shared = Arc::clone(&self.shared);
        let stop = self.shared.stop.clone();
        self.listeners
            .start(stop, listener, move |listener, timeout| {
                if let Some((socket, peer)) = listener.accept_socket(timeout)? {
                    admission::start(&shared, guest.as_deref(), socket, peer);
                }
                Ok(())
            })
    }

    /// Stops accepting on a listener and drops it. Connected guests stay.
    pub fn close(&mut self, listener: ListenerId) {
        self.listeners.close(listener);
    }

    /// Starts `command`, which serves the virtual machine `name` at `socket`, and ends it at
    /// shutdown. [`wait_for_vms`](Supervisor::wait_for_vms) waits until it serves. The command
    /// restarts its executor itself. If the process of the command ends later, it is started again.
    /// The control socket of the process is `control`.
    ///
    /// The command gets a socket as standard input, for [`FileSupervisor`](super::FileSupervisor),
    /// and by it the machine's files in the fd store, also those of an earlier supervisor.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start_vm(
        &mut self,
        name: &str,
        command: MakeMachine,
        socket: &Path,
        control: &Path,
    ) -> io::Result<()> {
        let vm = vm_process::start(&self.shared, name, command, socket, control)?;
        self.starting.extend(vm);
        Ok(())
    }

    /// Waits until the processes of all virtual machines serve, and for 10 s at most.
    ///
    /// After an error the other processes run on, until the shutdown.
    ///
    /// # Errors
    /// The name of a virtual machine whose process has ended before it listens, and
    /// [`StartVmError`].
    pub fn wait_for_vms(&mut self) -> Result<(), (String, StartVmError)> {
        vm_process::wait_until_ready(&self.shared, std::mem::take(&mut self.starting))
    }

    /// A handle that says, on any thread, whether the supervisor makes progress. From this call on,
    /// the status expects that a thread [checks](SupervisorHealth::check) it about once a second.
    pub fn health(&self) -> SupervisorHealth {
        self.shared.main.beat();
        SupervisorHealth(Arc::clone(&self.shared))
    }

    /// Closes the listeners, lets each worker complete its requests and tell its guest, and returns
    /// when all processes have ended. Processes that do not end are killed; one that the kernel
    /// does not end is left alone, with a line in the log.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        if std::mem::replace(&mut self.is_stopped, true) {
            return;
        }
        self.shared.stop.set();
        self.listeners.close_all();
        self.shared.wake_waiters();
        // Those for which a start was given up. Without a thread they were killed.
        let _ = vm_process::watch_all(&self.shared, std::mem::take(&mut self.starting));
        let mut processes = self.shared.processes();
        processes.workers.values().for_each(|w| w.ipc.close());
        signal_machines(&processes, Signal::TERM, None);
        let timeouts = &self.shared.timeouts;
        let (start, kill) = (Instant::now(), timeouts.machine_end + timeouts.machine_kill);
        // Each worker has a thread that kills it, if need be.
        let last = kill.max(timeouts.end) + AFTER_KILL;
        let mut steps = [
            (timeouts.machine_end, Some(Signal::TERM)),
            (kill, Some(Signal::KILL)),
            (last, None),
        ]
        .into_iter()
        .peekable();
        while !processes.workers.is_empty() || !processes.machines.is_empty() {
            let Some((at, signal)) = steps.peek() else {
                log_left(&processes);
                break;
            };
            let left = at.saturating_sub(start.elapsed());
            if left.is_zero() {
                if let Some(signal) = signal {
                    signal_machines(&processes, *signal, Some(*at));
                }
                steps.next();
                continue;
            }
            processes = processes.wait_timeout(&self.shared.changed, left);
        }
        drop(processes);
        self.shared.handshakes.close();
        for left_out in { self.shared.logs() }
            .into_iter()
            .flat_map(SessionLog::rest)
        {
            warn!("{left_out}");
        }
    }
}

/// As [`Supervisor::shutdown`]: a start that fails leaves no process behind.
impl Drop for Supervisor {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Sends a signal to the processes of virtual machines. `late`: they should have ended within this
/// time, and the log says so.
fn signal_machines(processes: &Processes, signal: Signal, late: Option<Duration>) {
    for machine in processes.machines.values() {
        if let Some(time) = late {
            let what = match signal == Signal::KILL {
                true => "killed",
                false => "told again",
            };
            error!(
                vm = machine.name,
                pid = machine.pid.as_raw_nonzero(),
                "the machine's process does not end within {time:?}, and is {what}"
            );
        }
        // The process is in the list, so it has not been waited for, and the pid is still its own.
        let _ = kill_process(machine.pid, signal);
    }
}

/// Logs the processes that do not end.
fn log_left(processes: &Processes) {
    let machines = processes.machines.values();
    let machines = machines.map(|machine| machine.pid.as_raw_nonzero().get().to_string());
    let workers = processes.workers.values().filter_map(|worker| worker.pid);
    let pids: Vec<String> = machines.chain(workers.map(|pid| pid.to_string())).collect();
    error!(
        "the kernel does not end the processes {}: a call of a driver does not return",
        pids.join(", ")
    );
}

/// Says whether a supervisor makes progress.
#[derive(Clone)]
pub struct SupervisorHealth(Arc<SupervisorState>);

impl SupervisorHealth {
    /// Returns only if no thread keeps the lock that connections, reports and shutdown need.
    pub fn check(&self) {
        drop(self.0.processes());
        self.0.main.beat();
    }

    /// Logs how many lines about the sessions of guests were left out, for each guest at most once
    /// in 10 s.
    pub fn log_left_out(&self) {
        let (logs, now) = (self.0.logs(), Instant::now());
        for left_out in logs.into_iter().flat_map(|log| log.left_out(now)) {
            warn!("{left_out}");
        }
    }

    /// Lets quotas grow that the machine could not hold when their workers started.
    pub fn grow_quotas(&self) {
        machine_memory::grow_and_tell(&self.0, &mut self.0.processes());
    }

    /// Ends workers that have more threads than [`Supervisor::limit_threads`] permits.
    pub fn end_workers_of_many_threads(&self) {
        worker_process::end_workers_of_many_threads(&self.0);
    }

    /// Asks the processes of virtual machines that do not know whether the supervisor drains: those
    /// that have not answered, and those that have started since. Does not wait for them.
    pub fn tell_machines(&self) {
        drain::tell_later(&self.0);
    }

    /// Ends the open sessions if the supervisor drains and the deadline has passed. Programs that
    /// are in their handshakes get none any more. Returns how many programs of workers were told.
    /// The processes of virtual machines do the same.
    pub fn end_drained(&self) -> usize {
        let Some(limit) = self.0.drain.take_due() else {
            return 0;
        };
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let processes = self.0.processes();
        let workers = processes.workers.values();
        let mut count = 0;
        for worker in workers.filter(|worker| !worker.is_closing && !worker.is_rejection) {
            count += worker.sessions.len();
            if let Err(error) = worker.send(&ipc::Command::EndDrained { limit_ms }, None) {
                warn!(
                    guest = worker.guest,
                    "the worker is not told to end: {error}"
                );
                worker.ipc.close();
            }
        }
        drop(processes);
        self.0.drain.add_ended(count);
        if count > 0 {
            warn!("the deadline of the drain has passed: {count} sessions are ended");
        }
        count
    }
}
