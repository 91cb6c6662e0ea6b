//! ggml's own `test-backend-ops`: every op on VGPU0, compared with a reference.

use std::cell::OnceCell;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::ops::table::{self, Findings};
use crate::ops::{self, Cases, Claim, Report, Suite};
use crate::ops::{by_engine, by_version};
use crate::ops::{constructors, op_params};
use crate::preload::Library;
use vgpu_gguf::Rng;
use xtask_common::dist::Dist;
use xtask_common::ggml_releases::{self, Release};
use xtask_common::llama;
use xtask_common::node_llama::Backend;
use xtask_common::process;
use xtask_common::progress::{Progress, heading};
use xtask_common::scratch::Scratch;

use super::{ggml_cuda, ops_vulkan};
use crate::test_run::{Served, TestRun};

/// The number of different parameters in the sample for another engine than the CPU engine.
const ENGINE_SAMPLE: usize = 100;

/// Log lines of the plugin in a process without a model: the session and the device.
const MAX_LOG_LINES: usize = 2;

/// The number of different parameters in a sample, limited by the length of the regular expression
/// that the program accepts.
const SAMPLE: usize = 400;

/// Types of weights and of KV caches that a default run draws for the ops that take most of the
/// time.
const TYPES: usize = 6;

/// The SIMD levels of this processor, by their names in `VGPU_CPU_LEVEL`, without the one that the
/// CPU engine chooses (`host-kernels/cpu/src/isa.rs: best`).
fn other_levels() -> Vec<&'static str> {
    let mut levels = vec!["scalar"];
    let mut chosen = 0;
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = has!("avx2") && has!("fma") && has!("f16c");
        let avx512 = avx2
            && has!("avx512f")
            && has!("avx512bw")
            && has!("avx512dq")
            && has!("avx512vl")
            && has!("avx512vnni");
        let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let is_intel = processor.contains("GenuineIntel");
        let has_amx = processor.contains(" amx_bf16") && processor.contains(" amx_tile");
        for (name, is_supported, is_slower) in [
            ("avx2", avx2, false),
            ("avx2vnni", avx2 && has!("avxvnni"), false),
            ("avx512", avx512, false),
            ("avx512bf16", avx512 && has!("avx512bf16"), is_intel),
            // If the kernel does not permit tiles, the level that is chosen then is tried twice.
            ("amx", avx512 && has_amx, false),
        ] {
            if is_supported {
                levels.push(name);
                chosen = if is_slower { chosen } else { levels.len() - 1 };
            }
        }
    }
    levels.remove(chosen);
    levels
}

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("test-backend-ops on VGPU0");
    let Some(dist) = tests.dist() else { return };
    let built = tests.prepare("builds of test-backend-ops", |tests| {
        let oldest = llama::build(tests.cache, llama::Stage::Ops)?;
        Ok((oldest, llama::newest_ops(tests.cache)?))
    });
    let Some((bin, newest)) = built else { return };
    let wanted = { ggml_releases::RELEASES.iter() }
        .filter(|release| tests.options.wants_build(release, release.is_default));
    let mut releases = Vec::new();
    for release in wanted {
        let what = format!("ggml {} and its test-backend-ops", release.name());
        let built = tests.prepare(&what, |tests| release.ops(tests.cache));
        releases.extend(built.map(|bin| (release, bin)));
    }

    let name = "what each release writes into nodes, against translate/releases.rs";
    tests.check(name, |tests, _| op_params::check(tests.cache));
    let is_sampled = tests.options.samples_ops();
    // The program compares with one thread, which leaves a part of the cores idle.
    tests.at_the_same_time(
        |tests| {
            if tests.options.wants_ggml(llama::RELEASE, true) {
                of_main_release(tests, &dist, &bin, is_sampled);
            }
        },
        |tests| {
            if tests.options.wants_ggml(llama::RELEASE, true) {
                tests.check("log lines at level info", |tests, _| {
                    log_lines(tests, &dist, &bin)
                });
                without_cases(tests, &dist, (llama::RELEASE, &bin));
            }
            // Every other series of ggml, each build with its own program and CPU backend.
            for (release, bin) in &releases {
                of_release(tests, &dist, (release, bin), is_sampled);
            }
            if tests.options.wants_ggml(llama::NEWEST_RELEASE, true) {
                of_newest_release(tests, &dist, (&bin, &newest), is_sampled);
            }
            if tests.options.wants_ggml(llama::RELEASE, true) {
                ops_vulkan::run(tests, &dist, &bin);
                ggml_cuda::run(tests, &dist, &bin);
            }
        },
    );
}

