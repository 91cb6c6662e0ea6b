//! Child processes: programs that end by themselves, servers, and dialogues line by line.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Pid, Signal};

use crate::progress::Progress;

/// How much of a log is shown when its program failed.
const TAIL_LINES: usize = 30;

/// Runs `command` to its end. The output goes to `log`; `step` shows the last line.
///
/// # Errors
/// If the command cannot be started or fails. The error has the end of the log.
pub fn run(command: &mut Command, progress: &Progress, log: &Path) -> Result<()> {
    let status = run_lines(command, log, |line| progress.note(line))?;
    if !status.success() {
        bail!("{} ended with {status}\n{}", name(command), tail(log));
    }
    Ok(())
}

/// Runs `command` to its end. Passes each line of its stdout and stderr to `line`, and writes all
/// lines to `log`.
///
/// # Errors
/// If the command cannot be started, or the log cannot be written. A command that fails is no
/// error.
pub fn run_lines(
    command: &mut Command,
    log: &Path,
    mut line: impl FnMut(&str),
) -> Result<ExitStatus> {
    let mut log = create(log)?;
    let (reader, writer) = std::io::pipe().context("creating a pipe")?;
    command.stdin(Stdio::null());
    command
        .stdout(writer.try_clone().context("duplicating a pipe")?)
        .stderr(writer);
    let mut child = Owned::spawn(command)?;
    // The command holds the pipe's writing ends; the reader sees the end only when they are gone.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    each_line(reader, |bytes| {
        log.write_all(bytes).context("writing a log")?;
        line(String::from_utf8_lossy(bytes).trim_end());
        Ok(())
    })?;
    child
        .0
        .wait()
        .with_context(|| format!("waiting for {}", name(command)))
}

/// Runs `command` and returns what it has written to stdout.
///
/// # Errors
/// If the command cannot be started or fails, or its output is not UTF-8. The error has its stderr.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {}", name(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{} ended with {}\n{}",
            name(command),
            output.status,
            stderr.trim_end()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} wrote no text", name(command)))
}

/// The last lines of a log, indented, and where the rest is.
pub fn tail(log: &Path) -> String {
    let text = read(log);
    let lines: Vec<_> = text.lines().collect();
    let shown = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    let mut tail = format!("last {} lines of {}:\n", shown.len(), log.display());
    shown
        .iter()
        .for_each(|line| tail.extend(["    ", line, "\n"]));
    tail
}

/// A log as far as it is written. A device (`/dev/full`) has no end, and holds nothing.
fn read(log: &Path) -> String {
    let is_file = std::fs::metadata(log).is_ok_and(|log| log.is_file());
    let bytes = match is_file {
        true => std::fs::read(log).unwrap_or_default(),
        false => Vec::new(),
    };
    String::from_utf8_lossy(&bytes).into_owned()
}

fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("creating {}", path.display()))
}

fn each_line(from: impl Read, mut line: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let (mut from, mut buffer) = (BufReader::new(from), Vec::new());
    while from
        .read_until(b'\n', &mut buffer)
        .context("reading a program's output")?
        > 0
    {
        line(&buffer)?;
        buffer.clear();
    }
    Ok(())
}

fn name(command: &Command) -> String {
    Path::new(command.get_program())
        .file_name()
        .unwrap_or(command.get_program())
        .to_string_lossy()
        .into_owned()
}

/// A child that does not outlive its owner.
#[derive(Debug)]
struct Owned(Child);

impl Owned {
    fn spawn(command: &mut Command) -> Result<Owned> {
        // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are
        // allowed; it makes one system call (prctl) and allocates nothing.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                Ok(())
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", name(command)))?;
        Ok(Owned(child))
    }

    /// The child has not been waited for yet: until then its process id cannot be reused.
    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).context("sending a signal")
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // Both fail only if it has ended and been waited for already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server in the background; its output goes to a log. Killed on drop.
#[derive(Debug)]
pub struct Daemon {
    child: Owned,
    name: String,
    log: PathBuf,
}

impl Daemon {
    /// Starts the program; its output goes to `log`.
    ///
    /// # Errors
    /// If it cannot be started, or `log` cannot be created.
    pub fn start(command: &mut Command, log: &Path) -> Result<Daemon> {
        let file = create(log)?;
        let copy = file.try_clone().context("duplicating a log")?;
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        let child = Owned::spawn(command)?;
        Ok(Daemon {
            child,
            name: name(command),
            log: log.to_owned(),
        })
    }

    /// The output of the program so far.
    pub fn log(&self) -> String {
        read(&self.log)
    }

