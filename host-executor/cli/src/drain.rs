//! `vgpu drain`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Parser;
use vgpu_executor::OperatorRequest;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;

use crate::control_client;

/// The exit status if the deadline has ended sessions.
const ENDED_AT_DEADLINE: u8 = 3;

/// How often the executor is asked for its programs.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// How long sessions that were told to end may take: a graph of theirs ends at the end of a node.
const END_TIME: Duration = Duration::from_secs(30);

/// How long the process of a virtual machine may take to be told, when all programs have ended. The
/// executor asks a process that does not answer again, and one that has started again.
const TELL_TIME: Duration = Duration::from_secs(15);

/// Makes the executor accept no new sessions, and waits until the open ones have ended.
///
/// A program that connects meanwhile is told that the executor drains, and /healthz answers 503, so
/// that load balancers send programs elsewhere. The exit status is 0 if all programs have ended by
/// themselves, 3 if the deadline has ended some since the command began, and 1 if some do not end,
/// if the executor does not answer, or if the process of a virtual machine does not know of the
/// drain. Ctrl+C ends this command, and not the drain.
#[derive(Parser)]
pub(crate) struct Args {
    /// End the programs that are connected after this time, such as 90s, 5m or 1h [default: never]
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "undo")]
    deadline: Option<Duration>,

    /// Accept sessions again
    #[arg(long)]
    undo: bool,

    /// The executor's control socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,
}

/// A text that is no time.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a time, such as 90s, 5m or 1h")]
pub(crate) struct ParseTimeError;

/// The time that a text says.
///
/// # Errors
/// [`ParseTimeError`]: it is no number of seconds, minutes or hours.
pub(crate) fn time(text: &str) -> Result<Duration, ParseTimeError> {
    let (number, seconds) = match text.as_bytes().last() {
        Some(b's') => (&text[..text.len() - 1], 1),
        Some(b'm') => (&text[..text.len() - 1], 60),
        Some(b'h') => (&text[..text.len() - 1], 3600),
        _ => (text, 1),
    };
    let number: u32 = number.parse().map_err(|_| ParseTimeError)?;
    Ok(Duration::from_secs(u64::from(number) * seconds))
}

/// How far a drain has come.
struct DrainProgress<'a> {
    /// Programs that are connected.
    programs: usize,
    /// Programs that the deadline has ended since the command began.
    ended: u64,
    /// The virtual machines whose processes do not know of the drain, and why.
    untold: &'a [String],
    /// How long the command has waited, and how long since the last program has ended.
    waited: Duration,
    idle: Duration,
    deadline: Option<Duration>,
}

/// Why a drain does not come to an end.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum DrainError {
    #[error("{0} programs do not end: vgpu dump says what they do")]
    Programs(usize),
    #[error(
        "the processes of virtual machines accept sessions, as they do not know of the drain: {0}"
    )]
    Untold(String),
}

impl DrainProgress<'_> {
    /// The exit status and the last line. `None`: the drain goes on.
    ///
    /// # Errors
    /// [`DrainError`] says who keeps the drain from its end.
    fn outcome(&self) -> Result<Option<(u8, String)>, DrainError> {
        let &DrainProgress {
            programs,
            ended,
            untold,
            waited,
            idle,
            deadline,
        } = self;
        if programs > 0 {
            let limit = deadline.map(|deadline| deadline.saturating_add(END_TIME));
            return match limit.is_some_and(|limit| waited > limit) {
                true => Err(DrainError::Programs(programs)),
                false => Ok(None),
            };
        }
        if !untold.is_empty() {
            return match idle > TELL_TIME {
                true => Err(DrainError::Untold(untold.join("; "))),
                false => Ok(None),
            };
        }
        Ok(Some(match ended {
            0 => (0, "all programs have ended".into()),
            ended => (
                ENDED_AT_DEADLINE,
                format!("all programs have ended, {ended} of them at the deadline"),
            ),
        }))
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.undo {
        let said = control_client::perform(&args.control, &OperatorRequest::Undrain)?;
        println!("{said}");
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    // Of an earlier drain, or of an earlier deadline of this one.
    let before = control_client::status(&args.control)?.draining;
    let before = before.map_or(0, |draining| draining.ended);
    let request = OperatorRequest::drain(args.deadline);
    println!("{}", control_client::perform(&args.control, &request)?);
    let mut last_program = Instant::now();
    loop {
        let status = control_client::status(&args.control)?;
        let Some(draining) = &status.draining else {
            bail!(
                "the drain was undone, {} programs are connected",
                status.programs()
            );
        };
        if status.programs() > 0 {
            last_program = Instant::now();
        }
        let progress = DrainProgress {
            programs: status.programs(),
            ended: draining.ended.saturating_sub(before),
            untold: &draining.untold,
            waited: began.elapsed(),
            idle: last_program.elapsed(),
            deadline: args.deadline,
        };
        if let Some((code, said)) = progress.outcome()? {
            println!("{said}");
            return Ok(ExitCode::from(code));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_machine_that_does_not_know_of_the_drain_makes_it_fail() {
        let second = Duration::from_secs(1);
        let untold = ["vm1: it has just started".to_owned()];
        let outcome = |programs, untold: &[String], waited, deadline| {
            let ended = 0;
            let progress = DrainProgress {
                programs,
                ended,
                untold,
                waited,
                idle: waited,
                deadline,
            };
            progress.outcome()
        };
        let done = Ok(Some((0, "all programs have ended".to_owned())));
        assert_eq!(outcome(0, &[], second, None), done);
        assert_eq!(
            outcome(0, &untold, second, None),
            Ok(None),
            "it may be told"
        );
        let error = outcome(0, &untold, TELL_TIME + second, None).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("drain: vm1: it has just started")
        );
        // A machine that starts again at the end of a long drain has time, too.
        let progress = DrainProgress {
            programs: 0,
            ended: 0,
            untold: &untold,
            waited: 100 * TELL_TIME,
            idle: second,
            deadline: None,
        };
        assert_eq!(progress.outcome(), Ok(None));
        // Programs are waited for, up to the deadline.
        let late = second + END_TIME + second;
        assert_eq!(outcome(2, &untold, late, None), Ok(None));
        let error = outcome(2, &[], late, Some(second));
        assert_eq!(error, Err(DrainError::Programs(2)));
        let progress = DrainProgress {
            programs: 0,
            ended: 2,
            untold: &[],
            waited: second,
            idle: second,
            deadline: Some(second),
        };
        assert!(matches!(
            progress.outcome(),
            Ok(Some((ENDED_AT_DEADLINE, _)))
        ));
    }

    #[test]
    fn times_have_units() {
        for (text, seconds) in [
            ("60", 60),
            ("60s", 60),
            ("5m", 300),
            ("2h", 7200),
            ("0s", 0),
        ] {
            assert_eq!(time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "s", "-1s", "1.5m", "1d", "99999999999h"] {
            assert_eq!(time(text), Err(ParseTimeError), "{text}");
        }
    }
}
