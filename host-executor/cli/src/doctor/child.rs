//! Checks in a process of their own: a driver or a plugin may hang, or end the process that loads
//! it.

use std::convert::Infallible;
use std::io;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use rustix::process::Signal;

use crate::watched_process::{self, Watched};

/// Why a process has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("the process of the check does not start: {0}")]
    Start(#[from] io::Error),
    #[error("no answer within {} s", .0.as_secs_f64())]
    Late(Duration),
    #[error("the process of the check ended: {0}")]
    Ended(ExitStatus),
}

/// Makes this process end with the one that has started it.
pub(super) fn end_with_parent() {
    // Without it, a process that hangs stays.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
}

/// What a process writes to its standard output until it ends, and its status, if that takes no
/// longer than `limit`. Standard error is that of the command.
///
/// # Errors
/// The process does not start, takes longer, or is ended by a signal.
pub(super) fn output(
    command: &mut Command,
    limit: Duration,
) -> Result<(String, ExitStatus), NoAnswer> {
    // What counts is the end.
    let no_answer = |_: &str| None::<Infallible>;
    match watched_process::watch(command, limit, no_answer)? {
        Watched::Answered(never) => match never {},
        Watched::Late => Err(NoAnswer::Late(limit)),
        Watched::Ended(status, _) if status.code().is_none() => Err(NoAnswer::Ended(status)),
        Watched::Ended(status, text) => Ok((text, status)),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

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
