//! The process that serves a virtual machine, as its supervisor sees it: start, restarts, end.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::SocketType;
use rustix::process::Pid;
use tracing::{error, warn};
use vgpu_transport::link::socket_file;

use super::ipc::IpcSocket;
use super::log_pipe::LogPipe;
use super::process::{ExitReason, spawn};
use super::state::{MakeMachine, Shared, VmProcess};
use super::vm_files::VmFiles;
use crate::control::StartingProcess;

/// Pause before the process of a virtual machine is started again: at first, and at most. Doubled
/// while processes end early.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// How often a thread that pauses checks for a shutdown.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long the process of a virtual machine that starts may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(100);

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

/// Starts the process of a virtual machine, as
/// [`Supervisor::start_vm`](super::Supervisor::start_vm) says.
pub(super) fn start(
    shared: &Arc<Shared>,
    name: &str,
    command: MakeMachine,
    socket: &Path,
    control: &Path,
) -> Result<(), StartVmError> {
    let id = shared.new_id();
    let mut files = VmFiles::new(name);
    let Some(mut process) = spawn_child(shared, id, name, &command, control, &files)? else {
        return Ok(()); // a shutdown
    };
    let start = Instant::now();
    // The process opens its sockets before it starts its engine, and answers when it serves.
    let mut starting = StartingProcess::default();
    while !starting.has_answered(control, ANSWER_TIMEOUT) {
        if let Some(status) = process.child.try_wait()? {
            shared.processes().machines.remove(&id);
            process.log.finish();
            return Err(StartVmError::Ended(status));
        }
        if start.elapsed() > shared.timeouts.ready {
            break; // The log of the process says why it does not listen.
        }
        thread::sleep(Duration::from_millis(10));
    }
    let (shared, name) = (Arc::clone(shared), name.to_owned());
    let (socket, control) = (socket.to_owned(), control.to_owned());
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
    shared: &Shared,
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
    // Locked until the process is in the list, so that a shutdown does not miss it.
    let mut processes = shared.processes();
    if shared.stop.is_set() {
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
    // `command` is dropped here, and with it the process's end of the socket.
    Ok(Some(RunningVm {
        child,
        log,
        ipc,
        files,
    }))
}

/// Waits for the end of the process of a virtual machine and starts the next one, until the
/// shutdown.
fn keep(
    shared: &Shared,
    id: u64,
    mut process: RunningVm,
    files: &mut VmFiles,
    name: &str,
    command: &MakeMachine,
    (socket, control): (&Path, &Path),
) {
    let mut pause = MIN_PAUSE;
    loop {
        let (pid, started) = (process.child.id(), Instant::now());
        files.receive(&process.ipc);
        let status = process.child.wait();
        process.log.finish();
        // The process could not remove its socket if it was killed.
        if let Err(error) = socket_file::remove_stale(socket, SocketType::STREAM) {
            warn!(vm = name, "the socket of its process stays: {error}");
        }
        // Between these two lines the kernel could give the pid to a new process, but it uses all
        // other pids first.
        shared.processes().machines.remove(&id);
        shared.changed.notify_all();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => error!(vm = name, pid, "its process {}", ExitReason(status)),
            Err(error) => error!(vm = name, pid, "cannot wait for its process: {error}"),
        }
        pause = match started.elapsed() > MAX_PAUSE {
            true => MIN_PAUSE,
            false => (pause * 2).min(MAX_PAUSE),
        };
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
                Err(error) => error!(vm = name, "its process cannot be started: {error}"),
            }
            pause = (pause * 2).min(MAX_PAUSE);
        };
        warn!(
            vm = name,
            pid = process.child.id(),
            "its process is started again, with {} files of the machine",
            process.files
        );
    }
}
