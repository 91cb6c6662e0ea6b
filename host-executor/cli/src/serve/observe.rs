//! The sockets through which an executor is observed and reloaded.

use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use anyhow::Context as _;
use tracing::{error, info};
use vgpu_executor::added_guests::GuestAnswer;
use vgpu_executor::config::Settings;
use vgpu_executor::control::{self, Actions, ControlSocket, ReloadOutcome};
use vgpu_executor::size::shown;
use vgpu_executor::status::StatusHandle;
use vgpu_executor::{DumpThread, GuestChange, OperatorRequest, Quota};
use vgpu_transport::link::socket_file::{self, SocketFile};

use super::events::Event;
use super::metrics_http;
use super::sandboxing::Confined;

/// How long a client of the control socket waits for the main thread at most: less than clients
/// wait for an answer.
const MAIN_THREAD_TIMEOUT: Duration = Duration::from_secs(55);

/// The sockets that the settings ask for, bound. No client is answered yet.
pub(super) struct Observers {
    metrics: Option<metrics_http::Listener>,
    control: Option<(UnixListener, SocketFile)>,
}

/// The sockets of a process that starts. Clients that want a dump are answered, and others wait.
pub(super) struct StartedObservers {
    metrics: Option<metrics_http::Listener>,
    control: Option<ControlSocket>,
    files: SocketFiles,
}

/// Removes the socket files of this process when it is dropped, at the end of the process.
pub(super) struct SocketFiles(());

impl Drop for SocketFiles {
    fn drop(&mut self) {
        socket_file::remove_all();
    }
}

/// Binds the sockets for metrics and control, where the settings ask for them.
pub(super) fn bind(settings: &Settings) -> anyhow::Result<Observers> {
    let mut observers = Observers {
        metrics: None,
        control: None,
    };
    if let Some(address) = &settings.metrics {
        match metrics_http::bind(address) {
            Ok(listener) => observers.metrics = Some(listener),
            // Guests can be served all the same.
            Err(error) if error.kind() == ErrorKind::AddrInUse => error!(
                "no metrics: another program listens on {address} (dcgm-exporter, for one, uses \
                 port 9400); choose another address with metrics.listen or --metrics, and restart"
            ),
            Err(error) => return Err(error).with_context(|| format!("metrics at {address}")),
        }
    }
    if let Some(path) = &settings.control {
        let bound = control::bind(path);
        let bound = bound.with_context(|| format!("the control socket {}", path.display()))?;
        observers.control = Some(bound);
    }
    Ok(observers)
}

impl Observers {
    /// Answers clients of the control socket that want a dump from now on. Starts the threads that
    /// answer them, before a driver can hang in the dynamic linker. The socket files of the process
    /// are removed when the result is dropped.
    pub(super) fn start(self, dumps: &DumpThread) -> anyhow::Result<StartedObservers> {
        let start = |(listener, file)| ControlSocket::start(listener, file, dumps.clone());
        let control = self.control.map(start).transpose();
        Ok(StartedObservers {
            metrics: self.metrics,
            control: control.context("no thread for the control socket")?,
            files: SocketFiles(()),
        })
    }
}

impl StartedObservers {
    /// Answers all clients from now on. The socket files of the process are removed when the result
    /// is dropped.
    pub(super) fn serve(
        self,
        settings: &Settings,
        status: &StatusHandle,
        events: Sender<Event>,
        _: &Confined,
    ) -> anyhow::Result<SocketFiles> {
        if let Some(listener) = self.metrics {
            metrics_http::serve(listener, status.clone()).context("no thread for metrics")?;
            if let Some(address) = &settings.metrics {
                info!("metrics at {address}");
            }
        }
        let limit = MAIN_THREAD_TIMEOUT;
        let refused = |message| ReloadOutcome { ok: false, message };
        let (requests, guest_requests) = (events.clone(), events.clone());
        let reload = move || {
            let outcome = ask(&events, |sender| Event::Reload(Some(sender)), limit);
            outcome.unwrap_or_else(|error| refused(error.to_string()))
        };
        let snapshots = status.clone();
        let perform = move |request: OperatorRequest| {
            let event = |sender| Event::Perform(request.clone(), sender);
            let outcome = ask(&requests, event, limit);
            let outcome = outcome.unwrap_or_else(|error| refused(error.to_string()));
            with_what_happens(outcome, &request, &snapshots)
        };
        let guests = move |request| {
            let event = |sender| Event::Guests(request, sender);
            let answer = ask(&guest_requests, event, limit);
            answer.unwrap_or_else(|error| GuestAnswer::Refused(error.to_string()))
        };
        if let Some(control) = self.control {
            let actions = Actions {
                reload: Box::new(reload),
                perform: Box::new(perform),
                guests: Box::new(guests),
            };
            control.serve(status.clone(), actions);
        }
        Ok(self.files)
    }
}

/// Why the main thread has not answered.
#[derive(Debug, PartialEq, thiserror::Error)]
enum NoAnswer {
    #[error("the executor is ending")]
    Ending,
    #[error(
        "the main thread of the executor has not answered for {0:?}: vgpu dump says what everybody \
         does; the request is carried out when the main thread goes on"
    )]
    Late(Duration),
}

/// Has the main thread handle an event, and waits up to `limit` for its answer.
fn ask<T>(
    events: &Sender<Event>,
    event: impl FnOnce(Sender<T>) -> Event,
    limit: Duration,
) -> Result<T, NoAnswer> {
    let (sender, answer) = mpsc::channel();
    { events.send(event(sender)) }.map_err(|_| NoAnswer::Ending)?;
    answer.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => NoAnswer::Late(limit),
        RecvTimeoutError::Disconnected => NoAnswer::Ending,
    })
}

/// The outcome with what follows from the state of the guests.
fn with_what_happens(
    mut outcome: ReloadOutcome,
    request: &OperatorRequest,
    status: &StatusHandle,
) -> ReloadOutcome {
    if !outcome.ok {
        return outcome;
    }
    match request {
        OperatorRequest::Set(GuestChange {
            guest,
            memory: Some(Quota::Bytes(quota)),
            ..
        }) => {
            let status = status.status();
            let used = status.guests.iter().find(|one| one.name == *guest);
            let used = used.map_or(0, |one| one.usage.memory);
            // Each unnamed guest has the quota, and the status has the sum of all.
            if guest != "-" && used > *quota {
                outcome.message.push_str(&format!(
                    "; its buffers have {}: allocations are refused until {} of them are freed",
                    shown(used),
                    shown(used - quota)
                ));
            }
        }
        OperatorRequest::Drain { .. } => {
            let programs = status.status().programs();
            outcome
                .message
                .push_str(&format!("; {programs} programs are connected"));
        }
        OperatorRequest::Set(_) | OperatorRequest::Undrain | OperatorRequest::Kill { .. } => {}
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn main_thread_that_hangs_is_not_waited_for_without_end() {
        let (events, main_thread) = mpsc::channel();
        let reload = |limit| ask(&events, |sender| Event::Reload(Some(sender)), limit);
        let soon = Duration::from_millis(20);
        assert_eq!(reload(soon), Err(NoAnswer::Late(soon)));
        // It ends.
        drop(main_thread);
        assert_eq!(reload(Duration::from_secs(60)), Err(NoAnswer::Ending));
    }
}
