//! QEMU: this machine's own, and for vfio-user a newer one.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::cache::Cache;
use crate::packages;
use crate::process;
use crate::progress::Step;

const QEMU: &str = "qemu-system-x86_64";

/// The package of QEMU, and where Debian has one that knows vfio-user (10.1 or newer).
const PACKAGE: &str = "qemu-system-x86";
const RELEASE: &str = "trixie";
const SUITE: &str = "trixie-backports";

/// A QEMU that can be started.
#[derive(Clone, Debug)]
pub(super) struct Qemu {
    program: PathBuf,
    before: Vec<OsString>,
    /// Where its loadable parts are, if not where it was built for.
    modules: Option<PathBuf>,
}

impl Qemu {
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.before);
        if let Some(modules) = &self.modules {
            command.env("QEMU_MODULE_DIR", modules);
        }
        command
    }

    /// This machine's.
    pub(super) fn stock(cache: &Cache) -> Result<Qemu> {
        if !packages::runs(QEMU, &["--version"]) {
            packages::apt(cache, &[PACKAGE], "QEMU")?;
        }
        Ok(Qemu {
            program: QEMU.into(),
            before: Vec::new(),
            modules: None,
        })
    }

    /// A newer one, of the next Debian release: unpacked with all its libraries, and started by its own dynamic linker, so that
    /// nothing of this machine's system is touched.
    pub(super) fn with_vfio_user(cache: &Cache) -> Result<Qemu> {
        let root = cache.folder(&format!("qemu-{SUITE}"), |dir| unpack(cache, dir))?;
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        let mut path = libraries.clone().into_os_string();
        let folders = std::fs::read_dir(&libraries).context("listing QEMU's libraries")?;
        for folder in folders {
            let folder = folder.context("listing QEMU's libraries")?.path();
            if folder.is_dir() {
                path.push(":");
                path.push(folder);
            }
        }
        let share = root.join("usr/share");
        Ok(Qemu {
            program: libraries.join("ld-linux-x86-64.so.2"),
            before: vec![
                "--library-path".into(),
                path,
                root.join("usr/bin").join(QEMU).into(),
                "-L".into(),
                share.join("qemu").into(),
                "-L".into(),
                share.join("seabios").into(),
            ],
            modules: Some(libraries.join("qemu")),
        })
    }

    /// The fastest way to run a guest that can be relied on here: KVM, or emulation. (KVM inside a virtual machine may be
    /// there, start a guest, and never run it.)
    pub(super) fn accelerator(&self) -> &'static str {
        let probe = || -> std::io::Result<bool> {
            let mut probe = self
                .command()
                .args(["-accel", "kvm", "-cpu", "max", "-machine", "q35"])
                .args(["-nodefaults", "-display", "none", "-monitor", "stdio", "-S"])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?;
            if let Some(mut monitor) = probe.stdin.take() {
                // It may have ended already; its status says so.
                let _ = monitor.write_all(b"quit\n");
            }
            Ok(probe.wait()?.success())
        };
        let is_nested =
            std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" hypervisor"));
        if !is_nested && Path::new("/dev/kvm").exists() && probe().unwrap_or(false) {
            "kvm"
        } else {
            "tcg,thread=multi"
        }
    }
}

/// Fetches QEMU and everything it needs with an apt of its own, from the host that this machine gets its Debian packages from.
fn unpack(cache: &Cache, dir: &Path) -> Result<()> {
    let step = Step::new(&format!("fetching {PACKAGE} of {SUITE}"));
    let log = cache.log("qemu");
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
    let sources = format!("deb [{key}] {site} {RELEASE} main\ndeb [{key}] {site} {SUITE} main\n");
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
        // The cache belongs to whoever runs this.
        command.args([
            "-o",
            "APT::Sandbox::User=root",
            "-o",
            "Debug::NoLocking=true",
        ]);
        command
    };
    process::run(apt_get().arg("update"), &step, &log).context("updating package lists")?;
    let install = [
        "install",
        "-y",
        "--no-install-recommends",
        "--download-only",
    ];
    process::run(
        apt_get().args(install).args(["-t", SUITE, PACKAGE]),
        &step,
        &log,
    )?;
    for archive in std::fs::read_dir(apt.join("cache/archives")).context("listing packages")? {
        let archive = archive.context("listing packages")?.path();
        if archive.extension() == Some("deb".as_ref()) {
            let mut unpack = Command::new("dpkg-deb");
            process::run(unpack.arg("-x").arg(&archive).arg(dir), &step, &log)?;
        }
    }
    std::fs::remove_dir_all(&apt).context("removing what else was fetched")?;
    step.done("");
    Ok(())
}
