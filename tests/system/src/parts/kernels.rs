//! The CUDA kernels compile, and performance-critical ones do not spill registers. Needs no GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use vgpu_gguf::Rng;

use xtask_common::dist;
use xtask_common::machine_code;
use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::workspace;

use crate::ops::draw;
use crate::test_run::TestRun;

/// The architecture that a default run compiles every kernel for: the one with kernels of its own.
const COMPLETE: &str = "sm_90a";

/// The number of source files that a default run compiles for another architecture each.
const SAMPLE: usize = 6;

/// The arguments of `kernels` for a default run: `sm_90a`, and drawn sources as
/// `<architecture>:<source>`. `list` is the output of `kernels --list`.
fn sample(list: &str, rng: &mut Rng) -> Vec<String> {
    let mut others: Vec<String> = { list.lines() }
        .filter(|line| !line.starts_with(COMPLETE))
        .map(str::to_owned)
        .collect();
    draw(&mut others, SAMPLE, rng);
    others.sort_unstable();
    others.insert(0, COMPLETE.to_owned());
    others
}

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("CUDA kernels");
    let Some(nvrtc) = tests.prepare("NVRTC", |tests| packages::nvrtc(tests.cache)) else {
        return;
    };
    tests.check("machine code", |tests, step| {
        let mut cargo = workspace::cargo();
        cargo.arg("build").args(dist::AS_TESTS);
        process::run(&mut cargo, step, &tests.log("kernels-build"))?;
        let (architectures, drawn) = if tests.options.full {
            (Vec::new(), String::new())
        } else {
            let seed = tests.options.seed();
            let list = process::output(Command::new(program()).arg("--list"))?;
            let sample = sample(&list, &mut Rng::new(seed, 4));
            let drawn = format!("; {}; --seed {seed}", sample.join(" "));
            (sample, drawn)
        };
        let compiled = compile(tests, step, &nvrtc, "kernels", &architectures)?;
        machine_code::check(&workspace::reports().join("kernels"))?;
        Ok(format!("{compiled}{drawn}"))
    });
    if tests.options.full {
        // What the first start does on a host that has this NVRTC, without code built in.
        tests.check("machine code by NVRTC 13", |tests, step| {
            let nvrtc = packages::nvrtc_13(tests.cache)?;
            compile(tests, step, &nvrtc, "kernels-13", &[])
        });
    }
}

fn program() -> PathBuf {
    workspace::root().join("target/debug/kernels")
}

/// Compiles kernels with the library in `nvrtc` into the folder `name` of the reports. Returns the
/// last line of the program.
fn compile(
    tests: &TestRun<'_>,
    step: &Progress,
    nvrtc: &Path,
    name: &str,
    architectures: &[String],
) -> Result<String> {
    let log = tests.log(name);
    // Of util-linux, as every Debian has: only what other tests leave of the cores (SCHED_IDLE).
    let mut kernels = Command::new("chrt");
    kernels
        .args(["--idle", "0"])
        .arg(program())
        .arg(nvrtc)
        .arg(workspace::reports().join(name))
        .args(architectures)
        .env("VGPU_KERNEL_CACHE", tests.cache.machine_code());
    process::run(&mut kernels, step, &log)?;
    let report = std::fs::read_to_string(&log).context("reading the report")?;
    Ok(report.lines().last().unwrap_or_default().to_owned())
}
