//! `cargo xtask vm`: a real guest under QEMU, with everything in it that a user would have.

mod cpio;
mod device;
mod guest;
mod image;
mod inside;
mod links;
mod qemu;

use std::path::PathBuf;
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
use links::Certificates;
pub(crate) use links::boot_without_device;
use qemu::Qemu;

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
    initramfs: PathBuf,
    certificates: Certificates,
    dist: Dist,
    scratch: Scratch,
}

/// Fetches and builds it.
pub(crate) fn prepare(cache: &Cache, dist: &Dist) -> Result<Prepared> {
    let qemu = Qemu::stock(cache)?;
    let kernel = image::kernel(cache)?;
    let bin = llama::build(cache, llama::Stage::Tools)?;
    let cpu = llama::cpu_for_guests(cache)?;
    let vocabulary = llama::source(cache)?.join(demo::VOCABULARY);
    let model = model::ensure(cache, &model::TINY, Weights::F16, &vocabulary, demo::SEED)?;
    let scratch = Scratch::new()?;
    let initramfs = scratch.path().join("initramfs");
    let certificates = Certificates::make(&dist.vgpu, scratch.path())?;
    let step = Step::new("assembling an initramfs");
    let content = image::Content {
        dist,
        bin: &bin,
        cpu: &cpu,
        model: &model,
        more: &certificates.for_guests(),
    };
    image::initramfs(cache, &kernel, &content, &initramfs)?;
    let mib = initramfs.metadata().map_or(0, |m| m.len() >> 20);
    step.done(&format!("{mib} MiB"));
    Ok(Prepared {
        qemu,
        kernel,
        initramfs,
        certificates,
        dist: dist.clone(),
        scratch,
    })
}
