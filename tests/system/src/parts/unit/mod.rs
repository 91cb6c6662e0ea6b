//! The tests of the whole workspace, as `cargo test` compiles them.
//!
//! `cargo test` runs its programs one after the other. Many of them wait for servers, links and
//! deadlines most of the time, so that two cores are half idle. Here two programs run at a time.

mod counted;
mod programs;

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use anyhow::ensure;
use xtask_common::ggml_releases;
use xtask_common::llama;
use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};

use crate::test_run::TestRun;
use counted::Counted;
use programs::TestProgram;

/// The variable with which some tests take a twelfth of their cases (host-kernels/check/tests).
const SAMPLE: &str = "VGPU_TEST_SAMPLE";
/// The variable with which tests fail if a ggml is missing (tests/abi.rs, host-kernels/ggml/tests).
const ALL_GGML: &str = "VGPU_TEST_ALL_GGML";

/// Programs that compute all the time, the longest first. The second lane has the others.
const COMPUTING: [&str; 11] = [
    "vgpu-check ops",
    "vgpu-check self_check",
    "vgpu-check fallbacks",
    "vgpu-check check",
    "vgpu-check cuda",
    "vgpu-cuda lib",
    "vgpu-check fusion",
    "ggml-vgpu formats",
    "vgpu-ggml ggml_cpu",
    "vgpu-cpu lib",
    "ggml-vgpu abi",
];

/// Programs that compare shares of the processor or the memory of the machine. Nothing runs beside
/// them.
const ALONE: [&str; 7] = [
    "vgpu-executor batch",
    "vgpu-executor fairness",
    "vgpu-executor shares",
    "vgpu-executor tenants",
    "vgpu-executor resources",
    "vgpu-executor weights_peak",
    "vgpu-executor races",
];

/// `beside`: what runs at the same time as the programs that wait most of the time.
pub(crate) fn run(tests: &mut TestRun<'_>, beside: impl FnOnce(&mut TestRun<'_>) + Send) {
    heading("unit, property and ABI tests");
    // Some tests compare with the headers of every ggml, and with real ones: the oldest, the
    // newest, and that of most tests.
    let ready = tests.prepare("sources and builds of ggml", |tests| {
        packages::libclang(tests.cache)?;
        llama::newest_ops(tests.cache)?;
        ggml_releases::RELEASES[0].ops(tests.cache)?;
        ggml_releases::fetch_sources(tests.cache)?;
        llama::build(tests.cache, llama::Stage::Ops)
    });
    if ready.is_none() {
        return beside(tests);
    }
    let mut programs = Vec::new();
    tests.check("compile all tests", |tests, progress| {
        programs = programs::compile(tests, progress)?;
        let is_there = |name: &String| programs.iter().any(|program| program.name == *name);
        let missing: Vec<_> = { programs::names()?.into_iter() }
            .filter(|name| !is_there(name))
            .collect();
        ensure!(
            missing.is_empty(),
            "cargo has compiled no tests of {missing:?}"
        );
        Ok(format!("{} programs", programs.len()))
    });
    if programs.is_empty() {
        return beside(tests);
    }

    let progress = Progress::new("tests of the workspace");
    let is_alone = |program: &TestProgram| ALONE.contains(&program.name.as_str());
    let (alone, others): (Vec<_>, Vec<_>) = programs.into_iter().partition(is_alone);
    let sample = (!tests.options.full).then(|| tests.options.seed());
    let mut counted = Counted::default();
    tests.at_the_same_time(
        |_| counted = side_by_side(&progress, sample, others),
        beside,
    );
    for program in &alone {
        run_program(&progress, sample, program, &mut counted);
    }
    document_tests(tests, &progress, &mut counted);

    let drawn = sample.map_or_else(String::new, |seed| {
        format!("; a twelfth of the operators' random cases; --seed {seed}")
    });
    match counted.failed.len() {
        0 => progress.done(&format!("{} tests{drawn}", counted.passed)),
        failed => {
            let logs = programs::logs();
            let mut text = format!("{failed} tests, see {}", logs.display());
            { counted.said.iter() }.for_each(|line| text.extend(["\n    ", line]));
            progress.failed(&text);
        }
    }
    tests.passed += counted.passed;
    tests.failed.append(&mut counted.failed);
}

/// Runs programs in two lanes. One begins with those that compute, the other one with the others.
fn side_by_side(
    progress: &Progress,
    sample: Option<u64>,
    mut programs: Vec<TestProgram>,
) -> Counted {
    let place = |program: &TestProgram| {
        let at = COMPUTING.iter().position(|name| *name == program.name);
        at.unwrap_or(COMPUTING.len())
    };
    programs.sort_by_key(place);
    let queue = Mutex::new(VecDeque::from(programs));
    let lane = |next: fn(&mut VecDeque<TestProgram>) -> Option<TestProgram>| {
        let mut counted = Counted::default();
        loop {
            let program = next(&mut queue.lock().unwrap_or_else(PoisonError::into_inner));
            let Some(program) = program else {
                return counted;
            };
            run_program(progress, sample, &program, &mut counted);
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| lane(VecDeque::pop_back));
        let mut counted = lane(VecDeque::pop_front);
        match other.join() {
            Ok(others) => counted.add(others),
            Err(panic) => std::panic::resume_unwind(panic),
        }
        counted
    })
}

/// Runs a program of tests to its end. `sample`: the seed, if not all cases run.
fn run_program(
    progress: &Progress,
    sample: Option<u64>,
    program: &TestProgram,
    counted: &mut Counted,
) {
    let mut command = program.command();
    command.env(ALL_GGML, "1");
    match sample {
        Some(seed) => command.env(SAMPLE, seed.to_string()),
        // Tests that need ptrace, user namespaces or control groups fail without them.
        None => command.env("CI", "true"),
    };
    run_command(&mut command, progress, &program.name, counted);
}

/// Runs the examples in documentation comments.
fn document_tests(tests: &TestRun<'_>, progress: &Progress, counted: &mut Counted) {
    let mut cargo = tests.cargo();
    cargo.args(["test", "--workspace", "--no-fail-fast", "--doc"]);
    run_command(&mut cargo, progress, "examples in documentation", counted);
}

/// Runs a command that prints what the test harness does.
fn run_command(
    command: &mut std::process::Command,
    progress: &Progress,
    name: &str,
    counted: &mut Counted,
) {
    let failed_before = counted.failed.len();
    let log = programs::log(name);
    let ended = process::run_lines(command, &log, |line| {
        counted.line(line);
        progress.note(&format!("{name}: {line}"));
    });
    // Without a failed test, the program did not reach its end.
    let reason = match ended {
        Ok(status) if status.success() || counted.failed.len() > failed_before => return,
        Ok(status) => format!("{name} ended with {status}\n{}", process::tail(&log)),
        Err(error) => format!("{name}: {error:#}"),
    };
    counted.failed.push(name.to_owned());
    counted.said.extend(reason.lines().map(str::to_owned));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_programs_exist() {
        let all = programs::names().expect("cargo metadata");
        for name in COMPUTING.iter().chain(&ALONE) {
            assert!(all.iter().any(|known| known == name), "no program {name}");
        }
    }
}
