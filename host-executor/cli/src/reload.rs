//! `vgpu reload`.

use std::path::PathBuf;

use anyhow::bail;
use clap::Parser;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;

use crate::control_client;

/// Makes the executor reload its configuration.
///
/// Connected guests stay. Settings that need a restart are reported. A configuration with a mistake
/// changes nothing, and the exit status is 1.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let outcome = control_client::reload(&args.control)?;
    if !outcome.ok {
        bail!("{}", outcome.message);
    }
    println!("{}", outcome.message);
    Ok(())
}
