//! `cargo xtask test`: everything that must hold, from formatting to real hosts.

mod dependencies;
mod deploy;
mod failures;
mod faults;
mod generation;
mod hosts;
mod kernels;
mod lints;
mod models;
mod ollama;
mod ops;
mod packages;
mod unit;
mod vm;

use std::cell::OnceCell;
use std::path::PathBuf;

use anyhow::{Context as _, Result, anyhow};

use crate::cache::Cache;
use crate::demo;
use crate::dist::{self, Dist};
use crate::executor::Executor;
use crate::llama;
use crate::model::{self, Weights};
use crate::progress::{self, Step};
use crate::scratch::Scratch;
use crate::workspace;

/// Options of the tests.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Also the few cases of test-backend-ops that take minutes each, and all cases with fewer instruction sets
    #[arg(long)]
    full: bool,
    /// Only these parts [default: all]
    #[arg(long, value_enum, value_name = "PART")]
    only: Vec<Part>,
    /// For test-backend-ops: only these ops, separated by commas; the number of cases is then not
    /// checked
    #[arg(long, value_name = "OPS")]
    ops: Option<String>,
    /// Test libggml-vgpu.so and vgpu of this folder instead of a fresh release build
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
    /// Only the virtual machine of this kind.
    #[arg(skip)]
    machine: Option<crate::vm::Kind>,
}

/// Options of `cargo xtask vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct VmOptions {
    /// Only the virtual machine of this kind [default: all]
    #[arg(long, value_enum)]
    only: Option<crate::vm::Kind>,
    /// Test libggml-vgpu.so and vgpu of this folder instead of a fresh release build
    #[arg(long, value_name = "FOLDER")]
    dist: Option<PathBuf>,
}

impl From<&VmOptions> for Options {
    /// Only the part with the virtual machine.
    fn from(options: &VmOptions) -> Options {
        Options {
            dist: options.dist.clone(),
            machine: options.only,
            ..Options::only(Part::Vm)
        }
    }
}

impl Options {
    /// As from the command line with `--only part`.
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
    /// The CUDA kernels, compiled for every architecture
    Kernels,
    /// ggml's test-backend-ops on VGPU0, over both links
    Ops,
    /// llama.cpp's own tests of models on VGPU0: every architecture, states, threads
    Models,
    /// Text from llama-server through the plugin, compared with its CPU
    Generation,
    /// The demo: node-llama-cpp, over both links
    Demo,
    /// Executors and guests that are not there, or die
    Failures,
    /// Kills, stops, and memory, disk and descriptors that run out, injected
    Faults,
    /// The Debian packages and the archive: installed, used, removed
    Packages,
    /// One plugin file in ggml 0.23 to 0.26, in every place a ggml can be
    Hosts,
    /// Ollama: the plugin installed in it, and its API used as a client would
    Ollama,
    /// The files in deploy/, by their own validators
    Deploy,
    /// A virtual machine under QEMU
    Vm,
}

const PARTS: [Part; 15] = [
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
    Part::Hosts,
    Part::Ollama,
    Part::Deploy,
    Part::Vm,
];

/// Runs the tests; an error if one failed.
pub(crate) fn run(cache: &Cache, options: &Options) -> Result<()> {
    let reports = workspace::reports();
    std::fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
    let mut bench = Bench {
        cache,
        options,
        dist: OnceCell::new(),
        passed: 0,
        failed: Vec::new(),
    };
    let wanted = |part: &Part| options.only.is_empty() || options.only.contains(part);
    for part in PARTS.into_iter().filter(wanted) {
        match part {
            Part::Lints => lints::run(&mut bench),
            Part::Dependencies => dependencies::run(&mut bench),
            Part::Unit => unit::run(&mut bench),
            Part::Kernels => kernels::run(&mut bench),
            Part::Ops => ops::run(&mut bench),
            Part::Models => models::run(&mut bench),
            Part::Generation => generation::run(&mut bench),
            Part::Demo => demos(&mut bench),
            Part::Failures => failures::run(&mut bench),
            Part::Faults => faults::run(&mut bench),
            Part::Packages => packages::run(&mut bench),
            Part::Hosts => hosts::run(&mut bench),
            Part::Ollama => ollama::run(&mut bench),
            Part::Deploy => deploy::run(&mut bench),
            Part::Vm => vm::run(&mut bench),
        }
    }

    println!();
    bench
        .failed
        .iter()
        .for_each(|name| println!("failed: {name}"));
    println!("{} passed, {} failed", bench.passed, bench.failed.len());
    if bench.failed.is_empty() {
        Ok(())
    } else {
        Err(anyhow!("logs and reports: {}", reports.display()))
    }
}

