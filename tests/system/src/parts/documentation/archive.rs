//! A host without packages: the archive, with the units in their places.

use anyhow::{Context as _, Result, ensure};

use super::guide::Guide;
use crate::container::{Container, TRIXIE, USER};
use crate::debian::Packages;
use crate::test_run::TestRun;

pub(super) fn follow(tests: &TestRun<'_>, packages: &Packages) -> Result<String> {
    let sections = ["Install from the archive", "Start the executor"];
    let mut guide = Guide::open("install.md", &sections)?;
    let log = |name: &str| tests.log(&format!("documentation-archive-{name}"));
    let container = Container::boot(tests.cache, &TRIXIE, &log("system"))?;
    let name = packages.archive.file_name().context("a file has a name")?;
    let name = name.to_string_lossy();
    container.copy(&packages.archive, &format!("/home/{USER}/{name}"))?;
    let folder = { name.strip_suffix(".tar.xz") }.context("the archive has another name")?;
    let names = [("ggml-vgpu-0.1.0-x86_64-linux", folder)];

    let version = container.run(USER, &guide.take_with("tar -xJf", &names)?)?;
    container.run(USER, &guide.take_with("deploy/host/vgpu.service", &names)?)?;
    guide.leave_out("60-vgpu.rules", "udev does not run in this system")?;
    container.run(USER, &guide.take("systemctl enable --now vgpu")?)?;
    guide.leave_out("vgpu serve --listen", "the way with packages has it")?;
    container.run(USER, &guide.take("usermod --append --groups vgpu alice")?)?;
    container.await_that("systemctl is-active vgpu")?;
    let doctor = format!("vgpu doctor --plugin /opt/{folder}/lib/vgpu/libggml-vgpu.so");
    let said = container.run(USER, &doctor)?;
    let link = "unix:/run/vgpu/vgpu.sock";
    let is_tried = { said.lines() }.any(|line| line.starts_with("ok ") && line.contains(link));
    ensure!(is_tried, "vgpu doctor has not tried {link}:\n{said}");
    guide.finish()?;
    Ok(version.lines().last().unwrap_or_default().to_owned())
}
