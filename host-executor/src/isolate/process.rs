//! Child processes of a supervisor.

use std::fmt;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

/// Starts a process that receives SIGTERM when its parent thread ends, `nice` levels nicer than
/// this process.
pub(super) fn spawn(command: &mut Command, nice: i32) -> io::Result<Child> {
    // The kernel lets nobody lower a level, and has none beyond 19.
    let level = (rustix::process::getpriority_process(None)? + nice).min(19);
    // SAFETY: between fork and exec only async-signal-safe functions may be called. The closure
    // makes two system calls, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            // The kernel sends the signal when the thread that forked ends. The forking thread
            // waits for the child, or is the main thread of the supervisor.
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            if nice > 0 {
                rustix::process::setpriority_process(None, level)?;
            }
            Ok(())
        });
    }
    command.spawn()
}

/// How often the end of a process is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Waits for the end of a process that has been told to end, and kills it after `timeout`. Returns
/// its status, and whether it was killed.
pub(super) fn wait_or_kill(
    process: &mut Child,
    timeout: Duration,
) -> io::Result<(ExitStatus, bool)> {
    let start = Instant::now();
    while start.elapsed() < timeout {
        if let Some(status) = process.try_wait()? {
            return Ok((status, false));
        }
        thread::sleep(POLL_INTERVAL);
    }
    process.kill()?;
    Ok((process.wait()?, true))
}

/// Describes how a process ended.
pub(super) struct ExitReason(pub(super) ExitStatus);

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.signal() {
            Some(signal) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                write!(f, "was ended by {name} (signal {signal})")
            }
            None => write!(f, "ended with {}", self.0),
        }
    }
}
