//! `vgpu wait`.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Parser;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::connect::expand;

use crate::error_text;
use crate::install::{INSTALLED, check_installed};
use crate::session_client::{self, Client};

/// How long an executor that is connected may take to accept a session.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// Waits until an executor accepts sessions.
///
/// For services that look for a device once, when they start, such as Ollama: ExecStartPre=vgpu
/// wait. Every named executor must accept one, or one at the default addresses. The exit status is
/// 1, with the reason, if none does in time, or if VGPU_INSTALLED names a plugin that is not there
/// or does not work with the Ollama around it.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's address, as in VGPU_ENDPOINT. May be given several times. [default:
    /// VGPU_ENDPOINT, or the addresses that the plugin tries]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Vec<Endpoint>,

    /// How long to wait, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(plugin) = std::env::var_os(INSTALLED) {
        check_installed(Path::new(&plugin))?;
    }
    let began = Instant::now();
    let timeout = Duration::from_secs(args.timeout);
    let (mut missing, are_named) =
        session_client::endpoints(&args.endpoint).context("VGPU_ENDPOINT")?;
    loop {
        let before = missing.len();
        let mut reasons = Vec::new();
        missing.retain(|endpoint| match accepts(endpoint) {
            Ok(()) => false,
            Err(error) => {
                reasons.push(format!("{endpoint}: {}", error_text::one_line(&error)));
                true
            }
        });
        if missing.is_empty() || (!are_named && missing.len() < before) {
            return Ok(());
        }
        if began.elapsed() + PAUSE > timeout {
            bail!(
                "no executor within {} s: {}",
                args.timeout,
                reasons.join("; ")
            );
        }
        thread::sleep(PAUSE);
    }
}

/// Whether an executor accepts a session at `endpoint`.
fn accepts(endpoint: &Endpoint) -> anyhow::Result<()> {
    if *endpoint == Endpoint::Inproc {
        return Ok(());
    }
    let all = expand(endpoint)?;
    for one in all {
        session_client::within(HELLO_TIMEOUT, move || {
            Client::connect(&one, "vgpu wait").map(drop)
        })?;
    }
    Ok(())
}
