//! `vgpu fd-store`: keeps the file descriptors of virtual machines while an executor is replaced,
//! where there is no systemd.
//!
//! A QEMU connects to its device's server once. For an executor to be restarted under a running
//! virtual machine, another process has to keep the machine's memory, its doorbell and the socket
//! to its QEMU. This process does so with systemd's protocol: it receives file descriptors by
//! `NOTIFY_SOCKET` and `FDSTORE`, passes these on by `LISTEN_FDS`, and starts the executor again
//! when the executor has died, or has fallen silent (`WATCHDOG_USEC`). Below the supervisor of
//! `--isolate`, the standard input of the executor is in place of `NOTIFY_SOCKET`.

use std::cell::Cell;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use clap::Parser;
use command_fds::{CommandFdExt as _, FdMapping};
use rustix::fs::FileType;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use tempfile::TempDir;
use tracing::Level;
use vgpu_executor::isolate::{
    ALIVE_PERIOD, FileSupervisor, RestartPause, ThreadWatch, limit_executor_descriptors,
};
use vgpu_executor::{HangFinding, HangWatch, log_queue, raise_descriptors, sandbox, service};
use vgpu_transport::link::credentials::{self, PeerCredentials};

use crate::child_status;
use crate::error_text;
use crate::own_program::{OWN_PROGRAM, check_supervisor};
use crate::runtime_dir;

/// An executor that has said that it runs, and does not for so long, hangs and is killed: as in the
/// units of the package (`WatchdogSec=`).
const WATCHDOG: Duration = Duration::from_secs(60);

/// Most file descriptors that are kept: three per virtual machine.
const MAX_FDS: usize = 1024;

/// Number of the first passed file descriptor (`SD_LISTEN_FDS_START`).
const FIRST_FD: RawFd = 3;

/// How often the state of the executor is checked while it sends nothing.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Signals within this time of the first one count as one, as in `vgpu serve`.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// How long an executor may live on that was told a second time to end. Then it is killed.
const KILL_AFTER: Duration = Duration::from_secs(4);

/// Runs a command such as `vgpu serve`, restarts the command when it dies, and keeps the file
/// descriptors of virtual machines for it. Passes SIGTERM, SIGINT (as SIGTERM) and SIGHUP on.
///
/// Only file descriptors from the process of the command are kept, none from a process that the
/// command starts. Under systemd this command is not needed: FileDescriptorStoreMax= and Restart=
/// do the same.
#[derive(Parser)]
pub(crate) struct Args {
    /// Standard input is the socket of a supervisor of this version, which passes files of an
    /// earlier one, and is told of changes.
    #[arg(long, hide = true, value_name = "VERSION", require_equals = true)]
    supervised: Option<String>,

    /// Seconds after which an executor that has fallen silent is killed
    #[arg(long, hide = true, value_name = "SECONDS", default_value_t = WATCHDOG.as_secs())]
    watchdog: u64,

    /// The most threads of an executor: one that has more is killed
    #[arg(long, hide = true, value_name = "COUNT")]
    max_threads: Option<usize>,

