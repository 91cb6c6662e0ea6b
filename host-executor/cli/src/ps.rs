//! `vgpu ps`.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Parser;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;
use vgpu_executor::status::{GuestStatus, SessionStatus, Status};

use crate::control_client;
use crate::units::{drain, duration, gpu_figures, gpu_name, mean_batch, on_cpu, size};

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

/// The tables of guests and sessions. The column of the guests is as wide as the longest name.
fn table(status: &Status) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    for (device, engine) in status.engines().enumerate() {
        let _ = write!(
            text,
            "{}: {}, {} of {} used by guests, other {}",
            engine.name,
            engine.description,
            size(status.memory_of_guests(device)),
            size(engine.memory_total),
            size(status.memory_of_others(device)),
        );
        let _ = match device {
            0 => writeln!(text, ", up {}", duration(status.uptime)),
            _ => writeln!(text),
        };
    }
    for engine in status.engines() {
        if let Some(on_cpu) = engine.fallback.as_ref().and_then(on_cpu) {
            let _ = writeln!(text, "{}: on the engine cpu {on_cpu}", engine.name);
        }
    }
    if let Some(gpu) = &status.engine.unused_gpu {
        let _ = writeln!(text, "warning: the GPU {gpu}");
    }
    if let Some(draining) = &status.draining {
        let _ = writeln!(text, "draining: {}", drain(draining));
    }
    for gpu in status.engines().filter_map(|engine| engine.gpu.as_ref()) {
        let _ = writeln!(text, "{}: {}", gpu_name(gpu), gpu_figures(gpu));
        for reason in &gpu.missing {
            let _ = writeln!(text, "warning: a figure of the GPU is missing: {reason}");
        }
    }
    let names = status.guests.iter().map(|guest| &guest.name);
    let names = names.chain(status.sessions.iter().map(|session| &session.guest));
    let width = names.map(|name| name.chars().count()).max().unwrap_or(0);
    let width = width.max("GUEST".len());
    let _ = writeln!(
        text,
        "\n{:<width$} {:>6} {:>5} {:>10} {:>10} {:>10} {:>5} {:>8} {:>8} {:>8}",
        "GUEST", "WEIGHT", "PROGS", "MEMORY", "QUOTA", "GRAPHS", "BATCH", "RUN", "QUEUED", "FAILED"
    );
    for guest in &status.guests {
        let GuestStatus { usage, .. } = guest;
        let _ = writeln!(
            text,
            "{:<width$} {:>6} {:>5} {:>10} {:>10} {:>10} {:>5} {:>8} {:>8} {:>8}",
            guest.name,
            guest.weight,
            guest.sessions,
            size(usage.memory),
            { guest.quota }.map_or_else(|| "-".into(), |_| size(status.memory_for(guest))),
            usage.graphs,
            mean_batch(usage.batch_members as f64, usage.turns as f64),
            duration(usage.busy),
            duration(usage.queued),
            usage.failures,
        );
    }
    // With one device, nobody asks which it is.
    let engines = status.engines().map(|engine| engine.name.chars().count());
    let column = match status.has_several_engines() {
        true => engines.max().unwrap_or(0).max("ENGINE".len()) + 1,
        false => 0,
    };
    let engine_title = if column > 0 { " ENGINE" } else { "" };
    let _ = writeln!(
        text,
        "\n{:>5} {:<width$}{engine_title:<column$} {:>8} {:>6} {:>8} {:>10} {:>10} {:>5}  PROGRAM",
        "ID", "GUEST", "PID", "UID", "AGE", "MEMORY", "GRAPHS", "PROTO"
    );
    for session in &status.sessions {
        let SessionStatus { usage, .. } = session;
        let engine = match column {
            0 => String::new(),
            _ => format!(" {}", status.engine_of(session)),
        };
        let number = |n: Option<i64>| n.map_or_else(|| "-".into(), |n| n.to_string());
        let _ = writeln!(
            text,
            "{:>5} {:<width$}{engine:<column$} {:>8} {:>6} {:>8} {:>10} {:>10} {:>5}  {}",
            session.id,
            session.guest,
            number(session.pid.map(i64::from)),
            number(session.uid.map(i64::from)),
            duration(session.age),
            size(usage.memory),
            usage.graphs,
            number(session.protocol.map(i64::from)),
            session.program.as_deref().unwrap_or("(before HELLO)"),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use vgpu_executor::status::{EngineStatus, FallbackStatus, SessionEnds};

    use super::*;

    #[test]
    fn engine_that_leaves_nodes_to_the_cpu_engine_has_a_line_of_80_columns() {
        let mut status = Status {
            version: "1".into(),
            uptime: 1.0,
            engine: EngineStatus {
                name: "ggml:Vulkan0".into(),
                fallback: Some(FallbackStatus::default()),
                ..EngineStatus::default()
            },
            further_engines: Vec::new(),
            draining: None,
            guests: Vec::new(),
            sessions: Vec::new(),
            ended: SessionEnds::default(),
        };
        assert!(!table(&status).contains("engine cpu"), "nothing has run");
        status.engine.fallback = Some(FallbackStatus {
            device_nodes: 969,
            cpu_nodes: 31,
            device_seconds: 6.0,
            cpu_seconds: 2.0,
        });
        let text = table(&status);
        let line = "ggml:Vulkan0: on the engine cpu 3.1 % of nodes, 25.0 % of time";
        assert!(
            text.lines().any(|it| it == line) && line.len() <= 80,
            "{text}"
        );
    }
}
