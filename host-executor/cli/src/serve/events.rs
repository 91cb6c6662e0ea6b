//! What the main thread waits for: signals, reloads, and the loss of the engine.

use std::io::{Write as _, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use tracing::{Level, error, info};
use vgpu_executor::added_guests::{GuestAnswer, GuestRequest};
use vgpu_executor::config::Settings;
use vgpu_executor::control::ReloadOutcome;
use vgpu_executor::{DumpThread, OperatorRequest, end_with_last_log};
use vgpu_transport::link::socket_file;

use crate::error_text;

/// Signals within this time of the first one count as one: `timeout` and some service managers
/// signal a process and its process group.
const SAME_SIGNAL: Duration = Duration::from_millis(500);

/// How often the state of the engine is checked.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What the main thread waits for.
pub(super) enum Event {
    /// A signal of this name asks the process to end.
    Stop(&'static str),
    /// The configuration is to be reloaded. The sender, if there is one, gets the outcome.
    Reload(Option<Sender<ReloadOutcome>>),
    /// A request is to be carried out. The sender gets the outcome.
    Perform(OperatorRequest, Sender<ReloadOutcome>),
    /// A client of the control socket adds, removes or lists guests.
    Guests(GuestRequest, Sender<GuestAnswer>),
}

/// What the main thread is to do without an end of the process.
pub(super) enum Task {
    Reload,
    Perform(OperatorRequest),
}

/// Ends the process because the engine hangs. The log says why.
pub(super) fn end_stuck(_: &str) {
    let text = "vgpu serve ends, and a supervisor can start it again";
    end_with_last_log(1, Level::ERROR, text);
}

/// Whether programs may be served, so that a signal asks the main thread for an orderly end. Until
/// then the main thread may wait for a driver, and nobody loses anything by an end at once.
#[derive(Clone, Default)]
pub(super) struct Serving(Arc<AtomicU8>);

impl Serving {
    const STARTING: u8 = 0;
    const BEGUN: u8 = 1;
    const ENDING: u8 = 2;

    /// From now on programs may be served. Does not return if a signal has come before.
    pub(super) fn begin(&self) {
        while self.change(Serving::BEGUN) == Serving::ENDING {
            // The thread for signals ends the process.
            std::thread::park();
        }
    }

    /// Whether a signal ends the process at once. If so, programs will never be served.
    fn ends_at_once(&self) -> bool {
        self.change(Serving::ENDING) == Serving::STARTING
    }

    /// Ends the start, and returns the state before.
    fn change(&self, to: u8) -> u8 {
        let (start, order) = (Serving::STARTING, Ordering::AcqRel);
        let changed = self.0.compare_exchange(start, to, order, Ordering::Acquire);
        changed.unwrap_or_else(|before| before)
    }
}

/// Waits until the process is to end. Carries out each task that an event asks for, and returns to
/// the asker what has changed, or why nothing has. So does `guests` with requests about guests.
/// Calls `engine_failure` about once a second, and after each event.
///
/// Fails if the engine is lost for good: all data of the guests is lost with it, and only a new
/// process can use the device.
pub(super) fn wait_for_end(
    events: &Receiver<Event>,
    engine_failure: impl Fn() -> Option<String>,
    mut carry_out: impl FnMut(Task) -> anyhow::Result<String>,
    mut guests: impl FnMut(&GuestRequest) -> GuestAnswer,
) -> anyhow::Result<()> {
    loop {
        let event = match events.recv_timeout(POLL_INTERVAL) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => {
                fail_with(engine_failure())?;
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => {
                anyhow::bail!("the thread for signals has ended")
            }
        };
        match event {
            Event::Stop(signal) => {
                info!(
                    "{signal} received: ending the sessions; a second signal ends the process at \
                     once"
                );
                return Ok(());
            }
            Event::Reload(sender) => {
                let done = carry_out(Task::Reload).context("the configuration is unchanged");
                let outcome = outcome_of(done);
                if let Some(sender) = sender {
                    // The client may have disconnected.
                    let _ = sender.send(outcome);
                }
                fail_with(engine_failure())?;
            }
            Event::Perform(request, sender) => {
                let _ = sender.send(outcome_of(carry_out(Task::Perform(request))));
                fail_with(engine_failure())?;
            }
            Event::Guests(request, sender) => {
                let _ = sender.send(guests(&request));
                fail_with(engine_failure())?;
            }
        }
    }
}

/// The outcome of a task, which the log has, too.
fn outcome_of(done: anyhow::Result<String>) -> ReloadOutcome {
    match done {
        Ok(message) => {
            info!("{message}");
            ReloadOutcome { ok: true, message }
        }
        Err(error) => {
            let message = error_text::one_line(&error);
            error!("{message}");
            ReloadOutcome { ok: false, message }
        }
    }
}

fn fail_with(engine_failure: Option<String>) -> anyhow::Result<()> {
    match engine_failure {
        None => Ok(()),
        Some(reason) => anyhow::bail!(
            "{reason}; all data of the guests is lost, so vgpu serve ends, and a supervisor can \
             start it again"
        ),
    }
}

/// What the end of a session that an operator wants says.
pub(super) fn describe_kill(session: u64, guest: &str) -> String {
    format!("session {session} of guest {guest} is told to end")
}

/// Describes a reload. `late`: the settings that need a restart.
pub(super) fn describe_reload(settings: &Settings, late: &[&str]) -> String {
    let guests = settings.guests.len();
    let mut text = format!("the configuration was reloaded: {guests} named guests");
    if !late.is_empty() {
        text.push_str(&format!(
            "; {} take effect after a restart",
            late.join(", ")
        ));
    }
    text
}

/// Sends an event for the first SIGTERM or SIGINT and for each SIGHUP. A second SIGTERM or SIGINT
/// ends the process at once, and so does the first one before programs are served. SIGUSR1 writes a
/// dump into the log, whatever the main thread does.
///
/// The thread for signals waits for nothing else. A driver may hang in the dynamic linker: the
/// thread uses nothing that needs the linker's lock ([`vgpu_executor::log_queue`]).
pub(super) fn catch_signals(
    events: Sender<Event>,
    dumps: DumpThread,
    serving: Serving,
) -> anyhow::Result<()> {
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).context("signals cannot be caught")?;
    let (begun, has_begun) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("vgpu-signals".into())
        .spawn(move || {
            // The receiver waits.
            let _ = begun.send(());
            let mut first: Option<Instant> = None;
            for signal in signals.forever() {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                match first {
                    // The receiver is gone if the start has failed.
                    _ if signal == SIGUSR1 => dumps.write_into_log(),
                    _ if signal == SIGHUP => drop(events.send(Event::Reload(None))),
                    None if serving.ends_at_once() => {
                        socket_file::remove_all();
                        let text = format!("{name} received before anybody is served: ending");
                        end_with_last_log(0, Level::INFO, &text);
                    }
                    None => {
                        first = Some(Instant::now());
                        let _ = events.send(Event::Stop(name));
                    }
                    Some(first) if first.elapsed() < SAME_SIGNAL => {}
                    Some(_) => {
                        let text = format!("{name} received again: ending at once");
                        end_with_last_log(1, Level::WARN, &text);
                    }
                }
            }
        })
        .context("no thread for signals")?;
    // A thread that has not begun waits for the linker's lock, too.
    let _ = has_begun.recv();
    Ok(())
}

/// Prints the line "ready" with the listening addresses on standard output.
pub(super) fn announce(addresses: &[String]) {
    let mut out = stdout().lock();
    // The reader may have closed the pipe.
    let _ = writeln!(out, "ready {}", addresses.join(" ")).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn programs_are_served_or_a_signal_ends_the_start() {
        let serving = Serving::default();
        serving.begin();
        assert!(!serving.ends_at_once(), "programs are served");
        serving.begin();
        // A signal first: the main thread serves nobody.
        let serving = Serving::default();
        assert!(serving.ends_at_once());
        let (state, states) = mpsc::channel();
        let main_thread = std::thread::spawn(move || {
            state.send("starts").unwrap();
            serving.begin();
            // The receiver is gone if the test has ended.
            let _ = state.send("serves");
        });
        assert_eq!(states.recv().unwrap(), "starts");
        for _ in 0..20 {
            main_thread.thread().unpark();
            let serves = states.recv_timeout(Duration::from_millis(5));
            assert_eq!(
                serves,
                Err(RecvTimeoutError::Timeout),
                "programs are served"
            );
        }
    }

    #[test]
    fn a_lost_engine_ends_the_executor() {
        let (sender, events) = mpsc::channel();
        let no_task = |_| anyhow::bail!("no task is expected");
        let no_change = |_: &GuestRequest| GuestAnswer::Refused("no change is expected".into());
        let outcome = wait_for_end(&events, || Some("it is lost".into()), no_task, no_change);
        let error = outcome.unwrap_err().to_string();
        assert!(error.starts_with("it is lost; "), "{error}");
        // An engine that works does not.
        sender.send(Event::Stop("SIGTERM")).unwrap();
        wait_for_end(&events, || None, no_task, no_change).unwrap();
    }
}
