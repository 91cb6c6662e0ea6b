//! `vgpu kill`.

use std::path::PathBuf;

use clap::Parser;
use vgpu_executor::OperatorRequest;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;

use crate::control_client;

/// Ends the session of a program.
///
/// A graph of the session ends within milliseconds on the CPU, and at the end of a kernel on a GPU.
/// The memory of the session is freed. The program goes on without its vGPU: llama.cpp and Ollama
/// report an error, and may connect again with the next model. `vgpu set` and the configuration
/// limit what a guest may use.
#[derive(Parser)]
pub(crate) struct Args {
    /// The number of the session: ID in `vgpu ps`
    session: u64,

    /// The executor's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let session = args.session;
    let said = control_client::perform(&args.control, &OperatorRequest::Kill { session })?;
    println!("{said}");
    Ok(())
}
