//! Connecting to the executor of an endpoint.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vgpu_transport::link;
use vgpu_transport::link::{Endpoint, GuestEnd};
use vgpu_transport::wire::{DeviceIndex, Offer, ProtocolVersion};

use crate::ggml::Ggml;
use crate::session::{Hello, Session, SessionError};

/// How long an attempt to reach an executor may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectTimeouts {
    /// Until the link is open.
    link: Duration,
    /// From then on, until the executor has answered HELLO.
    welcome: Duration,
}

/// For an attempt of which nothing is known.
///
/// The link: Ollama asks for the free memory of all devices in 3 seconds.
///
/// The answer: an executor whose engine hangs answers after 0.5 s, and one with many guests has
/// opened the link late, not the session. A process that is stopped has lost its heartbeat after 10
/// s, so that an executor that exceeds this time runs and is at fault. Ollama's first look at the
/// devices may take 30 s.
pub(crate) const LONG: ConnectTimeouts = ConnectTimeouts {
    link: Duration::from_secs(2),
    welcome: Duration::from_secs(15),
};

/// For an attempt soon after one that was waited for in vain.
pub(crate) const SHORT: ConnectTimeouts = ConnectTimeouts {
    link: Duration::from_secs(1),
    welcome: Duration::from_secs(1),
};

/// The time between two attempts at a place that an earlier attempt has had.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(50);

/// Where a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceAddress {
    /// The executor.
    pub(crate) endpoint: Endpoint,
    /// The device among those that the executor has for this guest.
    pub(crate) device: DeviceIndex,
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.endpoint.fmt(f)?;
        match self.device {
            DeviceIndex(0) => Ok(()),
            DeviceIndex(device) => write!(f, ", device {device}"),
        }
    }
}

/// Why an executor could not be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecutorConnectError {
    /// There is no link to the executor.
    #[error("{endpoint}: {error}")]
    Link {
        /// The endpoint that was tried.
        endpoint: Endpoint,
        /// What went wrong.
        error: Box<link::connect::ConnectError>,
    },
    /// The executor in this process cannot start.
    #[cfg(feature = "inproc")]
    #[error("inproc: {0}")]
    Inproc(#[from] InprocError),
    /// This build of the plugin has no executor inside.
    #[cfg(not(feature = "inproc"))]
    #[error("inproc: this build of the plugin has no executor inside")]
    NoInproc,
    /// There is a link, but no session.
    #[error("{address}: {error}")]
    Session {
        /// The device that was tried.
        address: DeviceAddress,
        /// What went wrong.
        error: SessionError,
    },
}

/// Opens a session for a device. An executor of version 3 of the messages, which
/// does not choose from several versions, is asked a second time, for that version.
///
/// # Errors
///
/// [`ExecutorConnectError`], which names the endpoint.
pub(crate) fn connect(
    address: &DeviceAddress,
    ggml: &Ggml,
    timeouts: ConnectTimeouts,
) -> Result<Arc<Session>, ExecutorConnectError> {
    let opened = connect_with(Offer::SERVED, address, ggml, timeouts);
    let Err(ExecutorConnectError::Session {
        error: SessionError::Refused(reason),
        ..
    }) = &opened
    else {
        return opened;
    };
    match ProtocolVersion::after_refusal(reason) {
        None => opened,
        Some(version) => {
            tracing::info!(
                "{address}: the executor speaks version {version} of the protocol only, an \
                 earlier one than this plugin: update ggml-vgpu on the host"
            );
            // The executor may still count the session that it has refused, and have no place yet.
            let deadline = Instant::now() + timeouts.link;
            loop {
                let opened = connect_with(Offer::only(version), address, ggml, timeouts);
                if opened.is_ok() || Instant::now() >= deadline {
                    return opened;
                }
                std::thread::sleep(BETWEEN_ATTEMPTS);
            }
        }
    }
}

fn connect_with(
    offer: Offer,
    address: &DeviceAddress,
    ggml: &Ggml,
    timeouts: ConnectTimeouts,
) -> Result<Arc<Session>, ExecutorConnectError> {
    let DeviceAddress { endpoint, device } = address;
    let end: Box<dyn GuestEnd> = match endpoint {
        Endpoint::Inproc => inproc()?,
        other => link::connect::connect(other, timeouts.link).map_err(|error| {
            ExecutorConnectError::Link {
                endpoint: endpoint.clone(),
                error: Box::new(error),
            }
        })?,
    };
    // Over these two links bytes move at the speed of copying memory, about three times that of
    // hashing.
    let hashes_first = !matches!(endpoint, Endpoint::Unix(_) | Endpoint::Inproc);
    let hello = Hello {
        offer,
        name: introduction(ggml),
        device: *device,
    };
    Session::open(end, hello, hashes_first, timeouts.welcome).map_err(|error| {
        ExecutorConnectError::Session {
            address: address.clone(),
            error,
        }
    })
}

