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

/// The columns of a terminal that nobody has made wider.
const TERMINAL: usize = 80;

/// Rows of cells below each other. Each column is as wide as its longest cell. `is_text`: which
/// columns begin at the same place, and do not end there.
fn aligned(rows: &[Vec<String>], is_text: &[usize]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = { row.iter().zip(&widths).enumerate() }
            .map(|(column, (cell, &width))| match is_text.contains(&column) {
                true => format!("{cell:<width$}"),
                false => format!("{cell:>width$}"),
            })
            .collect();
        text.push_str(cells.join(" ").trim_end());
        text.push('\n');
    }
    text
}

/// The tables of guests and sessions.
fn table(status: &Status) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    for (device, engine) in status.engines().enumerate() {
        let name = format!("{}: {}", engine.name, engine.description);
        let mut figures = format!(
            "{} of {} used by guests, other {}",
            size(status.memory_of_guests(device)),
            size(engine.memory_total),
            size(status.memory_of_others(device)),
        );
        if device == 0 {
            figures += &format!(", up {}", duration(status.uptime));
        }
        let is_long = name.chars().count() + figures.chars().count() + 2 > TERMINAL;
        let between = if is_long { "\n    " } else { ", " };
        let _ = writeln!(text, "{name}{between}{figures}");
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
    let _ = write!(text, "\n{}\n{}", guests(status), sessions(status));
    text
}

/// A heading as a row.
fn heading(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn guests(status: &Status) -> String {
    let mut rows = vec![heading(&[
        "GUEST", "WEIGHT", "PROGS", "MEMORY", "QUOTA", "GRAPHS", "BATCH", "RUN", "QUEUED", "FAILED",
    ])];
    rows.extend(status.guests.iter().map(|guest| {
        let GuestStatus { usage, .. } = guest;
        vec![
            guest.name.clone(),
            guest.weight.to_string(),
            guest.sessions.to_string(),
            size(usage.memory),
            { guest.quota }.map_or_else(|| "-".into(), |_| size(status.memory_for(guest))),
            usage.graphs.to_string(),
            mean_batch(usage.batch_members as f64, usage.turns as f64),
            duration(usage.busy),
            duration(usage.queued),
            usage.failures.to_string(),
        ]
    }));
    aligned(&rows, &[0])
}

fn sessions(status: &Status) -> String {
    let mut rows = vec![heading(&[
        "ID", "GUEST", "ENGINE", "PID", "UID", "AGE", "MEMORY", "GRAPHS", "PROTO", "PROGRAM",
    ])];
    let number = |n: Option<i64>| n.map_or_else(|| "-".into(), |n| n.to_string());
    rows.extend(status.sessions.iter().map(|session| {
        let SessionStatus { usage, .. } = session;
        vec![
            session.id.to_string(),
            session.guest.clone(),
            status.engine_of(session).to_owned(),
            number(session.pid.map(i64::from)),
            number(session.uid.map(i64::from)),
            duration(session.age),
            size(usage.memory),
            usage.graphs.to_string(),
            number(session.protocol.map(i64::from)),
            { session.program.as_deref() }
                .unwrap_or("(before HELLO)")
                .to_owned(),
        ]
    }));
    // With one device, nobody asks which it is.
    const ENGINE: usize = 2;
    if !status.has_several_engines() {
        for row in &mut rows {
            row.remove(ENGINE);
        }
        return aligned(&rows, &[1, 8]);
    }
    aligned(&rows, &[1, ENGINE, 9])
}

#[cfg(test)]
mod tests {
    use vgpu_executor::status::{EngineStatus, FallbackStatus, SessionEnds, Usage};

    use super::*;

    /// Figures as a host of virtual machines and containers has them after weeks.
    #[test]
    fn tables_fit_a_terminal_of_80_columns() {
        let guest = |name: &str, memory, quota: Option<u64>| GuestStatus {
            name: name.into(),
            weight: 100,
            quota,
            sessions: 12,
            usage: Usage {
                memory,
                graphs: 123_456_789,
                turns: 100,
                batch_members: 123,
                busy: 86_400.0 * 40.0,
                queued: 86_400.0 * 100.0,
                failures: 4711,
                ..Usage::default()
            },
            by_device: Vec::new(),
            devices: Vec::new(),
        };
        let session = |id, guest: &str, program: &str| SessionStatus {
            id,
            guest: guest.into(),
            device: 0,
            endpoint: String::new(),
            program: Some(program.into()),
            pid: Some(4_194_303),
            uid: Some(1000),
            age: 86_400.0 * 40.0,
            protocol: Some(4),
            usage: Usage {
                memory: 1_073_000_000,
                graphs: 123_456_789,
                ..Usage::default()
            },
        };
        let mut status = Status {
            version: "1".into(),
            uptime: 86_400.0 * 40.0,
            engine: EngineStatus {
                name: "cuda:0".into(),
                description: "NVIDIA RTX PRO 6000 Blackwell Server Edition, 188 SMs".into(),
                memory_total: 96 << 30,
                ..EngineStatus::default()
            },
            further_engines: Vec::new(),
            draining: None,
            guests: vec![
                guest("uid:1000", 1_073_000_000, Some(24 << 30)),
                guest("vm1", 23 << 30, None),
            ],
            sessions: vec![
                session(123_456, "uid:1000", "llama-server"),
                session(2, "vm1", "ollama"),
            ],
            ended: SessionEnds::default(),
        };
        let text = table(&status);
        for line in text.lines() {
            assert!(line.chars().count() <= TERMINAL, "{line}\n{text}");
        }
        assert!(
            text.contains("188 SMs\n    24.0 GiB of 96.0 GiB used"),
            "{text}"
        );
        // Words begin, and numbers end, where those of their column do.
        let lines: Vec<&str> = text.lines().collect();
        let at = |heading: &str| {
            let place = lines.iter().position(|line| line.contains(heading));
            place.expect("a heading")
        };
        let (guests, sessions) = (at("QUOTA"), at("PROGRAM"));
        let end = lines[guests].find("QUOTA").expect("it is there") + "QUOTA".len();
        assert!(lines[guests + 1][..end].ends_with(" 24.0 GiB"), "{text}");
        assert!(lines[guests + 2][..end].ends_with(" -"), "{text}");
        let start = lines[sessions].find("PROGRAM").expect("it is there");
        assert_eq!(&lines[sessions + 1][start..], "llama-server", "{text}");
        assert_eq!(&lines[sessions + 2][start..], "ollama", "{text}");
        assert!(!text.contains("ENGINE"), "{text}");
        status.further_engines.push(status.engine.clone());
        status.sessions[1].device = 1;
        assert!(table(&status).contains("GUEST    ENGINE     PID"));
    }

    #[test]
    fn gpu_that_is_not_used_is_a_warning() {
        let mut status = Status {
            version: "1".into(),
            uptime: 1.0,
            engine: EngineStatus::default(),
            further_engines: Vec::new(),
            draining: None,
            guests: Vec::new(),
            sessions: Vec::new(),
            ended: SessionEnds::default(),
        };
        assert!(!table(&status).contains("warning"));
        let gpu = "0000:01:00.0 (NVIDIA, 10de:2204) is not used: no driver";
        status.engine.unused_gpu = Some(gpu.into());
        let text = table(&status);
        let line = format!("warning: the GPU {gpu}");
        assert!(text.lines().any(|it| it == line), "{text}");
    }

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
