//! What the threads of a supervisor share.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use tracing::error;

use super::ipc::{Command, IpcSocket, MAX_WORKER_SESSIONS, Rejection, WorkerReport};
use super::partition::{Partition, Resources};
use super::process::ProcFiles;
use super::restart_limit::{GuestKey, KilledGuests};
use super::thread_limit::EngineThreads;
use super::totals::EndedWorkers;
use crate::control::{ControlError, OpenQuestion, QuestionOutcome};
use crate::drain::Drain;
use crate::gpu_monitor::GpuWatch;
use crate::handshakes::{Handshakes, PendingHandshake};
use crate::heartbeat::Heartbeat;
use crate::host_memory::HostMemory;
use crate::limits::{HandshakeLimits, sessions_of_one_guest};
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::log_limit::LogLimit;
use crate::peer::Peer;
use crate::policy::LinkKind;
use crate::session_log::SessionLog;
use crate::status::Report;
use crate::stop::StopFlag;
use crate::tenant_registry::{RulesError, TenantRegistry};

/// Programs of one guest and origin that workers have been given and that have no session yet, at
/// most, and not more than a quarter of the programs that can be served. Further ones wait, so that
/// an origin cannot fill the workers with programs that never complete their handshakes.
const MAX_WORKER_HANDSHAKES: usize = 4;

/// Returns the bytes that the machine has left.
pub(super) type MachineMemory = Box<dyn Fn() -> u64 + Send + Sync>;

/// Makes the command of a worker whose engine has so many bytes of memory. The supervisor adds the
/// socket and a number.
pub type MakeCommand = Box<dyn Fn(Option<u64>) -> process::Command + Send + Sync>;

/// Makes the command of a process that serves a virtual machine.
pub type MakeMachine = Box<dyn Fn() -> process::Command + Send + Sync>;

/// How long a supervisor waits for processes, which a guest may have taken over.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    /// For the end of a process that has been told to end. Then it is killed.
    pub(super) end: Duration,
    /// For a worker that tells a guest why it is rejected.
    pub(super) rejection: Duration,
    /// For the process of a virtual machine to listen, before the supervisor goes on.
    pub(super) ready: Duration,
    /// At a shutdown, for the process of a virtual machine, whose executor itself gives up 10 s
    /// after its last progress. Then the process is told again.
    pub(super) machine_end: Duration,
    /// From then on, before the process is killed. The process kills an executor 4 s after it was
    /// told again.
    pub(super) machine_kill: Duration,
    /// For a process that has reported, to do so again. Then it counts as one that hangs.
    pub(super) silence: Duration,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            end: Duration::from_secs(10),
            rejection: Duration::from_secs(30),
            ready: Duration::from_secs(10),
            machine_end: Duration::from_secs(15),
            machine_kill: Duration::from_secs(6),
            silence: Duration::from_secs(10),
        }
    }
}

/// What the threads of a supervisor share.
pub(super) struct SupervisorState {
    pub(super) timeouts: Timeouts,
    /// For the first report of a worker, whose engine starts before. Unset: no limit.
    pub(super) start_limit: OnceLock<Duration>,
    /// For a process that has fallen silent. Then it is killed. Unset: no limit.
    pub(super) hang_limit: OnceLock<Duration>,
    /// Unset: the memory of the machine is not divided.
    pub(super) machine_memory: OnceLock<MachineMemory>,
    /// What the most threads of a worker depend on. Unset: without a limit.
    pub(super) thread_limit: OnceLock<EngineThreads>,
    pub(super) command: MakeCommand,
    pub(super) resources: Resources,
    /// What the driver says of the GPU of the engines of each device.
    pub(super) gpus: Vec<OnceLock<GpuWatch>>,
    pub(super) since: Instant,
    pub(super) registry: TenantRegistry,
    pub(super) stop: StopFlag,
    pub(super) drain: Drain,
    /// Whether a thread tells processes of virtual machines of the drain.
    pub(super) is_telling: AtomicBool,
    /// Held while processes of virtual machines are told of the drain, one request after another.
    pub(super) telling: RankedMutex<()>,
    last_id: AtomicU64,
    processes: RankedMutex<Processes>,
    /// Limits the lines about guests that get no worker.
    pub(super) refusal_log: LogLimit,
    /// Limits the lines about the sessions of each guest, in all of its workers.
    pub(super) session_log: SessionLog,
    /// Limits the lines about workers of each guest that have crashed, which no number of other
    /// lines hides.
    pub(super) crash_log: SessionLog,
    /// Programs that have no session yet.
    pub(super) handshakes: Arc<Handshakes>,
    /// Notified when a process has ended, and when a program has got a session.
    pub(super) changed: Condvar,
    /// Of the thread that checks [`SupervisorHealth`](super::SupervisorHealth).
    pub(super) main: Heartbeat,
}

