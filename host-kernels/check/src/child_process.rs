//! A child process that may die or hang, and what it says line by line.

use std::io::{self, BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a child may say nothing.
#[derive(Debug, Clone, Copy)]
pub struct Silence {
    /// Before its first line.
    pub at_start: Duration,
    /// After each line.
    pub between: Duration,
}

/// The end of a child process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// It has closed its output, and ended with this status unless it was ended.
    Closed(Option<ExitStatus>),
    /// It was silent for this long, and was ended.
    Silent(Duration),
}

impl Ended {
    /// Whether the child ended itself with status 0.
    pub fn is_success(&self) -> bool {
        matches!(self, Ended::Closed(Some(status)) if status.success())
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Closed(Some(status)) => write!(f, "its process ended with {status}"),
            Ended::Closed(None) => f.write_str("its process ended with no status yet"),
            Ended::Silent(time) => {
                write!(f, "it was silent for {} s and was ended", time.as_secs())
            }
        }
    }
}

/// The time for a child to end after its output has, or after it was killed. A process inside the
/// driver may take longer than anybody waits.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Starts a child and calls `seen` with each line of its standard output. The child is ended when
/// it is silent for too long, or when `seen` fails.
///
/// # Errors
/// If the child cannot be started, or the error of `seen`.
pub fn watch<E: From<io::Error>>(
    command: &mut Command,
    silence: Silence,
    mut seen: impl FnMut(&str) -> Result<(), E>,
) -> Result<Ended, E> {
    let mut child = { command.stdin(Stdio::null()).stdout(Stdio::piped()) }.spawn()?;
    let out = child.stdout.take().expect("the child's output is piped");
    let (sender, lines) = mpsc::channel();
    // Ends when the child's output does: after its end, or after `Child::kill`.
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let mut limit = silence.at_start;
    loop {
        let line = match lines.recv_timeout(limit) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                kill(&mut child);
                return Ok(Ended::Silent(limit));
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(Ended::Closed(wait(&mut child))),
        };
        if let Err(error) = seen(&line) {
            kill(&mut child);
            return Err(error);
        }
        limit = silence.between;
    }
}

/// The status of a child that has ended or is about to.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let begin = Instant::now();
    while begin.elapsed() < END_LIMIT {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill(); // it may have ended just now
    child.try_wait().ok().flatten()
}

/// Ends a child that does not answer.
fn kill(child: &mut Child) {
    let _ = child.kill(); // it may have ended just now
    wait(child);
}
