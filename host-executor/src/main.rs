//! The `vgpu` command.

mod serve;
mod size;

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
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let outcome = match command {
        Command::Serve(args) => serve::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vgpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}