    /// Waits up to `timeout` until `ready` returns true.
    ///
    /// # Errors
    /// If the server ends, or is not ready in time. The error has the end of the log.
    pub fn wait_until(&mut self, timeout: Duration, ready: impl Fn(&Daemon) -> bool) -> Result<()> {
        let started = Instant::now();
        loop {
            if ready(self) {
                return Ok(());
            }
            if let Some(status) = self.exited()? {
                bail!(
                    "{} ended with {status} before it was ready\n{}",
                    self.name,
                    tail(&self.log)
                );
            }
            if started.elapsed() > timeout {
                bail!(
                    "{} is not ready after {timeout:?}\n{}",
                    self.name,
                    tail(&self.log)
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The exit status, if the program has ended.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .0
            .try_wait()
            .with_context(|| format!("looking after {}", self.name))
    }

    /// The peak of the program's resident memory in bytes (`VmHWM`).
    ///
    /// # Errors
    /// If the program has ended.
    pub fn peak_memory(&self) -> Result<u64> {
        bytes_of(self.pid(), "VmHWM:")
    }

    /// Ends the program with SIGKILL, which no program can handle.
    ///
    /// # Errors
    /// If the program has ended.
    pub fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL)
    }

    /// The process id of the program.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.child.signal(signal)
    }

    /// Ends the program with SIGTERM.
    ///
    /// # Errors
    /// If the program has ended, does not end within `timeout`, or reports a failure. The error
    /// has the end of the log.
    pub fn stop(mut self, timeout: Duration) -> Result<()> {
        self.child.signal(Signal::TERM)?;
        let started = Instant::now();
        while started.elapsed() < timeout {
            if let Some(status) = self.exited()? {
                return match (status.success(), status.signal()) {
                    (true, _) => Ok(()),
                    // Programs without a handler end by the signal itself.
                    (_, Some(signal)) if signal == Signal::TERM.as_raw() => Ok(()),
                    _ => Err(anyhow!(
                        "{} ended with {status}\n{}",
                        self.name,
                        tail(&self.log)
                    )),
                };
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!(
            "{} did not end within {timeout:?} of SIGTERM\n{}",
            self.name,
            tail(&self.log)
        );
    }
}

/// A program that is talked with: a line each way at a time. The stderr of the program goes to a
/// log.
#[derive(Debug)]
pub struct Dialogue {
    child: Owned,
    name: String,
    log: PathBuf,
    lines: Receiver<String>,
}

impl Dialogue {
    /// Starts the program; its output goes to `log`.
    ///
    /// # Errors
    /// If it cannot be started, or `log` cannot be created.
    pub fn start(command: &mut Command, log: &Path) -> Result<Dialogue> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(create(log)?);
        let mut child = Owned::spawn(command)?;
        let stdout = child.0.stdout.take().expect("stdout was piped");
        let (sender, lines) = std::sync::mpsc::channel();
        // Ends with the program, or with the last one who would listen.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Dialogue {
            child,
            name: name(command),
            log: log.to_owned(),
            lines,
        })
    }

    /// What the program has written to its log.
    pub fn log(&self) -> String {
        read(&self.log)
    }

    /// The next line that the program writes. Waits up to `timeout`.
    ///
    /// # Errors
    /// If the program writes no line in time, or has ended. The error has the end of the log.
    pub fn read_line(&mut self, timeout: Duration) -> Result<String> {
        self.lines.recv_timeout(timeout).map_err(|reason| {
            let what = match reason {
                RecvTimeoutError::Timeout => "says nothing",
                RecvTimeoutError::Disconnected => "has ended",
            };
            anyhow!("{} {what}\n{}", self.name, tail(&self.log))
        })
    }

    /// The next line that the program has written, if there is one. Does not wait.
    ///
    /// # Errors
    /// If the program has ended. The error has the end of the log.
    pub fn try_read_line(&mut self) -> Result<Option<String>> {
        match self.lines.try_recv() {
            Ok(line) => Ok(Some(line)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                bail!("{} has ended\n{}", self.name, tail(&self.log))
            }
        }
    }

    /// Writes a line to the program's stdin.
    ///
    /// # Errors
    /// If the program has closed its stdin or has ended.
    pub fn write_line(&mut self, line: &str) -> Result<()> {
        let stdin = self.child.0.stdin.as_mut().expect("stdin was piped");
        writeln!(stdin, "{line}").with_context(|| format!("talking to {}", self.name))
    }

    /// The process id of the program.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.child.signal(signal)
    }

    /// Closes the program's stdin and waits up to `timeout` for its end.
    ///
    /// # Errors
    /// If the program does not end in time, or reports a failure. The error has the end of the log.
    pub fn finish(mut self, timeout: Duration) -> Result<()> {
        drop(self.child.0.stdin.take());
        let started = Instant::now();
        while started.elapsed() < timeout {
            if let Some(status) = self.child.0.try_wait().context("looking after a program")? {
                if status.success() {
                    return Ok(());
                }
                bail!("{} ended with {status}\n{}", self.name, tail(&self.log));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("{} does not end\n{}", self.name, tail(&self.log));
    }
}

/// A TCP port that was free when this function looked.
///
/// # Errors
/// If no port is free.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("looking for a free port")?;
    Ok(listener
        .local_addr()
        .context("looking for a free port")?
        .port())
}

/// The resident memory of a process in bytes, with the memory that it shares (`VmRSS`).
///
/// # Errors
/// If there is no such process.
pub fn memory(pid: u32) -> Result<u64> {
    bytes_of(pid, "VmRSS:")
}

/// A line of a process's status that counts kilobytes.
fn bytes_of(pid: u32, key: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kilobytes.with_context(|| format!("{path} has no {key}"))? << 10)
}
