//! What `vgpu install` has left in an Ollama installation, for `vgpu doctor`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use vgpu_elf::Library;

use super::before_start::BeforeStart;
use super::ollama::Ollama;
use super::stamp::{PLUGIN, Stamp};
use super::{DROP_IN, plugin};
use crate::error_text;

/// The state of the Ollama of a machine.
#[derive(Debug)]
pub(crate) enum OllamaState {
    /// No Ollama, or one that loads no other backends.
    Absent,
    /// An Ollama with this library folder that does not have the plugin.
    WithoutPlugin(PathBuf),
    /// The plugin there does not work with this Ollama, for this reason.
    Unusable(String),
    /// The plugin is there, and the service lacks this file.
    NoDropIn(PathBuf),
    /// The plugin is there, and the file of the service is that of another version.
    OutdatedDropIn(PathBuf),
    /// The plugin is in this library folder. `drop_in`: the file of the service, if a service runs
    /// this Ollama.
    Installed {
        lib: PathBuf,
        drop_in: Option<PathBuf>,
    },
}

/// The state of the Ollama in the file system `root`.
pub(crate) fn ollama_state(root: &Path) -> OllamaState {
    let Ok(ollama) = Ollama::find(root, None) else {
        return OllamaState::Absent;
    };
    let plugin = ollama.backend_folder().join(PLUGIN);
    if !plugin.exists() {
        return OllamaState::WithoutPlugin(ollama.lib);
    }
    if let Err(error) = check(&ollama, &plugin) {
        return OllamaState::Unusable(error_text::one_line(&error));
    }
    let drop_in = ollama.drop_ins(root).map(|folder| folder.join(DROP_IN));
    match drop_in {
        Some(file) if !file.exists() => OllamaState::NoDropIn(file),
        Some(file)
            if std::fs::read_to_string(&file)
                .is_ok_and(|text| is_outdated(root, &ollama, &text)) =>
        {
            OllamaState::OutdatedDropIn(file)
        }
        drop_in => OllamaState::Installed {
            lib: ollama.lib,
            drop_in,
        },
    }
}

/// Checks that the plugin at this place is there, and works with the Ollama around it.
///
/// # Errors
/// If not, with the reason and what helps.
pub(crate) fn check_installed(plugin: &Path) -> Result<()> {
    let lib = { plugin.parent() }.and_then(Path::parent);
    let lib = lib.with_context(|| format!("{} is in no Ollama", plugin.display()))?;
    let ollama = Ollama::find(Path::new("/"), Some(lib));
    { ollama.and_then(|ollama| check(&ollama, plugin)) }.with_context(|| {
        format!(
            "Ollama would compute on the CPU: it has no plugin that works at {}. `sudo vgpu \
             install` says why, or installs it",
            plugin.display()
        )
    })
}

/// The commands that `vgpu install` would write into the drop-in `text`, and that are not there.
fn is_outdated(root: &Path, ollama: &Ollama, text: &str) -> bool {
    let found = plugin(None).and_then(|plugin| BeforeStart::find(root, &plugin, &ollama.found));
    let Ok(before_start) = found else {
        return false;
    };
    let mut commands = before_start.commands().into_iter();
    commands.any(|command| !text.contains(&format!("\nExecStartPre={command}\n")))
}

fn check(ollama: &Ollama, plugin: &Path) -> Result<()> {
    let library = Library::read(plugin)?;
    let stamp = Stamp::of(&library)?;
    ollama.check_ggml(&library, &stamp)?;
    Ok(())
}
