//! Debian packages.
//!
//! dpkg-deb packs them. cargo-deb is not used: it packs the files of one crate, as it builds them
//! itself. Here each of two packages has files of builds with features of their own, and the
//! machine that packs would first have to compile it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::contents::Package;
use super::layout::{Entry, GLIBC, entry, lay_out, source_date_epoch};
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

/// The scripts that a package may have, in `deploy/debian`.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// Packs a package that depends on `depends`, besides the C library.
pub(super) fn pack(
    package: &Package,
    depends: &str,
    version: &str,
    folder: &Path,
) -> Result<PathBuf> {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("Debian has no name for {other} that we know"),
    };
    let Package { name, summary, .. } = package;
    let scratch = Scratch::new()?;
    let root = scratch.path().join(name);
    lay_out(&root, &package.entries)?;

    let bytes: u64 = { package.entries.iter() }
        .filter_map(|entry| entry.file.metadata().ok())
        .map(|metadata| metadata.len())
        .sum();
    let text = format!(
        "Package: {name}\nVersion: {version}\nArchitecture: {architecture}\n\
         Maintainer: ggml-vgpu <maintainers@ggml-vgpu.invalid>\nInstalled-Size: {}\n\
         Depends: libc6 (>= {}.{}), libgcc-s1, {depends}\nSection: utils\nPriority: optional\n\
         Description: {summary}\n {}\n",
        bytes.div_ceil(1024),
        GLIBC.0,
        GLIBC.1,
        package.description.join("\n "),
    );
    let debian = root.join("DEBIAN");
    let deploy = workspace::root().join("deploy/debian");
    let scripts: Vec<Entry> = { SCRIPTS.iter() }
        .map(|script| entry(*script, deploy.join(format!("{name}.{script}")), 0o755))
        .filter(|script| script.file.exists())
        .collect();
    lay_out(&debian, &scripts)?;
    fs::write(debian.join("control"), text).context("writing a control file")?;
    if !package.conffiles.is_empty() {
        let lines = package.conffiles.iter().map(|file| format!("/{file}\n"));
        let text: String = lines.collect();
        fs::write(debian.join("conffiles"), text).context("writing the list of conffiles")?;
    }
    let file = folder.join(format!("{name}_{version}_{architecture}.deb"));
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.args(["--build", "--root-owner-group", "-Zxz"])
        .arg(&root)
        .arg(&file)
        .env("SOURCE_DATE_EPOCH", source_date_epoch()?.to_string());
    process::output(&mut dpkg).context("packing, which needs Debian's dpkg-deb")?;
    Ok(file)
}
