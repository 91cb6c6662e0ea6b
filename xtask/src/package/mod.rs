//! `cargo xtask package`: what a server's administrator installs, as Debian packages and as an
//! archive. `cargo xtask release`: the same with RPM packages, images and a signature.

mod contents;
mod deb;
mod debian_base;
mod layout;
mod oci;
mod rpm;
mod sbom;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::cache::Cache;
use xtask_common::dist::{self, Dist};
use xtask_common::elf::ElfLibrary;
use xtask_common::llama::{self, PortableServer};
use xtask_common::machine_code;
use xtask_common::packages;
use xtask_common::println;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use contents::Generated;
use layout::{GLIBC, entry, files_below, lay_out, reproducible_tar};
use sbom::Tree;

/// What ssh-keygen calls a namespace: a signature for another purpose is not valid here.
const NAMESPACE: &str = "ggml-vgpu";
const CHECKSUMS: &str = "SHA256SUMS";
const INSTALLER: &str = "install.sh";

/// Options of the packaging.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Pack libggml-vgpu.so and vgpu of this folder instead of a fresh release build
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
    /// Where the packages are made; what is in this folder is removed [default: target/package, or
    /// target/dist/release for a release]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Machine code for these GPU architectures only [default: all]
    #[arg(long, value_name = "sm_90a", conflicts_with = "dist")]
    arch: Vec<String>,
}

/// Options of a release.
#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseOptions {
    #[command(flatten)]
    package: Options,
    /// Make no image of llama-server, which takes a quarter of an hour to build
    #[arg(long)]
    without_llama_server: bool,
    /// Sign the checksums with this SSH key, as a file or in the agent (its public key)
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
}

/// Makes all packages and prints their paths.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    heading("packages");
    let made = Release::new(cache, options, "target/package")?;
    made.debs_and_archive()?;
    made.finish(None)
}

/// Makes everything that is published.
pub(crate) fn release(cache: &Cache, options: &ReleaseOptions) -> Result<()> {
    heading("release");
    let changed = workspace::changed_files();
    ensure!(
        options.package.dist.is_some() || changed.is_empty(),
        "a release is made of a commit, and these files differ from it:\n{}",
        changed.join("\n")
    );
    if !packages::runs("rpmbuild", &["--version"]) {
        packages::apt(cache, &["rpm"], "rpmbuild")?;
    }
    let made = Release::new(cache, &options.package, "target/dist/release")?;
    made.debs_and_archive()?;
    made.rpms()?;
    made.images(match options.without_llama_server {
        true => None,
        false => Some(llama::portable_server(cache)?),
    })?;
    let installer = made.folder.join(INSTALLER);
    fs::copy(workspace::root().join("deploy").join(INSTALLER), &installer)
        .context("copying the installer")?;
    made.finish(options.sign.as_deref())
}

/// What is being made.
struct Release {
    dist: Dist,
    version: String,
    folder: PathBuf,
    generated: Generated,
    tree: Tree,
    /// The number of files with machine code for GPUs in `vgpu`.
    machine_code: usize,
}