/// The other link, the other version of the plugin ABI, and another engine.
fn of_newest_release(
    tests: &mut TestRun<'_>,
    dist: &Dist,
    (bin, newest): (&Path, &Path),
    is_sampled: bool,
) {
    let version = llama::NEWEST_RELEASE;
    let what = extent(is_sampled);
    tests.check(
        &format!("{what} inproc, ggml {version}"),
        |tests, progress| inproc(tests, dist, newest, version, is_sampled, progress),
    );
    without_cases(tests, dist, (version, newest));
    let other = llama::RELEASE;
    for (guest, host) in [
        ((other, bin), (version, newest)),
        ((version, newest), (other, bin)),
    ] {
        let name = format!(
            "guest ggml {}, the engine ggml over ggml-cpu {}",
            guest.0, host.0
        );
        tests.check(&name, |tests, progress| {
            on_ggml_cpu(tests, dist, guest, host, progress)
        });
    }
}

/// How many cases the name of a check promises.
fn extent(is_sampled: bool) -> &'static str {
    match is_sampled {
        true => "a sample of the ops",
        false => "every op",
    }
}

/// `test-backend-ops` of the release that most tests run on, over a socket, with the cases that
/// ggml's CPU backend cannot compute.
fn of_main_release(tests: &mut TestRun<'_>, dist: &Dist, bin: &Path, is_sampled: bool) {
    let is_whole = tests.options.ops.is_none() && !is_sampled;
    let [name, name_of_reference] = table::run_names(is_whole);
    let every = format!("every op over unix, ggml {}", llama::RELEASE);
    let found: OnceCell<(Vec<Claim>, Report)> = OnceCell::new();
    let seed = tests.options.seed();
    let cases = OnceCell::new();
    tests.check(&every, |tests, progress| {
        let (suite, mut drawn) = (suite(tests, bin, name), String::new());
        let pair = over_unix(dist, tests, None, |backend| {
            let mut suite = Suite { backend, ..suite };
            if is_sampled {
                let types = ops::draw_types(&suite.claims()?, TYPES, &mut Rng::new(seed, 1));
                drawn = format!(
                    "; MUL_MAT_ID, FLASH_ATTN_EXT and fused products with {}; --seed {seed}",
                    types.join(", ")
                );
                suite.cases = ops::of_types(&types);
            }
            let _ = cases.set(suite.cases.clone()); // it was empty
            ops::compare_with_cpu(&suite, progress)
        })?;
        let result = format!("{}{drawn}", summary(&pair.0, &pair.1));
        let _ = found.set(pair); // it was empty
        Ok(result)
    });
    if tests.options.full {
        tests.check("the cases that take minutes each", |tests, progress| {
            let suite = Suite {
                cases: Cases::Giants,
                ..suite(tests, bin, "giants")
            };
            let (claims, report) = over_unix(dist, tests, None, |backend| {
                ops::compare_with_cpu(&Suite { backend, ..suite }, progress)
            })?;
            Ok(summary(&claims, &report))
        });
    }
    // The kernels of other levels. Each run takes as long as the first.
    for level in other_levels().into_iter().filter(|_| tests.options.full) {
        tests.check(&format!("{every}, {level} kernels"), |tests, progress| {
            let name = format!("unix-{level}");
            let suite = suite(tests, bin, &name);
            let (claims, report) = over_unix(dist, tests, Some(level), |backend| {
                ops::compare_with_cpu(&Suite { backend, ..suite }, progress)
            })?;
            Ok(summary(&claims, &report))
        });
    }

    let Some((claims, with_cpu)) = found.into_inner() else {
        return; // failed above
    };
    let of: Vec<&str> = with_cpu.incomparable_ops().into_iter().collect();
    if of.is_empty() {
        return; // the ops chosen by the caller have none
    }
    let cases = cases.into_inner().unwrap_or(Cases::Usual);
    let name = "what ggml's CPU cannot compute, in double precision";
    let with_reference = OnceCell::new();
    tests.check(name, |tests, progress| {
        let report = against_reference(
            tests,
            dist,
            (bin, cases, name_of_reference),
            &of.join(","),
            &with_cpu,
            progress,
        )?;
        let result = format!("{} ok", report.totals().ok);
        let _ = with_reference.set(report); // it was empty
        Ok(result)
    });
    if let (Some(with_reference), true) = (with_reference.into_inner(), is_whole) {
        let findings = Findings {
            release: llama::RELEASE.to_owned(),
            claims,
            with_cpu,
            with_reference,
        };
        tests.check("docs/OPS.md matches the results", |tests, _| {
            by_version::check(&findings.release, &findings.claims, &findings.with_cpu)?;
            table::check(tests.cache, &findings)
        });
    }
}

