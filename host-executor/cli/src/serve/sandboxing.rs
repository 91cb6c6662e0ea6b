//! What an executor gives up after its start, depending on its engine.

use anyhow::Context as _;
use tracing::{info, warn};
use vgpu_engine::Engine;
use vgpu_executor::sandbox::{self, Profile, Role};

use super::trim_pages::Scope;

/// What helps when the kernel refuses the sandbox.
pub(super) const REMEDY: &str = "no sandbox; --no-sandbox starts without one";

fn profile(engine: &dyn Engine) -> Profile {
    match engine.name() {
        "cpu" => Profile::Cpu,
        // The system calls of drivers are not documented.
        _ => Profile::Driver,
    }
}

/// The code pages that can be dropped.
pub(super) fn trim_scope(engine: &dyn Engine) -> Scope {
    match profile(engine) {
        Profile::Cpu => Scope::AllObjects,
        Profile::Driver => Scope::Program,
    }
}

/// Shows that the process has given up what it does not need, or that the operator has disabled
/// that. Without this value no client is accepted.
pub(super) struct Confined(());

/// Enters the sandbox, unless the operator has disabled it.
pub(super) fn enter(
    engine: &dyn Engine,
    role: Role,
    is_disabled: bool,
) -> anyhow::Result<Confined> {
    if is_disabled {
        warn!("no sandbox: --no-sandbox");
        return Ok(Confined(()));
    }
    let sandbox = sandbox::enter(profile(engine), role).context(REMEDY)?;
    info!("sandboxed: {sandbox}");
    Ok(Confined(()))
}

/// Takes from a supervisor what it does not need to start and to watch processes. It opens its
/// sockets before.
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
