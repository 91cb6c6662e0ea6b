//! The running program as a command.

/// Starts a process of the running program, of the same version: the kernel knows the file even if
/// an upgrade has replaced or removed it since.
pub(crate) const OWN_PROGRAM: &str = "/proc/self/exe";

/// The version of the running program with its commit (`xtask/common/src/version.rs`). The
/// processes that it starts have the same.
pub(crate) const VERSION: &str = env!("VGPU_VERSION");

/// Refuses a supervisor of another version. `process` is what the supervisor has started.
/// `supervisor` is its version; earlier versions do not say theirs.
pub(crate) fn check_supervisor(process: &str, supervisor: Option<&str>) -> anyhow::Result<()> {
    let supervisor = supervisor.filter(|version| !version.is_empty());
    anyhow::ensure!(
        supervisor == Some(VERSION),
        "this {process} is vgpu {VERSION}, and its supervisor is vgpu {}: restart `vgpu serve \
         --isolate`",
        supervisor.unwrap_or("of an earlier version")
    );
    Ok(())
}
