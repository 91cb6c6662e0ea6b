//! The CUDA kernels compile, and performance-critical ones do not spill registers. Needs no GPU.

use std::process::Command;

use anyhow::Context as _;

use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::workspace;

use crate::test_run::TestRun;

/// The architectures of a default run: the oldest that runs all common kernels, and the one with
/// architecture-specific kernels.
const DEFAULT: [&str; 2] = ["sm_80", "sm_90a"];

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("CUDA kernels");
    let Some(nvrtc) = tests.prepare("NVRTC", |tests| packages::nvrtc(tests.cache)) else {
        return;
    };
    tests.check("machine code", |tests, step| {
        let log = tests.log("kernels");
        // Uses the features of `cargo test --workspace`, which has already built most crates.
        let mut cargo = workspace::cargo();
        cargo.args(["build", "--workspace", "--example", "kernels"]);
        process::run(&mut cargo, step, &tests.log("kernels-build"))?;
        let mut kernels = Command::new(workspace::root().join("target/debug/examples/kernels"));
        kernels
            .arg(&nvrtc)
            .arg(workspace::reports().join("kernels"))
            .args(DEFAULT.iter().filter(|_| !tests.options.full))
            .env("VGPU_KERNEL_CACHE", tests.cache.machine_code());
        process::run(&mut kernels, step, &log)?;
        let report = std::fs::read_to_string(&log).context("reading the report")?;
        Ok(report.lines().last().unwrap_or_default().to_owned())
    });
}