/// The processes of the guests.
pub(super) struct Processes {
    pub(super) partition: Partition,
    /// Workers by the number of their first session.
    pub(super) workers: BTreeMap<u64, Worker>,
    pub(super) machines: BTreeMap<u64, VmProcess>,
    pub(super) ended_workers: EndedWorkers,
    /// Guests that wait for their next worker.
    pub(super) killed_guests: KilledGuests,
    /// The certificates of TCP links, for workers.
    pub(super) certificates: Option<OwnedFd>,
}

/// A worker, until its process has ended.
pub(super) struct Worker {
    pub(super) ipc: Arc<IpcSocket>,
    /// The process, once it has been started.
    pub(super) pid: Option<u32>,
    /// The files of the process, once it has been started.
    pub(super) files: Option<ProcFiles>,
    /// How many nice levels its threads are above the supervisor.
    pub(super) nice: i32,
    /// The guest's name, if it has one.
    pub(super) guest: Option<String>,
    /// Who the guest is without a name ([`Peer::source`]), if anything tells.
    pub(super) source: Option<String>,
    /// The most processes that the guest has had at once while this one runs.
    pub(super) siblings: u32,
    /// The guest's quota on each of its devices, in bytes: its part, or less if the machine has
    /// less (`machine_memory`). `None`: without a limit.
    pub(super) memory: Option<u64>,
    /// Whether the worker only tells a guest why it is rejected.
    pub(super) is_rejection: bool,
    /// Programs that the worker has been given and has not reported as ended.
    pub(super) sessions: BTreeMap<u64, Program>,
    given: u64,
    /// Whether the worker has the certificates of TCP links.
    pub(super) has_certificates: bool,
    /// When the worker was started.
    pub(super) since: Instant,
    /// The origin of the first program.
    pub(super) origin: Option<String>,
    /// The same, with one origin for all addresses of the loopback interface.
    pub(super) quota_origin: Option<String>,
    /// The link of the first program.
    pub(super) link: Option<LinkKind>,
    /// Whether a program has got a session.
    pub(super) has_had_session: bool,
    /// Whether the start of the process has been charged: to the first program, without a session.
    pub(super) is_paid: bool,
    /// Whether the worker has been told to end, and gets no further programs.
    pub(super) is_closing: bool,
    /// Whether the worker gets no time for its end.
    pub(super) must_be_killed: bool,
    /// The last report, and when it has come.
    pub(super) report: Option<(WorkerReport, Instant)>,
    /// The dumps that somebody waits for, by number, with the answer of the worker.
    dumps: BTreeMap<u64, Option<String>>,
}

/// Dumps of a worker that somebody waits for, at most: one thread of the supervisor makes dumps.
const MAX_DUMPS: usize = 8;

/// Most processes of one named guest that have been told to end and still run, for a new one to be
/// started.
const MAX_ENDING: usize = 2;

/// A program that a worker has been given.
pub(super) struct Program {
    /// The position in the order of giving.
    pub(super) number: u64,
    pub(super) peer: Peer,
    /// Until the worker has reported that the program has a session.
    pub(super) pending: Option<PendingHandshake>,
}

