//! What `vgpu install` has left in an Ollama installation, for `vgpu doctor`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use vgpu_elf::Library;

use super::DROP_IN;
use super::ollama::Ollama;
use super::stamp::{PLUGIN, Stamp};
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
        drop_in => OllamaState::Installed {
            lib: ollama.lib,
            drop_in,
        },
    }
}

fn check(ollama: &Ollama, plugin: &Path) -> Result<()> {
    let library = Library::read(plugin)?;
    let stamp = Stamp::of(&library)?;
    ollama.check_ggml(&library, &stamp)?;
    Ok(())
}
