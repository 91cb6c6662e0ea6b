//! `vgpu ps`, `vgpu top`, `vgpu reload`: the executor's control socket, from the other side.

mod rates;
mod screen;
mod top;

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Parser;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;
use vgpu_executor::control;
use vgpu_executor::status::{GuestStatus, SessionStatus, Status};

pub(crate) use top::{TopArgs, top};

/// Lists guests and the programs that they have connected.
#[derive(Parser)]
pub(crate) struct PsArgs {
    /// The executor's control socket (`vgpu serve --control`, or `control` in its configuration).
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,

    /// Answer with one JSON object: engine, guests, sessions; sizes in bytes, times in seconds.
    #[arg(long)]
    json: bool,
}

/// Has the executor read its configuration again.
///
/// Guests that are connected stay. What takes a restart is said. A file with a mistake changes nothing, and the
/// exit status is 1.
#[derive(Parser)]
pub(crate) struct ReloadArgs {
    /// The executor's control socket.
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,
}

pub(crate) fn ps(args: &PsArgs) -> anyhow::Result<()> {
    let status = ask(&args.control)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", table(&status));
    }
    Ok(())
}

pub(crate) fn reload(args: &ReloadArgs) -> anyhow::Result<()> {
    let said = control::reload(&args.control).map_err(|error| unreachable(&args.control, error))?;
    if !said.ok {
        bail!("{}", said.message);
    }
    println!("{}", said.message);
    Ok(())
}

fn ask(path: &Path) -> anyhow::Result<Status> {
    control::status(path).map_err(|error| unreachable(path, error))
}

fn unreachable(path: &Path, error: io::Error) -> anyhow::Error {
    let hint = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            "; is an executor running, with a control socket there (vgpu serve --control, or [control] in its \
             configuration)?"
        }
        io::ErrorKind::PermissionDenied => "; it is for the executor's user and root",
        _ => "",
    };
    let outcome: anyhow::Result<()> =
        Err(error).with_context(|| format!("{}{hint}", path.display()));
    outcome.expect_err("it is an error")
}

/// What people read.
fn table(status: &Status) -> String {
    let mut text = String::new();
    let engine = &status.engine;
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{}: {}, {} of {} used, up {}",
        engine.name,
        engine.description,
        size(engine.memory_total - engine.memory_free.min(engine.memory_total)),
        size(engine.memory_total),
        duration(status.uptime),
    );
    let _ = writeln!(
        text,
        "\n{:<20} {:>6} {:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>8}",
        "GUEST", "WEIGHT", "PROGS", "MEMORY", "QUOTA", "GRAPHS", "RUN", "QUEUED", "FAILED"
    );
    for guest in &status.guests {
        let GuestStatus { work, .. } = guest;
        let _ = writeln!(
            text,
            "{:<20} {:>6} {:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>8}",
            guest.name,
            guest.weight,
            guest.sessions,
            size(work.memory),
            guest.quota.map_or_else(|| "-".into(), size),
            work.graphs,
            duration(work.busy),
            duration(work.queued),
            work.failures,
        );
    }
    let _ = writeln!(
        text,
        "\n{:>5} {:<20} {:>8} {:>6} {:>8} {:>10} {:>10}  PROGRAM",
        "ID", "GUEST", "PID", "UID", "AGE", "MEMORY", "GRAPHS"
    );
    for session in &status.sessions {
        let SessionStatus { work, .. } = session;
        let number = |n: Option<i64>| n.map_or_else(|| "-".into(), |n| n.to_string());
        let _ = writeln!(
            text,
            "{:>5} {:<20} {:>8} {:>6} {:>8} {:>10} {:>10}  {}",
            session.id,
            session.guest,
            number(session.pid.map(i64::from)),
            number(session.uid.map(i64::from)),
            duration(session.age),
            size(work.memory),
            work.graphs,
            session.program.as_deref().unwrap_or("(no hello yet)"),
        );
    }
    text
}

/// A number of bytes as people read it.
fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", units[unit]),
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0}ms", 1e3 * s),
        s if s < 100.0 => format!("{s:.1}s"),
        s if s < 6000.0 => format!("{:.0}m", s / 60.0),
        s if s < 360_000.0 => format!("{:.0}h", s / 3600.0),
        s => format!("{:.0}d", s / 86400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_are_short() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size((1 << 30) - 1), "1.0 GiB");
        assert_eq!(size(24 << 30), "24.0 GiB");
        assert_eq!(size(u64::MAX), "16777216.0 TiB");
        assert_eq!(duration(0.0123), "12ms");
        assert_eq!(duration(99.0), "99.0s");
        assert_eq!(duration(3600.0), "60m");
        assert_eq!(duration(90_000.0), "25h");
        assert_eq!(duration(1e6), "12d");
    }
}
