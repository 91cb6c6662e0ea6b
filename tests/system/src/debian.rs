//! The output of `cargo xtask package`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

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
        let files: Vec<PathBuf> = written.lines().map(PathBuf::from).collect();
        let [host, guest, archive, checksums] = <[PathBuf; 4]>::try_from(files)
            .map_err(|files| anyhow::anyhow!("`cargo xtask package` named {files:?}"))?;
        for file in [&host, &guest, &archive, &checksums] {
            ensure!(file.is_file(), "{} was not created", file.display());
        }
        Ok(Packages {
            host,
            guest,
            archive,
            checksums,
        })
    }

    /// The files in the list of checksums.
    pub(crate) fn all(&self) -> [&Path; 3] {
        [&self.host, &self.guest, &self.archive]
    }
}
