//! What a supervisor and its processes do now, as text for people.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::printable::printable;
use super::query::REPORT_TIMEOUT;
use super::state::{Processes, SupervisorState, VmProcess, Worker};
use crate::control;
use crate::lock::RankedGuard;
use crate::service;
use crate::version::version;

/// How often the dump looks for answers of workers.
const POLL_PERIOD: Duration = Duration::from_millis(5);

/// A worker that is asked for its dump.
struct DumpRequest {
    id: u64,
    /// Who it is, for people.
    name: String,
    pid: Option<u32>,
    /// Since its start.
    age: Duration,
    /// The number of the question. An error: the worker was not asked.
    question: Result<u64, NotAsked>,
}

/// Why a worker is not asked for its dump.
#[derive(Debug, thiserror::Error)]
enum NotAsked {
    #[error("has not started yet")]
    NotStarted,
    /// A worker without reports may not read yet.
    #[error("has not reported yet")]
    NoReport,
    #[error("is ending")]
    Ending,
    #[error("cannot be asked: {0}")]
    Socket(#[from] io::Error),
}

/// The supervisor's own lines, and the dumps of its workers and of the processes of virtual
/// machines, all of which have [`REPORT_TIMEOUT`] together. Waits for no lock, and starts no
/// thread.
pub(super) fn dump(shared: &SupervisorState) -> String {
    let mut text = format!(
        "vgpu {}, supervisor {}, up {:.1?}\n",
        version(),
        std::process::id(),
        shared.since.elapsed()
    );
    if let Some(line) = service::dump() {
        text.push_str(&line);
        text.push('\n');
    }
    let end = Instant::now() + REPORT_TIMEOUT;
    let Some(mut processes) = processes_until(shared, end) else {
        text.push_str(&format!(
            "the table of processes has been locked for {REPORT_TIMEOUT:?}: nothing is known of \
             workers and virtual machines; kill -USR1 of such a process writes its dump into the \
             log\n"
        ));
        return text;
    };
    let workers = processes.workers.iter_mut();
    let workers: Vec<_> = workers
        .map(|(&id, worker)| DumpRequest::new(shared, id, worker))
        .collect();
    let machines: Vec<_> = { processes.machines.values() }
        .map(VmProcess::address)
        .collect();
    drop(processes);
    let left = end.saturating_duration_since(Instant::now());
    let of_machines = control::dumps_of_processes(machines, left);
    let answers = answers(shared, &workers, end);
    // Writing to a string cannot fail.
    for (worker, answer) in workers.iter().zip(answers) {
        let _ = match (&worker.question, answer) {
            (Ok(_), Some(dump)) => write!(text, "{}:\n{}", worker.name, indented(&dump)),
            (Ok(_), None) => writeln!(
                text,
                "{}: no answer within {REPORT_TIMEOUT:?}{}",
                worker.name,
                how_to_dump(worker.pid)
            ),
            (Err(why @ NotAsked::NoReport), _) => {
                let how = how_to_dump(worker.pid);
                writeln!(text, "{} {why}, for {:.1?}{how}", worker.name, worker.age)
            }
            (Err(why), _) => writeln!(text, "{} {why}", worker.name),
        };
    }
    for (name, answer) in of_machines {
        let _ = match answer {
            Ok(dump) => write!(text, "virtual machine {name}:\n{}", indented(&dump)),
            Err(error) => writeln!(text, "virtual machine {name}: no answer: {error}"),
        };
    }
    text
}

impl DumpRequest {
    fn new(shared: &SupervisorState, id: u64, worker: &mut Worker) -> DumpRequest {
        let process = worker
            .pid
            .map_or(String::new(), |pid| format!(", process {pid}"));
        let name = format!(
            "worker {id} of guest {}{process}, with {} programs",
            worker.guest.as_deref().unwrap_or("-"),
            worker.sessions.len(),
        );
        let question = match (worker.pid, &worker.report) {
            (None, _) => Err(NotAsked::NotStarted),
            (Some(_), None) => Err(NotAsked::NoReport),
            (Some(_), Some(_)) if worker.is_closing => Err(NotAsked::Ending),
            (Some(_), Some(_)) => {
                let number = shared.new_id();
                let asked = worker.ask_for_dump(number);
                asked.map(|()| number).map_err(NotAsked::from)
            }
        };
        let (pid, age) = (worker.pid, worker.since.elapsed());
        DumpRequest {
            id,
            name,
            pid,
            age,
            question,
        }
    }
}

/// The processes, if their table is not locked all the time until `end`. A thread that hangs may
/// keep the lock.
fn processes_until(shared: &SupervisorState, end: Instant) -> Option<RankedGuard<'_, Processes>> {
    loop {
        match shared.try_processes() {
            None if Instant::now() < end => thread::sleep(POLL_PERIOD),
            processes => return processes,
        }
    }
}

/// The answers of the workers. `None` without one at `end`, and if the table of processes is locked
/// then.
fn answers(shared: &SupervisorState, workers: &[DumpRequest], end: Instant) -> Vec<Option<String>> {
    loop {
        let Some(mut processes) = processes_until(shared, end) else {
            return workers.iter().map(|_| None).collect();
        };
        let is_late = Instant::now() >= end;
        let table = &mut processes.workers;
        let is_due = |asked: &DumpRequest| match (&asked.question, table.get(&asked.id)) {
            (Ok(number), Some(worker)) => !worker.has_dump(*number),
            // Not asked, or ended.
            _ => false,
        };
        if is_late || !workers.iter().any(is_due) {
            let take = |asked: &DumpRequest| {
                let number = asked.question.as_ref().ok()?;
                table.get_mut(&asked.id)?.take_dump(*number)
            };
            return workers.iter().map(take).collect();
        }
        drop(processes);
        thread::sleep(POLL_PERIOD);
    }
}

/// Lines that another process has written.
fn indented(dump: &str) -> String {
    let lines = dump.lines().map(printable);
    lines.map(|line| format!("  {line}\n")).collect()
}

/// How to get the dump of a worker that does not answer. Its thread for signals is another one.
fn how_to_dump(pid: Option<u32>) -> String {
    pid.map_or(String::new(), |pid| {
        format!("; kill -USR1 {pid} writes its dump into the log")
    })
}
