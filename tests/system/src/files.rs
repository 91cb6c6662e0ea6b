//! Files and their content.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use xtask_common::process;

/// The SHA-256 of a file in hexadecimal.
///
/// # Errors
/// If the file cannot be read.
pub(crate) fn sha256(file: &Path) -> Result<String> {
    let said = process::output(Command::new("sha256sum").arg("--binary").arg(file))?;
    Ok(said.split(' ').next().unwrap_or_default().to_owned())
}
