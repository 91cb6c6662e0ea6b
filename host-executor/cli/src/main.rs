//! The `vgpu` command.

// First: its macros are for all other modules.
#[macro_use]
mod output;

#[cfg(feature = "tools")]
mod bench;
#[cfg(feature = "tools")]
mod cert;
mod check_config;
mod child_status;
mod config_error;
mod control_client;
mod doctor;
mod drain;
mod dump;
mod engine_probe;
mod error_text;
mod fd_store;
#[cfg(feature = "tools")]
mod generate;
#[cfg(feature = "tools")]
mod gpu_check;
mod install;
mod kill;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod own_program;
mod ps;
mod reload;
mod runtime_dir;
mod serve;
mod session_client;
mod set;
#[cfg(feature = "tools")]
mod top;
mod units;
mod wait;
mod watched_process;

use std::io::Write as _;
use std::process::ExitCode;

#[cfg(feature = "tools")]
use clap::CommandFactory as _;
use clap::{Parser, Subcommand};
use tracing::Level;
use vgpu_executor::{log_queue, service};

/// Executes tensor graphs for guests that load libggml-vgpu.so.
#[derive(Parser)]
#[command(name = "vgpu", version = own_program::VERSION, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
#[allow(clippy::large_enum_variant)] // a process has one of them
enum Command {
    Serve(serve::Args),
    CheckConfig(check_config::Args),
    Ps(ps::Args),
    Dump(dump::Args),
    #[cfg(feature = "tools")]
    Top(top::Args),
    Reload(reload::Args),
    Set(set::Args),
    Drain(drain::Args),
    Kill(kill::Args),
    Install(install::InstallArgs),
    Uninstall(install::UninstallArgs),
    Doctor(doctor::Args),
    Wait(wait::Args),
    #[cfg(feature = "tools")]
    GpuCheck(gpu_check::Args),
    #[cfg(feature = "tools")]
    Bench(bench::Args),
    #[cfg(feature = "tools")]
    Cert(cert::Args),
    FdStore(fd_store::Args),
    #[cfg(feature = "kubernetes")]
    Kubernetes(kubernetes::Args),
    #[command(hide = true)]
    ProbeEngine(engine_probe::Args),
    #[command(hide = true)]
    ServeGuest(serve::WorkerArgs),
    #[command(hide = true)]
    FdStoreExec(fd_store::ExecArgs),
    #[command(hide = true)]
    DoctorDriver(doctor::DriverArgs),
    #[command(hide = true)]
    DoctorPlugin(doctor::PluginArgs),
    #[cfg(feature = "tools")]
    #[command(hide = true)]
    Generate(generate::Args),
}

impl Command {
    /// Whether the command is over when nobody reads what it prints.
    fn only_prints(&self) -> bool {
        #[cfg(feature = "tools")]
        match self {
            Command::GpuCheck(args) => return args.only_prints(),
            Command::Bench(_) => return true,
            _ => {}
        }
        matches!(
            self,
            Command::CheckConfig(_)
                | Command::Ps(_)
                | Command::Dump(_)
                | Command::Doctor(_)
                | Command::DoctorDriver(_)
                | Command::DoctorPlugin(_)
        )
    }
}

fn main() -> ExitCode {
    vgpu_executor::set_version(own_program::VERSION);
    let Cli { command } = Cli::parse();
    if command.only_prints() {
        output::end_without_reader();
    }
    let success = |()| ExitCode::SUCCESS;
    let outcome: anyhow::Result<ExitCode> = match command {
        Command::Serve(args) => serve::run(&args).map(success),
        Command::ProbeEngine(args) => engine_probe::run(&args).map(success),
        Command::ServeGuest(args) => serve::run_worker(args).map(success),
        Command::CheckConfig(args) => check_config::run(&args),
        Command::Ps(args) => ps::run(&args).map(success),
        Command::Dump(args) => dump::run(&args).map(success),
        #[cfg(feature = "tools")]
        Command::Top(args) => top::run(&args).map(success),
        Command::Reload(args) => reload::run(&args).map(success),
        Command::Set(args) => set::run(&args).map(success),
        Command::Drain(args) => drain::run(&args),
        Command::Kill(args) => kill::run(&args).map(success),
        Command::Install(args) => install::install(args).map(success),
        Command::Uninstall(args) => install::uninstall(args).map(success),
        Command::Doctor(args) => Ok(doctor::run(&args)),
        Command::DoctorDriver(args) => Ok(doctor::run_driver(&args)),
        Command::DoctorPlugin(args) => Ok(doctor::run_plugin(&args)),
        Command::Wait(args) => wait::run(&args).map(success),
        #[cfg(feature = "tools")]
        Command::GpuCheck(args) => gpu_check::run(&args),
        #[cfg(feature = "tools")]
        Command::Bench(args) => bench::run(&args),
        #[cfg(feature = "tools")]
        Command::Cert(args) => cert::run(&args).map(success),
        #[cfg(feature = "kubernetes")]
        Command::Kubernetes(args) => kubernetes::run(args).map(success),
        Command::FdStore(args) => fd_store::run(&args).map(success),
        Command::FdStoreExec(args) => fd_store::exec(&args).map(success),
        #[cfg(feature = "tools")]
        Command::Generate(args) => generate::run(&args, &Cli::command()).map(success),
    };
    let code = match outcome {
        Ok(code) => code,
        Err(error) => {
            print(&format!("vgpu: {}", error_text::one_line(&error)));
            match config_error::is_in(&error) {
                true => ExitCode::from(config_error::EX_CONFIG),
                false => ExitCode::FAILURE,
            }
        }
    };
    log_queue::flush();
    code
}

/// Prints an error to standard error. In a process with a log it is a part of it: nobody may read
/// the log.
fn print(error: &str) {
    if log_queue::is_in_use() {
        log_queue::write_line(Level::ERROR, error);
        return;
    }
    let text = service::with_priority(Level::ERROR, error);
    // If it fails, there is nobody to tell.
    let _ = std::io::stderr().write_all(text.as_bytes());
}
