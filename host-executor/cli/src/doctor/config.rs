//! The configuration of `vgpu serve`, by the code of `vgpu check-config`.

use std::io::ErrorKind;

use vgpu_executor::config::{DEFAULT_PATH, LoadError, Settings};

use super::report::Report;
use super::root::Root;
use crate::check_config;

const PART: &str = "config";

/// Returns the settings of the executor. `None`: there is no file, or it cannot be used.
pub(super) fn check(root: &Root, report: &mut Report) -> Option<Settings> {
    let path = root.path(DEFAULT_PATH);
    let edit = || format!("sudoedit {}", path.display());
    match Settings::load(&path) {
        Ok(settings) => {
            match check_config::checked(&settings) {
                Ok(_) => report.ok(
                    PART,
                    format!(
                        "{}: engine {}, {} named guests",
                        path.display(),
                        settings.engine,
                        settings.guests.len()
                    ),
                ),
                Err(error) => report.fail(PART, format!("{}: {error}", path.display()), edit()),
            }
            Some(settings)
        }
        Err(LoadError::Read { error, .. }) if error.kind() == ErrorKind::NotFound => None,
        Err(error @ LoadError::Read { .. }) => {
            report.note(PART, format!("{error}: run vgpu doctor as root"));
            None
        }
        Err(error @ LoadError::Problem { .. }) => {
            report.fail(PART, error.to_string(), edit());
            None
        }
    }
}
