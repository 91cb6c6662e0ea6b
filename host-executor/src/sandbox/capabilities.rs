//! Dropping the capabilities of all threads. A thread can drop only its own, so each thread is sent
//! a signal, as the C library does to change the user of a process.

use std::fs;
use std::time::{Duration, Instant};

use rustix::thread::{CapabilitySet, CapabilitySets};

use super::profile::SandboxError;

/// The time within which all threads must have handled the signal.
const TIMEOUT: Duration = Duration::from_secs(5);

const NONE: CapabilitySets = CapabilitySets {
    effective: CapabilitySet::empty(),
    permitted: CapabilitySet::empty(),
    inheritable: CapabilitySet::empty(),
};

/// Drops the capabilities of every thread of this process. Returns how many threads had some.
pub(super) fn drop_everywhere() -> Result<usize, SandboxError> {
    let had = holders()?;
    if had.is_empty() {
        return Ok(0);
    }
    let signal = libc::SIGRTMAX() - 2;
    let before = handle(
        signal,
        on_signal as extern "C" fn(i32) as libc::sighandler_t,
    )?;
    let outcome = ask(signal);
    // A thread that was sent the signal again before it ran has a signal left when its capabilities
    // are gone. The default action of that one would end the process. Linux discards the pending
    // signals of all threads when a signal becomes ignored.
    handle(signal, libc::SIG_IGN)?;
    // SAFETY: `before` was filled in by `sigaction` for this signal, so it is a valid disposition;
    // the third pointer may be null.
    unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
    outcome.map(|()| had.len())
}

fn ask(signal: i32) -> Result<(), SandboxError> {
    give_up().map_err(SandboxError::Privileges)?;
    let start = Instant::now();
    // A thread that is started meanwhile inherits the capabilities of its creator. The loop ends
    // when no thread has any.
    loop {
        let left = holders()?;
        let Some(first) = left.first() else {
            return Ok(());
        };
        if start.elapsed() > TIMEOUT {
            return Err(SandboxError::Stubborn {
                name: first.name.clone(),
                tid: first.tid,
            });
        }
        for thread in &left {
            // SAFETY: `tgkill` takes no pointers. If the thread has ended, the call fails, and that
            // is ignored.
            unsafe {
                libc::syscall(
                    libc::SYS_tgkill,
                    std::process::id() as libc::pid_t,
                    thread.tid,
                    signal,
                )
            };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn give_up() -> rustix::io::Result<()> {
    rustix::thread::set_capabilities(None, NONE)
}

/// Handles the signal in each thread. Makes one system call, which is async-signal-safe.
extern "C" fn on_signal(_: i32) {
    // `holders` checks the result.
    let _ = give_up();
}

/// Sets the handler of a signal: [`on_signal`] or `SIG_IGN`. Returns the previous disposition.
fn handle(signal: i32, handler: libc::sighandler_t) -> Result<libc::sigaction, SandboxError> {
    // SAFETY: `sigaction` is a C struct of integers and pointers, for which all zero bits are
    // valid: default action, no flags, empty mask.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) =
        unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    // Interrupted system calls are restarted where possible.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: both pointers are to valid structures for the call. The handler is `SIG_IGN`, or a
    // function of this program, which is never unloaded, and calls only functions that are
    // async-signal-safe.
    let result = unsafe { libc::sigaction(signal, &raw const action, &raw mut before) };
    match result {
        0 => Ok(before),
        _ => Err(SandboxError::Privileges(
            rustix::io::Errno::from_io_error(&std::io::Error::last_os_error())
                .unwrap_or(rustix::io::Errno::INVAL),
        )),
    }
}

struct Thread {
    tid: i32,
    name: String,
}

/// The threads that have effective, permitted or inheritable capabilities.
fn holders() -> Result<Vec<Thread>, SandboxError> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/task").map_err(SandboxError::Threads)? {
        let entry = entry.map_err(SandboxError::Threads)?;
        // A thread that has ended meanwhile has no file.
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else {
            continue;
        };
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let is_zero = |name| field(name).is_none_or(|hex| hex.bytes().all(|digit| digit == b'0'));
        if !(is_zero("CapEff:") && is_zero("CapPrm:") && is_zero("CapInh:"))
            && let Some(tid) = entry.file_name().to_str().and_then(|tid| tid.parse().ok())
        {
            found.push(Thread {
                tid,
                name: field("Name:").unwrap_or_default().to_owned(),
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;
    use std::sync::mpsc;

    use super::*;

    /// Set in the process of the test that drops its capabilities.
    const CHILD: &str = "VGPU_TEST_DROP_CAPABILITIES";

    /// Signals that wait for the thread: handling them takes longer than the look at its
    /// capabilities.
    const PENDING: usize = 20_000;

    /// Sends a thread many signals before it can handle one, and drops the capabilities.
    fn drop_with_pending_signals() {
        let signal = libc::SIGRTMAX() - 2;
        // SAFETY: the set is a plain structure that the calls fill in and read; the last pointer
        // may be null.
        let mask = move |how| unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, signal);
            libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
        };
        let (blocked, is_blocked) = mpsc::channel();
        let (end, is_end) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            mask(libc::SIG_BLOCK);
            // SAFETY: `gettid` and `tgkill` take no pointers, and the signal is blocked.
            unsafe {
                let own = libc::gettid();
                for _ in 0..PENDING {
                    libc::syscall(libc::SYS_tgkill, libc::getpid(), own, signal);
                }
            }
            blocked.send(()).unwrap();
            // Until the other thread waits for this one.
            std::thread::sleep(Duration::from_millis(20));
            mask(libc::SIG_UNBLOCK);
            is_end.recv().unwrap_err();
        });
        is_blocked.recv().unwrap();
        let had = drop_everywhere().unwrap();
        assert!(had >= 2, "{had} threads had capabilities");
        drop(end);
        thread.join().unwrap();
    }

    /// A busy machine runs a thread so late that it has been sent the signal several times.
    #[test]
    fn signals_that_are_left_over_do_not_end_the_process() {
        if std::env::var_os(CHILD).is_some() {
            return drop_with_pending_signals();
        }
        if holders().unwrap().is_empty() {
            eprintln!("this user has no capabilities to drop: not tested");
            return;
        }
        let name = "sandbox::capabilities::tests::\
                    signals_that_are_left_over_do_not_end_the_process";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child
            .args([name, "--exact", "--test-threads=1"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(output.status.signal(), None, "{output:?}");
        assert!(output.status.success(), "{output:?}");
    }
}
