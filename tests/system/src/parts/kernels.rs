//! The CUDA kernels compile, and performance-critical ones do not spill registers. Needs no GPU.

use std::process::Command;

use anyhow::{Context as _, Result};
use vgpu_gguf::Rng;

use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::heading;
use xtask_common::workspace;

use crate::ops::draw;
use crate::test_run::TestRun;

/// The architecture that a default run compiles all kernels for: the one with kernels of its own.
const COMPLETE: &str = "sm_90a";

/// The architectures of which a default run draws one.
const OTHERS: [&str; 4] = ["sm_80", "sm_89", "sm_100a", "sm_120a"];

/// The number of source files that a default run draws for that one.
const SOURCES: usize = 10;

/// The arguments for a default run: `sm_90a`, and a sample as `<architecture>:<source>,...`.
fn sample(rng: &mut Rng) -> Result<[String; 2]> {
    let folder = workspace::root().join("host-kernels/cuda/kernels");
    let mut sources = Vec::new();
    for entry in std::fs::read_dir(&folder).context("listing the kernels")? {
        let path = entry.context("listing the kernels")?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            let name = path.file_stem().context("a kernel without a name")?;
            sources.push(name.to_string_lossy().into_owned());
        }
    }
    sources.sort_unstable();
    draw(&mut sources, SOURCES, rng);
    let mut others = OTHERS.to_vec();
    draw(&mut others, 1, rng);
    Ok([
        COMPLETE.into(),
        format!("{}:{}", others[0], sources.join(",")),
    ])
}

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
        let seed = tests.options.seed();
        let (architectures, drawn) = if tests.options.full {
            (Vec::new(), String::new())
        } else {
            let sample = sample(&mut Rng::new(seed, 4))?;
            (sample.to_vec(), format!("; {}; --seed {seed}", sample[1]))
        };
        let mut kernels = Command::new(workspace::root().join("target/debug/examples/kernels"));
        kernels
            .arg(&nvrtc)
            .arg(workspace::reports().join("kernels"))
            .args(architectures)
            .env("VGPU_KERNEL_CACHE", tests.cache.machine_code());
        process::run(&mut kernels, step, &log)?;
        let report = std::fs::read_to_string(&log).context("reading the report")?;
        Ok(format!(
            "{}{drawn}",
            report.lines().last().unwrap_or_default()
        ))
    });
}