/// The process that serves a virtual machine.
#[derive(Debug)]
pub(super) struct VmProcess {
    pub(super) name: String,
    pub(super) pid: Pid,
    /// The control socket of the process.
    pub(super) control: PathBuf,
    pub(super) answers: VmAnswers,
    /// The number of the last change of [`SupervisorState::drain`] that the process knows.
    pub(super) told: u64,
    /// Why it knows no later one.
    pub(super) untold: Option<String>,
    /// What it has reported last.
    pub(super) report: Option<Report>,
}

impl VmProcess {
    /// The name of the machine and the control socket, for [`query_all`](super::query::query_all).
    pub(super) fn address(&self) -> (String, PathBuf) {
        (self.name.clone(), self.control.clone())
    }
}

/// Which of the questions at a control socket were answered.
#[derive(Debug, Default)]
pub(super) struct VmAnswers {
    /// The executor that has answered last, and that no other one has replaced since.
    executor: Option<i32>,
    /// When the latest question with an answer was asked.
    answered: Option<Instant>,
    /// What it has not answered since.
    unanswered: Option<Unanswered>,
}

/// Questions without an answer.
#[derive(Debug)]
struct Unanswered {
    /// When the first one was asked.
    since: Instant,
    /// The first one of those that the executor may still answer: a slow executor answers after the
    /// questioner has given up.
    question: Option<OpenQuestion>,
}

impl VmAnswers {
    /// Takes down what became of a question that was asked at `at`. An executor that has not
    /// answered yet may be starting its engine, for minutes, and has another number than the one
    /// before.
    pub(super) fn note<T>(&mut self, at: Instant, asked: &mut QuestionOutcome<T>) {
        if asked.answer.is_err() && self.answered.is_some_and(|answered| at < answered) {
            // Another thread has asked later, and has its answer.
            return;
        }
        match (&asked.answer, asked.process) {
            (Ok(_), process) => {
                (self.executor, self.unanswered) = (process, None);
                self.answered = self.answered.max(Some(at));
            }
            // Clients wait without an end, and none is accepted: nobody says which process listens.
            (Err(ControlError::Busy { .. }), None) => {}
            (Err(_), process) if process.is_some() && process == self.executor => {}
            (Err(_), _) => (self.executor, self.unanswered) = (None, None),
        }
        if asked.answer.is_err() && self.executor.is_some() {
            let (since, question) = (at, asked.open.take());
            match &mut self.unanswered {
                Some(before) if !before.is_answered() => {
                    before.question = { before.question.take() }
                        .filter(|question| !question.is_closed())
                        .or(question);
                }
                unanswered => *unanswered = Some(Unanswered { since, question }),
            }
        }
    }

    /// The number of the process that has answered last.
    pub(super) fn executor(&self) -> Option<u32> {
        u32::try_from(self.executor?).ok()
    }

    /// How long an executor that has answered before has left a question without an answer.
    pub(super) fn silent(&self) -> Option<Duration> {
        Some(self.unanswered.as_ref()?.since.elapsed())
    }
}

impl Unanswered {
    /// Whether an answer has come late.
    fn is_answered(&self) -> bool {
        self.question
            .as_ref()
            .is_some_and(OpenQuestion::is_answered)
    }
}

impl SupervisorState {
    /// The limits of log lines that are counted.
    pub(super) fn logs(&self) -> [&SessionLog; 2] {
        [&self.session_log, &self.crash_log]
    }

