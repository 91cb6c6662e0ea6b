//! What an executor gives up after its start, depending on its engine.

use anyhow::Context as _;
use tracing::{info, warn};
use vgpu_executor::engine::EngineKind;
use vgpu_executor::sandbox::{self, FileIsolation, ProcessIsolation, Profile, Role};

use super::trim_pages::Scope;

/// What helps when the kernel refuses the sandbox.
pub(super) const REMEDY: &str = "no sandbox; --no-sandbox starts without one";

fn profile(engines: &[EngineKind]) -> Profile {
    match engines.iter().all(|engine| *engine == EngineKind::Cpu) {
        true => Profile::Cpu,
        // The system calls of drivers are not documented.
        false => Profile::Driver,
    }
}

/// The code pages that can be dropped.
pub(super) fn trim_scope(engines: &[EngineKind]) -> Scope {
    match profile(engines) {
        Profile::Cpu => Scope::AllObjects,
        Profile::Driver => Scope::Program,
    }
}

/// Shows that the process has given up what it does not need, or that the operator has disabled
/// that. Without this value no client is accepted.
pub(super) struct Confined(());

/// Gives up the capabilities before an engine with a driver starts, unless the operator has
/// disabled the sandbox: threads of a driver may handle no signal, and a thread can only drop its
/// own. What needs capabilities, such as opening the sockets, comes before. Returns the number of
/// threads that had some.
pub(super) fn before_engine(engines: &[EngineKind], is_disabled: bool) -> anyhow::Result<usize> {
    if is_disabled || profile(engines) == Profile::Cpu {
        return Ok(0);
    }
    sandbox::drop_current_capabilities().context(REMEDY)
}

/// Enters the sandbox, unless the operator has disabled it. `dropped`: what [`before_engine`] has
/// returned.
pub(super) fn enter(
    engines: &[EngineKind],
    role: Role,
    is_disabled: bool,
    dropped: usize,
) -> anyhow::Result<Confined> {
    if is_disabled {
        warn!("no sandbox: --no-sandbox");
        return Ok(Confined(()));
    }
    let mut sandbox = sandbox::enter(profile(engines), role).context(REMEDY)?;
    sandbox.threads += dropped;
    info!("sandboxed: {sandbox}");
    Ok(Confined(()))
}

/// Takes the files of the user from the process of a guest, or, if it has a driver, which opens
/// files and devices, other processes only. The process must have no other thread yet: the kernel
/// restricts only the calling thread and its children.
pub(super) fn isolate(engines: &[EngineKind]) -> anyhow::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task").context("counting threads")?;
    let threads = threads.count();
    anyhow::ensure!(
        threads == 1,
        "a fault of vgpu: {threads} threads run before the process is confined"
    );
    match profile(engines) {
        Profile::Cpu => match sandbox::isolate_files().context(REMEDY)? {
            isolation @ FileIsolation::None => warn!("files: {isolation}"),
            isolation => info!("files: {isolation}"),
        },
        Profile::Driver => match sandbox::isolate_processes().context(REMEDY)? {
            isolation @ ProcessIsolation::None => warn!("files: {isolation}"),
            isolation => info!("files: {isolation}"),
        },
    }
    Ok(())
}

/// Takes from a supervisor what it does not need to start and to watch processes. A supervisor
/// opens its sockets before.
pub(super) fn confine_supervisor(is_disabled: bool) -> anyhow::Result<Confined> {
    if is_disabled {
        warn!("no sandbox: --no-sandbox");
        return Ok(Confined(()));
    }
    let threads = sandbox::enter_supervisor().context(REMEDY)?;
    info!(
        "the supervisor is sandboxed: not dumpable, no new privileges, no capabilities (dropped by \
         {threads} threads), none of the system calls that it does not use"
    );
    Ok(Confined(()))
}
