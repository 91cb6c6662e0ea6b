//! Developer commands: `cargo xtask setup | build | demo | package | release`, and those that are
//! programs of their own: the system tests (`test`, `vm`, `ollama`, `ops-table`, `faults`, `soak`,
//! `abi-diff`, `gpu-check`) and the benchmarks (`bench`).
//!
//! Each fetches and builds just what it needs, into a cache folder shared by all checkouts, and
//! shows what it is doing. See [`xtask_common::cache`] for where that is.

mod demo;
mod package;

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;

use xtask_common::cache::Cache;
use xtask_common::println;
use xtask_common::progress::{self, heading};
use xtask_common::{dist, ggml_releases, llama, model, node, packages, workspace};

/// Builds ggml-vgpu and tries it in real programs.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
enum Arguments {
    /// Fetch and build everything the other commands need
    Setup,
    /// Build libggml-vgpu.so and vgpu into target/dist
    Build,
    /// Generate text in a real program through the plugin, and compare with its CPU
    Demo(demo::Options),
    /// Make Debian packages and an archive in target/package
    Package(package::Options),
    /// Make all that is published in target/dist/release: packages, archive, image, checksums
    Release(package::ReleaseOptions),
    /// Run the tests, from formatting to real programs
    #[command(disable_help_flag = true)]
    Test(Passed),
    /// Boot guests under QEMU and run the tests inside
    #[command(disable_help_flag = true)]
    Vm(Passed),
    /// Build Ollama, install the plugin in it, and use it as a client would
    #[command(disable_help_flag = true)]
    Ollama(Passed),
    /// Run test-backend-ops and write docs/OPS.md
    #[command(disable_help_flag = true)]
    OpsTable(Passed),
    /// Kill, suspend and exhaust executors and guests hundreds of times, and look for leaks
    #[command(disable_help_flag = true)]
    Faults(Passed),
    /// Let random events happen to an executor and six guests, and compare every token
    #[command(disable_help_flag = true)]
    Soak(Passed),
    /// Print what another ggml changes in headers, enums and constructors
    #[command(disable_help_flag = true)]
    AbiDiff(Passed),
    /// Collect the GPU tests in target/gpu-check, and run them if there is a GPU
    #[command(disable_help_flag = true)]
    GpuCheck(Passed),
    /// Run the benchmarks, each beside a peer in the same run
    #[command(disable_help_flag = true)]
    Bench(Passed),
}

/// Arguments of a command that is a program of its own.
#[derive(Debug, clap::Args)]
struct Passed {
    /// The program's arguments; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress::say(&format!("\nerror: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let cache = Cache::open()?;
    match arguments {
        Arguments::Setup => setup(&cache),
        Arguments::Build => {
            let built = dist::build(&cache)?;
            println!("{}\n{}", built.plugin.display(), built.vgpu.display());
            Ok(())
        }
        Arguments::Demo(options) => demo::run(&cache, options),
        Arguments::Package(options) => package::run(&cache, options),
        Arguments::Release(options) => package::release(&cache, options),
        Arguments::Test(passed) => start(TESTS, Some("test"), passed),
        Arguments::Vm(passed) => start(TESTS, Some("vm"), passed),
        Arguments::Ollama(passed) => start(TESTS, Some("ollama"), passed),
        Arguments::OpsTable(passed) => start(TESTS, Some("ops-table"), passed),
        Arguments::Faults(passed) => start(TESTS, Some("faults"), passed),
        Arguments::Soak(passed) => start(TESTS, Some("soak"), passed),
        Arguments::AbiDiff(passed) => start(TESTS, Some("abi-diff"), passed),
        Arguments::GpuCheck(passed) => start(TESTS, Some("gpu-check"), passed),
        Arguments::Bench(passed) => start(BENCHES, None, passed),
    }
}

/// The package of the system tests.
const TESTS: &str = "vgpu-system-tests";
/// The package of the benchmarks.
const BENCHES: &str = "vgpu-benches";

/// Builds the program of `package` and becomes it: what only tests and benchmarks need, the other
/// commands do not compile.
fn start(package: &str, command: Option<&str>, passed: &Passed) -> Result<()> {
    let mut cargo = workspace::cargo();
    cargo
        .args([
            "run",
            "--quiet",
            "--package",
            package,
            "--bin",
            package,
            "--",
        ])
        .args(command)
        .args(&passed.arguments);
    Err(cargo.exec()).context("starting cargo")
}

fn setup(cache: &Cache) -> Result<()> {
    heading("setup");
    packages::libclang(cache)?;
    node::Node::ensure(cache)?;
    packages::ggml_vulkan(cache)?;
    llama::newest_source(cache)?;
    ggml_releases::RELEASES[0].source(cache)?;
    for file_type in [model::FileType::F16, model::FileType::Q4KM] {
        model::ensure(cache, &model::DEMO, file_type)?;
    }
    let built = llama::build(cache, llama::Stage::Tools)?;
    llama::newest_ops(cache)?;
    println!("{}", built.display());
    Ok(())
}