    /// The command: vgpu serve --vm vm1,socket=/run/vgpu/vm1.sock
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Becomes the command, with `LISTEN_PID` and the other variables set. Only `vgpu fd-store` starts
/// this.
#[derive(Parser)]
pub(crate) struct ExecArgs {
    /// The names of the passed file descriptors, in the order of their numbers.
    #[arg(long = "fd-name", value_name = "NAME")]
    fd_names: Vec<String>,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    child_status::keep().context("the exit statuses of executors")?;
    // The files are those of all virtual machines: no other process of the user may open them in
    // /proc.
    sandbox::hide().context("the stored files cannot be kept from other processes")?;
    let mut signals = ReceivedSignals::catch()?;
    log_queue::start().context("no thread for the log")?;
    // Each file needs a descriptor here, and one of the same number in the executor, which inherits
    // the limit.
    raise_descriptors();
    // If the user is root, the executor has its capabilities again when it starts, for the groups
    // of its sockets: so no `no_new_privs` here.
    sandbox::drop_current_capabilities().context("the capabilities of this process")?;
    let (supervisor, mut stored) = match &args.supervised {
        Some(version) => {
            check_supervisor("fd-store", Some(version))?;
            let received = FileSupervisor::on_stdin();
            let (supervisor, files) = received.context("the files of the supervisor")?;
            (Some(supervisor), files)
        }
        None => (None, Vec::new()),
    };
    let mut socket = NotifySocket::open(supervisor)?;
    let mut pauses = match args.supervised {
        Some(_) => RestartPause::of_one_guest(),
        None => RestartPause::of_all_guests(),
    };
    let mut executor = Executor::new(Duration::from_secs(args.watchdog), args.max_threads);
    loop {
        let started = Instant::now();
        let mut child = match start(args, &mut socket, &stored) {
            Ok(child) => child,
            // A mistake in the command.
            Err(error) if stored.is_empty() => return Err(error),
            Err(error) => {
                let pause = pauses.after_failed_start();
                log(
                    Level::ERROR,
                    &format!(
                        "no executor can be started ({}); {} file descriptors are kept, the next \
                         attempt is made in {} ms",
                        error_text::one_line(&error),
                        stored.len(),
                        pause.as_millis()
                    ),
                );
                executor.end();
                match socket.rest(&mut executor, pause, &mut stored, &mut signals) {
                    true => return Ok(()),
                    false => continue,
                }
            }
        };
        // At once: the executor hides.
        executor.begin(child.id());
        log(
            Level::INFO,
            &format!("pid {} runs {}", child.id(), args.command.join(" ")),
        );
        let status = loop {
            socket.receive(&mut executor, &mut stored);
            if signals.take_dump_request() {
                log_state(&executor, &stored);
            }
            if executor.hangs(signals.is_told()) || executor.has_too_many_threads() {
                let _ = child.kill();
            }
            for signal in signals.take() {
                // The child has not been waited for, so the pid is its own.
                let _ = kill_process(Pid::from_child(&child), signal);
            }
            if signals.kill_is_due() {
                log(
                    Level::WARN,
                    &format!("pid {} does not end, and is killed", child.id()),
                );
                let _ = child.kill();
            }
            match child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => break Some(status),
                // There is no such child any more. The stored files are for the next one.
                Err(error) => {
                    log(Level::WARN, &format!("waiting for the executor: {error}"));
                    break None;
                }
            }
        };
        let is_success = status.is_some_and(|status| status.success());
        let status = status.map_or("an unknown status".to_owned(), |status| status.to_string());
        match after(is_success, signals.is_told(), stored.len()) {
            After::End => return Ok(()),
            After::Fail => return Err(anyhow!("{} ended with {status}", args.command[0])),
            After::Restart => {}
        }
        let pause = pauses.after(started.elapsed(), Instant::now());
        log(
            Level::WARN,
            &format!(
                "pid {} ended with {status}; {} file descriptors are kept, the next executor \
                 starts in \
             {} ms",
                child.id(),
                stored.len(),
                pause.as_millis()
            ),
        );
        executor.watch = None;
        if socket.rest(&mut executor, pause, &mut stored, &mut signals) {
            return Ok(());
        }
    }
}

/// The executor, as this process sees it.
struct Executor {
    /// The silence after which it hangs.
    limit: Duration,
    /// 0: there is none.
    pid: u32,
    since: Option<Instant>,
    /// How many were started.
    starts: u64,
    /// Once the executor has said that it runs.
    watch: Option<HangWatch>,
    /// The most threads of an executor. `None`: any number.
    max_threads: Option<usize>,
    threads: Option<ThreadWatch>,
    /// Whether the executor is to be killed since nobody can count its threads.
    is_unwatched: bool,
}

impl Executor {
    /// None yet.
    fn new(limit: Duration, max_threads: Option<usize>) -> Executor {
        Executor {
            limit,
            pid: 0,
            since: None,
            starts: 0,
            watch: None,
            max_threads,
            threads: None,
            is_unwatched: false,
        }
    }

