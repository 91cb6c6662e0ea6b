//! The executor of this host, by its control socket. The sockets of virtual machines are not
//! connected to, since an executor takes every client there for a QEMU: an executor that hangs is
//! found here.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use vgpu_executor::config::{DEFAULT_CONTROL_PATH, Settings};
use vgpu_executor::control::{self, ControlError};
use vgpu_executor::status::Status;

use super::report::Report;
use super::root::Root;
use super::unit::UnitState;
use crate::session_client::{NoResult, result_within};

const PART: &str = "executor";

/// How long the executor may take. A supervisor waits two seconds for each of its processes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// `host`: the settings of the executor of this machine. Returns what an executor that works says.
pub(super) fn check(
    root: &Root,
    host: Option<&Settings>,
    service: UnitState,
    report: &mut Report,
) -> Option<Status> {
    // The service has this one if its configuration names none, and so may an executor that was
    // started by hand on a machine without a configuration.
    let path = host.and_then(|settings| settings.control.as_deref());
    let path = root.path(path.unwrap_or(Path::new(DEFAULT_CONTROL_PATH)));
    // A container may see the socket of its host.
    if host.is_none() && (root.is_container() || !path.exists()) {
        return None;
    }
    let shown = path.display().to_string();
    let asked = path.clone();
    let answer = result_within(TIMEOUT, move || control::status(&asked));
    // What the executor does is to be seen before it is ended.
    let dump = || "sudo vgpu dump; sudo systemctl restart vgpu".to_owned();
    match answer {
        Ok(Ok(status)) => {
            let Some(engine) = status.engines().find(|engine| engine.hang.is_some()) else {
                let names: Vec<&str> = { status.engines() }
                    .map(|engine| &engine.name[..])
                    .collect();
                let text = match names[..] {
                    [name] => format!("the engine {name} answers"),
                    _ => format!("the engines {} answer", names.join(", ")),
                };
                report.ok(PART, format!("{shown}: {text}"));
                return Some(status);
            };
            let hang = engine.hang.as_deref().unwrap_or_default();
            let which = match status.has_several_engines() {
                true => format!(" {}", engine.name),
                false => String::new(),
            };
            report.fail(PART, format!("the engine{which} hangs: {hang}"), dump());
        }
        // It does not run, which the checks of the service and of the links report.
        Ok(Err(ControlError::Socket(error)))
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) => {}
        Ok(Err(ControlError::Socket(error))) if error.kind() == ErrorKind::PermissionDenied => {
            report.note(PART, format!("{shown}: not asked: run vgpu doctor as root"));
        }
        // The sockets are there before the engine is, whose kernels may be compiled for minutes.
        Ok(Err(_)) | Err(NoResult::Late { .. }) if service == UnitState::Changing => {
            report.note(
                PART,
                format!("{shown}: no answer yet, while the service starts"),
            );
        }
        Ok(Err(error @ ControlError::Invalid(_))) => report.fail(
            PART,
            format!("{shown}: {error}"),
            "sudo systemctl restart vgpu",
        ),
        Ok(Err(error)) => report.fail(PART, format!("{shown}: {error}"), dump()),
        Err(NoResult::Late { limit }) => report.fail(
            PART,
            format!(
                "{shown}: no answer within {} s: the executor hangs",
                limit.as_secs()
            ),
            dump(),
        ),
        Err(error) => report.note(PART, format!("{shown}: not asked: {error}")),
    }
    None
}
