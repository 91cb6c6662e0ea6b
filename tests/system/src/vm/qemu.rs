//! QEMU: the one of this machine, and a newer one for vfio-user.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use super::debian::Wanted;
use xtask_common::cache::Cache;
use xtask_common::packages;

const QEMU: &str = "qemu-system-x86_64";

/// The package of QEMU. The backports of Debian 13 have a QEMU with vfio-user (10.1 or newer).
const PACKAGE: &str = "qemu-system-x86";

/// A QEMU installation.
#[derive(Clone, Debug)]
pub(super) struct Qemu {
    program: PathBuf,
    before: Vec<OsString>,
    /// The folder of its modules, if it is not the one that QEMU was built for.
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

    /// The QEMU of this machine.
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

    /// A newer QEMU of a later Debian release: unpacked with all its libraries, and started by its
    /// own dynamic linker, so that this machine is not changed.
    pub(super) fn with_vfio_user(cache: &Cache) -> Result<Qemu> {
        let wanted = Wanted {
            name: "qemu",
            backports: true,
            packages: &[PACKAGE],
        };
        let root = cache.folder("qemu-trixie-backports", |dir| wanted.unpack(cache, dir))?;
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

    /// The fastest accelerator that works on this machine: KVM or emulation. KVM inside a virtual
    /// machine may exist and start a guest that then never runs.
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
                // The process may have ended already; its status shows it.
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