/// Why the executor in this process cannot start.
#[cfg(feature = "inproc")]
#[derive(Debug, thiserror::Error)]
pub(crate) enum InprocError {
    /// `VGPU_ENGINE` is not an engine.
    #[cfg(feature = "inproc-cuda")]
    #[error("VGPU_ENGINE={value}: {reason}")]
    UnknownEngine {
        /// The value of the variable.
        value: String,
        /// Why it is not an engine.
        reason: vgpu_executor::engine::ParseEngineKindError,
    },
    /// The CPU engine cannot start.
    #[cfg(not(feature = "inproc-cuda"))]
    #[error("the engine cannot start: {0}")]
    Engine(#[from] vgpu_engine::EngineError),
    /// The engine cannot start.
    #[cfg(feature = "inproc-cuda")]
    #[error("the engine cannot start: {0}")]
    Engine(#[from] vgpu_executor::engine::StartError),
    /// The executor cannot start.
    #[error("the executor cannot start: {0}")]
    Executor(#[from] std::io::Error),
}

/// A link to the executor in this process. All of its sessions share one engine.
#[cfg(feature = "inproc")]
fn inproc() -> Result<Box<dyn GuestEnd>, ExecutorConnectError> {
    use std::sync::OnceLock;
    use vgpu_engine::Engine;
    use vgpu_transport::fork::PerProcess;

    // A forked child has none of its parent's threads, and starts an engine of its own.
    static ENGINE: PerProcess<OnceLock<Arc<dyn Engine>>> = PerProcess::new();
    let started = ENGINE.get_or_init(OnceLock::new);
    let engine = match started.get() {
        Some(engine) => Arc::clone(engine),
        None => {
            let engine = start_engine()?;
            Arc::clone(started.get_or_init(|| engine))
        }
    };
    let end = vgpu_executor::inproc::start(engine).map_err(InprocError::from)?;
    Ok(Box::new(end))
}

#[cfg(not(feature = "inproc"))]
fn inproc() -> Result<Box<dyn GuestEnd>, ExecutorConnectError> {
    Err(ExecutorConnectError::NoInproc)
}

/// The number of threads that `VGPU_THREADS` asks for; 0, which leaves the choice to the engine, if
/// it does not.
#[cfg(feature = "inproc")]
fn threads() -> usize {
    let threads = std::env::var("VGPU_THREADS").ok();
    threads.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Starts the CPU engine.
#[cfg(all(feature = "inproc", not(feature = "inproc-cuda")))]
fn start_engine() -> Result<Arc<dyn vgpu_engine::Engine>, InprocError> {
    Ok(Arc::new(vgpu_cpu::CpuEngine::new(threads(), None)?))
}

/// Starts the engine that `VGPU_ENGINE` asks for, in the syntax of `vgpu serve --engine`; by
/// default the CPU engine.
#[cfg(feature = "inproc-cuda")]
fn start_engine() -> Result<Arc<dyn vgpu_engine::Engine>, InprocError> {
    let value = std::env::var("VGPU_ENGINE").unwrap_or_else(|_| "cpu".to_owned());
    let kind = value.parse();
    let kind = kind.map_err(|reason| InprocError::UnknownEngine { value, reason })?;
    Ok(vgpu_executor::engine::start(&kind, threads().into(), None)?)
}

/// Who the guest is, for the executor's log: program, process id, versions.
fn introduction(ggml: &Ggml) -> String {
    let program = std::env::current_exe().ok();
    let program = program
        .as_deref()
        .and_then(|path| path.file_name())
        .map(|name| name.to_string_lossy());
    format!(
        "{}[{}], ggml {}, ggml-vgpu {}",
        program.as_deref().unwrap_or("unknown"),
        std::process::id(),
        ggml.release(),
        env!("VGPU_VERSION"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times of docs/life-events.md: no connection, no answer to HELLO, and each of them soon
    /// after a wait in vain.
    #[test]
    fn a_load_waits_for_an_executor_as_long_as_the_table_says() {
        let seconds = |limits: ConnectTimeouts| (limits.link.as_secs(), limits.welcome.as_secs());
        assert_eq!((seconds(LONG), seconds(SHORT)), ((2, 15), (1, 1)));
    }
}
