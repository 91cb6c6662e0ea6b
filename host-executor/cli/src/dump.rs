//! `vgpu dump`.

use std::path::PathBuf;

use clap::Parser;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;

use crate::control_client;

/// Prints what the executor does now: who has the engine, what each session does, since when, and
/// what it waits for.
///
/// The executor answers also while its engine hangs. SIGUSR1 makes it write the same text into its
/// log.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    print!("{}", control_client::dump(&args.control)?);
    Ok(())
}