    /// The executor has been started. It hides later, and its threads can be counted then, too.
    fn begin(&mut self, pid: u32) {
        (self.pid, self.since, self.watch) = (pid, Some(Instant::now()), None);
        self.starts += 1;
        (self.threads, self.is_unwatched) = (None, false);
        let Some(max) = self.max_threads else { return };
        match ThreadWatch::begin(pid, max) {
            Ok(threads) => self.threads = Some(threads),
            Err(error) => {
                let line = format!(
                    "the threads of pid {pid} cannot be counted: {error}; it is killed, and the \
                     next executor gets the files"
                );
                log(Level::ERROR, &line);
                self.is_unwatched = true;
            }
        }
    }

    /// There is none.
    fn end(&mut self) {
        (self.pid, self.since, self.watch) = (0, None, None);
        self.threads = None;
    }

    /// Whether the executor is to be killed, because it has too many threads, or nobody can count
    /// them.
    fn has_too_many_threads(&mut self) -> bool {
        if std::mem::take(&mut self.is_unwatched) {
            return true;
        }
        let Some((count, max)) = self.threads.as_mut().and_then(ThreadWatch::look) else {
            return false;
        };
        let line = format!(
            "pid {} has {count} threads, its limit is {max}, and is killed: the next executor \
             gets the files",
            self.pid
        );
        log(Level::ERROR, &line);
        self.threads = None;
        true
    }

    /// The executor says that it runs.
    fn alive(&mut self) {
        let limit = Some(self.limit);
        let watch = self.watch.get_or_insert_with(|| HangWatch::new(limit));
        watch.reported();
    }

    /// Whether the executor is to be killed, because it has fallen silent. An executor that was
    /// told to end need not say any more that it runs.
    fn hangs(&mut self, is_told: bool) -> bool {
        let found = self.watch.as_mut().and_then(HangWatch::look);
        match found {
            None => false,
            _ if is_told => false,
            Some(HangFinding::Notice(silent)) => {
                let line = format!("pid {} has not run for {silent:.0?}", self.pid);
                log(Level::WARN, &line);
                false
            }
            Some(HangFinding::Hangs(silent)) => {
                let line = format!(
                    "pid {} has not run for {silent:.0?}, and is killed: the next executor gets \
                     the files",
                    self.pid
                );
                log(Level::ERROR, &line);
                self.watch = None;
                true
            }
        }
    }
}

/// What this process does, for people.
fn state(executor: &Executor, stored: &[(String, OwnedFd)]) -> String {
    let names: Vec<&str> = stored.iter().map(|(name, _)| name.as_str()).collect();
    let files = match names[..] {
        [] => "no files".into(),
        _ => format!("{} files: {}", names.len(), names.join(", ")),
    };
    let runs = match executor.since {
        Some(since) => format!(
            "executor {}, start {}, {:.1?} ago",
            executor.pid,
            executor.starts,
            since.elapsed()
        ),
        None => "no executor runs".into(),
    };
    format!(
        "vgpu fd-store, process {}: {runs}; keeps {files}",
        std::process::id()
    )
}

fn log_state(executor: &Executor, stored: &[(String, OwnedFd)]) {
    log_queue::write_line(Level::INFO, &format!("dump: {}", state(executor, stored)));
}

/// Writes the state into the pipe of an executor that asks. A guest may have taken it over: what is
/// no pipe could make this process wait, and so could a pipe whose flags the executor changes
/// meanwhile. So the state goes into a pipe of this process, and from there without waiting, which
/// is a flag of this one call.
fn answer(pipe: &OwnedFd, state: &str) {
    let is_pipe = rustix::fs::fstat(pipe)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    if !is_pipe {
        return;
    }
    let Ok((ours, end)) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK) else {
        return;
    };
    // What does not fit is left out.
    if let Ok(len) = rustix::io::write(&end, state.as_bytes()) {
        let _ = splice(&ours, None, pipe, None, len, SpliceFlags::NONBLOCK);
    }
}

/// The signals that this process receives.
struct ReceivedSignals {
    signals: Signals,
    /// When this process was told to end.
    told: Option<Instant>,
    /// When the executor is killed: this process was told twice to end.
    kill_at: Option<Instant>,
    /// Somebody has asked for the state of this process.
    is_dump_wanted: bool,
}

