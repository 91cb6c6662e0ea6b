//! Debian: the packages that `cargo xtask package` makes, and minimal systems to install them in.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::packages as tools;
use xtask_common::process;
use xtask_common::progress::Progress;
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

/// Makes a release of a build in the new folder `folder`. Returns what `cargo xtask release` has
/// written: the files.
///
/// # Errors
/// If the clone has changed files, or the release cannot be made.
pub(crate) fn release(dist: &Dist, folder: &Path) -> Result<String> {
    let built = dist.vgpu.parent().context("a build lies in a folder")?;
    let mut cargo = workspace::cargo();
    cargo.args(["xtask", "release", "--dist"]).arg(built);
    process::output(cargo.arg("--out").arg(folder))
}

/// The file of a release by the start and the end of its name. `written` is what
/// `cargo xtask package` or `cargo xtask release` has written.
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

/// A supported release of Debian.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Release {
    pub(crate) number: &'static str,
    name: &'static str,
}

pub(crate) const BOOKWORM: Release = Release {
    number: "12",
    name: "bookworm",
};
pub(crate) const TRIXIE: Release = Release {
    number: "13",
    name: "trixie",
};

impl Release {
    /// The file system of a minimal system, made once, with what programs of llama.cpp and Ollama
    /// need of Debian beside the C library. The packages under test depend on none of it.
    ///
    /// # Errors
    /// As [`Release::tree`].
    pub(crate) fn minimal(self, cache: &Cache) -> Result<PathBuf> {
        self.tree(cache, ("minimal", "libstdc++6,libgomp1"), |_| Ok(()))
    }

    /// The file system of a minimal system with further packages, made once with `debootstrap`.
    /// `finish` may change the new system.
    ///
    /// # Errors
    /// If this user is not root, or the packages cannot be fetched.
    pub(crate) fn tree(
        self,
        cache: &Cache,
        (what, packages): (&str, &str),
        finish: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let is_root = rustix::process::geteuid().is_root();
        ensure!(is_root, "debootstrap and chroot need root");
        let mut hasher = DefaultHasher::new();
        packages.hash(&mut hasher);
        let name = self.name;
        let folder = format!("debian-{what}-{name}-{:016x}", hasher.finish());
        cache.folder(&folder, |dir| {
            if !tools::runs("debootstrap", &["--version"]) {
                tools::apt(cache, &["debootstrap"], "debootstrap")?;
            }
            let progress = Progress::new(&format!("a Debian ({what}), {name}"));
            let mut debootstrap = Command::new("debootstrap");
            let include = format!("--include={packages}");
            debootstrap.args(["--variant=minbase", &include, name]);
            let log = cache.log("debootstrap");
            process::run(debootstrap.arg(dir), &progress, &log)?;
            // Downloads, which make copies large.
            for folder in ["var/cache/apt/archives", "var/lib/apt/lists"] {
                fs::remove_dir_all(dir.join(folder)).context("removing downloads")?;
            }
            finish(dir)?;
            progress.done("");
            Ok(())
        })
    }
}