    pub(super) fn new(
        command: MakeCommand,
        resources: Resources,
        partition: Partition,
        handshakes: HandshakeLimits,
        timeouts: Timeouts,
    ) -> Result<SupervisorState, RulesError> {
        let total = resources.memory.unwrap_or(u64::MAX);
        // No graph is here: each process counts the host memory of its guest.
        let host = HostMemory::new(u64::MAX, 1);
        let registry = TenantRegistry::new(resources.engines.iter().map(|_| total), host);
        partition.rules.check_devices(resources.engines.len())?;
        registry.apply(partition.rules.clone())?;
        let gpus = resources.engines.iter().map(|_| OnceLock::new()).collect();
        Ok(SupervisorState {
            timeouts,
            start_limit: OnceLock::new(),
            hang_limit: OnceLock::new(),
            machine_memory: OnceLock::new(),
            thread_limit: OnceLock::new(),
            command,
            resources,
            gpus,
            since: Instant::now(),
            registry,
            stop: StopFlag::new(),
            drain: Drain::default(),
            is_telling: AtomicBool::new(false),
            last_id: AtomicU64::new(0),
            processes: RankedMutex::new(
                Rank::Processes,
                Processes {
                    partition,
                    workers: BTreeMap::new(),
                    machines: BTreeMap::new(),
                    ended_workers: EndedWorkers::default(),
                    killed_guests: KilledGuests::default(),
                    certificates: None,
                },
            ),
            refusal_log: LogLimit::new(10),
            session_log: SessionLog::default(),
            crash_log: SessionLog::default(),
            telling: RankedMutex::new(Rank::Telling, ()),
            handshakes: Handshakes::new(handshakes),
            changed: Condvar::new(),
            main: Heartbeat::new(),
        })
    }

    pub(super) fn processes(&self) -> RankedGuard<'_, Processes> {
        self.processes.lock()
    }

    /// The processes, if the table is not locked. Does not wait.
    pub(super) fn try_processes(&self) -> Option<RankedGuard<'_, Processes>> {
        self.processes.try_lock()
    }

    /// Makes all that wait for `changed` check their conditions again.
    pub(super) fn wake_waiters(&self) {
        // Under the lock: a thread between its check and its wait would miss the notification.
        let processes = self.processes();
        self.changed.notify_all();
        drop(processes);
    }

    /// A number that no session and no process of this supervisor has had.
    pub(super) fn new_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// A program that no worker has been given yet.
pub(super) struct UnassignedProgram {
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
    pub(super) pending: PendingHandshake,
}

impl Worker {
    /// A worker without programs.
    pub(super) fn new(ipc: IpcSocket, guest: Option<String>, is_rejection: bool) -> Worker {
        Worker {
            ipc: Arc::new(ipc),
            pid: None,
            files: None,
            nice: 0,
            guest,
            source: None,
            siblings: 1,
            memory: None,
            is_rejection,
            sessions: BTreeMap::new(),
            given: 0,
            has_certificates: false,
            since: Instant::now(),
            origin: None,
            quota_origin: None,
            link: None,
            has_had_session: false,
            is_paid: false,
            is_closing: false,
            must_be_killed: false,
            report: None,
            dumps: BTreeMap::new(),
        }
    }

    /// The guest for which the end of this worker counts.
    pub(super) fn guest_key(&self) -> Option<GuestKey> {
        let named = self.guest.clone().map(GuestKey::Named);
        named.or_else(|| self.quota_origin.clone().map(GuestKey::Origin))
    }

    /// The name of the guest, or who it is without one.
    pub(super) fn guest_or_source(&self) -> &str {
        let name = self.guest.as_ref().or(self.source.as_ref());
        name.map_or("-", String::as_str)
    }

    /// Whether another worker serves the same guest.
    pub(super) fn is_of_guest_of(&self, other: &Worker) -> bool {
        match (&self.guest, &other.guest) {
            (None, None) => self.source.is_some() && self.source == other.source,
            (own, guest) => own == guest,
        }
    }

    /// How long it is since the last report. `None` before the first one, for a worker that ends,
    /// and for one that only rejects a guest: these have limits of their own.
    pub(super) fn silent(&self) -> Option<Duration> {
        let (_, at) = self.report.as_ref()?;
        (!self.is_closing && !self.is_rejection).then(|| at.elapsed())
    }

    /// Asks the worker for a dump, which [`take_dump`](Worker::take_dump) returns later.
    pub(super) fn ask_for_dump(&mut self, number: u64) -> io::Result<()> {
        self.send(&Command::Dump { number }, None)?;
        self.dumps.insert(number, None);
        // Who has asked may have found the table locked, and takes no answer any more.
        while self.dumps.len() > MAX_DUMPS {
            self.dumps.pop_first();
        }
        Ok(())
    }

