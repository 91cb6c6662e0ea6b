//! `vgpu set`.

use std::path::PathBuf;

use clap::Parser;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;
use vgpu_executor::{GuestChange, OperatorRequest};

use crate::control_client;

/// Changes the memory quota and the weight of a guest while the executor runs.
///
/// Connected programs stay. A larger quota is there at once. With a quota below what the guest
/// uses, its allocations are refused until it has freed enough. The configuration file stays as it
/// is: a reload and a restart bring its values back.
#[derive(Parser)]
pub(crate) struct Args {
    /// The guest's name in the configuration; - for each unnamed guest
    guest: String,

    /// memory=SIZE such as memory=40G, memory=none for no quota, weight=NUMBER from 1 to 1000
    #[arg(required = true, value_name = "KEY=VALUE")]
    changes: Vec<String>,

    /// The executor's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let change = GuestChange::parse(&args.guest, &args.changes)?;
    let said = control_client::perform(&args.control, &OperatorRequest::Set(change))?;
    println!("{said}");
    Ok(())
}
