//! The supervisor: accepts guests, starts and watches workers.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvFlags, SocketType};
use rustix::process::{Pid, Signal};
use tracing::{error, info, warn};
use vgpu_transport::link::socket_file;
use vgpu_transport::link::stream::tls::CertificateFiles;

use super::certificates;
use super::ipc::{self, IpcSocket, ReceiveOutcome, Rejection, WorkerReport};
use super::log_pipe::LogPipe;
use super::partition::{Partition, Resources};
use super::process::{ExitReason, spawn, wait_or_kill};
use super::state::{
    MakeCommand, MakeMachine, Processes, Shared, Timeouts, UnassignedProgram, VmProcess, Worker,
};
use crate::control;
use crate::limits::HandshakeLimits;
use crate::listener::threads::ListenerThreads;
use crate::listener::{HANDSHAKE_TIMEOUT, ListenerId, SocketListener};
use crate::lock::RankedGuard;
use crate::peer::Peer;
use crate::status::StatusHandle;
use crate::tenant_registry::QuotaError;

/// How long the supervisor waits for the process of a virtual machine to listen before it goes on.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause before the process of a virtual machine is started again: at first, and at most. Doubled
/// while processes end early.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// How often a thread that pauses checks for a shutdown.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Rejected guests that are told why by a worker. Further guests are disconnected without a
/// message.
const MAX_REJECTIONS: usize = 16;

/// How long a program waits for a worker.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the process of a virtual machine that starts may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);

/// Reports of a worker that are received at once, and the interval of further ones.
const REPORT_BURST: u32 = 64;
const REPORT_INTERVAL: Duration = Duration::from_millis(20);

