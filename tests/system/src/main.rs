//! The system tests: the program behind `cargo xtask test`, `vm`, `ollama`, `ops-table`, `faults`,
//! `soak`, `abi-diff` and `gpu-check`.

mod abi_diff;
mod c_source;
mod cluster;
mod container;
mod debian;
mod faults;
mod files;
mod gpu_check;
mod llama_server;
mod ollama;
mod op_params;
mod ops;
mod parts;
mod preload;
mod previous;
mod suite;
mod test_run;
mod times;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use xtask_common::cache::Cache;

/// Tests ggml-vgpu with real programs and real virtual machines.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Arguments {
    /// Run the tests, from formatting to real programs
    #[command(after_help = test_run::FULL)]
    Test(test_run::Options),
    /// Boot a guest under QEMU and run the tests inside
    Vm(test_run::VmTestOptions),
    /// Build Ollama, install the plugin in it, and test its API
    Ollama,
    /// Run test-backend-ops and write docs/OPS.md
    OpsTable(ops::table::Options),
    /// Kill, suspend and exhaust executors and guests hundreds of times, and check for leaks
    Faults(faults::Options),
    /// Let random events happen to an executor and six guests, and compare every token
    Soak(faults::SoakOptions),
    /// Be a virtual machine of the random events
    #[command(hide = true)]
    Machine(faults::MachineOptions),
    /// Print what another ggml changes in headers, enums and constructors
    AbiDiff(abi_diff::Options),
    /// Collect the GPU tests in target/gpu-check, and run them if there is a GPU
    GpuCheck(gpu_check::Options),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            xtask_common::progress::say(&format!("\nerror: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let cache = Cache::open()?;
    match arguments {
        Arguments::Test(options) => suite::run(&cache, options),
        Arguments::Vm(options) => suite::run(&cache, &options.into()),
        Arguments::Ollama => suite::run(&cache, &test_run::Options::only(test_run::Part::Ollama)),
        Arguments::OpsTable(options) => ops::table::write(&cache, options),
        Arguments::Faults(options) => faults::run(&cache, options),
        Arguments::Soak(options) => faults::soak(&cache, options),
        Arguments::Machine(options) => faults::be_machine(options),
        Arguments::AbiDiff(options) => abi_diff::run(&cache, options),
        Arguments::GpuCheck(options) => gpu_check::run(&cache, options),
    }
}