    /// The worker has answered. Without a question the answer is ignored.
    pub(super) fn answer_dump(&mut self, number: u64, text: String) {
        if let Some(answer) = self.dumps.get_mut(&number) {
            *answer = Some(text);
        }
    }

    /// Whether the worker has answered.
    pub(super) fn has_dump(&self, number: u64) -> bool {
        self.dumps.get(&number).is_some_and(Option::is_some)
    }

    /// Whether somebody waits for the worker's answer.
    #[cfg(test)]
    pub(super) fn waits_for_dump(&self) -> bool {
        self.dumps.values().any(Option::is_none)
    }

    /// The answer of the worker, if there is one. A later one is ignored.
    pub(super) fn take_dump(&mut self, number: u64) -> Option<String> {
        self.dumps.remove(&number).flatten()
    }

    pub(super) fn send(&self, command: &Command, socket: Option<&OwnedFd>) -> io::Result<()> {
        self.ipc.send(command, socket)
    }

    /// Tells the worker to end.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
        self.ipc.close();
    }

    /// Gives the worker a program of its guest, on the thread of the program's connection. Only a
    /// worker with a program over TCP gets the `certificates`, and so the private key.
    pub(super) fn give(
        &mut self,
        session: u64,
        UnassignedProgram {
            socket,
            peer,
            mut pending,
        }: UnassignedProgram,
        rejection: Option<Rejection>,
        certificates: Option<&OwnedFd>,
    ) -> io::Result<()> {
        if let (LinkKind::Tcp, false, Some(file)) = (peer.link, self.has_certificates, certificates)
        {
            self.send(&Command::Certificates, Some(file))?;
            self.has_certificates = true;
        }
        pending.leaves_its_thread();
        let command = Command::Serve {
            session,
            guest: self.guest.clone(),
            peer: peer.clone(),
            rejection,
        };
        self.send(&command, Some(&socket))?;
        if self.given == 0 {
            self.origin = Some(peer.origin());
            self.quota_origin = Some(peer.quota_origin());
            self.link = Some(peer.link);
        }
        self.given += 1;
        let program = Program {
            number: self.given,
            peer,
            pending: Some(pending),
        };
        self.sessions.insert(session, program);
        Ok(())
    }
}

impl Processes {
    /// Replaces the certificates of TCP links, also in the workers that have some. A worker that
    /// cannot be told is told to end.
    pub(super) fn set_certificates(&mut self, file: OwnedFd) {
        let has_some = |worker: &&mut Worker| worker.has_certificates && !worker.is_closing;
        for worker in self.workers.values_mut().filter(has_some) {
            if let Err(error) = worker.send(&Command::Certificates, Some(&file)) {
                error!(
                    guest = worker.guest,
                    "the worker cannot be sent new certificates, and ends: {error}"
                );
                worker.close();
            }
        }
        self.certificates = Some(file);
    }

    /// A worker that serves a guest and has room for another program, and the certificates of TCP
    /// links.
    pub(super) fn worker_of(&mut self, guest: &str) -> Option<(&mut Worker, Option<&OwnedFd>)> {
        let worker = self.workers.values_mut().find(|worker| {
            worker.guest.as_deref() == Some(guest)
                && !worker.is_closing
                && worker.sessions.len() < MAX_WORKER_SESSIONS
        });
        Some((worker?, self.certificates.as_ref()))
    }

