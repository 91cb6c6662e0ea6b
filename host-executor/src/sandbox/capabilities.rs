//! Capabilities belong to threads, and a thread can only give up its own: each is asked by a
//! signal, as the C library does when a process changes its user.

use std::fs;
use std::time::{Duration, Instant};

use rustix::thread::{CapabilitySet, CapabilitySets};

use super::SandboxError;

/// How long a thread may take to hear the signal. It has nothing else to do than to run.
const PATIENCE: Duration = Duration::from_secs(5);

const NONE: CapabilitySets = CapabilitySets {
    effective: CapabilitySet::empty(),
    permitted: CapabilitySet::empty(),
    inheritable: CapabilitySet::empty(),
};

/// Every thread of this process gives up its capabilities. Returns how many had some.
pub(super) fn drop_everywhere() -> Result<usize, SandboxError> {
    let had = holders()?;
    if had.is_empty() {
        return Ok(0);
    }
    let signal = libc::SIGRTMAX() - 2;
    let before = listen(signal)?;
    let outcome = ask(signal);
    // SAFETY: `before` is what the kernel has told about this signal.
    unsafe { libc::sigaction(signal, &raw const before, std::ptr::null_mut()) };
    outcome.map(|()| had.len())
}

fn ask(signal: i32) -> Result<(), SandboxError> {
    give_up().map_err(SandboxError::Privileges)?;
    let start = Instant::now();
    // Threads that start meanwhile have what the one that starts them has: none, once all of these
    // have none.
    loop {
        let left = holders()?;
        let Some(first) = left.first() else {
            return Ok(());
        };
        if start.elapsed() > PATIENCE {
            return Err(SandboxError::Stubborn {
                name: first.name.clone(),
                tid: first.tid,
            });
        }
        for thread in &left {
            // SAFETY: a system call without pointers. A thread that has ended meanwhile is an error
            // of no interest.
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

/// Runs in the thread that is asked. It makes one system call, without the C library: that is
/// allowed here.
extern "C" fn on_signal(_: i32) {
    // Whether it has worked is seen from outside.
    let _ = give_up();
}

/// Takes the signal; returns what was done with it before.
fn listen(signal: i32) -> Result<libc::sigaction, SandboxError> {
    // SAFETY: all zero is a valid `sigaction`: the default action, no flags, an empty mask.
    let (mut action, mut before): (libc::sigaction, libc::sigaction) =
        unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as extern "C" fn(i32) as libc::sighandler_t;
    // What is interrupted goes on where it can.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: both structures are valid for the call; the handler lives as long as the program, and
    // does nothing that is not allowed in one.
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

/// The threads with capabilities that they have, may take, or would hand on.
fn holders() -> Result<Vec<Thread>, SandboxError> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/task").map_err(SandboxError::Threads)? {
        let entry = entry.map_err(SandboxError::Threads)?;
        // One that has ended meanwhile has none.
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
