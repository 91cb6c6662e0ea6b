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

/// Makes the executor accept no new sessions, and waits until the open ones have ended.
///
/// A program that connects meanwhile is told that the executor drains, and /healthz answers 503, so
/// that load balancers send programs elsewhere. The exit status is 0 if all programs have ended by
/// themselves, 3 if the deadline has ended some, and 1 if some do not end or the executor does not
/// answer. Ctrl+C ends this command, and not the drain.
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
struct ParseTimeError;

fn time(text: &str) -> Result<Duration, ParseTimeError> {
    let (number, seconds) = match text.as_bytes().last() {
        Some(b's') => (&text[..text.len() - 1], 1),
        Some(b'm') => (&text[..text.len() - 1], 60),
        Some(b'h') => (&text[..text.len() - 1], 3600),
        _ => (text, 1),
    };
    let number: u32 = number.parse().map_err(|_| ParseTimeError)?;
    Ok(Duration::from_secs(u64::from(number) * seconds))
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.undo {
        let said = control_client::perform(&args.control, &OperatorRequest::Undrain)?;
        println!("{said}");
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    let request = OperatorRequest::drain(args.deadline);
    println!("{}", control_client::perform(&args.control, &request)?);
    loop {
        let status = control_client::status(&args.control)?;
        let Some(draining) = status.draining else {
            bail!(
                "the drain was undone, {} programs are connected",
                status.programs()
            );
        };
        match (status.programs(), draining.ended) {
            (0, 0) => {
                println!("all programs have ended");
                return Ok(ExitCode::SUCCESS);
            }
            (0, ended) => {
                println!("all programs have ended, {ended} of them at the deadline");
                return Ok(ExitCode::from(ENDED_AT_DEADLINE));
            }
            (left, _) => {
                let limit = args
                    .deadline
                    .map(|deadline| deadline.saturating_add(END_TIME));
                if limit.is_some_and(|limit| began.elapsed() > limit) {
                    bail!("{left} programs do not end: vgpu dump says what they do");
                }
            }
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
