//! The sockets through which an executor is observed and reloaded.

use std::sync::mpsc::{self, Sender};

use anyhow::Context as _;
use tracing::info;
use vgpu_executor::config::Settings;
use vgpu_executor::control::{self, ReloadOutcome};
use vgpu_executor::status::StatusHandle;
use vgpu_transport::link::socket_file::SocketFile;

use super::events::Event;
use super::metrics_http;

/// Serves metrics and the control socket, where the settings ask for them. The sockets' files are
/// removed when the result is dropped.
pub(super) fn start(
    settings: &Settings,
    status: &StatusHandle,
    events: Sender<Event>,
) -> anyhow::Result<Vec<SocketFile>> {
    let mut files = Vec::new();
    if let Some(address) = &settings.metrics {
        let file = metrics_http::serve(address, status.clone());
        files.extend(file.with_context(|| format!("metrics at {address}"))?);
        info!("metrics at {address}");
    }
    if let Some(path) = &settings.control {
        let reload = move || {
            let (sender, outcome) = mpsc::channel();
            let sent = events.send(Event::Reload(Some(sender)));
            let outcome = sent.ok().and_then(|()| outcome.recv().ok());
            outcome.unwrap_or_else(|| ReloadOutcome {
                ok: false,
                message: "the executor is ending".into(),
            })
        };
        let file = control::serve(path, status.clone(), Box::new(reload));
        files.push(file.with_context(|| format!("the control socket {}", path.display()))?);
    }
    Ok(files)
}