impl ReceivedSignals {
    /// Catches the signals from now on. SIGUSR1 asks for a dump of this process, since the executor
    /// may be one that SIGUSR1 ends. This signal and SIGQUIT, sent to all processes of a unit or a
    /// terminal, must not end a process that keeps files. No signal is ignored: the executor would
    /// inherit that.
    fn catch() -> anyhow::Result<ReceivedSignals> {
        let signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1]);
        Ok(ReceivedSignals {
            signals: signals.context("signals cannot be caught")?,
            told: None,
            kill_at: None,
            is_dump_wanted: false,
        })
    }

    /// Whether SIGUSR1 has come since the last call, as of the last call of
    /// [`take`](ReceivedSignals::take).
    fn take_dump_request(&mut self) -> bool {
        std::mem::take(&mut self.is_dump_wanted)
    }

    /// The signals since the last call that the executor is to receive, too.
    fn take(&mut self) -> Vec<Signal> {
        let mut signals = Vec::new();
        for number in self.signals.pending() {
            match number {
                SIGTERM | SIGINT => {
                    let now = Instant::now();
                    let told = *self.told.get_or_insert(now);
                    if now.duration_since(told) >= SAME_SIGNAL && self.kill_at.is_none() {
                        self.kill_at = Some(now + KILL_AFTER);
                    }
                    signals.push(Signal::TERM);
                }
                SIGHUP => signals.push(Signal::HUP),
                SIGUSR1 => self.is_dump_wanted = true,
                _ => {}
            }
        }
        signals
    }

    /// Whether this process was told to end.
    fn is_told(&self) -> bool {
        self.told.is_some()
    }

    /// Whether the executor is to be killed now. True once.
    fn kill_is_due(&mut self) -> bool {
        let now = Instant::now();
        self.kill_at.take_if(|at| *at <= now).is_some()
    }
}

/// What follows the end of the executor.
#[derive(Debug, PartialEq, Eq)]
enum After {
    /// This process ends with success.
    End,
    /// This process ends with a failure.
    Fail,
    /// The next executor gets the files.
    Restart,
}

/// What follows an executor that has ended, with success or not, after this process was told to end
/// or not, with so many stored files. As long as a virtual machine depends on files, only a signal
/// ends this process.
fn after(is_success: bool, is_told: bool, files: usize) -> After {
    match (is_success, is_told) {
        (true, true) => After::End,
        (false, true) => After::Fail,
        (true, false) if files == 0 => After::End,
        (_, false) => After::Restart,
    }
}

/// Writes a line to the log. A line that cannot be written (a full disk, a pipe that nobody reads)
/// is lost: this process must neither end nor wait for it.
fn log(level: Level, line: &str) {
    log_queue::write_line(level, &format!("vgpu fd-store: {line}"));
}

fn start(
    args: &Args,
    socket: &mut NotifySocket,
    stored: &[(String, OwnedFd)],
) -> anyhow::Result<Child> {
    // The running program itself, even if an upgrade has replaced or removed its file: `exec` must
    // understand the arguments. The command can be that of the new version.
    let mut exec = Command::new(OWN_PROGRAM);
    exec.arg0("vgpu").arg("fd-store-exec");
    let mut mappings = Vec::new();
    for ((name, fd), child_fd) in stored.iter().zip(FIRST_FD..) {
        exec.arg(format!("--fd-name={name}"));
        let parent_fd = fd.try_clone().context("duplicating a file descriptor")?;
        mappings.push(FdMapping {
            parent_fd,
            child_fd,
        });
    }
    exec.fd_mappings(mappings)
        .context("passing file descriptors on")?;
    match &socket.folder {
        Some(folder) => exec
            .env("NOTIFY_SOCKET", folder.path().join("notify"))
            .env_remove(service::FD_STORE_ON_STDIN),
        // The executor of a guest must not reach the socket of the supervisor.
        None => exec
            .stdin(socket.renew()?)
            .env(service::FD_STORE_ON_STDIN, "1")
            .env_remove("NOTIFY_SOCKET"),
    };
    exec.arg("--")
        .args(&args.command)
        .env("WATCHDOG_USEC", (args.watchdog * 1_000_000).to_string())
        .env(service::FD_STORE_PID, std::process::id().to_string())
        .spawn()
        .with_context(|| format!("starting {}", args.command[0]))
}

