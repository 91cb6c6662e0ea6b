//! `cargo xtask package`: what a server's administrator installs, as Debian packages and as an
//! archive.

mod deb;
mod layout;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::cache::Cache;
use xtask_common::dist::{self, Dist};
use xtask_common::elf::ElfLibrary;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use layout::{GLIBC, VERSION, lay_out, source_date_epoch};

/// The files that were made.
#[derive(Debug)]
struct Packages {
    host: PathBuf,
    guest: PathBuf,
    archive: PathBuf,
    checksums: PathBuf,
}

/// Options of the packaging.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Pack libggml-vgpu.so and vgpu of this folder instead of a fresh release build
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
    /// Where the packages are made; what is in this folder is removed [default: target/package]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Makes all packages and prints their paths.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("packages");
    let dist = match &options.dist {
        Some(folder) => dist::at(folder),
        None => dist::build(cache)?,
    };
    let folder = match &options.out {
        Some(folder) => folder.clone(),
        None => workspace::root().join("target/package"),
    };
    let made = build(&dist, &folder)?;
    for file in made.all() {
        println!("{}", file.display());
    }
    println!("{}", made.checksums.display());
    Ok(())
}

fn build(dist: &Dist, folder: &Path) -> Result<Packages> {
    let progress = Progress::new("packing");
    let newest = check_glibc(dist)?;
    if folder.exists() {
        // A package of another version must not lie beside those that are listed.
        fs::remove_dir_all(folder).context("removing the packages of the last time")?;
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let packages = Packages {
        host: deb::host(dist, folder)?,
        guest: deb::guest(dist, folder)?,
        archive: archive(dist, folder)?,
        checksums: folder.join("SHA256SUMS"),
    };
    checksums(&packages, folder)?;
    progress.done(&format!("they need glibc {newest} or newer"));
    Ok(packages)
}

impl Packages {
    fn all(&self) -> [&Path; 3] {
        [&self.host, &self.guest, &self.archive]
    }
}

/// The newest version of the C library that a file of ours asks for.
fn check_glibc(dist: &Dist) -> Result<String> {
    let mut newest = (0, 0);
    for file in [&dist.vgpu, &dist.plugin] {
        let needs = ElfLibrary::read(file)?
            .glibc()
            .context("it needs no C library")?;
        ensure!(
            needs <= GLIBC,
            "{} needs glibc {}.{}; build it on a system with {}.{} or older, or call less of it",
            file.display(),
            needs.0,
            needs.1,
            GLIBC.0,
            GLIBC.1
        );
        newest = newest.max(needs);
    }
    Ok(format!("{}.{}", newest.0, newest.1))
}

/// An archive that is unpacked anywhere and removed with its folder.
fn archive(dist: &Dist, folder: &Path) -> Result<PathBuf> {
    let name = format!("ggml-vgpu-{VERSION}-{}-linux", std::env::consts::ARCH);
    let scratch = Scratch::new()?;
    let root = workspace::root();
    let deploy = root.join("deploy");
    let unpacked = scratch.path().join(&name);
    lay_out(
        &unpacked,
        &[
            ("bin/vgpu", &dist.vgpu, 0o755),
            ("lib/vgpu/libggml-vgpu.so", &dist.plugin, 0o644),
            (
                "share/systemd/vgpu.service",
                &deploy.join("host/vgpu.service"),
                0o644,
            ),
            ("share/vgpu.toml", &deploy.join("host/vgpu.toml"), 0o644),
            (
                "share/udev/60-vgpu.rules",
                &deploy.join("guest/60-vgpu.rules"),
                0o644,
            ),
            ("README.md", &root.join("README.md"), 0o644),
            ("LICENSE", &root.join("LICENSE"), 0o644),
        ],
    )?;
    let pages = pages(&root.join("docs"))?;
    let pages: Vec<_> = { pages.iter() }
        .map(|(place, page)| (place.as_str(), page.as_path(), 0o644))
        .collect();
    lay_out(&unpacked, &pages)?;
    let archive = folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    // The same files give the same archive on any machine.
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"])
        .arg(format!("--mtime=@{}", source_date_epoch()?))
        .args(["--use-compress-program", "gzip -9n", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(scratch.path())
        .arg(&name);
    process::output(&mut tar)?;
    Ok(archive)
}

/// The pages of documentation in a folder, each with its place in the archive.
fn pages(docs: &Path) -> Result<Vec<(String, PathBuf)>> {
    let reading = || format!("reading {}", docs.display());
    let mut pages = Vec::new();
    for entry in fs::read_dir(docs).with_context(reading)? {
        let page = entry.with_context(reading)?.path();
        if page.extension().is_some_and(|extension| extension == "md")
            && let Some(name) = page.file_name().and_then(|name| name.to_str())
        {
            pages.push((format!("docs/{name}"), page));
        }
    }
    Ok(pages)
}

fn checksums(packages: &Packages, folder: &Path) -> Result<()> {
    let mut sha256sum = Command::new("sha256sum");
    for file in packages.all() {
        sha256sum.arg(file.file_name().context("a package without a name")?);
    }
    let sums = process::output(sha256sum.current_dir(folder))?;
    fs::write(&packages.checksums, sums).context("writing the checksums")
}
