//! The sandbox: privileges and system calls that an executor gives up after its start.
//!
//! A guest that exploits a fault gets the rights of the executor. Before the first guest is served,
//! every thread therefore drops its capabilities and the right to get new ones (`no_new_privs`),
//! and a seccomp filter restricts the system calls of the whole process:
//!
//! | engine | allowed system calls |
//! |---|---|
//! | cpu | a list: memory (never executable), threads, files, sockets, time. All others fail. |
//! | cuda | all but a list: the system calls of the driver are not documented. |
//!
//! Under both filters a process cannot start programs, access other processes, mount, load modules
//! or BPF programs, or create io_urings or keys. A forbidden system call fails with EPERM and does
//! not end the process: if a library begins to use another call, guests lose a feature and keep
//! their sessions.

mod calls;
mod capabilities;

use std::fmt;
use std::io;

use rustix::io::Errno;

/// What the process does after it has entered the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Computes on the CPU.
    Cpu,
    /// Computes with a driver that is loaded into the process.
    Driver,
}

/// Why the sandbox cannot be entered.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum SandboxError {
    #[error("capabilities cannot be dropped: {0}")]
    Privileges(Errno),
    #[error("the threads of this process cannot be listed: {0}")]
    Threads(io::Error),
    #[error("thread {name} ({tid}) keeps its capabilities: it does not handle signals")]
    Stubborn { name: String, tid: i32 },
    #[error("the seccomp filter cannot be installed: {0}")]
    Filter(String),
}

/// The restrictions that are in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sandbox {
    profile: Profile,
    /// Number of threads that had capabilities and have dropped them.
    pub threads: usize,
}

/// Puts all threads of the process into the sandbox, for good.
///
/// # Errors
/// [`SandboxError`] names the step that failed. The process may have lost some rights by then.
pub fn enter(profile: Profile) -> Result<Sandbox, SandboxError> {
    rustix::thread::set_no_new_privs(true).map_err(SandboxError::Privileges)?;
    let threads = capabilities::drop_everywhere()?;
    // Installing the filter sets `no_new_privs` on all other threads, too.
    calls::filter(profile)?;
    Ok(Sandbox { profile, threads })
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no new privileges, ")?;
        match self.threads {
            0 => write!(f, "no capabilities (there were none), ")?,
            threads => write!(f, "no capabilities (dropped by {threads} threads), ")?,
        }
        match self.profile {
            Profile::Cpu => write!(f, "only the system calls of the cpu engine"),
            Profile::Driver => write!(f, "no system calls that affect other processes"),
        }
    }
}