/// Why the process of a virtual machine does not serve.
#[derive(Debug, thiserror::Error)]
pub enum StartVmError {
    /// The process, or the thread that watches it, cannot be started.
    #[error(transparent)]
    Start(#[from] io::Error),
    /// The process has ended before it listens.
    #[error("its process {}", ExitReason(*.0))]
    Ended(ExitStatus),
}

/// How fast the reports of a worker are received. A worker whose reports are not received loses
/// reports.
#[derive(Debug, Default)]
struct ReportRateLimit {
    /// When the reports so far would have been received, one in each interval.
    due: Option<Instant>,
}

impl ReportRateLimit {
    /// How long to wait after a report.
    fn delay(&mut self, now: Instant) -> Duration {
        let due = self.due.map_or(now, |due| due.max(now)) + REPORT_INTERVAL;
        self.due = Some(due);
        let early = due.saturating_duration_since(now);
        early.saturating_sub(REPORT_INTERVAL * REPORT_BURST)
    }
}

/// Starts a worker for each guest.
pub struct Supervisor {
    shared: Arc<Shared>,
    listeners: ListenerThreads,
}

impl Supervisor {
    /// A supervisor without listeners, with limits on connections whose handshake is not complete.
    /// `command` makes the command of a worker, which has to call
    /// [`serve`](super::serve) with [`take_socket`](super::take_socket).
    ///
    /// # Errors
    /// [`QuotaError`] if the quotas exceed the memory.
    pub fn new(
        command: MakeCommand,
        resources: Resources,
        partition: Partition,
        handshakes: HandshakeLimits,
    ) -> Result<Supervisor, QuotaError> {
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
    ) -> Result<Supervisor, QuotaError> {
        let shared = Shared::new(command, resources, partition, handshakes, timeouts)?;
        Ok(Supervisor {
            shared: Arc::new(shared),
            listeners: ListenerThreads::default(),
        })
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Applies a partition, and sends each worker its new limits.
    ///
    /// # Errors
    /// [`QuotaError`] if the quotas exceed the memory: nothing has changed.
    pub fn apply(&self, partition: Partition) -> Result<(), QuotaError> {
        let mut processes = self.shared.processes();
        self.shared.registry.apply(partition.rules.clone())?;
        processes.partition = partition;
        for worker in processes.workers.values().filter(|w| !w.is_closing) {
            let Some(rules) = processes.partition.rules_of(worker.guest.as_deref()) else {
                continue; // The configuration names the guest no longer. Its programs stay.
            };
            if let Err(error) = worker.send(&ipc::Command::Rules(rules), None) {
                warn!(
                    guest = worker.guest,
                    "the worker cannot be sent its limits: {error}"
                );
            }
        }
        Ok(())
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
        mut listener: impl SocketListener,
    ) -> io::Result<ListenerId> {
        let shared = Arc::clone(&self.shared);
        self.listeners
            .start(self.shared.stop.clone(), move |timeout| {
                if let Some((socket, peer)) = listener.accept_socket(timeout)? {
                    shared.start_guest(guest.as_deref(), socket, peer);
                }
                Ok(())
            })
    }

    /// Stops accepting on a listener and drops it. Connected guests stay.
    pub fn close(&mut self, listener: ListenerId) {
        self.listeners.close(listener);
    }

    /// Starts `command`, which serves the virtual machine `name` at `socket`, and ends it at
    /// shutdown. Returns when the process serves, or after 10 s. The command restarts its executor
    /// itself. If the process of the command ends later, it is started again: the machine's files
    /// are gone, but its QEMU can be restarted. The control socket of the process is `control`.
    ///
    /// # Errors
    /// [`StartVmError`] if the command cannot be started, or has ended before it listens.
    pub fn start_vm(
        &mut self,
        name: &str,
        command: MakeMachine,
        socket: &Path,
        control: &Path,
    ) -> Result<(), StartVmError> {
        let id = self.shared.new_id();
        let Some((mut child, log)) = self.shared.spawn_vm(id, name, &command, control)? else {
            return Ok(()); // a shutdown
        };
        let start = Instant::now();
        // The process opens its sockets before it starts its engine, and answers when it serves.
        while control::report(control, ANSWER_TIMEOUT).is_err() {
            if let Some(status) = child.try_wait()? {
                self.shared.processes().machines.remove(&id);
                log.finish();
                return Err(StartVmError::Ended(status));
            }
            if start.elapsed() > READY_TIMEOUT {
                break; // The log of the process says why it does not listen.
            }
            thread::sleep(Duration::from_millis(10));
        }
        let (shared, name) = (Arc::clone(&self.shared), name.to_owned());
        let (socket, control) = (socket.to_owned(), control.to_owned());
        thread::Builder::new()
            .name(format!("vgpu-vm-{name}"))
            .spawn(move || {
                let paths = (socket.as_path(), control.as_path());
                shared.keep_vm(id, (child, log), &name, &command, paths);
            })?;
        Ok(())
    }

    /// A handle that says, on any thread, whether the supervisor makes progress.
    pub fn health(&self) -> SupervisorHealth {
        SupervisorHealth(Arc::clone(&self.shared))
    }

    /// Closes the listeners, lets each worker complete its requests and tell its guest, and returns
    /// when all processes have ended.
    pub fn shutdown(mut self) {
        self.shared.stop.set();
        self.listeners.close_all();
        self.shared.wake_waiters();
        let mut processes = self.shared.processes();
        processes.workers.values().for_each(|w| w.ipc.close());
        for machine in processes.machines.values() {
            // The process is in the list, so it has not been waited for, and the pid is still its
            // own.
            let _ = rustix::process::kill_process(machine.pid, Signal::TERM);
        }
        while !processes.workers.is_empty() || !processes.machines.is_empty() {
            processes = processes.wait(&self.shared.changed);
        }
        drop(processes);
        self.shared.handshakes.close();
    }
}

impl Shared {
    /// Starts the thread of a connection, which ends when a worker has been given the connection.
    fn start_guest(self: &Arc<Shared>, owner: Option<&str>, socket: OwnedFd, peer: Peer) {
        let id = self.new_id();
        let duplicate = socket.try_clone().ok();
        let Some(pending) = self.handshakes.begin(id, &peer.origin(), duplicate) else {
            return;
        };
        let (shared, owner) = (Arc::clone(self), owner.map(str::to_owned));
        let program = UnassignedProgram {
            socket,
            peer,
            pending,
        };
        let spawned = thread::Builder::new()
            .name(format!("vgpu-guest-{id}"))
            .spawn(move || {
                if has_sent(&program.socket, HANDSHAKE_TIMEOUT) {
                    shared.admit(id, owner.as_deref(), program);
                }
            });
        if let Err(error) = spawned
            && let Some(others) = self.refusal_log.allow(Instant::now())
        {
            error!(
                session = id,
                "no thread for a guest, which is disconnected: {error}; {others} such lines were \
                 left out"
            );
        }
    }

