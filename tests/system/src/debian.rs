//! The output of `cargo xtask package`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use xtask_common::dist::Dist;
use xtask_common::process;
use xtask_common::workspace;

/// The Debian packages' names.
pub(crate) const HOST: &str = "vgpu";
pub(crate) const GUEST: &str = "vgpu-guest";

/// The files of a package build.
#[derive(Debug)]
pub(crate) struct Packages {
    pub(crate) host: PathBuf,
    pub(crate) guest: PathBuf,
    pub(crate) archive: PathBuf,
    /// The bill of materials.
    pub(crate) bill: PathBuf,
    pub(crate) checksums: PathBuf,
}

impl Packages {
    /// Packs a build with `cargo xtask package`. Removes the previous content of `folder`.
    pub(crate) fn make(dist: &Dist, folder: &Path) -> Result<Packages> {
        let built = dist.plugin.parent().context("a build lies in a folder")?;
        let mut cargo = workspace::cargo();
        cargo
            .args(["xtask", "package", "--dist"])
            .arg(built)
            .arg("--out")
            .arg(folder);
        let written = process::output(&mut cargo)?;
        let file = |start: &str, end: &str| of_release(&written, start, end);
        let host = file("vgpu_", ".deb")?;
        let guest = file("vgpu-guest_", ".deb")?;
        let archive = file("ggml-vgpu-", ".tar.xz")?;
        let bill = file("ggml-vgpu-", ".cdx.json")?;
        let checksums = file("SHA256SUMS", "")?;
        Ok(Packages {
            host,
            guest,
            archive,
            bill,
            checksums,
        })
    }

    /// The files in the list of checksums.
    pub(crate) fn all(&self) -> [&Path; 4] {
        [&self.host, &self.guest, &self.archive, &self.bill]
    }
}

/// The file of a release by the start and the end of its name. `written` is what `cargo xtask package`
/// or `cargo xtask release` has written.
///
/// # Errors
/// If there is no such file.
pub(crate) fn of_release(written: &str, start: &str, end: &str) -> Result<PathBuf> {
    let mut files = written.lines().map(PathBuf::from);
    let found = files.find(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(start) && name.ends_with(end)
    });
    let found = found.filter(|file| file.is_file());
    found.with_context(|| format!("no {start}*{end} in {written}"))
}
