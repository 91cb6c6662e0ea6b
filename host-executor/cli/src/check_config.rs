//! `vgpu check-config`.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use serde_json::json;
use vgpu_cpu::Threads;
use vgpu_executor::config::{DEFAULT_PATH, LoadError, Settings};
use vgpu_executor::engine::{self, EngineList, Selection};
use vgpu_executor::size::shown;

use crate::engine_probe;
use crate::error_text;
use crate::output;
use crate::serve;

/// Checks a configuration against this host, and reports the position of a mistake.
///
/// The exit status is 0 for a valid configuration, 1 for one with a mistake or one that does not
/// fit this host, 2 for one that cannot be read. As `vgpu serve` without other flags, the command
/// reads the certificates, starts the engine and compares the quotas with the engine's memory. The
/// answer names the engine, with `auto` the one that is chosen on this host. The running executor
/// is not changed, and no guest is served.
#[derive(Parser)]
pub(crate) struct Args {
    /// The configuration file
    #[arg(default_value = DEFAULT_PATH)]
    file: PathBuf,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Standard output for the answer alone: what a driver or a backend library prints there goes to
/// standard error from now on.
fn only_the_answer() -> io::Result<File> {
    // No process that tries an engine inherits the caller's pipe.
    let answer: OwnedFd = rustix::io::fcntl_dupfd_cloexec(io::stdout(), 3)?;
    rustix::stdio::dup2_stdout(io::stderr())?;
    Ok(answer.into())
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut out = only_the_answer().context("standard output")?;
    let file = args.file.display();
    let outcome = Settings::load(&args.file);
    let (status, text, value) = match &outcome {
        Ok(settings) => match checked(settings) {
            Ok(checked) => (
                0,
                summary(settings, &checked),
                json!({
                    "file": args.file,
                    "ok": true,
                    "guests": settings.guests.len(),
                    "memory": checked.memory,
                    "engine": checked.selection.names(),
                    "device": checked.device,
                    "unused_gpu": checked.selection.unused_gpu,
                    "needs_isolation": needs_isolation(settings),
                }),
            ),
            Err(reason) => {
                let reason = error_text::one_line(&reason);
                (
                    1,
                    format!("{file}: {reason}"),
                    json!({"file": args.file, "ok": false, "reason": reason}),
                )
            }
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
        (true, _) => output::check(writeln!(out, "{value}")),
        (false, 0) => output::check(writeln!(out, "{file}: {text}")),
        (false, _) => eprintln!("vgpu: {text}"),
    }
    Ok(ExitCode::from(status))
}

/// What `vgpu serve` would use.
struct Checked {
    /// The engines: with `auto`, those that are chosen here and now.
    selection: Selection,
    device: String,
    /// The memory of the engine that has least.
    memory: u64,
}

/// Checks the settings as `vgpu serve` does before it serves.
fn checked(settings: &Settings) -> anyhow::Result<Checked> {
    serve::check(settings)?;
    // A guest that is given backends of ggml needs --isolate, which is no setting, or trust.
    let guests_may_end_it = settings.trust_guests || settings.gives_ggml();
    let selection = engine_probe::select(&settings.engines, guests_may_end_it)?;
    let rules = settings.clone().on_engines(&selection.engines)?.rules();
    rules.check_devices(selection.engines.len())?;
    let (mut devices, mut memory) = (Vec::new(), u64::MAX);
    for (device, kind) in selection.engines.iter().enumerate() {
        // One thread: nothing is computed.
        let engine = engine::start(kind, Threads::from(1), settings.memory)?;
        let total = engine.memory().total;
        rules.check_memory(device, total)?;
        memory = memory.min(total);
        devices.push(engine.description().to_owned());
    }
    Ok(Checked {
        selection,
        device: devices.join(", "),
        memory,
    })
}

/// The engines of the settings, which ones these are on this host, and their devices.
pub(crate) fn engine_text(wanted: &EngineList, chosen: &str, device: &str) -> String {
    match wanted.to_string() {
        named if named == chosen => format!("engine {named} ({device})"),
        wanted => format!("engine {wanted}, here {chosen} ({device})"),
    }
}

fn summary(settings: &Settings, checked: &Checked) -> String {
    let quotas = settings.guests.iter().filter_map(|g| g.rule.policy.memory);
    let promised = quotas.fold(0, u64::saturating_add);
    let Checked {
        selection,
        device,
        memory,
    } = checked;
    let mut text = format!(
        "valid: {}, {} named guests, {} of {} reserved",
        engine_text(&settings.engines, &selection.names(), device),
        settings.guests.len(),
        shown(promised),
        shown(*memory)
    );
    if let Some(gpu) = &selection.unused_gpu {
        text.push_str(&format!("\nnot used: {gpu}"));
    }
    if needs_isolation(settings) {
        text.push_str(&format!("\n{NEEDS_ISOLATION}"));
    }
    text
}

/// What `vgpu serve` needs besides a configuration with an engine that a guest can end.
pub(crate) const NEEDS_ISOLATION: &str = "a guest can end this engine, and read what the others \
                                          have in it: vgpu serve needs --isolate, or \
                                          engine.trust-guests = true";

/// Whether `vgpu serve` refuses the settings without `--isolate`, which is no setting.
fn needs_isolation(settings: &Settings) -> bool {
    let needs_trust = settings.engines.needs_trust().is_some() || settings.gives_ggml();
    needs_trust && !settings.trust_guests
}