pub(crate) fn exec(args: &ExecArgs) -> anyhow::Result<()> {
    // The executor ends with the process that keeps its file descriptors.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .context("asking for a signal at the end of vgpu fd-store")?;
    // Below a supervisor, the executor is the process of a guest.
    if std::env::var_os(service::FD_STORE_ON_STDIN).is_some() {
        limit_executor_descriptors().context("limiting the descriptors of the executor")?;
    }
    let mut command = Command::new(&args.command[0]);
    if args.command[0] == OWN_PROGRAM {
        command.arg0("vgpu");
    }
    // An empty text would be one name, and there is no file: the executor would warn of that.
    match args.fd_names.is_empty() {
        true => command.env_remove("LISTEN_FDNAMES"),
        false => command.env("LISTEN_FDNAMES", args.fd_names.join(":")),
    };
    let error = command
        .args(&args.command[1..])
        .env("LISTEN_PID", std::process::id().to_string())
        .env("WATCHDOG_PID", std::process::id().to_string())
        .env("LISTEN_FDS", args.fd_names.len().to_string())
        .env("FDSTORE", MAX_FDS.to_string())
        .exec();
    Err(anyhow!("{}: {error}", args.command[0]))
}

/// The socket by which the executor says which file descriptors to keep.
struct NotifySocket {
    socket: OwnedFd,
    /// The folder of the socket, which is for this user only. `None` below a supervisor: the socket
    /// is one of a pair, and each executor gets the other one of a new pair as its standard input.
    /// The executor of a virtual machine therefore needs no system call that makes or connects a
    /// socket, and no datagram socket, which can send to any address. A message on a socket of this
    /// type has the other one as its only receiver.
    folder: Option<TempDir>,
    /// Told of changes, and that this process runs.
    supervisor: Option<FileSupervisor>,
    /// When the supervisor was told last that this process runs.
    told: Cell<Option<Instant>>,
}

impl NotifySocket {
    fn open(supervisor: Option<FileSupervisor>) -> anyhow::Result<NotifySocket> {
        let (socket, folder) = match supervisor {
            // Closed on the other side: no executor has it.
            Some(_) => (pair()?.0, None),
            None => {
                let folder = runtime_dir::create("vgpu-fd-store-")?;
                let path = folder.path().join("notify");
                let socket = UnixDatagram::bind(&path)
                    .with_context(|| format!("listening at {}", path.display()))?;
                (socket.into(), Some(folder))
            }
        };
        prepare(&socket)?;
        Ok(NotifySocket {
            socket,
            folder,
            supervisor,
            told: Cell::new(None),
        })
    }

    /// Makes a new pair, and returns the socket for the next executor.
    fn renew(&mut self) -> anyhow::Result<OwnedFd> {
        let (ours, theirs) = pair()?;
        prepare(&ours)?;
        self.socket = ours;
        Ok(theirs)
    }

    /// Tells the supervisor, if there is one, that this process runs, with this executor.
    fn alive(&self, executor: u32) {
        let is_due = { self.told.get() }.is_none_or(|told| told.elapsed() >= ALIVE_PERIOD);
        if let (Some(supervisor), true) = (&self.supervisor, is_due) {
            self.told.set(Some(Instant::now()));
            // A supervisor that does not read is told again.
            let _ = supervisor.alive(executor);
        }
    }

    /// Waits for `pause`, or until this process is told to end, and receives what the dead executor
    /// has sent. Returns whether this process is to end.
    fn rest(
        &self,
        executor: &mut Executor,
        pause: Duration,
        stored: &mut Vec<(String, OwnedFd)>,
        signals: &mut ReceivedSignals,
    ) -> bool {
        let until = Instant::now() + pause;
        loop {
            // The next executor reads the configuration again, so no SIGHUP is kept for it.
            signals.take();
            if signals.take_dump_request() {
                log_state(executor, stored);
            }
            if signals.is_told() || Instant::now() >= until {
                return signals.is_told();
            }
            self.receive(executor, stored);
        }
    }

