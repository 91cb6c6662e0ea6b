//! Files, their content, and copies of them.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use xtask_common::process;

/// Copies a folder with all that is in it, owners and modes included, to a path that is not there
/// yet, or the content (`from/.`) into a folder.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let mut cp = Command::new("cp");
    cp.args(["--archive", "--reflink=auto"]);
    process::output(cp.arg(from).arg(to)).map(drop)
}

/// The SHA-256 of a file in hexadecimal.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn sha256(file: &Path) -> Result<String> {
    let said = process::output(Command::new("sha256sum").arg("--binary").arg(file))?;
    Ok(said.split(' ').next().unwrap_or_default().to_owned())
}
