//! The CUDA kernels compile for every architecture, and hot ones do not spill. Needs no GPU.

use anyhow::Context as _;

use crate::packages;
use crate::process;
use crate::progress::heading;
use crate::workspace;

use super::Bench;

pub(super) fn run(bench: &mut Bench<'_>) {
    heading("CUDA kernels");
    let Some(nvrtc) = bench.prepare("NVRTC", |bench| packages::nvrtc(bench.cache)) else {
        return;
    };
    bench.check("machine code", |bench, step| {
        let log = bench.log("kernels");
        let mut cargo = workspace::cargo();
        cargo
            .args(["run", "-p", "vgpu-cuda", "--example", "kernels", "--"])
            .arg(&nvrtc)
            .arg(workspace::reports().join("kernels"))
            .env("VGPU_KERNEL_CACHE", bench.cache.machine_code());
        process::run(&mut cargo, step, &log)?;
        let report = std::fs::read_to_string(&log).context("reading the report")?;
        Ok(report.lines().last().unwrap_or_default().to_owned())
    });
}
