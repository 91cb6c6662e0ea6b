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
//!
//! A process is also not dumpable ([`hide`]): other processes of its user can read neither its
//! memory nor its descriptors. A worker with the CPU engine, which has the connections of one guest
//! only, opens no socket, and Landlock leaves it no file but those of [`isolate_files`]. With a
//! driver it opens no socket either, and keeps the files of the user; Landlock keeps other
//! processes from it ([`isolate_processes`]).

mod calls;
mod capabilities;
mod domain;
mod files;
mod kernel;
mod profile;

use std::fmt;

use rustix::process::DumpableBehavior;

pub use domain::{ProcessIsolation, isolate_processes};
pub use files::{FileIsolation, isolate_files};
pub use kernel::{landlock_version, seccomp_available};
pub use profile::{FilterError, Profile, Role, SandboxError};

/// The restrictions that are in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sandbox {
    profile: Profile,
    /// Number of threads that had capabilities and have dropped them.
    pub threads: usize,
}

/// Makes the process not dumpable: only root can read its memory and its descriptors, and the
/// kernel writes no core dump of it.
///
/// # Errors
/// [`SandboxError::Dumpable`] if the kernel refuses.
pub fn hide() -> Result<(), SandboxError> {
    // `rustix` reads the auxiliary vector at the first use of a value of it, with a call that the
    // filter refuses, or from a file that belongs to root from now on. `rustix` panics without the
    // vector.
    let _ = rustix::param::page_size();
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(SandboxError::Dumpable)
}

/// Takes all capabilities from all threads of the process, and the right to get new ones. Returns
/// the number of threads that had some.
fn drop_capabilities() -> Result<usize, SandboxError> {
    rustix::thread::set_no_new_privs(true).map_err(SandboxError::Privileges)?;
    capabilities::drop_everywhere()
}

/// Takes all capabilities from all threads of the process. If the user is root, a program that the
/// process executes later has them again, unless there is `no_new_privs`. Returns the number of
/// threads that had capabilities.
///
/// Before an engine loads a driver: a driver may start threads that handle no signal, and [`enter`]
/// cannot take theirs.
///
/// # Errors
/// [`SandboxError`] names the step that failed.
pub fn drop_current_capabilities() -> Result<usize, SandboxError> {
    capabilities::drop_everywhere()
}

/// Restricts a supervisor, which starts other processes: no capabilities, no right to get new ones,
/// and none of the system calls that neither a supervisor nor a driver uses. Processes that it
/// starts from now on inherit this. Returns the number of threads that had capabilities.
///
/// # Errors
/// [`SandboxError`] names the step that failed. The process may have lost some rights by then.
pub fn enter_supervisor() -> Result<usize, SandboxError> {
    let threads = drop_capabilities()?;
    calls::filter(Profile::Driver, Role::Supervisor)?;
    Ok(threads)
}

/// Puts all threads of the process into the sandbox, for good.
///
/// # Errors
/// [`SandboxError`] names the step that failed. The process may have lost some rights by then.
pub fn enter(profile: Profile, role: Role) -> Result<Sandbox, SandboxError> {
    hide()?;
    let threads = drop_capabilities()?;
    // Installing the filter sets `no_new_privs` on all other threads, too.
    calls::filter(profile, role)?;
    Ok(Sandbox { profile, threads })
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not dumpable, no new privileges, ")?;
        match self.threads {
            0 => write!(f, "no capabilities (there were none), ")?,
            threads => write!(f, "no capabilities (dropped by {threads} threads), ")?,
        }
        match self.profile {
            Profile::Cpu => write!(f, "only the system calls of the cpu engine"),
            Profile::Driver => write!(f, "none of the system calls that no driver uses"),
        }
    }
}
