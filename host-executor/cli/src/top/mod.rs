//! `vgpu top`.

mod controls;
mod rates;
mod screen;

use std::collections::BTreeMap;
use std::io::{IsTerminal, stdout};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Parser;
use crossterm::event::{self, Event};
use vgpu_executor::OperatorRequest;
use vgpu_executor::config::DEFAULT_CONTROL_PATH;
use vgpu_executor::status::Status;

use crate::control_client;
use crate::error_text;
use controls::{Controls, Next};
use rates::{busy, on_cpu, rates};
use screen::{View, draw};

/// Shows the guests with their memory and their rates, continuously.
///
/// GRAPHS/S is the number of graphs that a guest runs per second (a program that decodes runs one
/// graph per token), TIME its share of the engine's time, BATCH the mean number of graphs that run
/// together in its turns, WAITING the average number of its graphs in the queue. A narrow terminal
/// shows fewer columns. The arrow keys scroll a table, Tab changes to the other one, s changes the
/// order of the guests, / shows only guests whose name contains a text, x ends the session whose ID
/// follows. q or Ctrl+C ends the program.
#[derive(Parser)]
pub(crate) struct Args {
    /// The executor's control socket: `vgpu serve --control`, or `control` in its configuration
    #[arg(long, value_name = "PATH", default_value = DEFAULT_CONTROL_PATH)]
    control: PathBuf,

    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
}

/// Why a text is not an interval between two updates.
#[derive(Debug, thiserror::Error)]
enum IntervalError {
    #[error("not a number of seconds")]
    NotANumber,
    #[error("{0} s is outside of 0.1 to 3600 s")]
    Range(f64),
}

fn interval(text: &str) -> Result<f64, IntervalError> {
    let seconds: f64 = text.parse().map_err(|_| IntervalError::NotANumber)?;
    match (0.1..=3600.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err(IntervalError::Range(seconds)),
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if !stdout().is_terminal() {
        bail!("standard output is not a terminal; use `vgpu ps`, with or without --json");
    }
    // Errors here appear on the normal screen, before the alternate screen is entered.
    let first = control_client::status(&args.control)?;
    let mut terminal = ratatui::try_init().context("the terminal")?;
    let outcome = show(args, &mut terminal, first);
    ratatui::restore();
    outcome
}

fn show(args: &Args, terminal: &mut ratatui::DefaultTerminal, first: Status) -> anyhow::Result<()> {
    let pause = Duration::from_secs_f64(args.interval);
    let mut status = first;
    let mut shown = BTreeMap::new();
    let mut engines: Vec<f64> = Vec::new();
    let mut of_cpu: Vec<Option<f64>> = Vec::new();
    let mut notice: Option<String> = None;
    // What the executor has said to the last request, until the next key.
    let mut answer: Option<String> = None;
    let mut controls = Controls::default();
    let mut next = Instant::now() + pause;
    loop {
        terminal
            .draw(|frame| {
                let view = View {
                    status: &status,
                    rates: &shown,
                    busy: &engines,
                    on_cpu: &of_cpu,
                    notice: notice.as_deref(),
                    answer: answer.as_deref(),
                    controls: &controls,
                };
                draw(frame, &view);
            })
            .context("the terminal")?;
        let left = next.saturating_duration_since(Instant::now());
        if event::poll(left).context("the terminal")?
            && let Event::Key(key) = event::read().context("the terminal")?
        {
            match controls.press(key) {
                Next::Show => answer = None,
                Next::Quit => return Ok(()),
                Next::Kill(session) => {
                    let request = OperatorRequest::Kill { session };
                    let said = control_client::perform(&args.control, &request);
                    answer = Some(said.unwrap_or_else(|error| error_text::one_line(&error)));
                }
            }
        }
        if Instant::now() >= next {
            next = Instant::now() + pause;
            match control_client::status(&args.control) {
                Ok(now) => {
                    shown = rates(&status, &now);
                    engines = busy(&status, &now);
                    of_cpu = on_cpu(&status, &now);
                    status = now;
                    notice = None;
                }
                // A service manager may restart the executor.
                Err(_) => {
                    notice = Some(format!("no answer from {}", args.control.display()));
                    shown.clear();
                    engines.clear();
                    of_cpu.clear();
                }
            }
        }
    }
}
