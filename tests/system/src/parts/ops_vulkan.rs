//! `test-backend-ops` on an executor whose engine is ggml's own Vulkan backend, on a Vulkan driver
//! that computes on the processor. The backend has device memory, shaders and queues as on a GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::ops::{self, Report, Suite};
use vgpu_gguf::Rng;
use xtask_common::dist::Dist;
use xtask_common::llama;
use xtask_common::node_llama::{self, Backend};
use xtask_common::packages::{self, SoftwareVulkan};
use xtask_common::progress::Progress;
use xtask_common::scratch::Scratch;

use crate::test_run::{Served, TestRun};

/// The number of different parameters for each operator: in a default run, and with `--full`.
const EACH: [usize; 2] = [1, 4];

/// The cases that a sample of all operators has at least: in a default run, and with `--full`.
const LEAST: [u64; 2] = [100, 400];

/// The operators that Vulkan has computed in any sample, at least.
const LEAST_OPERATORS: usize = 20;

/// The sample is the same every day: a pipeline takes seconds to compile, some take minutes.
const SEED: u64 = 7;

/// ggml's name of the device in a process that has the backend itself.
const NATIVE: &str = "Vulkan0";

/// The files for the runs.
struct Vulkan {
    /// The folder of the backend.
    backend: PathBuf,
    driver: SoftwareVulkan,
}

pub(super) fn run(tests: &mut TestRun<'_>, dist: &Dist, bin: &Path) {
    let prepared = tests.prepare("ggml's Vulkan backend and a driver for it", |tests| {
        Ok(Vulkan {
            backend: packages::ggml_vulkan(tests.cache)?,
            driver: SoftwareVulkan::ensure(tests.cache)?,
        })
    });
    let Some(vulkan) = prepared else { return };
    let name = "--engine ggml and auto find Vulkan in the folders of an Ollama";
    tests.check(name, |tests, _| find(tests, dist, &vulkan));
    let name = format!("guest ggml {}, the engine ggml over Vulkan", llama::RELEASE);
    tests.check(&name, |tests, progress| {
        compare(tests, dist, bin, &vulkan, progress)
    });
}

/// Starts executors that have to look for the backend. As in Ollama, `libggml-base.so` is in the
/// folder above that of the backend.
fn find(tests: &TestRun<'_>, dist: &Dist, vulkan: &Vulkan) -> Result<String> {
    let scratch = Scratch::new()?;
    let (bin, lib) = (
        scratch.path().join("bin"),
        scratch.path().join("lib/ollama"),
    );
    for folder in [&bin, &lib.join("vulkan")] {
        std::fs::create_dir_all(folder).context("a folder of Ollama")?;
    }
    std::fs::write(bin.join("ollama"), "").context("a program")?;
    let copy = |file: &str, to: &Path| {
        let from = vulkan.backend.join(file);
        std::fs::copy(&from, to.join(file)).with_context(|| format!("copying {file}"))
    };
    copy("libggml-base.so", &lib)?;
    copy("libggml-vulkan.so", &lib.join("vulkan"))?;
    let library = lib.join("vulkan/libggml-vulkan.so");
    let log = tests.log("find-ggml-vulkan-vgpu-serve");
    let start = |engine: &str| -> Result<String> {
        let mut serve = Command::new(&dist.vgpu);
        serve.env("PATH", &bin).env_remove("GGML_BACKEND_PATH");
        vulkan.driver.set(&mut serve, &[]);
        let served = Served::start_engine(&mut serve, engine, &["--trust-guests"], &log)?;
        served.executor.stop().context("stopping the executor")?;
        std::fs::read_to_string(&log).context("reading the log")
    };
    let text = start("ggml")?;
    let taken = format!(
        "the backend of ggml {} is taken: device Vulkan0",
        library.display()
    );
    ensure!(
        text.contains(&taken),
        "{taken:?} is not in the log:\n{text}"
    );
    // A machine with an NVIDIA GPU needs no backend of ggml.
    let text = start("auto")?;
    let choices = [
        format!("auto: the engine ggml:{}:Vulkan0", library.display()),
        "auto: the engine cuda:0".to_owned(),
    ];
    ensure!(
        choices.iter().any(|choice| text.contains(choice)),
        "none of {choices:?} is in the log:\n{text}"
    );
    Ok(String::new())
}

