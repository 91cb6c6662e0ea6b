//! `vgpu check-config`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use serde_json::json;
use vgpu_cpu::CpuEngine;
use vgpu_engine::{Engine as _, EngineError};
use vgpu_executor::QuotaError;
use vgpu_executor::config::{DEFAULT_PATH, LoadError, Settings};
use vgpu_executor::engine::EngineKind;

/// Checks a configuration, and reports the position of a mistake.
///
/// The exit status is 0 for a valid configuration, 1 for one with a mistake, 2 for one that cannot
/// be read. Quotas are compared with `engine.memory`, or without it with the memory of this
/// machine if the engine is the CPU engine. The running executor is not changed, and no guest is
/// served.
#[derive(Parser)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(default_value = DEFAULT_PATH)]
    file: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Why a configuration that was read cannot be used.
#[derive(Debug, thiserror::Error)]
enum CheckError {
    /// The CPU engine, whose memory is compared with the quotas, does not start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The quotas exceed the engine's memory.
    #[error(transparent)]
    Quota(#[from] QuotaError),
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
                    "memory_checked": memory.is_some(),
                }),
            ),
            Err(reason) => (
                1,
                format!("{file}: {reason}"),
                json!({"file": args.file, "ok": false, "reason": reason.to_string()}),
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

/// Checks the quotas against the engine's memory, where that is known without starting the engine.
fn checked(settings: &Settings) -> Result<Option<u64>, CheckError> {
    let total = match (settings.memory, &settings.engine) {
        (Some(memory), _) => memory,
        (None, EngineKind::Cpu) => CpuEngine::new(1, None)?.memory().total,
        (None, _) => return Ok(None),
    };
    settings.rules().check_memory(total)?;
    Ok(Some(total))
}

fn summary(settings: &Settings, memory: Option<u64>) -> String {
    let quotas = settings.guests.iter().filter_map(|g| g.rule.policy.memory);
    let promised: u64 = quotas.sum();
    let memory = match memory {
        Some(memory) => format!("of {memory}"),
        None => "of the GPU's memory, which is not checked here".into(),
    };
    format!(
        "valid: engine {}, {} named guests, {promised} bytes {memory} reserved",
        settings.engine,
        settings.guests.len()
    )
}
