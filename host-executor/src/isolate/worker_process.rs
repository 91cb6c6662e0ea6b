//! The process of a worker, as its supervisor sees it: start, reports, end.
#![forbid(unsafe_code)]

use std::io;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use super::ipc::{IpcSocket, ReceiveOutcome, Rejection, WorkerMessage, WorkerReport};
use super::log_pipe::LogPipe;
use super::machine_memory;
use super::process::{Descriptors, ExitReason, ProcFiles, spawn, wait_or_kill};
use super::report_rate_limit::ReportRateLimit;
use super::state::{Processes, SupervisorState, UnassignedProgram, Worker};
use super::weights;
use crate::hang_watch::{HangFinding, HangWatch, LOOK_PERIOD};
use crate::peer::Peer;

/// Starts a worker, whose first program is `session`.
pub(super) fn start(
    shared: &Arc<SupervisorState>,
    processes: &mut Processes,
    session: u64,
    guest: Option<String>,
    rejection: Option<Rejection>,
    mut program: UnassignedProgram,
) -> io::Result<()> {
    program.pending.gets_a_worker();
    let (ipc, theirs) = IpcSocket::pair()?;
    let mut worker = Worker::new(ipc, guest, rejection.is_some());
    worker.source = program.peer.source();
    let guest = worker.guest.as_deref();
    // A reload can change the quota of a named guest, but not the size of an engine, which
    // therefore gets all memory.
    let memory = match (guest, &processes.partition.rules.unnamed) {
        (None, Some(policy)) => policy.memory,
        _ => None,
    };
    let memory = memory.or(shared.resources.memory);
    machine_memory::add(shared, processes, &mut worker);
    machine_memory::tell(&processes.partition, &worker)?;
    worker.give(session, program, rejection, processes.certificates.as_ref())?;
    weights::add(processes, &mut worker);
    let nice = worker.nice;
    let (shared, ipc) = (Arc::clone(shared), Arc::clone(&worker.ipc));
    let limit = worker.is_rejection.then_some(shared.timeouts.rejection);
    thread::Builder::new()
        .name(format!("vgpu-worker-{session}"))
        .spawn(move || {
            let mut command = (shared.command)(memory);
            command
                .arg(format!("--worker={session}"))
                .stdin(Stdio::from(theirs))
                .stdout(Stdio::null())
                .stderr(Stdio::piped());
            let started = spawn(&mut command, nice, Descriptors::OfWorker);
            // The command owns the worker's end of the socket, which must not stay open here.
            drop(command);
            watch(&shared, session, &ipc, started, limit);
        })?;
    processes.workers.insert(session, worker);
    Ok(())
}