    /// Waits up to [`POLL_INTERVAL`] for a message, and carries it out if the process `executor`
    /// has sent it. A failure is logged: it must not end a process that keeps file descriptors.
    fn receive(&self, executor: &mut Executor, stored: &mut Vec<(String, OwnedFd)>) {
        self.alive(executor.pid);
        let mut bytes = [0; 4096];
        let got = match credentials::receive(&self.socket, &mut bytes) {
            // The executor has closed its socket, of a pair. An empty message has a sender.
            Ok(got) if got.bytes == 0 && got.sender.is_none() => {
                std::thread::sleep(POLL_INTERVAL);
                return;
            }
            Ok(got) => got,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return;
            }
            Err(error) => {
                log(
                    Level::ERROR,
                    &format!("receiving from the executor: {error}"),
                );
                std::thread::sleep(POLL_INTERVAL);
                return;
            }
        };
        match is_from(executor.pid, got.sender) {
            true => {
                let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
                for line in text.lines() {
                    match line {
                        "READY=1" | "WATCHDOG=1" => executor.alive(),
                        "STOPPING=1" => executor.watch = None,
                        _ => {}
                    }
                }
                if text == service::FD_STORE_QUESTION {
                    if let Some(pipe) = &got.file {
                        answer(pipe, &state(executor, stored));
                    }
                    return;
                }
                if let Some(change) = apply(&text, got.file, stored) {
                    self.report(&change, stored);
                }
            }
            false => log(
                Level::WARN,
                &format!(
                    "a message of another process than pid {} is ignored: {:?}",
                    executor.pid, got.sender
                ),
            ),
        }
    }

    /// Tells the supervisor, if there is one, what has changed.
    fn report(&self, change: &Change, stored: &[(String, OwnedFd)]) {
        let (Change::Stored(name) | Change::Removed(name) | Change::Refused(name)) = change;
        if matches!(change, Change::Refused(_)) {
            log(
                Level::WARN,
                &format!(
                    "{name} is not kept, {MAX_FDS} other file descriptors are: when the executor \
                     ends, \
                 the virtual machine has no vGPU until its QEMU is started again"
                ),
            );
        }
        let Some(supervisor) = &self.supervisor else {
            return;
        };
        let file = stored.iter().find(|(known, _)| known == name);
        let told = match file {
            Some((name, file)) => supervisor.store(name, file),
            None => supervisor.remove(name),
        };
        if let Err(error) = told {
            log(
                Level::ERROR,
                &format!("the supervisor cannot be told of {name}: {error}"),
            );
        }
    }
}

/// A pair of sockets that keep messages apart.
fn pair() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).context("a pair of sockets")
}

/// Messages at `socket` have their senders, and are waited for no longer than [`POLL_INTERVAL`].
fn prepare(socket: impl AsFd) -> anyhow::Result<()> {
    sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(POLL_INTERVAL))
        .context("preparing the socket")?;
    credentials::report_senders(&socket).context("asking for the senders of messages")
}

/// What a message has changed: the file of this name.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    Stored(String),
    Removed(String),
    /// There are [`MAX_FDS`] others. An earlier file of the name is not kept any more.
    Refused(String),
}

/// Whether a message is from the executor: from its process, and from this user. Another process of
/// this user could exchange the file descriptors of a virtual machine.
fn is_from(executor: u32, sender: Option<PeerCredentials>) -> bool {
    sender.is_some_and(|sender| {
        u32::try_from(sender.pid).is_ok_and(|pid| pid == executor)
            && sender.uid == rustix::process::geteuid().as_raw()
    })
}

