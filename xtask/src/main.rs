//! Developer commands: `cargo xtask setup | build | demo | ollama | package | test | bench | gpu-check | vm | ops-table`.
//!
//! Each fetches and builds just what it needs, into a cache folder shared by all checkouts, and shows
//! what it is doing. See [`cache`] for where that is.

mod bench;
mod blocks;
mod cache;
mod compare;
mod demo;
mod dist;
mod elf;
mod executor;
mod faults;
mod gguf;
mod gpu_check;
mod host;
mod llama;
mod model;
mod node;
mod ollama;
mod ops;
mod package;
mod packages;
mod preload;
mod process;
mod progress;
mod sched;
mod scratch;
mod server;
mod stats;
mod test;
mod vm;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use cache::Cache;
use progress::heading;

/// Builds ggml-vgpu and tries it in real host programs.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
enum Arguments {
    /// Fetch and build everything the other commands need
    Setup,
    /// Build libggml-vgpu.so and vgpu into target/dist
    Build,
    /// Generate text in a real host through the plugin, and compare with its CPU
    Demo(demo::Options),
    /// Build Ollama, install the plugin in it, and use it as a client would
    Ollama,
    /// Make Debian packages and an archive in target/package
    Package,
    /// Run all tests, in the end with real hosts
    Test(test::Options),
    /// Measure beside the peers, in the same run
    #[command(subcommand)]
    Bench(bench::Options),
    /// Gather what looks at a GPU in target/gpu-check, and run it if there is one
    GpuCheck(gpu_check::Options),
    /// Boot a guest under QEMU and run the tests inside
    Vm(test::VmOptions),
    /// Run test-backend-ops and write docs/OPS.md
    OpsTable(ops::table::Options),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error:#}");
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
        Arguments::Package => {
            let made = package::build(&cache)?;
            made.all()
                .iter()
                .for_each(|file| println!("{}", file.display()));
            println!("{}", made.checksums.display());
            Ok(())
        }
        Arguments::Ollama => test::run(&cache, &test::Options::only(test::Part::Ollama)),
        Arguments::Test(options) => test::run(&cache, options),
        Arguments::Bench(options) => bench::run(&cache, options),
        Arguments::GpuCheck(options) => gpu_check::run(&cache, options),
        Arguments::Vm(options) => test::run(&cache, &options.into()),
        Arguments::OpsTable(options) => ops::table::write(&cache, options),
    }
}

fn setup(cache: &Cache) -> Result<()> {
    heading("setup");
    packages::libclang(cache)?;
    node::Node::ensure(cache)?;
    let vocabulary = llama::source(cache)?.join(demo::VOCABULARY);
    llama::newest_source(cache)?;
    for weights in [model::Weights::F16, model::Weights::Q4KM] {
        model::ensure(cache, &model::DEMO, weights, &vocabulary, demo::SEED)?;
    }
    let built = llama::build(cache, llama::Stage::Tools)?;
    llama::newest_ops(cache)?;
    println!("{}", built.display());
    Ok(())
}
