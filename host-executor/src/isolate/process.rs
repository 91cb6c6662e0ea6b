//! Child processes of a supervisor.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Dir, Mode, OFlags};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, setrlimit};

/// How many descriptors a process may have, in eighths of those of the supervisor.
///
/// The kernel counts the descriptors that wait in Unix sockets for all processes of a user
/// together, and refuses to send more to a process whose limit of open descriptors is below that
/// number. A worker that a guest has taken over can fill sockets that nobody reads. The supervisor
/// still passes on connections and files, and `vgpu fd-store` files, since each may have more than
/// the processes of guests.
#[derive(Debug, Clone, Copy)]
pub(super) enum Descriptors {
    /// A worker, which has six eighths. So does the executor of a virtual machine
    /// ([`limit_executor_descriptors`]).
    OfWorker,
    /// `vgpu fd-store`, which has seven eighths.
    OfFdStore,
}

impl Descriptors {
    fn limit(self) -> Rlimit {
        let eighths = match self {
            Descriptors::OfWorker => 6,
            Descriptors::OfFdStore => 7,
        };
        part_of_descriptors(eighths, 8)
    }
}

/// A part of the descriptors that this process may have.
fn part_of_descriptors(numerator: u64, denominator: u64) -> Rlimit {
    let own = getrlimit(Resource::Nofile);
    // Linux has a limit for each process.
    let most = own
        .maximum
        .map(|most| most - most / denominator * (denominator - numerator));
    let current = own.current.zip(most).map(|(now, most)| now.min(most));
    Rlimit {
        current: current.or(most),
        maximum: most,
    }
}

/// Limits the descriptors of this process, which is about to become the executor of a virtual
/// machine, to those of a worker: six of the seven eighths that its `vgpu fd-store` has.
///
/// # Errors
/// The kernel refuses the limit.
pub fn limit_executor_descriptors() -> io::Result<()> {
    setrlimit(Resource::Nofile, part_of_descriptors(6, 7))?;
    Ok(())
}

/// Starts a process that receives SIGTERM when its parent thread ends, `nice` levels nicer than
/// this process, and with fewer descriptors.
pub(super) fn spawn(
    command: &mut Command,
    nice: i32,
    descriptors: Descriptors,
) -> io::Result<Child> {
    let descriptors = descriptors.limit();
    // The kernel lets nobody lower a level, and has none beyond 19.
    let level = (rustix::process::getpriority_process(None)? + nice).min(19);
    // SAFETY: between fork and exec only async-signal-safe functions may be called. The closure
    // makes three system calls, allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            // The kernel sends the signal when the thread that forked ends. The forking thread
            // waits for the child, or is the main thread of the supervisor.
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            setrlimit(Resource::Nofile, descriptors)?;
            if nice > 0 {
                rustix::process::setpriority_process(None, level)?;
            }
            Ok(())
        });
    }
    command.spawn()
}

/// What the kernel tells of a process that has been started.
///
/// The files are opened before the process hides. Where `/proc` is mounted with `hidepid`, as for
/// units with `ProtectProc=invisible`, those of a process that has hidden cannot be opened, not
/// even by its parent. Open files stay readable.
#[derive(Debug)]
pub(super) struct ProcFiles {
    status: File,
    threads: Dir,
}

/// The longest `/proc/PID/status` that is read, in bytes.
const MAX_STATUS: usize = 16 << 10;

impl ProcFiles {
    /// Opens the files of a process that nobody has waited for.
    ///
    /// # Errors
    /// The process hides, or has ended.
    pub(super) fn open(pid: u32) -> io::Result<ProcFiles> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let threads = rustix::fs::open(format!("/proc/{pid}/task"), flags, Mode::empty())?;
        Ok(ProcFiles {
            status: File::open(format!("/proc/{pid}/status"))?,
            // Not `read_from`, which opens the folder again.
            threads: Dir::new(threads)?,
        })
    }

    /// Bytes of anonymous and shared memory that the process has touched: `RssAnon` and `RssShmem`
    /// of `proc_pid_status(5)`. 0 if the process has ended.
    pub(super) fn touched(&self) -> u64 {
        let text = self.status();
        let of = |key: &str| -> u64 {
            let kib = value(&text, key).and_then(|value| value.strip_suffix(" kB"));
            kib.and_then(|kib| kib.trim().parse().ok()).unwrap_or(0)
        };
        (of("RssAnon") + of("RssShmem")).saturating_mul(1024)
    }

    /// The number of threads of the process. 0 if it has ended.
    pub(super) fn thread_count(&self) -> usize {
        let text = self.status();
        let count = value(&text, "Threads").and_then(|value| value.parse().ok());
        count.unwrap_or(0)
    }

    /// The text of `/proc/PID/status`. Empty if the process has ended.
    fn status(&self) -> String {
        let mut bytes = vec![0; MAX_STATUS];
        let len = self.status.read_at(&mut bytes, 0).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    /// The threads of the process, which may start others meanwhile.
    ///
    /// # Errors
    /// The process has ended.
    pub(super) fn threads(&mut self) -> io::Result<Vec<Pid>> {
        self.threads.rewind();
        let mut threads = Vec::new();
        while let Some(entry) = self.threads.read() {
            let entry = entry?;
            let name = entry.file_name().to_str().ok();
            let number = name.and_then(|name| name.parse().ok());
            threads.extend(number.and_then(Pid::from_raw));
        }
        Ok(threads)
    }
}

/// The value of a line of `/proc/PID/status`.
fn value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    value.map(str::trim)
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
