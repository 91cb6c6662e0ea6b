//! Other processes, which Landlock keeps from the process of a guest that has a driver.
//!
//! Which files and devices a driver opens is not documented, so all of them stay. In a domain of
//! Landlock a process reaches no other process outside of it all the same: whatever a domain
//! restricts, the kernel refuses the access check of ptrace(2) there, on which the memory, the
//! environment, the mappings and the descriptors in `/proc` depend. It does not matter whose the
//! other process is, and whether it is dumpable.
#![forbid(unsafe_code)]

use std::fmt;

use landlock::{
    AccessFs, CompatLevel, Compatible as _, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetError, RulesetStatus, Scope,
};

use super::profile::SandboxError;

/// What the kernel refuses to a process with a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessIsolation {
    /// Memory, environment, mappings and descriptors of other processes, and signals to them.
    Full,
    /// The same without signals: a kernel before Linux 6.12.
    Partial,
    /// Nothing: a kernel before Linux 5.19, or one whose Landlock is turned off.
    None,
}

/// Takes other processes from the calling thread and the threads that it starts later: their
/// memory, environment, mappings and descriptors, and signals to them. Files stay as they are, and
/// so do processes that this process starts later.
///
/// TCP ports and abstract sockets are not restricted. A driver may connect to a service when it is
/// loaded, as CUDA does to NVIDIA's MPS, and which sockets it uses is not documented.
/// [`enter`](super::enter) refuses every further connection.
///
/// Call this before other threads start: the kernel restricts no thread that runs already.
///
/// # Errors
/// [`SandboxError::Processes`]: the kernel has Landlock and refuses the rules.
/// [`SandboxError::Root`]: the folder `/` cannot be opened.
pub fn isolate_processes() -> Result<ProcessIsolation, SandboxError> {
    let root = PathFd::new("/")?;
    let status = restrict(root).map_err(SandboxError::Processes)?;
    Ok(match status {
        RulesetStatus::FullyEnforced => ProcessIsolation::Full,
        RulesetStatus::PartiallyEnforced => ProcessIsolation::Partial,
        RulesetStatus::NotEnforced => ProcessIsolation::None,
    })
}

fn restrict(root: PathFd) -> Result<RulesetStatus, RulesetError> {
    let status = Ruleset::default()
        // A domain that restricts files refuses to move a file to another folder, unless a rule
        // permits that. A driver may do so in its cache. A kernel without such rules makes no
        // domain here.
        .set_compatibility(CompatLevel::SoftRequirement)
        .handle_access(AccessFs::Refer)?
        .set_compatibility(CompatLevel::BestEffort)
        // To make a device file needs a capability, which the process does not have either.
        .handle_access(AccessFs::MakeChar | AccessFs::MakeBlock)?
        .scope(Scope::Signal)?
        .create()?
        .add_rule(PathBeneath::new(root, AccessFs::Refer))?
        .restrict_self()?;
    Ok(status.ruleset)
}

impl fmt::Display for ProcessIsolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ProcessIsolation::Full => {
                "all of the user, for the driver; no memory, environment, mappings or descriptors \
                 of other processes, and no signals to them"
            }
            ProcessIsolation::Partial => {
                "all of the user, for the driver; no memory, environment, mappings or descriptors \
                 of other processes; the kernel's Landlock is older than Linux 6.12 and leaves \
                 signals"
            }
            ProcessIsolation::None => {
                "all of the user, for the driver, and the memory, environment, mappings and \
                 descriptors of the user's processes that are dumpable: Landlock is not available \
                 (the kernel before Linux 5.19, its parameter lsm=, or the container's filter)"
            }
        })
    }
}
