//! `cargo xtask package`: what a server's administrator installs, as Debian packages and as an
//! archive.

mod deb;
mod layout;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
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
    let unpacked = scratch.path().join(&name);
    lay_out(
        &unpacked,
        &[
            ("bin/vgpu", &dist.vgpu, 0o755),
            ("lib/vgpu/libggml-vgpu.so", &dist.plugin, 0o644),
        ],
    )?;
    // What the documentation names and links to, at the same places as in the repository.
    let mut files: Vec<String> = [
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "tests/fuzz/README.md",
    ]
    .map(str::to_owned)
    .into();
    for folder in ["deploy", "docs"] {
        files.extend(files_below(root, folder)?);
    }
    for file in &files {
        let source = root.join(file);
        let metadata = source.metadata();
        let metadata = metadata.with_context(|| format!("reading {}", source.display()))?;
        let mode = match metadata.permissions().mode() & 0o100 {
            0 => 0o644,
            _ => 0o755,
        };
        lay_out(&unpacked, &[(file, &source, mode)])?;
    }
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

/// The files below a folder of the repository, relative to the repository's `root`.
fn files_below(root: &Path, folder: &str) -> Result<Vec<String>> {
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
    Ok(files)
}

fn checksums(packages: &Packages, folder: &Path) -> Result<()> {
    let mut sha256sum = Command::new("sha256sum");
    for file in packages.all() {
        sha256sum.arg(file.file_name().context("a package without a name")?);
    }
    let sums = process::output(sha256sum.current_dir(folder))?;
    fs::write(&packages.checksums, sums).context("writing the checksums")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use xtask_common::markdown::{self, check_links, prose};

    /// An archive that is packed with other files instead of builds, unpacked.
    fn unpacked(scratch: &Scratch) -> PathBuf {
        let license = workspace::root().join("LICENSE");
        let dist = Dist {
            plugin: license.clone(),
            vgpu: license,
        };
        let archive = archive(&dist, scratch.path()).expect("an archive");
        let mut tar = Command::new("tar");
        tar.arg("-xzf").arg(&archive).arg("-C").arg(scratch.path());
        process::output(&mut tar).expect("it is an archive");
        let name = archive.file_name().and_then(|name| name.to_str());
        let name = name.and_then(|name| name.strip_suffix(".tar.gz"));
        scratch.path().join(name.expect("a name"))
    }

    #[test]
    fn every_relative_link_of_the_archive_resolves() {
        let scratch = Scratch::new().expect("a folder");
        let root = unpacked(&scratch);
        let pages = markdown::files_below(&root, &["md"]).expect("pages");
        let links = check_links(&root, &pages);
        assert!(links.count > 50, "only {} links were found", links.count);
        let broken = links.broken.join("\n");
        assert!(broken.is_empty(), "broken links:\n{broken}");
        // Programs stay programs.
        let script = root.join("deploy/vm/qemu-ivshmem.sh");
        let mode = script.metadata().expect("a script").permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        fs::remove_file(root.join("deploy/host/vgpu.toml")).expect("a file");
        assert!(!check_links(&root, &pages).broken.is_empty());
    }

    /// The commands that install from the archive name files that it has.
    #[test]
    fn files_that_the_installation_places_are_in_the_archive() {
        let scratch = Scratch::new().expect("a folder");
        let root = unpacked(&scratch);
        let page = fs::read_to_string(root.join("docs/install.md")).expect("a page");
        let section = page.split("\n## Install from the archive\n").nth(1);
        let section = section.and_then(|rest| rest.split("\n## ").next());
        let section = section.expect("the section of the archive");
        let text: BTreeSet<usize> = prose(section).into_iter().map(|(line, _)| line).collect();
        let code = (1..)
            .zip(section.lines())
            .filter(|(line, _)| !text.contains(line));
        let words = code.flat_map(|(_, line)| line.split_whitespace());
        let folders = ["bin/", "lib/", "deploy/"];
        let named = words.filter(|word| folders.iter().any(|folder| word.starts_with(folder)));
        let named: Vec<&str> = named.collect();
        assert!(named.len() > 5, "{named:?}");
        let missing: Vec<_> = named
            .iter()
            .filter(|file| !root.join(file).exists())
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