    /// Whether a program of `guest` from `origin` has to wait, because enough programs of the guest
    /// there have been given to workers and have no session yet. A worker that has had no session
    /// counts until its process has ended.
    ///
    /// `is_tcp`: an address does not tell who its programs are. Those without a name wait, too,
    /// while others without a session have half of the processes that unnamed guests can have. If
    /// these are few, the limit is one more than that of an origin, so that none keeps out others,
    /// but at least one process is left for other links.
    pub(super) fn has_to_wait(&self, guest: Option<&str>, origin: &str, is_tcp: bool) -> bool {
        let all = self.places(guest);
        let of_one_origin = (all / 4).clamp(1, MAX_WORKER_HANDSHAKES);
        if guest.is_none() && is_tcp {
            let without_session = self.workers.values().filter(|worker| {
                let is_tcp = worker.link == Some(LinkKind::Tcp);
                let is_unnamed = worker.guest.is_none() && !worker.is_rejection;
                is_tcp && is_unnamed && !worker.has_had_session
            });
            let limit = (all / 2).max(of_one_origin + 1);
            let limit = limit.min(all.saturating_sub(1)).max(1);
            if without_session.count() >= limit {
                return true;
            }
        }
        // Another guest of the same origin has workers and a quota of its own.
        let own = self
            .workers
            .values()
            .filter(|w| w.guest.as_deref() == guest);
        let programs = own.clone().flat_map(|worker| worker.sessions.values());
        let pending = programs.filter(|program| program.pending.is_some());
        let pending = pending.filter(|p| p.peer.origin() == origin).count();
        let is_ending = |worker: &&Worker| {
            let is_of_origin = worker.origin.as_deref() == Some(origin);
            worker.sessions.is_empty() && !worker.has_had_session && is_of_origin
        };
        let ending = own.filter(is_ending).count();
        pending + ending >= of_one_origin
    }

    /// How long a program has to wait, because workers of its guest were killed and it needs a new
    /// one.
    pub(super) fn pause_after_kills(&mut self, guest: Option<&str>, peer: &Peer) -> Duration {
        if guest.is_some_and(|name| self.worker_of(name).is_some()) {
            return Duration::ZERO;
        }
        let named = guest.map(|name| GuestKey::Named(name.to_owned()));
        let key = named.unwrap_or_else(|| GuestKey::Origin(peer.quota_origin()));
        self.killed_guests.wait(&key, Instant::now())
    }

    /// How many programs can be served at once, of all guests like this one.
    fn places(&self, guest: Option<&str>) -> usize {
        match guest {
            Some(_) => self.partition.max_sessions,
            None => self.partition.max_unnamed.min(self.partition.max_sessions),
        }
    }

    /// Why an unnamed guest gets no other process, if its origin has as many as one may have. Where
    /// the memory is divided, a process has its part until it has ended.
    fn too_many_processes(&self, guest: Option<&str>, peer: &Peer) -> Option<Rejection> {
        if guest.is_some() || peer.source().is_none() {
            return None;
        }
        let origin = peer.quota_origin();
        let is_own = |worker: &&Worker| {
            let is_unnamed = worker.guest.is_none() && !worker.is_rejection;
            is_unnamed && worker.quota_origin.as_ref() == Some(&origin)
        };
        let own = self.workers.values().filter(is_own).count();
        let limit = self.partition.unnamed_programs;
        (own >= limit).then(|| Rejection::Rejected {
            reason: format!(
                "{origin} has {own} processes of unnamed guests here, its limit is {limit} \
                 (unnamed.programs)"
            ),
        })
    }

    /// Why a guest gets no other program, if it has its share of them.
    fn too_many(&self, guest: Option<&str>, peer: &Peer) -> Option<Rejection> {
        let source = peer.source();
        let is_own = |worker: &&Worker| worker.guest.as_deref() == guest && !worker.is_rejection;
        let sessions = self.workers.values().filter(is_own);
        let sessions = sessions.flat_map(|worker| worker.sessions.values());
        let own = match (guest, &source) {
            (Some(_), _) => sessions.count(),
            (None, Some(_)) => sessions.filter(|p| p.peer.source() == source).count(),
            (None, None) => return None,
        };
        let all = self.places(guest);
        let limit = sessions_of_one_guest(all);
        let name = guest.or(source.as_deref()).unwrap_or_default();
        (own >= limit && own < all).then(|| Rejection::Rejected {
            reason: format!(
                "guest {name} has {own} programs here, its limit is {limit}: three quarters of the \
                 {all} that can be served at once"
            ),
        })
    }

