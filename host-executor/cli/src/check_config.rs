//! `vgpu check-config`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use serde_json::json;
use vgpu_cpu::Threads;
use vgpu_executor::config::{DEFAULT_PATH, LoadError, Settings};
use vgpu_executor::engine;

use crate::engine_probe;
use crate::serve;

/// Checks a configuration against this host, and reports the position of a mistake.
///
/// The exit status is 0 for a valid configuration, 1 for one with a mistake or one that does not
/// fit this host, 2 for one that cannot be read. As `vgpu serve` without other flags, the command
/// reads the certificates, starts the engine and compares the quotas with the engine's memory. The
/// running executor is not changed, and no guest is served.
#[derive(Parser)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(default_value = DEFAULT_PATH)]
    file: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> ExitCode {
    let file = args.file.display();
    let outcome = Settings::load(&args.file);
    let (status, text, value) = match &outcome {
        Ok(settings) => match checked(settings) {
            Ok(memory) => (
                0,
                summary(settings, memory),
                json!({
                    "file": args.file,
                    "ok": true,
                    "guests": settings.guests.len(),
                    "memory": memory,
                }),
            ),
            Err(reason) => (
                1,
                format!("{file}: {reason:#}"),
                json!({"file": args.file, "ok": false, "reason": format!("{reason:#}")}),
            ),
        },
        Err(error @ LoadError::Read { error: cause, .. }) => (
            2,
            error.to_string(),
            json!({"file": args.file, "ok": false, "reason": cause.to_string()}),
        ),
        Err(error @ LoadError::Problem { problem, .. }) => (
            1,
            error.to_string(),
            json!({
                "file": args.file,
                "ok": false,
                "line": problem.line,
                "column": problem.column,
                "reason": problem.reason,
            }),
        ),
    };
    match (args.json, status) {
        (true, _) => println!("{value}"),
        (false, 0) => println!("{file}: {text}"),
        (false, _) => eprintln!("vgpu: {text}"),
    }
    ExitCode::from(status)
}

/// Checks the settings as `vgpu serve` does before it serves. Returns the memory of the engine.
pub(crate) fn checked(settings: &Settings) -> anyhow::Result<u64> {
    serve::check(settings)?;
    // One thread: nothing is computed.
    let chosen = engine_probe::select(&settings.engine, settings.trust_guests)?;
    let engine = engine::start(&chosen.kind, Threads::from(1), settings.memory)?;
    let total = engine.memory().total;
    settings.rules().check_memory(total)?;
    Ok(total)
}

fn summary(settings: &Settings, memory: u64) -> String {
    let quotas = settings.guests.iter().filter_map(|g| g.rule.policy.memory);
    let promised = quotas.fold(0, u64::saturating_add);
    format!(
        "valid: engine {}, {} named guests, {promised} bytes of {memory} reserved",
        settings.engine,
        settings.guests.len()
    )
}
