//! A private temporary folder, removed on drop.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use tempfile::TempDir;

/// A folder that only this user can enter, removed on drop. The path is short: a Unix socket's
/// path has at most 107 bytes.
#[derive(Debug)]
pub struct Scratch {
    folder: TempDir,
}

impl Scratch {
    /// Creates the folder.
    ///
    /// # Errors
    /// If the system's folder for temporary files has no room, or is not writable.
    pub fn new() -> Result<Scratch> {
        let folder = tempfile::Builder::new()
            .prefix("vgpu-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir();
        let folder = folder.context("creating a private folder for temporary files")?;
        Ok(Scratch { folder })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_is_private_and_is_removed() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path().to_owned();
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        std::fs::write(path.join("file"), "").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
