//! The base of a container image: some packages of Debian, unpacked.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::process;
use xtask_common::scratch::Scratch;

/// What of those packages only other programs use.
const UNUSED: [&str; 3] = [
    "usr/share/lintian",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/aarch64-linux-gnu/gconv",
];

/// A package of Debian in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DebianPackage {
    pub(super) name: String,
    pub(super) version: String,
    /// As Debian names it: `amd64`, or `all`.
    pub(super) architecture: String,
    /// The short names of its licences, if its copyright file is in the format that machines read.
    pub(super) licenses: Vec<String>,
}

impl fmt::Display for DebianPackage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.name, self.version)
    }
}

/// Unpacks Debian's `packages` for the base of an image into `root`, with the files and the empty
/// `folders` that programs expect. Returns the packages, sorted by their names.
pub(super) fn unpack(
    root: &Path,
    packages: &[&str],
    folders: &[&str],
) -> Result<Vec<DebianPackage>> {
    let mut found = fetch(packages, root)?;
    // Packages of one source have their documents, and so their licenses, in one of them.
    let linked = linked_documents(root)?;
    let linked: Vec<&str> = linked.iter().map(String::as_str).collect();
    if !linked.is_empty() {
        found.extend(fetch(&linked, root)?);
    }
    // The texts that these documents name.
    let scratch = Scratch::new()?;
    fetch(&["base-files"], scratch.path())?;
    let texts = "usr/share/common-licenses";
    let mut copy = Command::new("cp");
    copy.arg("-a").arg(scratch.path().join(texts));
    process::output(copy.arg(root.join(texts)))?;
    found.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    for package in &mut found {
        let copyright = root.join("usr/share/doc").join(&package.name);
        let copyright = fs::read(copyright.join("copyright"))
            .with_context(|| format!("reading the copyright of {}", package.name))?;
        package.licenses = licenses(&String::from_utf8_lossy(&copyright));
    }
    link_merged_folders(root)?;
    for unused in UNUSED {
        let path = root.join(unused);
        if path.exists() {
            fs::remove_dir_all(path).context("removing what is not used")?;
        }
    }
    for (file, text) in [
        (
            "etc/passwd",
            "root:x:0:0:root:/:/usr/sbin/nologin\n\
             nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        ),
        ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
    ] {
        let path = root.join(file);
        fs::create_dir_all(path.parent().context("a folder")?).context("creating a folder")?;
        fs::write(path, text).context("writing a file")?;
    }
    for folder in folders {
        let folder = root.join(folder.trim_start_matches('/'));
        fs::create_dir_all(folder).context("creating a folder")?;
    }
    Ok(found)
}

/// Unpacks Debian's packages into `root`. Returns them, without their licences.
fn fetch(packages: &[&str], root: &Path) -> Result<Vec<DebianPackage>> {
    let scratch = Scratch::new()?;
    let mut download = Command::new("apt-get");
    download
        .arg("download")
        .args(["-o", "APT::Sandbox::User=root"])
        .args(packages)
        .current_dir(scratch.path());
    process::output(&mut download).context("fetching the packages of the image with apt")?;
    fs::create_dir_all(root).context("creating a folder")?;
    let mut fetched = Vec::new();
    for entry in fs::read_dir(scratch.path()).context("listing the packages")? {
        let path = entry.context("listing the packages")?.path();
        let mut unpack = Command::new("dpkg-deb");
        process::output(unpack.arg("-x").arg(&path).arg(root))?;
        let show = ["-W", "--showformat=${Package} ${Version} ${Architecture}"];
        let said = process::output(Command::new("dpkg-deb").args(show).arg(&path))?;
        let mut words = said.split_whitespace().map(str::to_owned);
        let (name, version, architecture) = (words.next(), words.next(), words.next());
        let saying = || format!("dpkg-deb says {said:?}");
        fetched.push(DebianPackage {
            name: name.with_context(saying)?,
            version: version.with_context(saying)?,
            architecture: architecture.with_context(saying)?,
            licenses: Vec::new(),
        });
    }
    Ok(fetched)
}

/// The packages to whose documents those of the unpacked ones are links.
fn linked_documents(root: &Path) -> Result<BTreeSet<String>> {
    let mut packages = BTreeSet::new();
    let documents = root.join("usr/share/doc");
    for entry in fs::read_dir(&documents).context("listing documents")? {
        let path = entry.context("listing documents")?.path();
        if path.exists() {
            continue;
        }
        let target = fs::read_link(&path).context("a link between documents")?;
        let package = target.file_name().context("a link between documents")?;
        packages.insert(package.to_string_lossy().into_owned());
    }
    Ok(packages)
}

/// Links `/lib` and `/lib64` to the folders of the same names below `/usr`, where a release has the
/// files of the C library there (Debian 13, Ubuntu 24.04) and another package has the links.
/// Programs name their loader `/lib64/ld-linux-x86-64.so.2`.
fn link_merged_folders(root: &Path) -> Result<()> {
    for name in ["lib", "lib64"] {
        let (link, folder) = (root.join(name), root.join("usr").join(name));
        if !link.exists() && folder.is_dir() {
            std::os::unix::fs::symlink(Path::new("usr").join(name), &link)
                .with_context(|| format!("linking {}", link.display()))?;
        }
    }
    Ok(())
}

/// The short names of the licences in a copyright file of Debian, sorted. None if the file is not
/// in the format that machines read.
fn licenses(copyright: &str) -> Vec<String> {
    // Older files name older places of the format.
    let is_for_machines = { copyright.lines().next() }
        .is_some_and(|first| first.starts_with("Format:") && first.contains("copyright-format"));
    if !is_for_machines {
        return Vec::new();
    }
    let names = copyright.lines().filter_map(|line| {
        let name = line.strip_prefix("License:")?.trim();
        (!name.is_empty()).then(|| name.to_owned())
    });
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loader is where programs look for it, whether a release has it below `/usr` or not.
    #[test]
    fn the_loader_is_in_lib64_of_either_layout() {
        const LOADER: &str = "ld-linux-x86-64.so.2";
        for folder in ["lib64", "usr/lib64"] {
            let root = Scratch::new().unwrap();
            let root = root.path();
            fs::create_dir_all(root.join(folder)).unwrap();
            fs::write(root.join(folder).join(LOADER), "loader").unwrap();
            link_merged_folders(root).unwrap();
            let text = fs::read_to_string(root.join("lib64").join(LOADER)).unwrap();
            assert_eq!(text, "loader", "{folder}");
            assert!(!root.join("lib").exists(), "nothing to link to");
        }
    }

    #[test]
    fn licences_are_those_of_a_machine_readable_copyright() {
        let text = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
                    \n\
                    Files: *\n\
                    License: GPL-2+ or MIT\n\
                    \n\
                    Files: b\n\
                    License: BSD-3-clause\n\
                    \u{20}License: of the text\n\
                    \n\
                    License: BSD-3-clause\n\
                    \u{20}Redistribution and use\n";
        assert_eq!(licenses(text), ["BSD-3-clause", "GPL-2+ or MIT"]);
        let prose = "This is the GNU C Library.\nLicense: LGPL\n";
        assert!(licenses(prose).is_empty());
        assert!(licenses("").is_empty());
    }
}
