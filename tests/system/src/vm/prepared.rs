//! The prerequisites of every virtual machine, made once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use xtask_common::cache::Cache;
use xtask_common::dist::Dist;
use xtask_common::llama;
use xtask_common::model::{self, FileType};
use xtask_common::progress::Progress;
use xtask_common::scratch::Scratch;

use super::certificates::Certificates;
use super::guest::Machine;
use super::image::{self, Content};
use super::program;
use super::qemu::Qemu;
use crate::faults;

/// The timeout for every wait.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of a command in an emulated guest.
pub(super) const GUEST_TIMEOUT: Duration = Duration::from_secs(900);

/// Memory of a guest.
pub(super) const MEMORY: &str = "2G";

/// The prerequisites of the tests, made once.
pub(crate) struct Prepared {
    pub(super) qemu: Qemu,
    pub(super) kernel: image::Kernel,
    pub(super) programs: Programs,
    pub(super) initramfs: PathBuf,
    pub(super) certificates: Certificates,
    pub(super) dist: Dist,
    pub(super) scratch: Scratch,
}

/// The programs and the model for every guest.
pub(super) struct Programs {
    pub(super) bin: PathBuf,
    pub(super) cpu: PathBuf,
    pub(super) model: PathBuf,
}

impl Programs {
    pub(super) fn content<'a>(
        &'a self,
        dist: &'a Dist,
        more: &'a [(&'a str, &'a Path)],
    ) -> Content<'a> {
        Content {
            dist,
            bin: &self.bin,
            cpu: &self.cpu,
            model: &self.model,
            more,
        }
    }
}

impl Prepared {
    /// A machine whose initramfs has systemd, with further devices.
    pub(super) fn with_systemd<'a>(
        &'a self,
        initramfs: &'a Path,
        devices: &'a [String],
        memory: &'a str,
    ) -> Machine<'a> {
        Machine {
            qemu: &self.qemu,
            accelerator: self.qemu.accelerator(),
            kernel: &self.kernel.image,
            initramfs,
            init: "/usr/lib/systemd/systemd systemd.getty_auto=0 systemd.firstboot=no \
                   systemd.show_status=0",
            devices,
            memory,
        }
    }
}

/// Downloads and builds the prerequisites.
pub(crate) fn prepare(cache: &Cache, dist: &Dist) -> Result<Prepared> {
    let qemu = Qemu::stock(cache)?;
    let kernel = image::kernel(cache)?;
    let programs = Programs {
        bin: llama::build(cache, llama::Stage::Tools)?,
        cpu: llama::cpu_for_guests(cache)?,
        model: model::ensure(cache, &model::TINY, FileType::F16)?,
    };
    let scratch = Scratch::new()?;
    let initramfs = scratch.path().join("initramfs");
    let certificates = Certificates::make(&dist.vgpu, scratch.path())?;
    let progress = Progress::new("assembling an initramfs");
    let retrying = faults::Program::build(cache, &programs.bin, &programs.model, scratch.path())?;
    let mut more = certificates.for_guests();
    more.push((program::PATH, retrying.path.as_path()));
    image::initramfs(cache, &kernel, &programs.content(dist, &more), &initramfs)?;
    let mib = initramfs.metadata().map_or(0, |m| m.len() >> 20);
    progress.done(&format!("{mib} MiB"));
    Ok(Prepared {
        qemu,
        kernel,
        programs,
        initramfs,
        certificates,
        dist: dist.clone(),
        scratch,
    })
}
