//! Private folders for sockets.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::Context as _;
use tempfile::TempDir;

/// Creates a folder that only this user can enter, in `XDG_RUNTIME_DIR` or the folder for temporary
/// files. Dropping the result removes the folder.
pub(crate) fn create(prefix: &str) -> anyhow::Result<TempDir> {
    let base = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let base = base.filter(|folder| folder.is_dir());
    let base = base.unwrap_or_else(std::env::temp_dir);
    tempfile::Builder::new()
        .prefix(prefix)
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(&base)
        .with_context(|| format!("creating a folder in {}", base.display()))
}
