//! A `vgpu serve` process for a test.
#![allow(dead_code)] // each test binary uses its part

pub(crate) mod program;
pub(crate) mod site;
pub(crate) mod workers;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use vgpu_transport::link::unix::connect;

use crate::common::{Guest, TIMEOUT};

/// A directory of one test, which other users can read.
pub(crate) struct Scratch(TempDir);

impl Scratch {
    pub(crate) fn new(test: &str) -> Scratch {
        let folder = tempfile::Builder::new()
            .prefix(&format!("vgpu-{test}-"))
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir();
        Scratch(folder.expect("a new directory"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path().join("vgpu.sock")
    }
}

/// The command under test. `serve` gets the CPU engine if the test names none: by default, a
/// machine with a GPU has another one.
pub(crate) fn vgpu(arguments: &[&str]) -> Command {
    vgpu_at(Path::new(env!("CARGO_BIN_EXE_vgpu")), arguments)
}

/// As [`vgpu`], of a copy of the program.
fn vgpu_at(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    let mut arguments = arguments.to_vec();
    let names_engine = arguments.iter().any(|one| one.starts_with("--engine"));
    let serve = arguments.iter().position(|one| *one == "serve");
    if let Some(at) = serve.filter(|_| !names_engine) {
        arguments.splice(at + 1..at + 1, ["--engine", "cpu"]);
    }
    command
        .args(arguments)
        .env_remove("VGPU_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A running `vgpu serve`.
pub(crate) struct Serve {
    pub(crate) child: Child,
    pub(crate) ready: String,
}

impl Serve {
    pub(crate) fn start(socket: &Path, more: &[&str]) -> Serve {
        let program = Path::new(env!("CARGO_BIN_EXE_vgpu"));
        Serve::of(Serve::command_of(program, socket, more))
    }

    /// The command of [`start`](Serve::start), of a copy of the program.
    pub(crate) fn command_of(program: &Path, socket: &Path, more: &[&str]) -> Command {
        let endpoint = format!("unix:{}", socket.display());
        let mut arguments = vec![
            "serve",
            "--listen",
            &endpoint,
            "--threads",
            "1",
            "--memory",
            "64M",
        ];
        arguments.extend(more);
        vgpu_at(program, &arguments)
    }

    /// Starts a command that serves, and waits until it is ready.
    pub(crate) fn of(command: Command) -> Serve {
        Serve::with_stdin(command, Stdio::null())
    }

    /// As [`of`](Serve::of), with something as standard input.
    pub(crate) fn with_stdin(mut command: Command, stdin: Stdio) -> Serve {
        command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let mut ready = String::new();
        let stdout = child.stdout.as_mut().expect("piped");
        BufReader::new(stdout)
            .read_line(&mut ready)
            .expect("a line");
        Serve { child, ready }
    }

    /// A guest that has not sent HELLO.
    pub(crate) fn connect(&self, socket: &Path) -> Guest {
        Guest::new(Box::new(connect(socket, TIMEOUT).expect("a connection")))
    }

    /// A guest whose user may have caused too much work before: it tries until it is served.
    pub(crate) fn guest_in_time(&self, socket: &Path) -> Guest {
        let start = Instant::now();
        loop {
            match connect(socket, TIMEOUT) {
                Ok(end) => {
                    let mut guest = Guest::new(Box::new(end));
                    guest.hello();
                    return guest;
                }
                Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    pub(crate) fn guest(&self, socket: &Path) -> Guest {
        let mut guest = self.connect(socket);
        guest.hello();
        guest
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the process is there");
    }

    /// Waits for the end. Returns the exit status and the log.
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let start = Instant::now();
        let status = loop {
            match self.child.try_wait().expect("it can be waited for") {
                Some(status) => break status,
                None if start.elapsed() > TIMEOUT => {
                    let _ = self.child.kill();
                    panic!("it does not end");
                }
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut log = String::new();
        self.child
            .stderr
            .take()
            .expect("piped")
            .read_to_string(&mut log)
            .expect("a log");
        (status, log)
    }
}

impl Drop for Serve {
    /// A test that fails leaves no process behind.
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

/// Runs `work` on a thread of another user. `None` if this user may not become another one: only
/// root may. In CI the tests run as root, and nothing is left out.
pub(crate) fn as_another_user<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    const NOBODY: libc::uid_t = 65534;
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the call changes the user of this thread only, and takes no pointer.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            (changed == 0).then(work)
        });
        let served = thread.join().expect("no panic");
        if served.is_none() {
            let is_ci = std::env::var_os("CI").is_some();
            assert!(!is_ci, "only root can connect as two users");
            eprintln!("only root can connect as two users: the other one was not tested");
        }
        served
    })
}