fn demos(bench: &mut Bench<'_>) {
    for (weights, inproc) in [(Weights::F16, false), (Weights::Q4KM, true)] {
        let name = format!(
            "demo, {}{}",
            weights.name(),
            if inproc { ", inproc" } else { "" }
        );
        let run = |bench: &Bench<'_>| demo::run(bench.cache, &demo::Options::new(weights, inproc));
        let done = bench.prepare(&name, run);
        bench.passed += u64::from(done.is_some());
    }
}

/// What the parts share: the things under test, and the score.
struct Bench<'a> {
    cache: &'a Cache,
    options: &'a Options,
    dist: OnceCell<Option<Dist>>,
    passed: u64,
    failed: Vec<String>,
}

impl Bench<'_> {
    /// Runs one check, shows it as a step, and counts it.
    fn check(&mut self, name: &str, check: impl FnOnce(&Bench<'_>, &Step) -> Result<String>) {
        let step = Step::new(name);
        match check(self, &step) {
            Ok(result) => {
                step.done(&result);
                self.passed += 1;
            }
            Err(error) => {
                step.failed(&format!("{error:#}"));
                self.failed.push(name.to_owned());
            }
        }
    }

    /// Makes something that the checks of a part need; without it, they count as one failure.
    fn prepare<T>(&mut self, what: &str, make: impl FnOnce(&Bench<'_>) -> Result<T>) -> Option<T> {
        match make(self) {
            Ok(made) => Some(made),
            Err(error) => {
                progress::say(&format!("  FAILED {what}: {error:#}"));
                self.failed.push(what.to_owned());
                None
            }
        }
    }

    /// The release build, made once.
    fn dist(&mut self) -> Option<Dist> {
        if let Some(folder) = &self.options.dist {
            let _ = self.dist.set(Some(dist::at(folder))); // the same each time
        }
        if self.dist.get().is_none() {
            let built = self.prepare("release build", |bench| dist::build(bench.cache));
            self.passed += u64::from(built.is_some());
            let _ = self.dist.set(built); // it was empty
        }
        self.dist.get().cloned().flatten()
    }

    /// Where a program under test writes what it has to say.
    fn log(&self, name: &str) -> PathBuf {
        workspace::reports().join(format!("{name}.log"))
    }

    /// A model with random weights.
    fn model(&self, weights: Weights) -> Result<PathBuf> {
        let vocabulary = llama::source(self.cache)?.join(demo::VOCABULARY);
        model::ensure(self.cache, &model::DEMO, weights, &vocabulary, demo::SEED)
    }
}

/// An executor on a socket in a folder of its own.
struct Served {
    executor: Executor,
    // Behind the executor: the folder goes last.
    _scratch: Scratch,
}

impl Served {
    fn start(dist: &Dist, log: &std::path::Path) -> Result<Served> {
        Served::start_command(&mut std::process::Command::new(&dist.vgpu), log)
    }

    /// The same with `serve` as the command, whose environment the caller may have changed.
    fn start_command(serve: &mut std::process::Command, log: &std::path::Path) -> Result<Served> {
        let scratch = Scratch::new()?;
        let socket = scratch.path().join("vgpu.sock");
        let executor = Executor::start_command(serve, &socket, workspace::cores(), log, &[])?;
        Ok(Served {
            executor,
            _scratch: scratch,
        })
    }
}