    /// Waits until few enough programs of an origin are in their handshakes. `None` if they are too
    /// many for too long, and if the program need not be served any more.
    fn wait_for_turn(
        &self,
        guest: Option<&str>,
        program: &UnassignedProgram,
    ) -> Option<RankedGuard<'_, Processes>> {
        let origin = program.peer.origin();
        let is_over = || self.stop.is_set() || program.pending.is_cancelled();
        let end = Instant::now() + WORKER_TIMEOUT;
        let mut processes = self.processes();
        while !is_over() && processes.has_to_wait(guest, &origin) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            processes = processes.wait_timeout(&self.changed, left);
        }
        (!is_over() && !has_hung_up(&program.socket)).then_some(processes)
    }

    /// Makes all that wait for `changed` check their conditions again.
    fn wake_waiters(&self) {
        // Under the lock: a thread between its check and its wait would miss the notification.
        let processes = self.processes();
        self.changed.notify_all();
        drop(processes);
    }

    /// Gives a program to the worker of its guest.
    fn admit(self: &Arc<Shared>, id: u64, owner: Option<&str>, program: UnassignedProgram) {
        let peer = &program.peer.clone();
        let (guest, rejected) = match self.registry.admit(owner, peer) {
            Ok(tenant) => (tenant.is_named().then(|| tenant.name().to_owned()), None),
            Err(error) => {
                let reason = error.to_string();
                (None, Some(Rejection::Rejected { reason }))
            }
        };
        // Locked until the worker has the socket, so that no worker is told to end meanwhile, and a
        // shutdown misses none.
        let Some(mut processes) = self.wait_for_turn(guest.as_deref(), &program) else {
            return;
        };
        let rejection = rejected.or_else(|| processes.full(guest.as_deref(), peer));
        let rejections = processes.workers.values().filter(|w| w.is_rejection);
        let count = rejections.count();
        if rejection.is_some() && count >= MAX_REJECTIONS {
            if let Some(others) = self.refusal_log.allow(Instant::now()) {
                warn!(
                    %peer,
                    "disconnected without a message: {count} other guests are being rejected; \
                     {others} such lines were left out"
                );
            }
            return;
        }
        let worker = match (&guest, &rejection) {
            (Some(name), None) => processes.worker_of(name),
            _ => None,
        };
        let outcome = match worker {
            Some((worker, certificates)) => worker.give(id, program, None, certificates),
            None => self.start_worker(&mut processes, id, guest, rejection, program),
        };
        if let Err(error) = outcome {
            error!(session = id, %peer, "no worker for this guest, which is disconnected: {error}");
        }
    }

