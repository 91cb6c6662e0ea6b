//! The Ollama of this machine: whether it has the plugin, and whether its service uses it.

use super::report::Report;
use super::root::Root;
use crate::install::{OllamaState, ollama_state};

const PART: &str = "ollama";
const INSTALL: &str = "sudo vgpu install";

pub(super) fn check(root: &Root, report: &mut Report) {
    match ollama_state(root.folder()) {
        OllamaState::Absent => report.note(PART, "none in the usual folders"),
        OllamaState::WithoutPlugin(lib) => report.note(
            PART,
            format!(
                "{}: does not have the plugin; {INSTALL} gives it",
                lib.display()
            ),
        ),
        OllamaState::Unusable(reason) => {
            report.fail(PART, reason, format!("{INSTALL} --dry-run"));
        }
        OllamaState::NoDropIn(file) => report.fail(
            PART,
            format!(
                "Ollama has the plugin, and its service has no {}",
                file.display()
            ),
            INSTALL,
        ),
        OllamaState::OutdatedDropIn(file) => report.note(
            PART,
            format!(
                "{} is of another version, or of another place of this program; {INSTALL} writes \
                 the present one, which installs the plugin again after updates of Ollama",
                file.display()
            ),
        ),
        OllamaState::Installed { lib, drop_in } => {
            let how = match drop_in {
                Some(file) => format!("its service has {}", file.display()),
                None => "no service runs it: start it with OLLAMA_LLM_LIBRARY=vgpu".into(),
            };
            report.ok(PART, format!("{}: has the plugin, {how}", lib.display()));
        }
    }
}
