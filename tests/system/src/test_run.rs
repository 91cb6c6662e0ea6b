//! The state that all parts of a run share: options, programs under test, and results.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};

use xtask_common::cache::Cache;
use xtask_common::dist::{self, Dist};
use xtask_common::executor::Executor;
use xtask_common::ggml_releases::{self, Release};
use xtask_common::model::{self, FileType};
use xtask_common::progress::{self, Progress};
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::vm::GuestKind;

/// The prompt of the generations.
pub(crate) const PROMPT: &str = "A virtual machine has no graphics processor of its own. It asks \
    its host for one, sends the work in a single message, and reads the answer back. What it needs \
    for that is";

/// Options of the tests.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Run all tests, which takes hours: the last lines of `--help` list the tests that are skipped
    /// otherwise
    #[arg(long)]
    pub(crate) full: bool,
    /// Seed of the samples of cases [default: changes daily; printed]
    #[arg(long, value_name = "NUMBER")]
    pub(crate) seed: Option<u64>,
    /// Only these parts [default: all]
    #[arg(long, value_enum, value_name = "PART")]
    pub(crate) only: Vec<Part>,
    /// For test-backend-ops: only these ops, separated by commas; the number of cases is then not
    /// checked
    #[arg(long, value_name = "OPS")]
    pub(crate) ops: Option<String>,
    /// For `ops` and `models`: only these releases of ggml, with every case: a number (0.24.0,
    /// every build with that number) or a build (b11081). With `--only ollama`: the releases that
    /// carry them, with the llama-server of that build
    #[arg(long, value_name = "RELEASE", value_parser = release_name)]
    pub(crate) ggml: Vec<String>,
    /// Test libggml-vgpu.so and vgpu of this folder instead of a fresh build
    #[arg(long, value_name = "FOLDER")]
    pub(crate) dist: Option<PathBuf>,
    /// Virtual machines of these kinds, instead of the default or all.
    #[arg(skip)]
    pub(crate) machines: Vec<GuestKind>,
}

/// The value of `--ggml`: a release that the tests build.
fn release_name(text: &str) -> Result<String> {
    ensure!(
        ggml_releases::is_name(text),
        "the tests build no such release, but these: {}",
        ggml_releases::names().join(", ")
    );
    Ok(text.to_owned())
}

/// The additional tests of `--full`, for the end of `--help`.
pub(crate) const FULL: &str = "\
Only `--full` runs:
  all parts the release build, as it is shipped, instead of that of `cargo test` with assertions
  lints     the CPU engine for each instruction set alone instead of for one
  unit      every random case of the operators' tests instead of a twelfth
  kernels   every GPU architecture instead of sm_90a and some sources for others
  ops       MUL_MAT_ID, FLASH_ATTN_EXT and fused products with every type instead of six; every case
            of ggml 0.20.2 (b10488), 0.24.0 (b11076) and 0.26.0 over inproc instead of a sample;
            every case of 0.25.3 on the engine ggml-cpu 0.26.0 instead of a hundred; four cases of
            each operator over ggml's Vulkan backend instead of one; b10603, b10644,
            b10760, b10883, b10985 and b11434 (ggml 0.21.0 to 0.26.0); the three cases of
            MUL_MAT_ID that take minutes each; every case again with the kernels of each other SIMD
            level of the processor; docs/OPS.md against what was found
  models    DeepSeek-V4 with ggml 0.21.0, 0.22.0, 0.23.0, 0.24.0 and b11434 besides
  demo      the variant with the executor in the program's process, built by the demo itself; the
            engine ggml over Vulkan
  faults    each fault twice as often (`cargo xtask faults`: hundreds of times); random events for
            an hour instead of a minute (`cargo xtask soak`)
  generation
            the plugin on an executor of the previous release, and the other way round
  packages  the RPM packages and the image of a release; Debian 12 and 13 from the package files
            alone: installed, used, upgraded under a guest of the previous release, purged
  ollama    all checks again without flash attention, and both again with Ollama 0.33.0; each
            release with the llama-server of the llama.cpp it carries instead of that of 0.25.3;
            an upgrade in place
  deploy    KubeVirt's own types; a Prometheus that scrapes an executor, with every query of the
            dashboard; the status page in Chromium, beside eight guests. `--only deploy` builds
            nothing: without --full or --dist it leaves out the device plugin with Kubernetes' own
            package, and vgpu's flags in the Helm chart
  documentation
            the ways of the documentation from nothing to a model on the device (docs/README.md):
            each command is read out of the pages; a cluster of Kubernetes; an upgrade from the
            previous release
  vm        the guests with vfio-user, with vsock and TCP, and with systemd; a guest that is paused,
            put to sleep, reset, unplugged and killed; test-backend-ops with 13 operators and
            products of nine types instead of two and two; 20 killed executors instead of three
            (`cargo xtask vm` runs all of these, too)