    /// Starts a worker, whose first program is `session`.
    fn start_worker(
        self: &Arc<Shared>,
        processes: &mut Processes,
        session: u64,
        guest: Option<String>,
        rejection: Option<Rejection>,
        program: UnassignedProgram,
    ) -> io::Result<()> {
        let (ipc, theirs) = IpcSocket::pair()?;
        let mut worker = Worker::new(ipc, guest, rejection.is_some());
        let guest = worker.guest.as_deref();
        // A reload can change the quota of a named guest, but not the size of an engine: it gets
        // all memory.
        let memory = match (guest, &processes.partition.rules.unnamed) {
            (None, Some(policy)) => policy.memory,
            _ => None,
        };
        let memory = memory.or(self.resources.memory);
        let nice = processes.partition.nice(guest);
        if let Some(rules) = processes.partition.rules_of(guest) {
            worker.send(&ipc::Command::Rules(rules), None)?;
        }
        worker.give(session, program, rejection, processes.certificates.as_ref())?;
        let (shared, ipc) = (Arc::clone(self), Arc::clone(&worker.ipc));
        let limit = worker.is_rejection.then_some(self.timeouts.rejection);
        thread::Builder::new()
            .name(format!("vgpu-worker-{session}"))
            .spawn(move || {
                let mut command = (shared.command)(memory);
                command
                    .arg(format!("--worker={session}"))
                    .stdin(Stdio::from(theirs))
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped());
                let started = spawn(&mut command, nice);
                // The command owns the worker's end of the socket, which must not stay open here.
                drop(command);
                shared.watch_worker(session, &ipc, started, limit);
            })?;
        processes.workers.insert(session, worker);
        Ok(())
    }

    /// Receives the reports of a worker until its process has ended, or has lived for `limit`.
    fn watch_worker(
        &self,
        id: u64,
        ipc: &IpcSocket,
        started: io::Result<Child>,
        limit: Option<Duration>,
    ) {
        let mut process = match started {
            Ok(process) => process,
            Err(error) => {
                self.remove_worker(id, |session, peer| {
                    error!(session, %peer, "no worker can be started, the guest is disconnected: \
                     {error}");
                });
                return;
            }
        };
        let pid = process.id();
        if let Some(worker) = self.processes().workers.get_mut(&id) {
            worker.pid = Some(pid);
        }
        let log = LogPipe::start(process.stderr.take(), format!("worker {id}"));
        self.receive_reports(id, ipc, limit);
        // From here on the worker gets no program, even if another thread has closed the
        // connection.
        if let Some(worker) = self.processes().workers.get_mut(&id) {
            worker.close();
        }
        let ended = wait_or_kill(&mut process, self.timeouts.end);
        log.finish();
        let status = ended.map(|(status, was_killed)| {
            if was_killed {
                error!(
                    worker = id,
                    pid, "the worker did not end within {:?}, and was killed", self.timeouts.end
                );
            }
            status
        });
        let is_good = matches!(&status, Ok(status) if status.success());
        self.remove_worker(id, |session, peer| match &status {
            Ok(_) if is_good => {}
            Ok(status) => error!(
                session,
                %peer,
                pid,
                "the worker of this guest {}: the session has ended, no other guest is affected; \
                 the guest's next session gets a new worker",
                ExitReason(*status)
            ),
            Err(error) => error!(session, %peer, pid, "cannot wait for the worker: {error}"),
        });
        if !self.stop.is_set() {
            info!(worker = id, pid, "the worker has ended");
        }
    }

    /// Receives the reports of a worker until the connection is closed, or `limit` has passed.
    fn receive_reports(&self, id: u64, ipc: &IpcSocket, limit: Option<Duration>) {
        let start = Instant::now();
        let mut rate_limit = ReportRateLimit::default();
        let mut has_logged = false;
        loop {
            let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                error!(
                    worker = id,
                    "the worker takes longer than {limit:?} to reject a guest"
                );
                return;
            }
            match ipc.receive(left) {
                Ok(ReceiveOutcome::Message(report, _)) => self.on_report(id, report),
                Ok(ReceiveOutcome::Nothing) => continue,
                Ok(ReceiveOutcome::Invalid(_)) if has_logged => {}
                Ok(ReceiveOutcome::Invalid(why)) => {
                    has_logged = true;
                    error!(worker = id, "invalid message from the worker: {why}");
                }
                Ok(ReceiveOutcome::Closed) => return,
                Err(error) => {
                    error!(worker = id, "no connection to the worker any more: {error}");
                    return;
                }
            }
            // A worker that sends without end must not occupy a processor of the supervisor.
            thread::sleep(rate_limit.delay(Instant::now()));
        }
    }

    /// Removes a worker from the list, and calls `log` for each program that it still had.
    fn remove_worker(&self, id: u64, log: impl Fn(u64, &Peer)) {
        let mut processes = self.processes();
        if let Some(worker) = processes.workers.remove(&id) {
            for (session, program) in &worker.sessions {
                log(*session, &program.peer);
            }
            if let Some(WorkerReport { report, .. }) = &worker.report {
                let guest = worker.guest.as_deref();
                processes.ended_workers.add(guest, report, &self.registry);
            }
        }
        drop(processes);
        self.changed.notify_all();
    }

    /// Stores a report. Tells a worker without programs to end.
    fn on_report(&self, id: u64, report: WorkerReport) {
        let mut processes = self.processes();
        let Some(worker) = processes.workers.get_mut(&id) else {
            return;
        };
        let sessions = &report.report.status.sessions;
        let is_open = |session| sessions.iter().any(|s| s.id == session);
        worker.sessions.retain(|&session, program| {
            if is_open(session) {
                program.pending = None;
                worker.unproven = None;
            }
            program.number > report.served || is_open(session) || report.pending.contains(&session)
        });
        worker.report = Some(report);
        if worker.sessions.is_empty() && !worker.is_closing {
            worker.close();
        }
        drop(processes);
        self.changed.notify_all();
    }

    /// Starts the process of a virtual machine and adds it to the list. `None` during a shutdown.
    fn spawn_vm(
        &self,
        id: u64,
        name: &str,
        command: &MakeMachine,
        control: &Path,
    ) -> io::Result<Option<(Child, LogPipe)>> {
        let mut command = command();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // Locked until the process is in the list, so that a shutdown does not miss it.
        let mut processes = self.processes();
        if self.stop.is_set() {
            return Ok(None);
        }
        let mut child = spawn(&mut command, processes.partition.nice(Some(name)))?;
        let log = LogPipe::start(child.stderr.take(), format!("virtual machine {name}"));
        let machine = VmProcess {
            name: name.into(),
            pid: Pid::from_child(&child),
            control: control.into(),
        };
        processes.machines.insert(id, machine);
        Ok(Some((child, log)))
    }

    /// Waits for the end of the process of a virtual machine and starts the next one, until the
    /// shutdown.
    fn keep_vm(
        &self,
        id: u64,
        (mut process, mut log): (Child, LogPipe),
        name: &str,
        command: &MakeMachine,
        (socket, control): (&Path, &Path),
    ) {
        let mut pause = MIN_PAUSE;
        loop {
            let (pid, started) = (process.id(), Instant::now());
            let status = process.wait();
            log.finish();
            // The process could not remove its socket if it was killed.
            if let Err(error) = socket_file::remove_stale(socket, SocketType::STREAM) {
                warn!(vm = name, "the socket of its process stays: {error}");
            }
            // Between these two lines the kernel could give the pid to a new process, but it uses
            // all other pids first.
            self.processes().machines.remove(&id);
            self.changed.notify_all();
            match status {
                Ok(status) if status.success() => {}
                Ok(status) => error!(vm = name, pid, "its process {}", ExitReason(status)),
                Err(error) => error!(vm = name, pid, "cannot wait for its process: {error}"),
            }
            pause = match started.elapsed() > MAX_PAUSE {
                true => MIN_PAUSE,
                false => (pause * 2).min(MAX_PAUSE),
            };
            (process, log) = loop {
                let until = Instant::now() + pause;
                while Instant::now() < until {
                    if self.stop.is_set() {
                        return;
                    }
                    thread::sleep(POLL_INTERVAL);
                }
                match self.spawn_vm(id, name, command, control) {
                    Ok(Some(process)) => break process,
                    Ok(None) => return,
                    Err(error) => error!(vm = name, "its process cannot be started: {error}"),
                }
                pause = (pause * 2).min(MAX_PAUSE);
            };
            warn!(
                vm = name,
                pid = process.id(),
                "its process is started again; a QEMU that was connected needs a restart"
            );
        }
    }
}

