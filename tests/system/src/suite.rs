//! `cargo xtask test`: all tests, from formatting to real programs.

use std::cell::OnceCell;

use anyhow::{Context as _, Result, anyhow};

use xtask_common::cache::Cache;
use xtask_common::workspace;

use crate::parts::{
    demo, dependencies, deploy, failures, faults, generation, kernels, lints, models, ollama, ops,
    packages, programs, unit, vm,
};
use crate::test_run::{Options, PARTS, Part, TestRun};
use crate::times::Times;

/// Runs the tests. Returns an error if one failed.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    let reports = workspace::reports();
    std::fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
    let mut run = TestRun {
        cache,
        options,
        dist: OnceCell::new(),
        passed: 0,
        failed: Vec::new(),
    };
    let wanted = |part: &Part| options.only.is_empty() || options.only.contains(part);
    if !options.full {
        println!(
            "samples depend on --seed {}; --full runs all tests",
            options.seed()
        );
    }
    let mut times = Times::default();
    for part in PARTS.into_iter().filter(wanted) {
        let begun = times.begin(run.passed, run.failed.len());
        match part {
            Part::Lints => lints::run(&mut run),
            Part::Dependencies => dependencies::run(&mut run),
            Part::Unit => unit::run(&mut run),
            Part::Kernels => kernels::run(&mut run),
            Part::Ops => ops::run(&mut run),
            Part::Models => models::run(&mut run),
            Part::Generation => generation::run(&mut run),
            Part::Demo => demo::run(&mut run),
            Part::Failures => failures::run(&mut run),
            Part::Faults => faults::run(&mut run),
            Part::Packages => packages::run(&mut run),
            Part::Programs => programs::run(&mut run),
            Part::Ollama => ollama::run(&mut run),
            Part::Deploy => deploy::run(&mut run),
            Part::Vm => vm::run(&mut run),
        }
        times.end(part, &begun, run.passed, run.failed.len());
    }

    println!("\n{times}");
    run.failed
        .iter()
        .for_each(|name| println!("failed: {name}"));
    println!("{} passed, {} failed", run.passed, run.failed.len());
    if run.failed.is_empty() {
        Ok(())
    } else {
        Err(anyhow!("logs and reports: {}", reports.display()))
    }
}