Not even `--full` runs what has no end of its own: the fuzzing of tests/fuzz, and the benchmarks
(`cargo xtask bench`), among them `soak`, with a million commands, `parts` and `fairness`";

/// Options of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct VmTestOptions {
    /// Only the virtual machine of this kind [default: all]
    #[arg(long, value_enum)]
    pub(crate) only: Option<GuestKind>,
    /// Test libggml-vgpu.so and vgpu of this folder instead of a fresh build
    #[arg(long, value_name = "FOLDER")]
    pub(crate) dist: Option<PathBuf>,
}

impl From<&VmTestOptions> for Options {
    /// Only the part with the virtual machine, and all of it.
    fn from(options: &VmTestOptions) -> Options {
        Options {
            full: true,
            dist: options.dist.clone(),
            machines: options
                .only
                .map_or_else(|| GuestKind::ALL.to_vec(), |kind| vec![kind]),
            ..Options::only(Part::Vm)
        }
    }
}

impl Options {
    /// The seed of the samples.
    pub(crate) fn seed(&self) -> u64 {
        const DAY: u64 = 24 * 60 * 60;
        self.seed.unwrap_or_else(|| {
            let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
            since.map_or(0, |since| since.as_secs() / DAY)
        })
    }

    /// Whether `test-backend-ops` of a release of ggml runs a sample of its cases. The caller asks
    /// for all of them by naming releases or operators.
    pub(crate) fn samples_ops(&self) -> bool {
        !self.full && self.ops.is_none() && self.ggml.is_empty()
    }

    /// Whether the caller wants the tests of a release of ggml. `is_default`: whether the release
    /// is one of those that run if the caller names none.
    pub(crate) fn wants_ggml(&self, version: &str, is_default: bool) -> bool {
        match self.ggml.as_slice() {
            [] => self.full || is_default,
            named => named.iter().any(|one| one == version),
        }
    }

    /// Whether the caller wants the tests of a build of llama.cpp. `is_default`: as for
    /// [`Options::wants_ggml`].
    pub(crate) fn wants_build(&self, release: &Release, is_default: bool) -> bool {
        match self.ggml.as_slice() {
            [] => self.full || is_default,
            named => named.iter().any(|one| release.is_named(one)),
        }
    }

    /// The options of the command line with `--only part`.
    pub(crate) fn only(part: Part) -> Options {
        Options {
            only: vec![part],
            ..Options::default()
        }
    }
}

/// The parts, in the order they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// cargo fmt, clippy and rustdoc without a warning
    Lints,
    /// Licences and sources of all dependencies
    Dependencies,
    /// cargo test: unit, property and ABI tests
    Unit,
    /// The CUDA kernels, compiled to machine code
    Kernels,
    /// ggml's test-backend-ops on VGPU0, over both links
    Ops,
    /// llama.cpp's own tests of models on VGPU0: every architecture, states, threads
    Models,
    /// Text from llama-server through the plugin, compared with its CPU
    Generation,
    /// The demo: node-llama-cpp, over both links
    Demo,
    /// Executors and guests that are missing or killed
    Failures,
    /// Injected faults: kills, suspends, exhausted memory, disk and descriptors
    Faults,
    /// The Debian packages and the archive: installed, used, removed
    Packages,
    /// One plugin file in ggml 0.23 to 0.26, in every place a ggml can be
    Programs,
    /// Ollama: the plugin installed in it, and its API used as a client would
    Ollama,
    /// The files in deploy/, by their own validators
    Deploy,
    /// The commands of the documentation, followed in minimal systems (only with --full)
    Documentation,
    /// A virtual machine under QEMU
    Vm,
}

pub(crate) const PARTS: [Part; 16] = [
    Part::Lints,
    Part::Dependencies,
    Part::Unit,
    Part::Kernels,
    Part::Ops,
    Part::Models,
    Part::Generation,
    Part::Demo,
    Part::Failures,
    Part::Faults,
    Part::Packages,
    Part::Programs,
    Part::Ollama,
    Part::Deploy,
    Part::Documentation,
    Part::Vm,
];

