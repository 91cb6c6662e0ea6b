//! A virtual machine with a minimal Debian, in which a user installs the packages.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::guest::Guest;
use super::image;
use super::inside::{As, Way};
use super::prepared::{GUEST_TIMEOUT, Prepared};
use xtask_common::progress::Progress;

/// The kernel unpacks the initramfs into memory, beside the initramfs itself.
const MEMORY: &str = "3G";

/// A booted machine.
pub(crate) struct Minimal {
    guest: Guest,
}

/// Boots a machine with a copy of the Debian in `tree`, which has systemd, with `files` in the home
/// folder of root and `arguments` for QEMU's devices.
///
/// # Errors
/// If the machine does not boot.
pub(crate) fn boot_minimal(
    prepared: &Prepared,
    tree: &Path,
    files: &[&Path],
    arguments: &[String],
    logs: &dyn Fn(&str) -> PathBuf,
) -> Result<Minimal> {
    let progress = Progress::new("assembling a minimal system");
    let initramfs = prepared.scratch.path().join("initramfs-minimal");
    let content = prepared.programs.content(&prepared.dist, &[]);
    image::with_files(tree, files, &content, &initramfs)?;
    progress.done("");
    let machine = prepared.with_systemd(&initramfs, arguments, MEMORY);
    let mut guest = Guest::boot(&machine, &logs("qemu"))?;
    guest.set_timeout(GUEST_TIMEOUT);
    Ok(Minimal { guest })
}

impl Minimal {
    /// Runs a line of shell in the home folder of root. Returns what the line writes.
    ///
    /// # Errors
    /// If the line fails. The error has its output.
    pub(crate) fn run(&mut self, line: &str) -> Result<String> {
        let ran = self.guest.run(&format!("cd /root; ({line}) 2>&1"))?;
        ran.good(line)
    }

    /// Text that a program generates through the installed plugin over a PCI device, which must be
    /// that of the machine's own processor.
    ///
    /// # Errors
    /// If the texts differ, or the device was not used.
    pub(crate) fn generation(&mut self) -> Result<String> {
        self.run("ln -sf /usr/lib/vgpu/libggml-vgpu.so /vgpu/libggml-vgpu.so")?;
        let reference = self.guest.reference()?;
        let way = Way {
            environment: "",
            link: "pci:0000:",
            who: As::Root,
        };
        self.guest.generation(&way, &reference)
    }
}
