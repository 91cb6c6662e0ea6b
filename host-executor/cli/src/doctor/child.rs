//! Checks in a process of their own: a driver or a plugin may hang, or end the process that loads
//! it.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;

/// How often a process is looked at.
const INTERVAL: Duration = Duration::from_millis(5);

/// How long the end of a killed process is waited for. One in a call of the kernel does not end.
const AFTER_KILL: Duration = Duration::from_secs(1);

/// Why a process has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("a process for it does not start: {0}")]
    Start(#[from] io::Error),
    #[error("no answer within {} s", .0.as_secs_f64())]
    Late(Duration),
    #[error("it ends its process: {0}")]
    Ended(ExitStatus),
}

/// Makes this process end with the one that has started it.
pub(super) fn end_with_parent() {
    // Without it, a process that hangs stays.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
}

/// What a process writes to its standard output until it ends, and its status, if that takes no
/// longer than `limit`. Standard error is that of the command.
pub(super) fn output(
    command: &mut Command,
    limit: Duration,
) -> Result<(String, ExitStatus), NoAnswer> {
    let mut out =
        File::from(memfd_create("vgpu-doctor", MemfdFlags::CLOEXEC).map_err(io::Error::from)?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .spawn()?;
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begin.elapsed() > limit {
            let _ = child.kill(); // it may have ended
            let killed = Instant::now();
            while matches!(child.try_wait(), Ok(None)) && killed.elapsed() < AFTER_KILL {
                thread::sleep(INTERVAL);
            }
            return Err(NoAnswer::Late(limit));
        }
        thread::sleep(INTERVAL);
    };
    if status.code().is_none() {
        return Err(NoAnswer::Ended(status));
    }
    let mut text = Vec::new();
    out.rewind()?;
    out.read_to_end(&mut text)?;
    Ok((String::from_utf8_lossy(&text).into_owned(), status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_hangs_or_crashes_has_no_answer() {
        let shell = |script: &str, limit| {
            let mut command = Command::new("sh");
            output(command.args(["-c", script]).stderr(Stdio::null()), limit)
        };
        let long = Duration::from_secs(60);
        let (text, status) = shell("echo yes; exit 3", long).expect("it answers");
        assert_eq!((text.as_str(), status.code()), ("yes\n", Some(3)));
        let hangs = shell("exec sleep 1000", Duration::from_millis(50));
        assert!(matches!(hangs, Err(NoAnswer::Late(_))), "{hangs:?}");
        let crashes = shell("kill -ABRT $$", long);
        assert!(matches!(crashes, Err(NoAnswer::Ended(_))), "{crashes:?}");
    }
}