impl Part {
    /// The name on the command line.
    pub(crate) fn name(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self);
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The state that the parts share: programs under test, and results.
pub(crate) struct TestRun<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) options: &'a Options,
    pub(crate) dist: OnceCell<Option<Dist>>,
    pub(crate) passed: u64,
    pub(crate) failed: Vec<String>,
}

impl TestRun<'_> {
    /// Cargo, whose builds of the kernels for the CPU are kept in the cache.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = workspace::cargo();
        cargo.env("VGPU_SHIM_CACHE", self.cache.shim_objects());
        cargo
    }

    /// Runs one check, shows it as a step, and counts it.
    pub(crate) fn check(
        &mut self,
        name: &str,
        check: impl FnOnce(&TestRun<'_>, &Progress) -> Result<String>,
    ) {
        let progress = Progress::new(name);
        match check(self, &progress) {
            Ok(result) => {
                progress.done(&result);
                self.passed += 1;
            }
            Err(error) => {
                progress.failed(&format!("{error:#}"));
                self.failed.push(name.to_owned());
            }
        }
    }

    /// Runs two lists of checks at the same time. For checks that leave cores idle, and whose
    /// results do not depend on how long something takes.
    pub(crate) fn at_the_same_time(
        &mut self,
        first: impl FnOnce(&mut TestRun<'_>),
        second: impl FnOnce(&mut TestRun<'_>) + Send,
    ) {
        let mut other = TestRun {
            cache: self.cache,
            options: self.options,
            dist: self.dist.clone(),
            passed: 0,
            failed: Vec::new(),
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| second(&mut other));
            first(self);
            if let Err(panic) = second.join() {
                std::panic::resume_unwind(panic);
            }
        });
        self.passed += other.passed;
        self.failed.append(&mut other.failed);
    }

    /// Makes a prerequisite of a part's checks. If that fails, the part counts as one failure.
    pub(crate) fn prepare<T>(
        &mut self,
        what: &str,
        make: impl FnOnce(&TestRun<'_>) -> Result<T>,
    ) -> Option<T> {
        match make(self) {
            Ok(made) => Some(made),
            Err(error) => {
                progress::say(&format!("  FAILED {what}: {error:#}"));
                self.failed.push(what.to_owned());
                None
            }
        }
    }

    /// The plugin and `vgpu` under test, built once per run: with `--full` as they are shipped,
    /// otherwise as `cargo test` has compiled them.
    pub(crate) fn dist(&mut self) -> Option<Dist> {
        if let Some(folder) = &self.options.dist {
            let _ = self.dist.set(Some(dist::at(folder))); // the same each time
        }
        if self.dist.get().is_none() {
            let built = self.prepare("build under test", |run| match run.options.full {
                true => dist::build(run.cache),
                false => {
                    let folder = workspace::root().join("target/test-dist");
                    dist::build_for_tests(run.cache, &folder)
                }
            });
            self.passed += u64::from(built.is_some());
            let _ = self.dist.set(built); // it was empty
        }
        self.dist.get().cloned().flatten()
    }

    /// The log file of a program under test.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        workspace::reports().join(format!("{name}.log"))
    }

    /// A model with random weights.
    pub(crate) fn model(&self, file_type: FileType) -> Result<PathBuf> {
        model::ensure(self.cache, &model::DEMO, file_type)
    }
}

/// An executor on a socket in a separate folder.
pub(crate) struct Served {
    pub(crate) executor: Executor,
    // After the executor, so that the folder is removed last.
    _scratch: Scratch,
}

impl Served {
    pub(crate) fn start(dist: &Dist, log: &std::path::Path) -> Result<Served> {
        Served::start_command(&mut std::process::Command::new(&dist.vgpu), log)
    }

    /// The same with the command `serve`, whose environment the caller may have changed.
    pub(crate) fn start_command(
        serve: &mut std::process::Command,
        log: &std::path::Path,
    ) -> Result<Served> {
        Served::start_engine(serve, "cpu", &[], log)
    }

    /// The same with another engine, the value of `--engine`, and further arguments.
    pub(crate) fn start_engine(
        serve: &mut std::process::Command,
        engine: &str,
        arguments: &[&str],
        log: &std::path::Path,
    ) -> Result<Served> {
        let scratch = Scratch::new()?;
        let socket = scratch.path().join("vgpu.sock");
        let threads = workspace::cores();
        let executor = Executor::start_engine(serve, engine, &socket, threads, log, arguments)?;
        Ok(Served {
            executor,
            _scratch: scratch,
        })
    }
}
