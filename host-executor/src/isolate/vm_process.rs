//! The process that serves a virtual machine, as its supervisor sees it: start, restarts, end.
#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::SocketType;
use rustix::process::{Pid, Signal, kill_process};
use tracing::{error, warn};
use vgpu_transport::link::socket_file;

use super::ipc::IpcSocket;
use super::log_pipe::LogPipe;
use super::process::{Descriptors, ExitReason, spawn};
use super::restart_limit::RestartPause;
use super::state::{MakeMachine, SupervisorState, VmAnswers, VmProcess};
use super::vm_files::{FilesEnd, VmFiles};
use crate::control::StartingProcess;

/// How often a thread that pauses checks for a shutdown.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long one of the processes that start is waited for, before the next one.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(10);

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

/// The process of a virtual machine that may not serve yet.
pub(super) struct StartingVm {
    id: u64,
    name: String,
    command: MakeMachine,
    socket: PathBuf,
    control: PathBuf,
    files: VmFiles,
    process: RunningVm,
    asked: StartingProcess,
    is_ready: bool,
}

/// Starts the process of a virtual machine, as
/// [`Supervisor::start_vm`](super::Supervisor::start_vm) says. `None` during a shutdown.
pub(super) fn start(
    shared: &SupervisorState,
    name: &str,
    command: MakeMachine,
    socket: &Path,
    control: &Path,
) -> io::Result<Option<StartingVm>> {
    let id = shared.new_id();
    let files = VmFiles::new(name);
    let process = spawn_child(shared, id, name, &command, control, &files)?;
    Ok(process.map(|process| StartingVm {
        id,
        name: name.into(),
        command,
        socket: socket.into(),
        control: control.into(),
        files,
        process,
        asked: StartingProcess::default(),
        is_ready: false,
    }))
}

