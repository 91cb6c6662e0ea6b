//! `vgpu kill`.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Parser;
use vgpu_executor::OperatorRequest;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;

use crate::control_client;
use crate::drain::time;

/// How often the executor is asked for the session.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Ends the session of a program, and waits for the end.
///
/// A graph of the session ends within milliseconds on the CPU, and at the end of a kernel on a GPU.
/// The memory of the session is freed. The program goes on without its vGPU: llama.cpp and Ollama
/// report an error, and may connect again with the next model. `vgpu set` and the configuration
/// limit what a guest may use. The exit status is 0 if the session has ended, and 1 if there is no
/// such session or it has not ended in time.
#[derive(Parser)]
pub(crate) struct Args {
    /// The number of the session: ID in `vgpu ps`
    session: u64,

    /// How long to wait for the end of the session
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10s")]
    wait: Duration,

    /// The executor's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let session = args.session;
    let said = control_client::perform(&args.control, &OperatorRequest::Kill { session })?;
    println!("{said}");
    let start = Instant::now();
    loop {
        let status = control_client::status(&args.control)?;
        if status.sessions.iter().all(|open| open.id != session) {
            break;
        }
        if start.elapsed() >= args.wait {
            bail!(
                "session {session} has not ended {:?} after it was told to: its process or the \
                 engine does not answer. vgpu dump shows what it does",
                args.wait
            );
        }
        thread::sleep(POLL_INTERVAL);
    }
    println!("session {session} has ended");
    Ok(())
}
