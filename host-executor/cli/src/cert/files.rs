//! The names and files of an authority's folder.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};

/// Days of validity of a certificate.
pub(super) const DAYS: u32 = 365;

/// The folder with a copy of each certificate.
pub(super) const ISSUED: &str = "issued";

/// Refuses a name that is no name of a folder, or no word of a command line.
pub(super) fn check_name(name: &str) -> anyhow::Result<()> {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if name.is_empty() || name.starts_with(['.', '-']) || !name.bytes().all(is_plain) {
        bail!("the name {name:?}: letters, digits, `.`, `_` and `-`, beginning with none of `.-`");
    }
    // The names of files of the authority's folder.
    if [ISSUED, "renew", "revoke"].contains(&name) {
        bail!("the name {name:?} has a meaning of its own: choose another one");
    }
    Ok(())
}

/// Writes a new file. Fails if the file exists.
pub(super) fn write_new(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path);
    file.and_then(|mut file| file.write_all(content))
        .with_context(|| format!("writing {}", path.display()))
}

/// Writes a file, or replaces it at once: a reader sees the old content or the new one.
pub(super) fn replace(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = Path::new(&name);
    // What an interrupted call has left behind.
    let _ = fs::remove_file(new);
    write_new(new, content, 0o644)?;
    fs::rename(new, path).with_context(|| format!("writing {}", path.display()))
}