/// Waits until all of the processes serve, for one time limit together, and watches them from then
/// on. After an error the others are watched all the same, so that a shutdown ends them.
///
/// # Errors
/// The name of a virtual machine whose process has ended, or for which there is no thread.
pub(super) fn wait_until_ready(
    shared: &Arc<SupervisorState>,
    mut starting: Vec<StartingVm>,
) -> Result<(), (String, StartVmError)> {
    let start = Instant::now();
    let first = loop {
        let failed = starting.iter_mut().position(|vm| !vm.may_get_ready());
        if let Some(at) = failed {
            let vm = starting.swap_remove(at);
            break Err(vm.fail(shared));
        }
        // The log of a process that takes longer says why it does not listen.
        if starting.iter().all(|vm| vm.is_ready) || start.elapsed() > shared.timeouts.ready {
            break Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    };
    first.and(watch_all(shared, starting))
}

impl StartingVm {
    /// Looks whether the process serves. Returns whether it does, or may do so later.
    ///
    /// The processes open their sockets before they start their engines, and answer when they
    /// serve.
    fn may_get_ready(&mut self) -> bool {
        if !self.is_ready {
            self.is_ready = self.asked.has_answered(&self.control, ANSWER_TIMEOUT);
        }
        self.is_ready || matches!(self.process.child.try_wait(), Ok(None))
    }

    /// The process does not serve, and cannot be waited for any more. Says why.
    fn fail(mut self, shared: &SupervisorState) -> (String, StartVmError) {
        let ended = self.process.child.wait();
        shared.processes().machines.remove(&self.id);
        shared.changed.notify_all();
        self.process.log.finish();
        (
            self.name,
            ended.map_or_else(StartVmError::Start, StartVmError::Ended),
        )
    }
}

/// Watches the processes of virtual machines from now on.
///
/// # Errors
/// The name of the first virtual machine for which there is no thread. Its process has been killed.
pub(super) fn watch_all(
    shared: &Arc<SupervisorState>,
    starting: Vec<StartingVm>,
) -> Result<(), (String, StartVmError)> {
    let mut first = Ok(());
    for vm in starting {
        let (id, name, pid) = (vm.id, vm.name.clone(), Pid::from_child(&vm.process.child));
        if let Err(error) = watch(shared, vm) {
            // Nobody has waited for the process, so the pid is its own.
            let _ = kill_process(pid, Signal::KILL);
            shared.processes().machines.remove(&id);
            shared.changed.notify_all();
            first = first.and(Err((name, StartVmError::Start(error))));
        }
    }
    first
}

/// Watches the process of a virtual machine on a thread of its own.
fn watch(shared: &Arc<SupervisorState>, vm: StartingVm) -> io::Result<()> {
    let StartingVm {
        id,
        name,
        command,
        socket,
        control,
        mut files,
        process,
        ..
    } = vm;
    let shared = Arc::clone(shared);
    thread::Builder::new()
        .name(format!("vgpu-vm-{name}"))
        .spawn(move || {
            let paths = (socket.as_path(), control.as_path());
            keep(&shared, id, process, &mut files, &name, &command, paths);
        })?;
    Ok(())
}

/// A running process of a virtual machine.
struct RunningVm {
    child: Child,
    log: LogPipe,
    /// The connection by which the process says what becomes of the machine's files.
    ipc: IpcSocket,
    /// How many files the process has got at its start.
    files: usize,
}

/// Starts the process of a virtual machine, passes `files` to it, and adds it to the list. `None`
/// during a shutdown.
fn spawn_child(
    shared: &SupervisorState,
    id: u64,
    name: &str,
    command: &MakeMachine,
    control: &Path,
    files: &VmFiles,
) -> io::Result<Option<RunningVm>> {
    let (ipc, theirs) = IpcSocket::pair()?;
    let files = files.pass(&ipc)?;
    let mut command = command();
    command
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    // Not locked: a start waits until the new process has loaded its program.
    let nice = shared.processes().partition.nice(Some(name), 1);
    let mut child = spawn(&mut command, nice, Descriptors::OfFdStore)?;
    let mut processes = shared.processes();
    // A shutdown that begins from now on finds the process in the list.
    if shared.stop.is_set() {
        drop(processes);
        child.kill()?;
        child.wait()?;
        return Ok(None);
    }
    let log = LogPipe::start(child.stderr.take(), format!("virtual machine {name}"), None);
    let machine = VmProcess {
        name: name.into(),
        pid: Pid::from_child(&child),
        control: control.into(),
        answers: VmAnswers::default(),
        told: shared.drain.changes_of_new(),
        untold: None,
        report: None,
    };
    processes.machines.insert(id, machine);
    // `command` is dropped here, and with it the process's end of the socket.
    Ok(Some(RunningVm {
        child,
        log,
        ipc,
        files,
    }))
}

/// Kills a `vgpu fd-store` that hangs, and its executor, which SIGTERM may not end.
fn kill(executor: Option<u32>, child: &mut Child) {
    // Its parent has said a moment before it hung that this is its child, and takes no status
    // since: the number belongs to no other process.
    let executor = executor.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    if let Some(executor) = executor {
        let _ = kill_process(executor, Signal::KILL);
    }
    // Fails if it has ended.
    let _ = child.kill();
}

/// Waits for the end of the process of a virtual machine and starts the next one, until the
/// shutdown.
fn keep(
    shared: &SupervisorState,
    id: u64,
    mut process: RunningVm,
    files: &mut VmFiles,
    name: &str,
    command: &MakeMachine,
    (socket, control): (&Path, &Path),
) {
    let mut pauses = RestartPause::of_one_guest();
    loop {
        let (pid, started) = (process.child.id(), Instant::now());
        let limit = shared.hang_limit.get().copied();
        if files.receive(&process.ipc, limit) == FilesEnd::Hangs {
            kill(files.executor(), &mut process.child);
        }
        let status = process.child.wait();
        process.log.finish();
        // The process could not remove its socket if it was killed.
        if let Err(error) = socket_file::remove_stale(socket, SocketType::STREAM) {
            warn!(
                vm = name,
                "the socket of the machine's process stays: {error}"
            );
        }
        // Between these two lines the kernel could give the pid to a new process, but it uses all
        // other pids first.
        shared.processes().machines.remove(&id);
        shared.changed.notify_all();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => error!(
                vm = name,
                pid,
                "the machine's process {}",
                ExitReason(status)
            ),
            Err(error) => error!(
                vm = name,
                pid, "cannot wait for the machine's process: {error}"
            ),
        }
        let mut pause = pauses.after(started.elapsed(), Instant::now());
        process = loop {
            let until = Instant::now() + pause;
            while Instant::now() < until {
                if shared.stop.is_set() {
                    return;
                }
                thread::sleep(POLL_INTERVAL);
            }
            match spawn_child(shared, id, name, command, control, files) {
                Ok(Some(process)) => break process,
                Ok(None) => return,
                Err(error) => error!(
                    vm = name,
                    "the machine's process cannot be started: {error}"
                ),
            }
            pause = pauses.after_failed_start();
        };
        warn!(
            vm = name,
            pid = process.child.id(),
            "the machine's process is started again, with {} of its files",
            process.files
        );
    }
}
