//! A private folder that goes away.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};

/// A folder only this user can enter, removed on drop. Its path is short: a unix socket's path has at
/// most 107 bytes.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Creates the folder.
    ///
    /// # Errors
    /// If the system's folder for temporary files has no room, or is not writable.
    pub fn new() -> Result<Scratch> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "vgpu-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed) // only has to differ
        );
        let path = std::env::temp_dir().join(name);
        // Not `recursive`: a folder that is already there is somebody else's.
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("creating the private folder {}", path.display()))?;
        Ok(Scratch { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing depends on it, and a temporary folder is cleaned by the system too.
        let _ = fs::remove_dir_all(&self.path);
    }
}