/// Runs cases with buffers of up to 192 MiB, which the program fills, with the plugin's log at
/// `info`. The log has lines for the session, and none for a buffer, which has one at `debug`.
fn log_lines(tests: &TestRun<'_>, dist: &Dist, bin: &Path) -> Result<String> {
    over_unix(dist, tests, None, |backend| {
        let suite = Suite {
            backend,
            ops: Some("ADD,CPY,MUL_MAT"),
            cases: Cases::Matching("^type(_a)?=f32,.*".to_owned()),
            ..suite(tests, bin, "log-lines")
        };
        let (cases, lines) = suite.log_lines("info")?;
        ensure!(
            lines.len() <= MAX_LOG_LINES,
            "{} lines for {cases} cases:\n{}",
            lines.len(),
            lines.join("\n")
        );
        let (_, of_debug) = suite.log_lines("debug")?;
        let loaded = of_debug.iter().filter(|line| line.contains(" loaded in "));
        let loaded = loaded.count();
        ensure!(loaded > 0, "no case has a buffer with a line at `debug`");
        let lines = lines.len();
        Ok(format!(
            "{lines} lines for {cases} cases with {loaded} large buffers"
        ))
    })
}

/// `test-backend-ops` of another release of ggml than the two that the other tests run on. The
/// program is in `bin`.
fn of_release(
    tests: &mut TestRun<'_>,
    dist: &Dist,
    (release, bin): (&Release, &Path),
    is_sampled: bool,
) {
    let what = extent(is_sampled);
    let name = &release.name();
    tests.check(&format!("{what} inproc, ggml {name}"), |tests, progress| {
        inproc(tests, dist, bin, name, is_sampled, progress)
    });
    without_cases(tests, dist, (name, bin));
}

/// The operators of a ggml of which `test-backend-ops` has no case. The libraries are in `bin`.
fn without_cases(tests: &mut TestRun<'_>, dist: &Dist, (release, bin): (&str, &Path)) {
    let name = format!("operators without cases, ggml {release}");
    tests.check(&name, |tests, _| {
        let backend = Backend::Plugin {
            dist,
            endpoint: "inproc",
        };
        let seed = tests.options.seed();
        let (cases, line) = constructors::compare(tests.cache, (release, bin), &backend, seed)?;
        by_version::check_ours(release, cases)?;
        Ok(line)
    });
}

/// Compares the ops of the ggml in `bin`, which is `ggml`, with its CPU backend, all or a sample,
/// with the executor in the plugin. A whole run must have the counts of `docs/OPS.md`.
fn inproc(
    tests: &TestRun<'_>,
    dist: &Dist,
    bin: &Path,
    ggml: &str,
    is_sampled: bool,
    progress: &Progress,
) -> Result<String> {
    let name = format!("ggml-{}", ggml.replace(' ', "-"));
    let mut suite = Suite {
        backend: Backend::Plugin {
            dist,
            endpoint: "inproc",
        },
        ..suite(tests, bin, &name)
    };
    let mut seed_note = String::new();
    if is_sampled {
        let seed = tests.options.seed();
        suite.cases = ops::sample(&suite.claims()?, SAMPLE, &mut Rng::new(seed, 0));
        seed_note = format!("; --seed {seed}");
    }
    let (claims, report) = ops::compare_with_cpu(&suite, progress)?;
    if tests.options.ops.is_none() && !is_sampled {
        by_version::check(ggml, &claims, &report)?;
    }
    Ok(format!("{}{seed_note}", summary(&claims, &report)))
}

