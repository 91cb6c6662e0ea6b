//! What a sandbox is for, and why it cannot be entered.
#![forbid(unsafe_code)]

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

/// What the process does for guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Listens for guests, and reloads its configuration.
    Server,
    /// Serves one virtual machine for a supervisor, at a socket that it has opened before.
    Machine,
    /// Serves guests whose connections another process hands over.
    Worker,
    /// Starts and watches workers. Has no engine.
    Supervisor,
}

/// Why the sandbox cannot be entered.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum SandboxError {
    #[error("capabilities cannot be dropped: {0}")]
    Privileges(Errno),
    #[error("other processes of this user cannot be kept out: {0}")]
    Dumpable(Errno),
    #[error("the files of this user cannot be closed off: {0}")]
    Files(#[from] landlock::RulesetError),
    #[error("other processes cannot be closed off: {0}")]
    Processes(landlock::RulesetError),
    #[error("the folder of all files cannot be opened: {0}")]
    Root(#[from] landlock::PathFdError),
    #[error("the threads of this process cannot be listed: {0}")]
    Threads(io::Error),
    #[error("thread {name} ({tid}) keeps its capabilities: it handles no signal")]
    Stubborn { name: String, tid: i32 },
    #[error("the seccomp filter cannot be installed: {0}")]
    Filter(FilterError),
}

/// Why a seccomp filter cannot be installed.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The rules are not a filter for this processor: a fault of the executor.
    #[error("{0}")]
    Rules(seccompiler::BackendError),
    /// The kernel refuses the filter, or has none.
    #[error("{0}")]
    Kernel(seccompiler::Error),
}
