//! The release before the one under test: with which guests and hosts are, that are upgraded one
//! after the other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::cache::Cache;
use xtask_common::dist::{self, Dist};
use xtask_common::process;
use xtask_common::progress::Progress;
use xtask_common::workspace;

/// Its commit. docs/upgrades.md has the version of its protocol.
const COMMIT: &str = "d8283f75";

/// What the commit builds.
#[derive(Debug)]
pub(crate) struct Previous {
    /// The plugin and the command.
    pub(crate) dist: Dist,
    /// Its Debian packages.
    pub(crate) packages: Vec<PathBuf>,
}

/// The previous release from the cache. Builds it if it is not there, which takes minutes.
pub(crate) fn previous(cache: &Cache) -> Result<Previous> {
    let folder = cache.folder(&format!("previous-{COMMIT}-1"), |dir| build(cache, dir))?;
    let files = fs::read_dir(folder.join("packages")).context("listing packages")?;
    let files = files.map(|file| Ok(file.context("listing packages")?.path()));
    let mut packages = files.collect::<Result<Vec<_>>>()?;
    packages.retain(|file| file.extension().is_some_and(|extension| extension == "deb"));
    Ok(Previous {
        dist: dist::at(&folder.join("dist")),
        packages,
    })
}

/// Builds and packs the commit in a clone, without machine code for GPUs.
fn build(cache: &Cache, dir: &Path) -> Result<()> {
    let progress = Progress::new(&format!("building the previous release, {COMMIT}"));
    let log = cache.log("previous");
    let sources = dir.join("sources");
    let mut clone = Command::new("git");
    clone.args(["clone", "--shared", "--no-checkout", "--quiet"]);
    clone.arg(workspace::root()).arg(&sources);
    process::run(&mut clone, &progress, &log)?;
    let mut checkout = Command::new("git");
    checkout.current_dir(&sources);
    checkout.args(["checkout", "--quiet", COMMIT]);
    process::run(&mut checkout, &progress, &log)
        .with_context(|| format!("this clone lacks the commit {COMMIT}"))?;
    let cargo = || {
        let mut cargo = workspace::cargo();
        cargo.current_dir(&sources);
        cargo.env_remove("CARGO_TARGET_DIR").arg("xtask");
        cargo
    };
    process::run(cargo().arg("build"), &progress, &log)?;
    let built = sources.join("target/dist");
    let mut pack = cargo();
    pack.args(["package", "--dist"]).arg(&built);
    pack.arg("--out").arg(dir.join("packages"));
    process::run(&mut pack, &progress, &log)?;
    fs::rename(&built, dir.join("dist")).context("keeping the build")?;
    fs::remove_dir_all(&sources).context("removing the clone")?;
    progress.done("");
    Ok(())
}