impl Release {
    /// Builds what is packed, and empties the folder of `options`.
    fn new(cache: &Cache, options: &Options, default: &str) -> Result<Release> {
        let dist = match &options.dist {
            Some(folder) => dist::at(folder),
            None => {
                let code = machine_code::compile(cache, &options.arch)?;
                let dist = dist::build_with(
                    cache,
                    &dist::Release {
                        machine_code: Some(&code),
                        is_engine_in_plugin: false,
                    },
                )?;
                let (files, _) = machine_code::check(&code)?;
                let built_in = machine_code::built_into(&dist.vgpu)?;
                ensure!(built_in == files, "{built_in} of {files} are built in");
                dist
            }
        };
        let progress = Progress::new("looking at what is packed");
        let newest = check_glibc(&dist)?;
        // The packages have the version of their files.
        let said = process::output(Command::new(&dist.vgpu).arg("--version"))?;
        let version = said.trim().strip_prefix("vgpu ");
        let version = version.with_context(|| format!("vgpu says {said:?}"))?;
        let machine_code = machine_code::built_into(&dist.vgpu)?;
        let tree = Tree::read()?;
        let generated = Generated::new(&dist.vgpu, &tree.licenses()?)?;
        let folder = { options.out.clone() }.unwrap_or_else(|| workspace::root().join(default));
        if folder.exists() {
            // A package of another version must not lie beside those that are listed.
            fs::remove_dir_all(&folder).context("removing the packages of the last time")?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let code = match machine_code {
            0 => "no machine code for GPUs: hosts need NVRTC".to_owned(),
            files => format!("machine code for GPUs in {files} files"),
        };
        progress.done(&format!("{version}; glibc {newest} or newer; {code}"));
        Ok(Release {
            version: version.to_owned(),
            dist,
            folder,
            generated,
            tree,
            machine_code,
        })
    }

    fn debs_and_archive(&self) -> Result<()> {
        let progress = Progress::new("packing for Debian, and an archive");
        let (version, folder) = (&self.version, &self.folder);
        let of_package = workspace::package_version(version);
        let host = contents::host(&self.dist, &self.generated)?;
        deb::pack(&host, "passwd", &of_package, folder)?;
        let guest = contents::guest(&self.dist, &self.generated);
        let depends = format!("vgpu (= {of_package})");
        deb::pack(&guest, &depends, &of_package, folder)?;
        archive(&self.dist, &self.generated.licenses, version, folder)?;
        let bill = self.tree.sbom(&self.dist, version, self.machine_code > 0)?;
        fs::write(folder.join(format!("ggml-vgpu-{version}.cdx.json")), bill)
            .context("writing the bill of materials")?;
        progress.done("");
        Ok(())
    }

    fn rpms(&self) -> Result<()> {
        let progress = Progress::new("packing for RPM");
        let (version, folder) = (workspace::package_version(&self.version), &self.folder);
        let host = contents::host(&self.dist, &self.generated)?;
        rpm::pack(&host, "systemd", &version, folder)?;
        let guest = contents::guest(&self.dist, &self.generated);
        rpm::pack(&guest, &format!("vgpu = {version}-1"), &version, folder)?;
        progress.done("");
        Ok(())
    }

    fn images(&self, server: Option<PortableServer>) -> Result<()> {
        let sources = oci::Sources {
            dist: &self.dist,
            generated: &self.generated,
            tree: &self.tree,
            has_machine_code: self.machine_code > 0,
            version: &self.version,
            folder: &self.folder,
        };
        let progress = Progress::new("packing the OCI image of the executor");
        let base = oci::executor(sources)?;
        progress.done(&format!("on {base}"));
        if let Some(server) = server {
            let progress = Progress::new("packing the OCI image of llama-server");
            let base = oci::llama_server(sources, &server)?;
            progress.done(&format!("on {base}"));
        }
        Ok(())
    }

    /// Writes the checksums and their signature, and prints all paths.
    fn finish(&self, key: Option<&Path>) -> Result<()> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder).context("listing the packages")? {
            names.push(entry.context("listing the packages")?.file_name());
        }
        names.sort_unstable();
        let mut sha256sum = Command::new("sha256sum");
        let sums = process::output(sha256sum.args(&names).current_dir(&self.folder))?;
        let file = self.folder.join(CHECKSUMS);
        fs::write(&file, sums).context("writing the checksums")?;
        for name in names {
            println!("{}", self.folder.join(name).display());
        }
        println!("{}", file.display());
        if let Some(key) = key {
            println!("{}", sign(&file, key)?.display());
        }
        Ok(())
    }
}

/// Signs a file. Returns the file with the signature.
fn sign(file: &Path, key: &Path) -> Result<PathBuf> {
    // The key may ask for its passphrase on the terminal.
    let status = Command::new("ssh-keygen")
        .args(["-q", "-Y", "sign", "-n", NAMESPACE, "-f"])
        .args([key, file])
        .status()
        .context("starting ssh-keygen")?;
    ensure!(status.success(), "ssh-keygen ended with {status}");
    let mut name = file.as_os_str().to_owned();
    name.push(".sig");
    Ok(name.into())
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
fn archive(dist: &Dist, licenses: &Path, version: &str, folder: &Path) -> Result<PathBuf> {
    let name = format!("ggml-vgpu-{version}-{}-linux", std::env::consts::ARCH);
    let scratch = Scratch::new()?;
    let root = workspace::root();
    let unpacked = scratch.path().join(&name);
    let mut entries = vec![
        entry("bin/vgpu", &dist.vgpu, 0o755),
        entry("lib/vgpu/libggml-vgpu.so", &dist.plugin, 0o644),
        entry("third-party-licenses.txt", licenses, 0o644),
    ];
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
        entries.push(entry(file, source, mode));
    }
    lay_out(&unpacked, &entries)?;
    let archive = folder.join(format!("{name}.tar.xz"));
    let mut tar = reproducible_tar()?;
    tar.args(["--use-compress-program", "xz -6 -T1", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(scratch.path())
        .arg(&name)
        .env_remove("XZ_OPT")
        .env_remove("XZ_DEFAULTS");
    process::output(&mut tar)?;
    Ok(archive)
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
        let licenses = dist.vgpu.clone();
        let archive = archive(&dist, &licenses, "0.1.0", scratch.path()).expect("an archive");
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(&archive).arg("-C").arg(scratch.path());
        process::output(&mut tar).expect("it is an archive");
        let name = archive.file_name().and_then(|name| name.to_str());
        let name = name.and_then(|name| name.strip_suffix(".tar.xz"));
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
