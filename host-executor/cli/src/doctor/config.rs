//! The configuration of `vgpu serve`, by `vgpu check-config` in a process of its own: the engine
//! that it starts may hang, or end the process.

use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use vgpu_executor::config::{DEFAULT_PATH, LoadError, Settings};

use super::child::{self, NoAnswer};
use super::gpu_use::Choice;
use super::report::Report;
use super::root::Root;
use crate::check_config;
use crate::own_program::OWN_PROGRAM;

const PART: &str = "config";

/// How long the check may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the settings of the executor, and which engines it would start with now. `None`: there
/// is no file, or it cannot be used.
pub(super) fn check(root: &Root, report: &mut Report) -> (Option<Settings>, Option<Choice>) {
    let path = root.path(DEFAULT_PATH);
    let edit = || format!("sudoedit {}", path.display());
    match Settings::load(&path) {
        Ok(settings) => {
            let shown = path.display();
            let mut command = Command::new(OWN_PROGRAM);
            command.arg("check-config").arg(&path).arg("--json");
            let answer = child::output(command.stderr(Stdio::null()), LIMIT);
            let value = answer.map(|(text, _)| serde_json::from_str::<Value>(text.trim()));
            let mut choice = None;
            match value {
                Ok(Ok(value)) if value["ok"] == true => {
                    let engines = value["engine"].as_str().unwrap_or_default();
                    report.ok(
                        PART,
                        format!(
                            "{shown}: {}, {} named guests",
                            check_config::engine_text(
                                &settings.engines,
                                engines,
                                value["device"].as_str().unwrap_or_default(),
                            ),
                            settings.guests.len()
                        ),
                    );
                    if value["needs_isolation"] == true {
                        report.note(PART, format!("{shown}: {}", check_config::NEEDS_ISOLATION));
                    }
                    choice = Some(Choice {
                        engines: engines.to_owned(),
                        unused_gpu: value["unused_gpu"].as_str().map(str::to_owned),
                    });
                }
                Ok(Ok(value)) => {
                    let reason = value["reason"].as_str().unwrap_or_default();
                    report.fail(PART, format!("{shown}: {reason}"), edit());
                }
                Ok(Err(error)) => {
                    report.fail(PART, format!("{shown}: {error}"), "vgpu check-config")
                }
                // A first start on a GPU compiles kernels.
                Err(error @ NoAnswer::Late(_)) => report.note(
                    PART,
                    format!("{shown}: vgpu check-config, which starts the engine: {error}"),
                ),
                Err(error) => report.fail(
                    PART,
                    format!("{shown}: vgpu check-config: {error}"),
                    "vgpu check-config",
                ),
            }
            (Some(settings), choice)
        }
        Err(LoadError::Read { error, .. }) if error.kind() == ErrorKind::NotFound => (None, None),
        Err(error @ LoadError::Read { .. }) => {
            report.note(PART, format!("{error}: run vgpu doctor as root"));
            (None, None)
        }
        Err(error @ LoadError::Problem { .. }) => {
            report.fail(PART, error.to_string(), edit());
            (None, None)
        }
    }
}
