//! `cargo xtask vm`: a real guest under QEMU, with everything in it that a user would have.

mod cpio;
mod debian;
mod device;
mod guest;
mod image;
mod inside;
mod links;
mod qemu;
mod systemd;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use crate::cache::Cache;
use crate::demo;
use crate::dist::Dist;
use crate::llama;
use crate::model::{self, Weights};
use crate::progress::Step;
use crate::scratch::Scratch;

pub(crate) use device::{Booted, Device, boot};
use image::Content;
use links::Certificates;
pub(crate) use links::boot_without_device;
use qemu::Qemu;
pub(crate) use systemd::boot_systemd;

/// Not a measure of speed: how long to wait before something must be wrong.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same for a command in an emulated guest.
const GUEST_PATIENCE: Duration = Duration::from_secs(900);

/// Memory of a guest.
const MEMORY: &str = "2G";

/// What the tests need, made once.
pub(crate) struct Prepared {
    qemu: Qemu,
    kernel: image::Kernel,
    programs: Programs,
    initramfs: PathBuf,
    certificates: Certificates,
    dist: Dist,
    scratch: Scratch,
}

/// The programs and the model that go into every guest.
struct Programs {
    bin: PathBuf,
    cpu: PathBuf,
    model: PathBuf,
}

impl Programs {
    fn content<'a>(&'a self, dist: &'a Dist, more: &'a [(&'a str, &'a Path)]) -> Content<'a> {
        Content {
            dist,
            bin: &self.bin,
            cpu: &self.cpu,
            model: &self.model,
            more,
        }
    }
}

/// Fetches and builds it.
pub(crate) fn prepare(cache: &Cache, dist: &Dist) -> Result<Prepared> {
    let qemu = Qemu::stock(cache)?;
    let kernel = image::kernel(cache)?;
    let vocabulary = llama::source(cache)?.join(demo::VOCABULARY);
    let programs = Programs {
        bin: llama::build(cache, llama::Stage::Tools)?,
        cpu: llama::cpu_for_guests(cache)?,
        model: model::ensure(cache, &model::TINY, Weights::F16, &vocabulary, demo::SEED)?,
    };
    let scratch = Scratch::new()?;
    let initramfs = scratch.path().join("initramfs");
    let certificates = Certificates::make(&dist.vgpu, scratch.path())?;
    let step = Step::new("assembling an initramfs");
    let more = certificates.for_guests();
    image::initramfs(cache, &kernel, &programs.content(dist, &more), &initramfs)?;
    let mib = initramfs.metadata().map_or(0, |m| m.len() >> 20);
    step.done(&format!("{mib} MiB"));
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

/// A kind of guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    /// With a vGPU on stock QEMU (ivshmem)
    Ivshmem,
    /// With a vGPU on a newer QEMU (vfio-user)
    VfioUser,
    /// Without the device: vsock, TCP with TLS
    Links,
    /// With systemd and our Debian packages: services
    Systemd,
}
