//! What an executor gives up once it has started: privileges, and the system calls that it does not
//! make.
//!
//! A guest that finds a fault in us gets what we have. So, before the first guest is served, every
//! thread gives up its capabilities and the right to get new ones (`no_new_privs`), and the whole
//! process is put behind a filter of system calls (seccomp):
//!
//! | engine | what passes |
//! |---|---|
//! | cpu | the calls of a list: memory (never executable), threads, files, sockets, time. Everything else is an error. |
//! | cuda | everything but a list: the driver talks to its devices in ways that nobody has written down. |
//!
//! In both, no program is started, no other process is touched, nothing is mounted, and no module,
//! BPF program, io_uring or key is made. A call that does not pass answers "operation not
//! permitted" and ends nobody: if a library makes a new call one day, guests lose a feature, not
//! their sessions.

mod calls;
mod capabilities;

use std::fmt;
use std::io;

use rustix::io::Errno;

/// What the process goes on to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// Arithmetic on the processors.
    Cpu,
    /// Arithmetic by a driver that is loaded into the process.
    Driver,
}

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum SandboxError {
    #[error("privileges cannot be given up: {0}")]
    Privileges(Errno),
    #[error("the threads of this process cannot be listed: {0}")]
    Threads(io::Error),
    #[error("thread {name} ({tid}) keeps its capabilities: it takes no signals")]
    Stubborn { name: String, tid: i32 },
    #[error("system calls cannot be filtered: {0}")]
    Filter(String),
}

/// What is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sandbox {
    profile: Profile,
    /// Threads that had capabilities, and have none.
    pub threads: usize,
}

/// Puts the whole process, all of its threads, into the sandbox. There is no way back.
pub fn enter(profile: Profile) -> Result<Sandbox, SandboxError> {
    rustix::thread::set_no_new_privs(true).map_err(SandboxError::Privileges)?;
    let threads = capabilities::drop_everywhere()?;
    // With the filter, all other threads get `no_new_privs`, too.
    calls::filter(profile)?;
    Ok(Sandbox { profile, threads })
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no new privileges, ")?;
        match self.threads {
            0 => write!(f, "no capabilities (there were none), ")?,
            threads => write!(f, "no capabilities (given up by {threads} threads), ")?,
        }
        match self.profile {
            Profile::Cpu => write!(f, "only the system calls of the cpu engine"),
            Profile::Driver => write!(f, "no system calls that start or touch others"),
        }
    }
}
