//! `cargo xtask test`: all tests, from formatting to real programs.

use std::cell::OnceCell;

use anyhow::{Context as _, Result, anyhow};

use xtask_common::cache::Cache;
use xtask_common::disk::{self, Need};
use xtask_common::println;
use xtask_common::{compiler_cache, progress, workspace};

use crate::parts::{
    demo, dependencies, deploy, documentation, failures, faults, generation, kernels, lints,
    models, ollama, ops, packages, programs, unit, vm,
};
use crate::test_run::{Options, PARTS, Part, TestRun};
use crate::times::Times;

/// Bytes of `target` after all tests, as they run without `--full`.
const TARGET_BYTES: u64 = 8 << 30;

/// Bytes of the cache folder after all tests.
const CACHE_BYTES: u64 = 4 << 30;

/// Runs the tests. Returns an error if one failed.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    let reports = workspace::reports();
    std::fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
    if options.only.is_empty() {
        let target = workspace::target();
        std::fs::create_dir_all(&target)
            .with_context(|| format!("creating {}", target.display()))?;
        disk::expect_space(&[
            Need {
                folder: &target,
                bytes: TARGET_BYTES,
            },
            Need {
                folder: cache.root(),
                bytes: CACHE_BYTES,
            },
        ])?;
    }
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
    // Until the end of the run.
    let _compiler_cache = compiler_cache::start(cache).unwrap_or_else(|error| {
        progress::say(&format!("without a compiler cache: {error:#}"));
        None
    });
    let mut times = Times::default();
    let parts: Vec<Part> = PARTS.into_iter().filter(wanted).collect();
    // An emulated machine leaves a part of the cores idle, and so do programs that wait for it or
    // for each other. The parts before these compile for minutes, or run two lists themselves.
    let first_beside = PARTS.iter().position(|part| *part == Part::Models);
    let is_early = |part: &Part| PARTS.iter().position(|one| one == part) < first_beside;
    let (early, late): (Vec<_>, Vec<_>) = parts.into_iter().partition(is_early);
    run_early(&mut run, &early, &mut times);
    let (machines, others): (Vec<_>, Vec<_>) = late.into_iter().partition(|part| *part == Part::Vm);
    if machines.is_empty() || others.is_empty() || options.full {
        run_parts(&mut run, &others, &mut times);
        run_parts(&mut run, &machines, &mut times);
    } else {
        // Built once, for both.
        run.dist();
        let (mut beside, mut of_machines) = (Times::default(), Times::default());
        run.at_the_same_time(
            |run| run_parts(run, &others, &mut beside),
            |run| run_parts(run, &machines, &mut of_machines),
        );
        times.beside_others(beside);
        times.beside_others(of_machines);
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

/// Runs parts, one after the other, but compiles the kernels beside the unit tests: many of these
/// wait most of the time, and the compilers take what is left of the cores (SCHED_IDLE).
fn run_early(run: &mut TestRun<'_>, parts: &[Part], times: &mut Times) {
    if ![Part::Unit, Part::Kernels]
        .iter()
        .all(|part| parts.contains(part))
    {
        return run_parts(run, parts, times);
    }
    for &part in parts.iter().filter(|part| **part != Part::Kernels) {
        if part != Part::Unit {
            run_parts(run, &[part], times);
            continue;
        }
        let (mut of_unit, mut of_kernels) = (Times::default(), Times::default());
        let begun = of_unit.begin(run.passed, run.failed.len());
        let (mut passed, mut failed) = (0, 0);
        unit::run(run, |run| {
            let before = (run.passed, run.failed.len());
            run_parts(run, &[Part::Kernels], &mut of_kernels);
            (passed, failed) = (run.passed - before.0, run.failed.len() - before.1);
        });
        of_unit.end(part, &begun, run.passed - passed, run.failed.len() - failed);
        times.beside_others(of_unit);
        times.beside_others(of_kernels);
    }
}

/// Runs parts, one after the other.
fn run_parts(run: &mut TestRun<'_>, parts: &[Part], times: &mut Times) {
    for &part in parts {
        let begun = times.begin(run.passed, run.failed.len());
        match part {
            Part::Lints => lints::run(run),
            Part::Dependencies => dependencies::run(run),
            Part::Unit => unit::run(run, |_| ()),
            Part::Kernels => kernels::run(run),
            Part::Ops => ops::run(run),
            Part::Models => models::run(run),
            Part::Generation => generation::run(run),
            Part::Demo => demo::run(run),
            Part::Failures => failures::run(run),
            Part::Faults => faults::run(run),
            Part::Packages => packages::run(run),
            Part::Programs => programs::run(run),
            Part::Ollama => ollama::run(run),
            Part::Deploy => deploy::run(run),
            Part::Documentation => documentation::run(run),
            Part::Vm => vm::run(run),
        }
        times.end(part, &begun, run.passed, run.failed.len());
    }
}