/// Runs a fixed sample of each operator on the device of the plugin, and the same cases on the same
/// backend in the program's own process. Whatever fails through the plugin has to fail there, too.
fn compare(
    tests: &TestRun<'_>,
    dist: &Dist,
    bin: &Path,
    vulkan: &Vulkan,
    progress: &Progress,
) -> Result<String> {
    let engine = vulkan.backend.join("libggml-vulkan.so");
    let mut serve = Command::new(&dist.vgpu);
    vulkan.driver.set(&mut serve, &[]);
    let log = tests.log("ops-ggml-vulkan-vgpu-serve");
    let engine = format!("ggml:{}", engine.display());
    // On a machine with other work, a pipeline takes minutes to compile.
    let arguments = [
        "--trust-guests",
        "--max-turn-time",
        "0",
        "--log",
        "info,vgpu_ggml=debug",
    ];
    let served = Served::start_engine(&mut serve, &engine, &arguments, &log)?;
    let endpoint = served.executor.endpoint();
    let mut suite = Suite {
        backend: Backend::Plugin {
            dist,
            endpoint: &endpoint,
        },
        ..Suite::new(bin, tests.options.ops.as_deref(), "engine-ggml-vulkan")
    };
    let mut claims = suite.claims()?;
    // With more columns, these take minutes on a processor.
    let is_slow = |op: &str| matches!(op, "LIGHTNING_INDEXER" | "FLASH_ATTN_EXT");
    claims.retain(|claim| !is_slow(&claim.op) || claim.case.contains(",nb=1,"));
    let is_full = usize::from(tests.options.full);
    let each = EACH[is_full];
    suite.cases = ops::sample_each(&claims, each, &mut Rng::new(SEED, 0));
    let (report, _) = suite.run(progress)?;
    served.executor.stop().context("stopping the executor")?;
    let denied = report.denied();
    ensure!(denied.is_empty(), "not supported: {}", denied.join("; "));
    let (cases, least) = (report.totals().all(), LEAST[is_full]);
    ensure!(
        tests.options.ops.is_some() || cases >= least,
        "{cases} cases, of at least {least}"
    );

    // Whatever Vulkan does not compute, the CPU engine does, and is right.
    let computed = std::fs::read_to_string(&log).context("reading the executor's log")?;
    let computed = computed.matches("is computed by Vulkan0").count();
    ensure!(
        tests.options.ops.is_some() || computed >= LEAST_OPERATORS,
        "Vulkan has computed {computed} operators, of at least {LEAST_OPERATORS}"
    );

    let (native, end) = native(&suite, vulkan, progress)?;
    let failed_natively = native.failed();
    let ours: Vec<&str> = { report.failed().into_iter() }
        .filter(|case| !failed_natively.contains(case))
        .collect();
    ensure!(
        ours.is_empty(),
        "{} cases fail and do not fail on {NATIVE}: {}",
        ours.len(),
        ours.join("; ")
    );
    let (own, other) = (report.totals(), native.totals());
    ensure!(own.ok > 0 && other.ok > 0, "no case has run");
    Ok(format!(
        "{computed} operators on the device; {} cases, all supported: {} ok, {} failed as on \
         {NATIVE}, {} that ggml's CPU cannot compute; on {NATIVE} in the program itself: {} ok, {} failed, {} not supported by it or \
         by the CPU{end}",
        own.all(),
        own.ok,
        own.failed,
        own.incomparable,
        other.ok,
        other.failed,
        other.incomparable
    ))
}

/// The cases of a suite on the backend in the program's own process, and how the process has ended
/// if it has crashed: on Mesa's driver, this build of the backend may use memory that it has freed.
fn native(suite: &Suite<'_>, vulkan: &Vulkan, progress: &Progress) -> Result<(Report, String)> {
    let name = "native-vulkan";
    let mut program = Command::new(suite.bin.join("test-backend-ops"));
    program.args(["test", "-b", NATIVE, "-p", &suite.cases.pattern()]);
    if let Some(ops) = suite.ops {
        program.args(["-o", ops]);
    }
    node_llama::set_backend(&mut program, &Backend::Cpu, Path::new(""));
    // The backend without a base of its own finds the program's.
    vulkan.driver.set(&mut program, &[suite.bin]);
    let backend = vulkan.backend.join("alone/libggml-vulkan.so");
    program.env("GGML_BACKEND_PATH", backend);
    // One thread: with two, the backend crashes at once.
    let (report, status) = ops::run(&mut program, name, progress)?;
    let end = match status.code() {
        Some(_) => String::new(),
        None => format!("; it ended with {status}"),
    };
    Ok((report, end))
}
