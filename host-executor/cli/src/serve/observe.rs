//! The sockets through which an executor is observed and reloaded.

use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{self, Sender};

use anyhow::Context as _;
use tracing::{error, info};
use vgpu_executor::added_guests::GuestAnswer;
use vgpu_executor::config::Settings;
use vgpu_executor::control::{self, Actions, ReloadOutcome};
use vgpu_executor::size::shown;
use vgpu_executor::status::StatusHandle;
use vgpu_executor::{GuestChange, OperatorRequest, Quota};
use vgpu_transport::link::socket_file::{self, SocketFile};

use super::events::Event;
use super::metrics_http;
use super::sandboxing::Confined;

/// The sockets that the settings ask for, bound. No client is answered yet.
pub(super) struct Observers {
    metrics: Option<metrics_http::Listener>,
    control: Option<(UnixListener, SocketFile)>,
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
    /// Answers clients from now on. The socket files of the process are removed when the result is
    /// dropped.
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
        let ask = |events: &Sender<Event>, event: &dyn Fn(Sender<ReloadOutcome>) -> Event| {
            let (sender, outcome) = mpsc::channel();
            let sent = events.send(event(sender));
            let outcome = sent.ok().and_then(|()| outcome.recv().ok());
            outcome.unwrap_or_else(|| ReloadOutcome {
                ok: false,
                message: "the executor is ending".into(),
            })
        };
        let (requests, guest_requests) = (events.clone(), events.clone());
        let reload = move || ask(&events, &|sender| Event::Reload(Some(sender)));
        let snapshots = status.clone();
        let perform = move |request: OperatorRequest| {
            let event = |sender| Event::Perform(request.clone(), sender);
            let outcome = ask(&requests, &event);
            with_what_happens(outcome, &request, &snapshots)
        };
        let guests = move |request| {
            let (sender, answer) = mpsc::channel();
            let sent = guest_requests.send(Event::Guests(request, sender));
            let answer = sent.ok().and_then(|()| answer.recv().ok());
            answer.unwrap_or_else(|| GuestAnswer::Refused("the executor is ending".into()))
        };
        if let Some((listener, file)) = self.control {
            let actions = Actions {
                reload: Box::new(reload),
                perform: Box::new(perform),
                guests: Box::new(guests),
            };
            control::serve(listener, file, status.clone(), actions)
                .context("no thread for the control socket")?;
        }
        Ok(SocketFiles(()))
    }
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
