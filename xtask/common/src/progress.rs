//! Progress on the terminal or in a log.
//!
//! On a terminal, a moving line with the time and the last thing said; elsewhere (CI, a file), a
//! line at the start, one every half minute, and one at the end. All of it goes to stderr: stdout
//! is for results.

use std::io::IsTerminal as _;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::output::print_error_line;

/// The interval of progress lines where standard error is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(30);

/// All moving lines: one step may be part of another.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// One long piece of work. Dropped without [`Progress::done`], it counts as failed.
#[derive(Debug)]
pub struct Progress {
    label: String,
    started: Instant,
    bar: Option<ProgressBar>,
    plain: Mutex<Plain>,
    finished: bool,
}

/// State of a step shown as plain lines.
#[derive(Debug)]
struct Plain {
    last_line: Instant,
    position: u64,
    total: Option<u64>,
}

impl Progress {
    /// A step of unknown length.
    pub fn new(label: &str) -> Progress {
        Progress::start(label, None)
    }

    /// A step of `total` bytes.
    pub fn with_total(label: &str, total: u64) -> Progress {
        Progress::start(label, Some(total))
    }

    fn start(label: &str, total: Option<u64>) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let (bar, template) = match total {
                Some(total) => (
                    ProgressBar::new(total),
                    "{spinner} {prefix} [{bar:30}] {bytes}/{total_bytes} {elapsed}",
                ),
                None => (
                    ProgressBar::new_spinner(),
                    "{spinner} {prefix} {elapsed} {wide_msg:.dim}",
                ),
            };
            let bar = BARS.add(bar);
            bar.set_style(ProgressStyle::with_template(template).expect("a constant template"));
            bar.set_prefix(label.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            say(&format!("  .. {label}"));
        }
        let started = Instant::now();
        let plain = Mutex::new(Plain {
            last_line: started,
            position: 0,
            total,
        });
        Progress {
            label: label.to_owned(),
            started,
            bar,
            plain,
            finished: false,
        }
    }

    /// Shows the last thing that happened.
    pub fn note(&self, message: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(message.to_owned()),
            None => self.say_progress(0, || message.to_owned()),
        }
    }

    /// Counts `amount` more of the total.
    pub fn advance(&self, amount: u64) {
        match &self.bar {
            Some(bar) => bar.inc(amount),
            None => self.say_progress(amount, String::new),
        }
    }

    fn say_progress(&self, amount: u64, message: impl Fn() -> String) {
        let mut plain = self.plain.lock().expect("no panic while holding it");
        plain.position += amount;
        if plain.last_line.elapsed() < LINE_INTERVAL {
            return;
        }
        plain.last_line = Instant::now();
        let seconds = self.started.elapsed().as_secs();
        match plain.total {
            Some(total) => {
                let percent = 100.0 * plain.position as f64 / total.max(1) as f64;
                say(&format!(
                    "     {} ({seconds} s, {percent:.0} %)",
                    self.label
                ));
            }
            None => say(&format!("     {} ({seconds} s): {}", self.label, message())),
        }
    }

    /// Ends the step well; `result` is said behind its label, if there is something to say.
    pub fn done(mut self, result: &str) {
        self.finish("ok", result);
    }

    /// Ends the step badly.
    pub fn failed(mut self, result: &str) {
        self.finish("FAILED", result);
    }

    fn finish(&mut self, outcome: &str, result: &str) {
        self.finished = true;
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.started.elapsed().as_secs_f32();
        let colon = if result.is_empty() { "" } else { ": " };
        say(&format!(
            "  {outcome} {}{colon}{result} ({seconds:.1} s)",
            self.label
        ));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if !self.finished {
            self.finish("FAILED", "");
        }
    }
}

/// A heading between groups of steps.
pub fn heading(text: &str) {
    say(&format!("\n== {text}"));
}

/// Writes a line above what moves.
pub fn say(line: &str) {
    BARS.suspend(|| print_error_line(line));
}
