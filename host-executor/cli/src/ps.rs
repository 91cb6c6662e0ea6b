//! `vgpu ps`.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Parser;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;
use vgpu_executor::status::{GuestStatus, SessionStatus, Status};

use crate::control_client;
use crate::units::{duration, size};

/// Lists the guests and their connected programs.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's control socket: `vgpu serve --control`, or `control` in its configuration
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,

    /// Print one JSON object with engine, guests and sessions; sizes in bytes, times in seconds
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let status = control_client::status(&args.control)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", table(&status));
    }
    Ok(())
}

/// The tables of guests and sessions.
fn table(status: &Status) -> String {
    let mut text = String::new();
    let engine = &status.engine;
    // Writing to a string cannot fail.
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
        let GuestStatus { usage, .. } = guest;
        let _ = writeln!(
            text,
            "{:<20} {:>6} {:>5} {:>10} {:>10} {:>10} {:>10} {:>10} {:>8}",
            guest.name,
            guest.weight,
            guest.sessions,
            size(usage.memory),
            guest.quota.map_or_else(|| "-".into(), size),
            usage.graphs,
            duration(usage.busy),
            duration(usage.queued),
            usage.failures,
        );
    }
    let _ = writeln!(
        text,
        "\n{:>5} {:<20} {:>8} {:>6} {:>8} {:>10} {:>10}  PROGRAM",
        "ID", "GUEST", "PID", "UID", "AGE", "MEMORY", "GRAPHS"
    );
    for session in &status.sessions {
        let SessionStatus { usage, .. } = session;
        let number = |n: Option<i64>| n.map_or_else(|| "-".into(), |n| n.to_string());
        let _ = writeln!(
            text,
            "{:>5} {:<20} {:>8} {:>6} {:>8} {:>10} {:>10}  {}",
            session.id,
            session.guest,
            number(session.pid.map(i64::from)),
            number(session.uid.map(i64::from)),
            duration(session.age),
            size(usage.memory),
            usage.graphs,
            session.program.as_deref().unwrap_or("(before HELLO)"),
        );
    }
    text
}
