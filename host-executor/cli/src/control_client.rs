//! The control socket of a running executor, with errors that say what to do.

use std::io;
use std::path::Path;

use anyhow::anyhow;
use vgpu_executor::OperatorRequest;
use vgpu_executor::control::{self, ControlError, ReloadOutcome};
use vgpu_executor::status::Status;

/// Asks the executor for a snapshot.
pub(crate) fn status(path: &Path) -> anyhow::Result<Status> {
    control::status(path).map_err(|error| explain(path, &error))
}

/// Asks the executor what everybody does now.
pub(crate) fn dump(path: &Path) -> anyhow::Result<String> {
    control::dump(path).map_err(|error| explain(path, &error))
}

/// Makes the executor reload its configuration.
pub(crate) fn reload(path: &Path) -> anyhow::Result<ReloadOutcome> {
    control::reload(path).map_err(|error| explain(path, &error))
}

/// Makes the executor carry out a request. Returns what has changed.
///
/// Fails with the executor's reason if it refuses.
pub(crate) fn perform(path: &Path, request: &OperatorRequest) -> anyhow::Result<String> {
    let outcome = control::perform(path, request).map_err(|error| explain(path, &error))?;
    anyhow::ensure!(outcome.ok, "{}", outcome.message);
    Ok(outcome.message)
}

fn explain(path: &Path, error: &ControlError) -> anyhow::Error {
    let path = path.display();
    let kind = match error {
        ControlError::Socket(error) => Some(error.kind()),
        _ => None,
    };
    match kind {
        Some(io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => anyhow!(
            "{path}: {error}; is an executor running with this control socket (vgpu serve \
             --control, or [control] in its configuration)?"
        ),
        Some(io::ErrorKind::PermissionDenied) => {
            anyhow!("{path}: {error}; only the executor's user and root may use the control socket")
        }
        _ => anyhow!("{path}: {error}"),
    }
}
