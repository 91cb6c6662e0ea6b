//! What all packages have in common: version, age and layout of their files.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::process;
use xtask_common::version;
use xtask_common::workspace;

/// The oldest C library that the files have to run with: that of RHEL 9 and its relatives. Ubuntu
/// 22.04 (2.35) and Debian 12 (2.36) have newer ones.
pub(super) const GLIBC: (u32, u32) = (2, 34);

/// A file of a package.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// The path in the package.
    pub(super) place: String,
    /// The file with the content.
    pub(super) file: PathBuf,
    /// The permissions.
    pub(super) mode: u32,
}

/// A file of a package.
pub(super) fn entry(place: impl Into<String>, file: impl Into<PathBuf>, mode: u32) -> Entry {
    Entry {
        place: place.into(),
        file: file.into(),
        mode,
    }
}

/// Copies files below `root`.
pub(super) fn lay_out(root: &Path, entries: &[Entry]) -> Result<()> {
    for Entry { place, file, mode } in entries {
        let target = root.join(place);
        let placing = || format!("placing {} as {place}", file.display());
        let mut folder = target.parent().with_context(placing)?.to_owned();
        fs::create_dir_all(&folder).with_context(placing)?;
        while folder.starts_with(root) {
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))
                .with_context(placing)?;
            folder.pop();
        }
        fs::copy(file, &target).with_context(placing)?;
        fs::set_permissions(&target, fs::Permissions::from_mode(*mode)).with_context(placing)?;
    }
    Ok(())
}

/// When the sources were last changed, in seconds: what files in a package say of their age.
pub(super) fn source_date_epoch() -> Result<u64> {
    let mut git = Command::new("git");
    git.args(["log", "-1", "--format=%ct"])
        .current_dir(workspace::root());
    let text = process::output(&mut git)?;
    text.trim()
        .parse()
        .with_context(|| format!("git says {text:?}"))
}

/// Arguments of `tar` for a file that is the same from the same files on any machine.
pub(super) fn reproducible_tar() -> Result<Command> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
        .args([
            "--format=gnu",
            &format!("--mtime=@{}", source_date_epoch()?),
        ]);
    Ok(tar)
}

/// The files below a folder of `root`, relative to `root`, sorted: those of git, since others may
/// lie beside them, or all of them in sources without git.
pub(super) fn files_below(root: &Path, folder: &str) -> Result<Vec<String>> {
    if let Some(listed) = version::git(root, &["ls-files", "-z", "--", folder]) {
        let files = listed.split('\0').filter(|file| !file.is_empty());
        return Ok(files.map(str::to_owned).collect());
    }
    let mut files = Vec::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        let reading = || format!("reading {}", folder.display());
        for entry in fs::read_dir(&folder).with_context(reading)? {
            let path = entry.with_context(reading)?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(root)?.to_str();
            let name = name.with_context(|| format!("{} is no text", path.display()))?;
            files.push(name.to_owned());
        }
    }
    files.sort_unstable();
    Ok(files)
}
