//! A `vgpu serve` as a child process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use serde_json::Value;

use crate::dist::Dist;
use crate::process::{self, Daemon};
use vgpu_median::median;

/// A timeout, not a measure of speed: a wait that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Arguments of an executor whose memory and descriptors the caller reads in `/proc`. A sandboxed
/// executor is not dumpable, so only root can.
pub fn inspected() -> &'static [&'static str] {
    match rustix::process::geteuid().is_root() {
        true => &[],
        false => &["--no-sandbox"],
    }
}

/// A running executor, most often on the CPU engine; killed on drop.
#[derive(Debug)]
pub struct Executor {
    daemon: Daemon,
    socket: PathBuf,
}

impl Executor {
    /// Starts an executor that listens at `socket`, and waits until the executor listens.
    ///
    /// # Errors
    /// If the executor does not start, ends, or does not listen in time. The error has the end of
    /// the log.
    pub fn start(dist: &Dist, socket: &Path, threads: usize, log: &Path) -> Result<Executor> {
        Executor::start_with(dist, socket, threads, log, &[])
    }

    /// [`Executor::start`] with further arguments.
    ///
    /// # Errors
    /// As [`Executor::start`].
    pub fn start_with(
        dist: &Dist,
        socket: &Path,
        threads: usize,
        log: &Path,
        arguments: &[&str],
    ) -> Result<Executor> {
        let mut serve = Command::new(&dist.vgpu);
        Executor::start_command(&mut serve, socket, threads, log, arguments)
    }

    /// [`Executor::start_with`] with `serve` as the command, whose environment the caller may have
    /// changed.
    ///
    /// # Errors
    /// As [`Executor::start`].
    pub fn start_command(
        serve: &mut Command,
        socket: &Path,
        threads: usize,
        log: &Path,
        arguments: &[&str],
    ) -> Result<Executor> {
        Executor::start_engine(serve, "cpu", socket, threads, log, arguments)
    }

    /// [`Executor::start_command`] with another engine: the value of `--engine`.
    ///
    /// # Errors
    /// As [`Executor::start`].
    pub fn start_engine(
        serve: &mut Command,
        engine: &str,
        socket: &Path,
        threads: usize,
        log: &Path,
        arguments: &[&str],
    ) -> Result<Executor> {
        serve
            .args(["serve", "--engine", engine, "--listen"])
            .arg(format!("unix:{}", socket.display()))
            .args(["--threads", &threads.to_string()])
            .args(arguments)
            // Tests read the figures in the line "session totals".
            .env("VGPU_LOG", "info,vgpu_executor::session::run=debug");
        let mut daemon = Daemon::start(serve, log)?;
        // One line on stdout, the first it writes there.
        daemon.wait_until(TIMEOUT, |daemon| {
            daemon.log().lines().any(|line| line.starts_with("ready "))
        })?;
        Ok(Executor {
            daemon,
            socket: socket.to_owned(),
        })
    }

    /// [`Executor::start`] with a log that is full: every write to the log fails.
    ///
    /// # Errors
    /// As [`Executor::start`].
    pub fn start_logless(dist: &Dist, socket: &Path, threads: usize) -> Result<Executor> {
        let mut serve = Command::new(&dist.vgpu);
        serve
            .args(["serve", "--engine", "cpu", "--listen"])
            .arg(format!("unix:{}", socket.display()))
            .args(["--threads", &threads.to_string()]);
        let mut daemon = Daemon::start(&mut serve, Path::new("/dev/full"))?;
        daemon.wait_until(TIMEOUT, |_| socket.exists())?;
        // The socket file appears two system calls before the executor listens. No event reports
        // the second.
        std::thread::sleep(Duration::from_millis(200));
        Ok(Executor {
            daemon,
            socket: socket.to_owned(),
        })
    }

    /// The process id of the executor.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Sends a signal to the executor.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.daemon.signal(signal)
    }

    /// The value of `VGPU_ENDPOINT` for a guest of this executor.
    pub fn endpoint(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    /// The peak of the executor's resident memory in bytes, with the memory that it shares with
    /// guests.
    ///
    /// # Errors
    /// If the executor has ended.
    pub fn peak_memory(&self) -> Result<u64> {
        self.daemon.peak_memory()
    }

    /// The executor's resident memory in bytes, with the memory that it shares with guests.
    ///
    /// # Errors
    /// If the executor has ended.
    pub fn memory(&self) -> Result<u64> {
        process::memory(self.pid())
    }

    /// Runs `work`. Returns its result, and the median of the executor's resident memory in bytes
    /// meanwhile.
    ///
    /// # Errors
    /// If the executor ends meanwhile.
    pub fn median_memory<T>(&self, work: impl FnOnce() -> T) -> Result<(T, u64)> {
        const EVERY: Duration = Duration::from_millis(20);
        let pid = self.pid();
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let looking = scope.spawn(move || -> Result<Vec<u64>> {
                let mut seen = vec![process::memory(pid)?];
                // Ends when the other end is gone.
                while is_done.recv_timeout(EVERY) == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
                {
                    seen.push(process::memory(pid)?);
                }
                Ok(seen)
            });
            let result = work();
            drop(done);
            let seen = looking.join();
            let seen = seen.map_err(|_| anyhow::anyhow!("looking at memory panicked"))??;
            Ok((result, median(seen)))
        })
    }

    /// Ends the executor with SIGKILL, which no program can handle.
    ///
    /// # Errors
    /// If the executor has ended.
    pub fn kill(self) -> Result<()> {
        self.daemon.kill()
    }

    /// Ends the executor with SIGTERM.
    ///
    /// # Errors
    /// If the executor has ended, does not end in time, or reports a failure.
    pub fn stop(self) -> Result<()> {
        self.daemon.stop(TIMEOUT)
    }
}

/// The status of the executor with this control socket (`vgpu ps --json`).
///
/// # Errors
/// If the executor does not answer, or the answer is not JSON.
pub fn status(vgpu: &Path, control: &Path) -> Result<Value> {
    let mut ps = Command::new(vgpu);
    ps.args(["ps", "--json", "--control"]).arg(control);
    let text = process::output(&mut ps)?;
    serde_json::from_str(&text).context("vgpu ps --json wrote no JSON")
}
