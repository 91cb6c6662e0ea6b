//! `vgpu serve` below `vgpu fd-store`, which keeps the devices of virtual machines and starts the
//! next executor when one ends.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal};
use xtask_common::executor::Executor;
use xtask_common::process;

use super::freezer::Freezer;
use super::guest::HANG;
use super::setup::Setup;

/// A running executor; `vgpu fd-store` is killed on drop, and the executor ends with it.
#[derive(Debug)]
pub(super) struct KeptExecutor {
    /// The process of `vgpu fd-store`.
    store: Executor,
    log: PathBuf,
    pid: u32,
    /// How many executors have been ready.
    count: usize,
}

impl KeptExecutor {
    /// Starts `vgpu fd-store` and an executor, with `arguments` for `vgpu serve`. `environment` is
    /// for both.
    pub(super) fn start(
        setup: &Setup<'_>,
        name: &str,
        environment: impl FnOnce(&mut Command),
        arguments: &[&str],
    ) -> Result<KeptExecutor> {
        let vgpu = &setup.dist.vgpu;
        KeptExecutor::start_programs(setup, name, [vgpu, vgpu], environment, arguments)
    }

    /// As [`start`](KeptExecutor::start), with the file of `vgpu fd-store` and that of the
    /// executors.
    pub(super) fn start_programs(
        setup: &Setup<'_>,
        name: &str,
        [store, executor]: [&Path; 2],
        environment: impl FnOnce(&mut Command),
        arguments: &[&str],
    ) -> Result<KeptExecutor> {
        let mut command = Command::new(store);
        command.args(["fd-store", "--"]).arg(executor);
        environment(&mut command);
        let store = setup.serve_command(&mut command, name, arguments)?;
        let log = setup.log(&format!("{name}-vgpu-serve"));
        let (count, pid) = next_executor(&log, 0, None)?;
        Ok(KeptExecutor {
            store,
            log,
            pid,
            count,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Moves the executor into the control group of `freezer`, and leaves `vgpu fd-store` outside.
    pub(super) fn add_to(&self, freezer: Option<&Freezer>) -> Result<()> {
        freezer.map_or(Ok(()), |freezer| freezer.add(self.pid))
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("the executor has no process")?;
        rustix::process::kill_process(pid, signal).context("sending a signal to the executor")
    }

    /// Ends the executor with SIGKILL or SIGTERM, and waits until the next one is ready.
    ///
    /// # Errors
    /// If the executor has ended in another way than such a signal lets it, or no other one is
    /// ready in time.
    pub(super) fn replace(&mut self, signal: Signal) -> Result<()> {
        self.signal(signal)?;
        let (count, pid) = next_executor(&self.log, self.count, Some(self.pid))?;
        let how = match signal {
            Signal::KILL => "signal: 9 (SIGKILL)",
            _ => "exit status: 0",
        };
        let ended = format!("vgpu fd-store: pid {} ended with {how}; ", self.pid);
        ensure!(
            read(&self.log)?.contains(&ended),
            "no line \"{ended}\" in the log: {}",
            process::tail(&self.log)
        );
        (self.count, self.pid) = (count, pid);
        Ok(())
    }

    /// Ends both.
    pub(super) fn stop(self) -> Result<()> {
        self.store.stop()
    }
}

/// Waits until more than `count` executors have been ready, and until the log names the process of
/// the last one, which is not `before`. `vgpu fd-store` may name it after it is ready. Returns how
/// many have been ready, and the process.
fn next_executor(log: &Path, count: usize, before: Option<u32>) -> Result<(usize, u32)> {
    let began = Instant::now();
    loop {
        match executors(log)? {
            (now, Some(pid)) if now > count && Some(pid) != before => return Ok((now, pid)),
            _ => {}
        }
        ensure!(
            began.elapsed() < HANG,
            "no executor after {HANG:?}: {}",
            process::tail(log)
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How many executors have been ready, and the process of the last one, by the log of `vgpu
/// fd-store`.
fn executors(log: &Path) -> Result<(usize, Option<u32>)> {
    let text = read(log)?;
    let ready = { text.lines() }.filter(|line| line.starts_with("ready "));
    Ok((ready.count(), text.lines().rev().find_map(started)))
}

fn read(log: &Path) -> Result<String> {
    let text = std::fs::read(log).with_context(|| format!("reading {}", log.display()))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The process in a line such as `... vgpu fd-store: pid 17 runs vgpu serve ...`.
fn started(line: &str) -> Option<u32> {
    let (_, rest) = line.split_once("vgpu fd-store: pid ")?;
    let (pid, rest) = rest.split_once(' ')?;
    pid.parse().ok().filter(|_| rest.starts_with("runs "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_of_the_executor_is_read_from_the_log() {
        assert_eq!(
            started("INFO vgpu fd-store: pid 17 runs vgpu serve --threads 1"),
            Some(17)
        );
        assert_eq!(
            started("WARN vgpu fd-store: pid 17 ended with signal: 9 (SIGKILL)"),
            None
        );
        assert_eq!(started("ready unix:/run/vgpu.sock"), None);
    }
}
