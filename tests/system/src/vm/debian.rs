//! Packages of a fixed Debian release with all dependencies, independent of the release of this
//! machine.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask_common::cache::Cache;
use xtask_common::process;
use xtask_common::progress::Progress;

const RELEASE: &str = "trixie";

/// The requested packages.
pub(super) struct Wanted<'a> {
    /// The name for the log.
    pub(super) name: &'a str,
    /// Whether to prefer packages from the backports.
    pub(super) backports: bool,
    pub(super) packages: &'a [&'a str],
}

impl Wanted<'_> {
    /// Downloads the packages and their dependencies with a separate apt configuration, from the
    /// host of this machine's Debian packages, and unpacks them into `dir`. Changes nothing on this
    /// machine and runs no package script.
    pub(super) fn unpack(&self, cache: &Cache, dir: &Path) -> Result<()> {
        let progress = Progress::new(&format!("fetching {} of Debian {RELEASE}", self.name));
        let log = cache.log(self.name);
        let sites = process::output(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Origin: Debian",
            "Component: main",
        ]))
        .context("asking apt where packages come from")?;
        let site = sites
            .lines()
            .find(|site| site.trim_end_matches('/').ends_with("/debian"))
            .context("apt's configuration names no host of Debian packages")?;
        let apt = dir.join("apt");
        for folder in ["lists/partial", "cache/archives/partial"] {
            std::fs::create_dir_all(apt.join(folder)).context("creating a folder for apt")?;
        }
        let key = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg";
        let mut sources = format!("deb [{key}] {site} {RELEASE} main\n");
        if self.backports {
            sources.push_str(&format!("deb [{key}] {site} {RELEASE}-backports main\n"));
        }
        std::fs::write(apt.join("sources.list"), sources).context("writing apt's sources")?;
        std::fs::write(apt.join("status"), "").context("writing apt's status")?;
        let apt_get = || {
            let mut command = Command::new("apt-get");
            for (key, value) in [
                ("Dir::Etc::sourcelist", apt.join("sources.list")),
                ("Dir::Etc::sourceparts", "/dev/null".into()),
                ("Dir::State::lists", apt.join("lists")),
                ("Dir::State::status", apt.join("status")),
                ("Dir::Cache", apt.join("cache")),
            ] {
                command.args(["-o", &format!("{key}={}", value.display())]);
            }
            // The cache belongs to the current user.
            command.args([
                "-o",
                "APT::Sandbox::User=root",
                "-o",
                "Debug::NoLocking=true",
            ]);
            command
        };
        process::run(apt_get().arg("update"), &progress, &log).context("updating package lists")?;
        let install = [
            "install",
            "-y",
            "--no-install-recommends",
            "--download-only",
        ];
        let mut fetch = apt_get();
        fetch.args(install);
        if self.backports {
            fetch.args(["-t", &format!("{RELEASE}-backports")]);
        }
        process::run(fetch.args(self.packages), &progress, &log)?;
        for archive in std::fs::read_dir(apt.join("cache/archives")).context("listing packages")? {
            let archive = archive.context("listing packages")?.path();
            if archive.extension() == Some("deb".as_ref()) {
                let mut unpack = Command::new("dpkg-deb");
                process::run(unpack.arg("-x").arg(&archive).arg(dir), &progress, &log)?;
            }
        }
        std::fs::remove_dir_all(&apt).context("removing the other downloads")?;
        progress.done("");
        Ok(())
    }
}