    /// Why there is no room for another program of a guest. `None`: there is room.
    pub(super) fn full(&self, guest: Option<&str>, peer: &Peer) -> Option<Rejection> {
        let served = self.workers.values().filter(|worker| !worker.is_rejection);
        let sessions = served.clone().map(|worker| worker.sessions.len()).sum();
        // A process holds its part of the memory until it has ended.
        let unnamed = served.filter(|worker| worker.guest.is_none()).count();
        let max_unnamed = self.partition.max_unnamed;
        if guest.is_none() && unnamed >= max_unnamed {
            return Some(Rejection::Full {
                sessions: unnamed,
                limit: max_unnamed,
            });
        }
        // The report of one worker has to fit into a packet.
        let own = self
            .workers
            .values()
            .filter(|worker| guest.is_some() && worker.guest.as_deref() == guest)
            .map(|worker| worker.sessions.len())
            .max();
        if let Some(own) = own.filter(|own| *own >= MAX_WORKER_SESSIONS) {
            return Some(Rejection::Full {
                sessions: own,
                limit: MAX_WORKER_SESSIONS,
            });
        }
        // A worker that does not end keeps its memory. Without this limit, a guest that has taken
        // its workers over would get its memory once more with each program.
        let ending = self.workers.values();
        let ending =
            ending.filter(|w| w.is_closing && guest.is_some() && w.guest.as_deref() == guest);
        let ending = ending.count();
        if ending >= MAX_ENDING {
            return Some(Rejection::Rejected {
                reason: format!(
                    "{ending} processes of this guest are ending, at most {MAX_ENDING} may: try \
                     again in some seconds"
                ),
            });
        }
        let too_many = self.too_many_processes(guest, peer);
        if let Some(rejection) = too_many.or_else(|| self.too_many(guest, peer)) {
            return Some(rejection);
        }
        let limit = self.partition.max_sessions;
        (sessions >= limit).then_some(Rejection::Full { sessions, limit })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::limits::Limits;
    use crate::policy::Policy;
    use crate::tenant_registry::Rules;

    /// Every program of this machine may connect from any address of its loopback interface, and
    /// gets no other process and quota by that.
    #[test]
    fn addresses_of_the_loopback_interface_have_the_processes_of_one_origin() {
        let partition = Partition {
            rules: Rules {
                guests: Vec::new(),
                unnamed: Some(Policy::default()),
                overcommit: true,
            },
            max_unnamed: 16,
            unnamed_programs: 2,
            max_sessions: 16,
        };
        let resources = Resources {
            engines: vec!["cpu".into()],
            unused_gpu: None,
            memory: Some(1 << 30),
        };
        let shared = SupervisorState::new(
            Box::new(|_| process::Command::new("true")),
            resources,
            partition,
            Limits::default().handshakes,
            Timeouts::default(),
        )
        .unwrap();
        let shared = Arc::new(shared);
        let from = |address: &str| Peer {
            address: Some(address.parse().unwrap()),
            ..Peer::new("test".into(), LinkKind::Tcp)
        };
        let mut theirs = Vec::new();
        for (session, address) in [(1, "127.0.0.1"), (2, "127.0.0.2")] {
            let peer = from(address);
            let pending = shared.handshakes.begin(session, &peer.origin(), None);
            let program = UnassignedProgram {
                socket: UnixStream::pair().unwrap().0.into(),
                peer,
                pending: pending.unwrap(),
            };
            let (ipc, their) = IpcSocket::pair().unwrap();
            theirs.push(their);
            let mut worker = Worker::new(ipc, None, false);
            let mut processes = shared.processes();
            let full = processes.full(None, &program.peer);
            assert!(full.is_none(), "{address}: {full:?}");
            worker.give(session, program, None, None).unwrap();
            processes.workers.insert(session, worker);
        }
        let mut processes = shared.processes();
        for address in ["127.0.0.1", "127.0.0.3", "127.255.0.9", "::1"] {
            // A process that was told to end has its memory until it has ended.
            processes.workers.values_mut().for_each(Worker::close);
            let Some(Rejection::Rejected { reason }) = processes.full(None, &from(address)) else {
                panic!("{address} gets another process");
            };
            let says = "tcp:loopback has 2 processes of unnamed guests here, its limit is 2";
            assert!(reason.contains(says), "{reason}");
        }
        assert!(processes.full(None, &from("10.0.0.1")).is_none());
    }

    /// A question whose connection is closed.
    fn note(
        answers: &mut VmAnswers,
        at: Instant,
        process: Option<i32>,
        answer: Result<(), ControlError>,
    ) {
        let open = None;
        answers.note(
            at,
            &mut QuestionOutcome {
                process,
                answer,
                open,
            },
        );
    }

    #[test]
    fn an_executor_is_silent_only_after_it_has_answered() {
        const LATE: fn() -> ControlError = || ControlError::Late { bytes: 0 };
        const BUSY: fn() -> ControlError = || ControlError::Busy {
            limit: Duration::ZERO,
        };
        const REFUSED: fn() -> ControlError =
            || ControlError::Socket(io::ErrorKind::ConnectionRefused.into());
        let mut answers = VmAnswers::default();
        for (step, (process, answer, is_silent)) in [
            // It starts.
            (None, Err(REFUSED()), false),
            (Some(1), Err(LATE()), false),
            (None, Err(BUSY()), false),
            (Some(1), Ok(()), false),
            // It falls mute, until too many clients wait.
            (Some(1), Err(LATE()), true),
            (None, Err(BUSY()), true),
            (Some(1), Ok(()), false),
            // Another one takes its place, and starts.
            (Some(1), Err(LATE()), true),
            (Some(2), Err(LATE()), false),
            (None, Err(BUSY()), false),
            (Some(2), Ok(()), false),
            (None, Err(BUSY()), true),
            // It ends.
            (None, Err(REFUSED()), false),
        ]
        .into_iter()
        .enumerate()
        {
            note(&mut answers, Instant::now(), process, answer);
            assert_eq!(answers.silent().is_some(), is_silent, "step {step}");
        }
        // From the first question on.
        let mut answers = VmAnswers::default();
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let mut note = |at, answer| note(&mut answers, at, Some(3), answer);
        note(now - 2 * minute, Ok(()));
        note(now - minute, Err(LATE()));
        note(now, Err(LATE()));
        let silent = answers.silent().expect("it is silent");
        assert!((minute..2 * minute).contains(&silent), "{silent:?}");
    }

    /// A question that was asked at `at`, and the executor's end of it.
    fn late(answers: &mut VmAnswers, at: Instant) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut asked = QuestionOutcome::<()> {
            process: Some(1),
            answer: Err(ControlError::Late { bytes: 0 }),
            open: Some(OpenQuestion::of(ours)),
        };
        answers.note(at, &mut asked);
        theirs
    }