/// Compares the ops of the ggml of this version in `bin` with its CPU backend, all or a sample, on
/// an executor whose engine is the CPU backend of the ggml `host`.
fn on_ggml_cpu(
    tests: &TestRun<'_>,
    dist: &Dist,
    (version, bin): (&str, &Path),
    (host_version, host): (&str, &Path),
    progress: &Progress,
) -> Result<String> {
    let engine = format!("ggml:{}", host.join("libggml-cpu.so").display());
    let mut serve = Command::new(&dist.vgpu);
    let name = format!("engine-ggml-cpu-{version}");
    let log = tests.log(&format!("ops-{name}-vgpu-serve"));
    let scratch = Scratch::new()?;
    let control = scratch.path().join("control.sock");
    let arguments = ["--trust-guests", "--control", path_text(&control)?];
    let served = Served::start_engine(&mut serve, &engine, &arguments, &log)?;
    let endpoint = served.executor.endpoint();
    let mut suite = Suite {
        backend: Backend::Plugin {
            dist,
            endpoint: &endpoint,
        },
        ..suite(tests, bin, &name)
    };
    let mut seed_note = String::new();
    if tests.options.samples_ops() {
        let seed = tests.options.seed();
        suite.cases = ops::sample(&suite.claims()?, ENGINE_SAMPLE, &mut Rng::new(seed, 2));
        seed_note = format!("; --seed {seed}");
    }
    let (claims, report) = ops::compare_with_cpu(&suite, progress)?;
    let mut dump = Command::new(&dist.vgpu);
    let dump = process::output(dump.arg("dump").arg("--control").arg(&control))?;
    let left = by_engine::parse_dump(&dump)?;
    served.executor.stop().context("stopping the executor")?;
    if tests.options.ops.is_none() && !tests.options.samples_ops() {
        by_engine::check((version, host_version), &left)?;
    }
    Ok(format!(
        "{}; {}{seed_note}",
        summary(&claims, &report),
        by_engine::summary(&left)
    ))
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is no text")
}

/// The suite of a build, without a backend.
fn suite<'a>(tests: &TestRun<'a>, bin: &'a Path, name: &'a str) -> Suite<'a> {
    Suite::new(bin, tests.options.ops.as_deref(), name)
}

fn against_reference(
    tests: &TestRun<'_>,
    dist: &Dist,
    (bin, cases, name): (&Path, Cases, &str),
    of: &str,
    with_cpu: &Report,
    progress: &Progress,
) -> Result<Report> {
    let library = Library::Reference.build(tests.cache, bin)?;
    let suite = Suite {
        ops: Some(of),
        cases,
        preload: Some(library),
        ..suite(tests, bin, name)
    };
    over_unix(dist, tests, None, |backend| {
        ops::compare_with_reference(&Suite { backend, ..suite }, with_cpu, progress)
    })
}

/// Runs `work` with an executor on a socket, whose kernels use at most the instruction sets of
/// `level`.
fn over_unix<T>(
    dist: &Dist,
    tests: &TestRun<'_>,
    level: Option<&str>,
    work: impl FnOnce(Backend<'_>) -> Result<T>,
) -> Result<T> {
    let mut serve = Command::new(&dist.vgpu);
    if let Some(level) = level {
        serve.env("VGPU_CPU_LEVEL", level);
    }
    let served = Served::start_command(&mut serve, &tests.log("ops-vgpu-serve"))?;
    let endpoint = served.executor.endpoint();
    let done = work(Backend::Plugin {
        dist,
        endpoint: &endpoint,
    })?;
    served.executor.stop().context("stopping the executor")?;
    Ok(done)
}

fn summary(claims: &[Claim], report: &Report) -> String {
    let counts = report.totals();
    let mut text = format!(
        "{} cases and {} fused ones, all supported: {} ok, {} that ggml's CPU cannot compute",
        claims.len(),
        counts.all() - claims.len() as u64,
        counts.ok,
        counts.incomparable
    );
    for tie in report.near_ties() {
        let _ = write!(text, "; a near tie: {tie}"); // a string accepts everything
    }
    text
}
