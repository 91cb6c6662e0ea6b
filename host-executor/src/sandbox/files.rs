//! The files that a worker can open, restricted by Landlock.
#![forbid(unsafe_code)]

use std::fmt;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _,
    RulesetStatus, Scope, path_beneath_rules,
};

use super::profile::SandboxError;

/// The newest version of Landlock whose restrictions are used: signals and abstract sockets of
/// other processes (Linux 6.12). An older kernel enforces what it has.
const NEWEST: ABI = ABI::V6;

/// What an engine reads: the machine's and the control group's memory, the processor, the NUMA
/// nodes. A path that does not exist is left out.
///
/// All of `/proc`, because the kernel may give a file below it another inode at any time, for which
/// a rule would not hold. The memory and descriptors of other processes are out of reach all the
/// same: Landlock refuses the access check of ptrace(2) outside its domain.
const READABLE: [&str; 4] = [
    "/proc",
    "/sys/devices/system",
    "/sys/fs/cgroup",
    "/sys/kernel/mm/transparent_hugepage",
];

/// What the kernel enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileIsolation {
    /// Files, TCP ports, and signals and abstract sockets of other processes.
    Full,
    /// An older kernel: some of these.
    Partial,
    /// The kernel has no Landlock, or it is turned off.
    None,
}

/// Takes all files from the calling thread and the threads that it starts later, except for what an
/// engine reads of the machine. Open descriptors are kept. The process can no longer access the
/// memory of processes outside, connect to abstract sockets or signal other processes.
///
/// Call this before other threads start: the kernel restricts no thread that runs already.
///
/// # Errors
/// [`SandboxError::Files`]: the kernel has Landlock and refuses the rules.
pub fn isolate_files() -> Result<FileIsolation, SandboxError> {
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rules(path_beneath_rules(READABLE, AccessFs::from_read(NEWEST)))?
        .restrict_self()?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => FileIsolation::Full,
        RulesetStatus::PartiallyEnforced => FileIsolation::Partial,
        RulesetStatus::NotEnforced => FileIsolation::None,
    })
}

impl fmt::Display for FileIsolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FileIsolation::Full => "no files, ports or other processes",
            FileIsolation::Partial => {
                "no files; the kernel's Landlock is older than Linux 6.12 and leaves some of TCP \
                 ports, signals and abstract sockets"
            }
            FileIsolation::None => {
                "all files of the user: Landlock is not available (the kernel, its parameter lsm=, \
                 or the container's filter)"
            }
        })
    }
}
