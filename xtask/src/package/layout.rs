//! What all packages have in common: version, age and layout of their files.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::process;
use xtask_common::workspace;

pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The oldest C library that the files have to run with: that of RHEL 9 and its relatives. Ubuntu
/// 22.04 (2.35) and Debian 12 (2.36) have newer ones.
pub(super) const GLIBC: (u32, u32) = (2, 34);

/// A file of a package: where it goes, what it is, its permissions.
pub(super) type Entry<'a> = (&'a str, &'a Path, u32);

/// Copies files below `root`.
pub(super) fn lay_out(root: &Path, entries: &[Entry<'_>]) -> Result<()> {
    for (place, file, mode) in entries {
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