/// Says whether a supervisor makes progress.
#[derive(Clone)]
pub struct SupervisorHealth(Arc<Shared>);

impl SupervisorHealth {
    /// Returns only if no thread keeps the lock that connections, reports and shutdown need.
    pub fn check(&self) {
        drop(self.0.processes());
    }
}

/// Waits up to `timeout` for the first bytes of a guest, which stay unread. Returns whether the
/// guest has sent any.
fn has_sent(socket: impl AsFd, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::IN)];
    let Ok(timeout) = Timespec::try_from(timeout) else {
        return false;
    };
    if !matches!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1)) {
        return false;
    }
    let peeked = rustix::net::recv(socket, &mut [0], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    peeked.is_ok_and(|(bytes, _)| bytes > 0)
}

/// Whether a guest has closed its socket. No process is worth starting then, whatever is unread.
fn has_hung_up(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let now = Timespec::default();
    // The kernel reports hang-ups and errors in any case.
    !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_without_end_are_received_at_a_limited_pace() {
        let mut rate_limit = ReportRateLimit::default();
        let mut now = Instant::now();
        let start = now;
        for _ in 0..REPORT_BURST {
            assert_eq!(rate_limit.delay(now), Duration::ZERO);
        }
        for _ in 0..100 {
            now += rate_limit.delay(now);
        }
        assert_eq!(now - start, REPORT_INTERVAL * 100);
        // A worker that reports now and then never waits.
        for _ in 0..1000 {
            now += Duration::from_millis(500);
            assert_eq!(rate_limit.delay(now), Duration::ZERO);
        }
    }
}