    #[test]
    fn an_executor_that_answers_late_is_not_silent() {
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let mut answers = VmAnswers::default();
        note(&mut answers, now - 4 * minute, Some(1), Ok(()));
        let mut first = late(&mut answers, now - 3 * minute);
        let silent = answers.silent().expect("it has not answered yet");
        assert!(silent >= 3 * minute, "{silent:?}");
        first.write_all(b"{").unwrap();
        let second = late(&mut answers, now - 2 * minute);
        let silent = answers.silent().expect("it has not answered yet");
        assert!((2 * minute..3 * minute).contains(&silent), "{silent:?}");
        // The end of a connection is no answer, and the next question may have one.
        drop(second);
        let mut third = late(&mut answers, now - minute);
        let silent = answers.silent().expect("it has not answered yet");
        assert!(silent >= 2 * minute, "{silent:?}");
        third.write_all(b"{").unwrap();
        let _fourth = late(&mut answers, now);
        let silent = answers.silent().expect("it has not answered yet");
        assert!(silent < minute, "{silent:?}");
    }

    #[test]
    fn a_question_before_an_answered_one_says_nothing() {
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let mut answers = VmAnswers::default();
        note(&mut answers, now, Some(1), Ok(()));
        // Two threads ask, and the first one is not answered in time.
        let _question = late(&mut answers, now - minute);
        assert_eq!(answers.silent(), None);
        let _question = late(&mut answers, now);
        assert!(answers.silent().is_some());
    }
}
