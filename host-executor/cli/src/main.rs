//! The `vgpu` command.

mod bench;
mod cert;
mod check_config;
mod doctor;
mod gpu_check;
mod hold;
mod install;
mod look;
mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs tensor work for guests that load libggml-vgpu.so.
#[derive(Parser)]
#[command(name = "vgpu", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::Args),
    CheckConfig(check_config::Args),
    Ps(look::PsArgs),
    Top(look::TopArgs),
    Reload(look::ReloadArgs),
    Install(install::InstallArgs),
    Uninstall(install::UninstallArgs),
    Doctor(doctor::Args),
    GpuCheck(gpu_check::Args),
    Bench(bench::Args),
    Cert(cert::Args),
    Hold(hold::Args),
    #[command(hide = true)]
    ServeGuest(serve::WorkerArgs),
    #[command(hide = true)]
    HoldExec(hold::ExecArgs),
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let outcome = match command {
        Command::Serve(args) => serve::run(args),
        Command::ServeGuest(args) => serve::work(args),
        Command::CheckConfig(args) => return check_config::run(&args),
        Command::Ps(args) => look::ps(&args),
        Command::Top(args) => look::top(&args),
        Command::Reload(args) => look::reload(&args),
        Command::Install(args) => install::install(args),
        Command::Uninstall(args) => install::uninstall(args),
        Command::Doctor(args) => return doctor::run(&args),
        Command::GpuCheck(args) => match gpu_check::run(&args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Bench(args) => match bench::run(&args) {
            Ok(code) => return code,
            Err(error) => Err(error),
        },
        Command::Cert(args) => cert::run(&args),
        Command::Hold(args) => hold::run(&args),
        Command::HoldExec(args) => hold::exec(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}