/// Carries out a message with `FDSTORE` or `FDSTOREREMOVE`. Ignores all others.
fn apply<F>(text: &str, fd: Option<F>, stored: &mut Vec<(String, F)>) -> Option<Change> {
    let value = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    };
    let name = value("FDNAME").unwrap_or("stored").to_owned();
    if value("FDSTOREREMOVE") == Some("1") {
        stored.retain(|(known, _)| *known != name);
        return Some(Change::Removed(name));
    }
    let fd = fd.filter(|_| value("FDSTORE") == Some("1"))?;
    stored.retain(|(known, _)| *known != name);
    if stored.len() >= MAX_FDS {
        return Some(Change::Refused(name));
    }
    stored.push((name.clone(), fd));
    Some(Change::Stored(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neither a pipe that is full nor a file that is no pipe makes this process wait.
    #[test]
    fn an_answer_waits_for_nobody() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        answer(&write, "the state");
        let mut bytes = [0; 64];
        let len = rustix::io::read(&read, &mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"the state");

        // Full, and set to wait.
        rustix::io::ioctl_fionbio(&write, true).unwrap();
        while rustix::io::write(&write, &[7; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&write, false).unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        let full = write.try_clone().unwrap();
        std::thread::spawn(move || {
            answer(&full, &"x".repeat(200_000));
            answer(&tempfile::tempfile().unwrap().into(), "no pipe");
            done.send(()).unwrap();
        });
        let waited = is_done.recv_timeout(Duration::from_secs(60));
        assert!(waited.is_ok(), "it waits for a reader");
        drop(read);
        answer(&write, "nobody reads");
    }

    #[test]
    fn fds_of_other_processes_are_not_stored() {
        let socket = NotifySocket::open(None).unwrap();
        let path = socket.folder.as_ref().unwrap().path().join("notify");
        let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        let mut stored = Vec::new();
        let mut send = |pid: u32| {
            let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            let text = b"FDSTORE=1\nFDNAME=a\n";
            vgpu_transport::link::scm_rights::send_to(&sender, &address, text, &[file.as_fd()])
                .unwrap();
            let mut executor = Executor::new(WATCHDOG, None);
            executor.begin(pid);
            socket.receive(&mut executor, &mut stored);
            stored.len()
        };
        // To the store of another executor, this process is any process of the user.
        assert_eq!(send(std::process::id() + 1), 0);
        assert_eq!(send(std::process::id()), 1);
        let own = PeerCredentials {
            pid: 7,
            uid: rustix::process::geteuid().as_raw(),
            gid: 0,
        };
        assert!(is_from(7, Some(own)));
        let other_user = PeerCredentials {
            uid: own.uid + 1,
            ..own
        };
        assert!(!is_from(7, Some(other_user)) && !is_from(7, None));
        // A process in another PID namespace.
        assert!(!is_from(7, Some(PeerCredentials { pid: 0, ..own })));
    }

    #[test]
    fn process_with_files_ends_when_told_only() {
        assert_eq!(after(true, false, 0), After::End);
        assert_eq!(after(true, false, 3), After::Restart);
        for files in [0, 3] {
            assert_eq!(after(false, false, files), After::Restart);
            assert_eq!(after(true, true, files), After::End);
            assert_eq!(after(false, true, files), After::Fail);
        }
    }

    #[test]
    fn fds_are_stored_by_name() {
        let mut stored = Vec::new();
        apply("READY=1\n", None, &mut stored);
        apply("FDSTORE=1\nFDNAME=a\n", Some(1), &mut stored);
        let change = apply("FDSTORE=1\nFDNAME=b\nFDPOLL=0\n", Some(2), &mut stored);
        assert_eq!(change, Some(Change::Stored("b".into())));
        apply("FDSTORE=1\nFDNAME=a\n", Some(3), &mut stored);
        assert_eq!(apply("FDSTORE=1\nFDNAME=c\n", None, &mut stored), None);
        assert_eq!(stored, [("b".to_owned(), 2), ("a".to_owned(), 3)]);
        apply("FDSTOREREMOVE=1\nFDNAME=b\n", None, &mut stored);
        assert_eq!(stored, [("a".to_owned(), 3)]);
        // No more than the executor is told.
        for number in 1..MAX_FDS {
            let text = format!("FDSTORE=1\nFDNAME=n{number}\n");
            let change = apply(&text, Some(0), &mut stored);
            assert_eq!(change, Some(Change::Stored(format!("n{number}"))));
        }
        let change = apply("FDSTORE=1\nFDNAME=more\n", Some(0), &mut stored);
        assert_eq!(change, Some(Change::Refused("more".into())));
        let change = apply("FDSTORE=1\nFDNAME=a\n", Some(0), &mut stored);
        assert_eq!(change, Some(Change::Stored("a".into())));
        assert_eq!(stored.len(), MAX_FDS);
    }
}