/// Receives the reports of a worker until its process has ended, or has lived for `limit`.
fn watch(
    shared: &SupervisorState,
    id: u64,
    ipc: &IpcSocket,
    started: io::Result<Child>,
    limit: Option<Duration>,
) {
    let mut process = match started {
        Ok(process) => process,
        Err(error) => {
            remove(shared, id, |session, peer| {
                error!(session, %peer, "no worker can be started, the guest is disconnected: \
                     {error}");
            });
            return;
        }
    };
    let pid = process.id();
    let files = ProcFiles::open(pid);
    if let Err(error) = &files {
        warn!(
            worker = id,
            pid,
            "cannot read what the worker uses, which is taken to use none of its memory: {error}"
        );
    }
    let mut guest = String::new();
    if let Some(worker) = shared.processes().workers.get_mut(&id) {
        worker.pid = Some(pid);
        worker.files = files.ok();
        // A weight that has changed since the start.
        weights::set_level(worker);
        guest = worker.guest_or_source().to_owned();
    }
    let lines = shared.session_log.of(&guest, Instant::now());
    let crashes = shared.crash_log.of(&guest, Instant::now());
    let who = format!("worker {id}");
    let log = LogPipe::start(process.stderr.take(), who, Some(Arc::clone(&lines)));
    receive_reports(shared, id, ipc, &mut process, limit);
    // From here on the worker gets no program, even if another thread has closed the connection.
    let mut must_be_killed = false;
    if let Some(worker) = shared.processes().workers.get_mut(&id) {
        worker.close();
        must_be_killed = worker.must_be_killed;
    }
    if must_be_killed {
        // Fails only if the process has ended.
        let _ = process.kill();
    }
    let ended = wait_or_kill(&mut process, shared.timeouts.end);
    log.finish();
    let status = ended.map(|(status, was_killed)| {
        if was_killed {
            error!(
                worker = id,
                pid, "the worker did not end within {:?}, and was killed", shared.timeouts.end
            );
        }
        status
    });
    let is_good = matches!(&status, Ok(status) if status.success());
    remove(shared, id, |session, peer| match &status {
        Ok(_) if is_good => {}
        _ if !crashes.passes(Instant::now()) => {}
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
    if !shared.stop.is_set() && lines.passes(Instant::now()) {
        info!(worker = id, pid, "the worker has ended");
    }
}

/// Receives the reports of a worker until the connection is closed, or `limit` has passed, or the
/// worker has not reported within the limit for starts, or has fallen silent for the limit of
/// hangs.
fn receive_reports(
    shared: &SupervisorState,
    id: u64,
    ipc: &IpcSocket,
    process: &mut Child,
    limit: Option<Duration>,
) {
    let start = Instant::now();
    let mut rate_limit = ReportRateLimit::default();
    let mut has_logged = false;
    let mut has_reported = false;
    let mut watch = HangWatch::new(shared.hang_limit.get().copied());
    loop {
        let (limit, what) = match limit {
            Some(limit) => (Some(limit), "to reject a guest"),
            None if !has_reported => (shared.start_limit.get().copied(), "to start its engine"),
            None => (None, ""),
        };
        let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
        if let (Some(limit), Some(Duration::ZERO)) = (limit, left) {
            error!(
                worker = id,
                "the worker takes longer than {limit:?} {what}, and is killed"
            );
            return;
        }
        let is_watched = limit.is_none() && has_reported;
        let received = ipc.receive(if is_watched { Some(LOOK_PERIOD) } else { left });
        if !matches!(received, Ok(ReceiveOutcome::Nothing)) {
            watch.reported();
        }
        match received {
            Ok(ReceiveOutcome::Message(WorkerMessage::Report(report), _)) => {
                has_reported = true;
                on_report(shared, id, *report);
            }
            Ok(ReceiveOutcome::Message(WorkerMessage::Dump { number, text }, _)) => {
                if let Some(worker) = shared.processes().workers.get_mut(&id) {
                    worker.answer_dump(number, text);
                }
            }
            Ok(ReceiveOutcome::Nothing) if is_watched => match watch.look() {
                None => continue,
                Some(HangFinding::Notice(silent)) => {
                    let pid = process.id();
                    warn!(
                        worker = id,
                        pid,
                        "the worker has not reported for {silent:.0?}: it hangs, or is stopped"
                    );
                    continue;
                }
                Some(HangFinding::Hangs(silent)) => {
                    error!(
                        worker = id,
                        "the worker has not reported for {silent:.0?}, and is killed: its guest \
                         loses its sessions"
                    );
                    let _ = process.kill();
                    return;
                }
            },
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

/// Marks the workers with too many threads. The thread that watches such a worker kills it.
pub(super) fn end_workers_of_many_threads(shared: &SupervisorState) {
    let Some(engines) = shared.thread_limit.get() else {
        return;
    };
    let mut processes = shared.processes();
    let Processes {
        workers,
        killed_guests,
        ..
    } = &mut *processes;
    for (id, worker) in workers {
        let threads = worker.files.as_ref().map_or(0, ProcFiles::thread_count);
        let limit = engines.of_worker(worker.sessions.len());
        if threads <= limit || worker.must_be_killed {
            continue;
        }
        error!(
            worker = id,
            pid = worker.pid,
            guest = worker.guest_or_source(),
            "the worker has {threads} threads, its limit is {limit}, and is killed: its guest \
             loses its sessions"
        );
        worker.must_be_killed = true;
        worker.close();
        if let Some(guest) = worker.guest_key() {
            killed_guests.add(guest, Instant::now());
        }
    }
}

/// Stores a report. Tells a worker without programs to end.
fn on_report(shared: &SupervisorState, id: u64, report: WorkerReport) {
    let mut processes = shared.processes();
    let Some(worker) = processes.workers.get_mut(&id) else {
        return;
    };
    let sessions = &report.report.status.sessions;
    let is_open = |session| sessions.iter().any(|s| s.id == session);
    let is_rejection = worker.is_rejection;
    worker.sessions.retain(|session, program| {
        let is_there = is_open(*session);
        let is_over = program.number <= report.served && !report.pending.contains(session);
        // A session may have begun and ended since the last report. The handshake of a program that
        // has got none is dropped with the program.
        let has_had_session = is_over && !is_rejection && !report.without_session.contains(session);
        if is_there || has_had_session {
            worker.has_had_session = true;
            if let Some(pending) = program.pending.take() {
                pending.session_begins();
            }
        } else if is_over && program.number == 1 {
            worker.is_paid = true;
        }
        is_there || !is_over
    });
    worker.report = Some((report, Instant::now()));
    if worker.sessions.is_empty() && !worker.is_closing {
        worker.close();
    }
    drop(processes);
    shared.changed.notify_all();
}

/// Removes a worker from the list, and calls `log` for each program that it still had.
fn remove(shared: &SupervisorState, id: u64, log: impl Fn(u64, &Peer)) {
    let mut processes = shared.processes();
    if let Some(worker) = processes.workers.remove(&id) {
        // Without a session, the end of the handshake has charged the origin.
        let is_due = worker.has_had_session && !worker.is_paid;
        if let (true, Some(origin)) = (is_due, &worker.origin) {
            let lived = worker.since.elapsed();
            shared.handshakes.worker_has_ended(origin, lived);
        }
        for (session, program) in &worker.sessions {
            log(*session, &program.peer);
        }
        if let Some((WorkerReport { report, .. }, _)) = &worker.report {
            let guest = worker.guest.as_deref();
            let devices = shared.resources.engines.len();
            processes
                .ended_workers
                .add(guest, report, &shared.registry, devices);
        }
    }
    drop(processes);
    shared.changed.notify_all();
}
