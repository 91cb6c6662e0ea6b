//! What a supervisor and its processes do now, as text for people.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

use super::printable::printable;
use super::query::query_all;
use super::state::Shared;
use crate::control;
use crate::service;

/// The supervisor's own lines, and the dumps of the processes of virtual machines. A worker has no
/// control socket: the text says how to make it write its dump into the log.
pub(super) fn dump(shared: &Shared) -> String {
    let mut text = format!(
        "vgpu {}, supervisor {}, up {:.1?}\n",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
        shared.since.elapsed()
    );
    if let Some(line) = service::dump() {
        text.push_str(&line);
        text.push('\n');
    }
    let Some(processes) = shared.try_processes() else {
        text.push_str("the table of processes is locked now\n");
        return text;
    };
    // Writing to a string cannot fail.
    for (id, worker) in &processes.workers {
        let _ = write!(
            text,
            "worker {id} of guest {}: {} programs",
            worker.guest.as_deref().unwrap_or("-"),
            worker.sessions.len(),
        );
        if worker.is_closing {
            text.push_str(", is ending");
        }
        let _ = writeln!(
            text,
            "; {}",
            how_to_dump(worker.pid, worker.report.is_some())
        );
    }
    let machines: Vec<_> = { processes.machines.values() }
        .map(|machine| (machine.name.clone(), machine.control.clone()))
        .collect();
    drop(processes);
    for (name, answer) in query_all(&machines, control::dump_of_process) {
        let _ = match answer {
            Ok(dump) => {
                let lines = dump.lines().map(printable);
                let lines: String = lines.map(|line| format!("  {line}\n")).collect();
                write!(text, "virtual machine {name}:\n{lines}")
            }
            Err(error) => writeln!(text, "virtual machine {name}: no answer: {error}"),
        };
    }
    text
}

/// How to get the dump of a worker. SIGUSR1 ends a process that does not catch it yet. A worker
/// reports after it does.
fn how_to_dump(pid: Option<u32>, has_reported: bool) -> String {
    match pid {
        Some(pid) if has_reported => format!("kill -USR1 {pid} writes its dump into the log"),
        Some(pid) => format!("process {pid} has not reported yet"),
        None => "is not started yet".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_that_may_not_catch_signals_yet_is_sent_none() {
        assert!(how_to_dump(Some(7), true).contains("kill -USR1 7"));
        assert!(!how_to_dump(Some(7), false).contains("kill"));
        assert!(!how_to_dump(None, false).contains("kill"));
    }
}
