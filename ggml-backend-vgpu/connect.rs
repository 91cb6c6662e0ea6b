//! Finding an executor.

use std::sync::Arc;
use std::time::Duration;

use vgpu_transport::link::dial::dial;
use vgpu_transport::link::{Endpoint, GuestEnd};

use crate::host::Host;
use crate::session::{Session, SessionError};

/// How long an executor may take to answer. Ollama gives a whole discovery 3 seconds.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Why an executor could not be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    /// No link to it.
    #[error("{endpoint}: {error}")]
    Link {
        /// Where it was looked for.
        endpoint: String,
        /// What happened.
        error: String,
    },
    /// A link, but no session.
    #[error("{endpoint}: {error}")]
    Session {
        /// Where it is.
        endpoint: String,
        /// What it said.
        error: SessionError,
    },
}

/// Opens a session with the executor at `endpoint`.
pub(crate) fn connect(endpoint: &Endpoint, host: &Host) -> Result<Arc<Session>, ConnectError> {
    let failed = |error: String| ConnectError::Link {
        endpoint: endpoint.to_string(),
        error,
    };
    let end: Box<dyn GuestEnd> = match endpoint {
        Endpoint::Inproc => inproc().map_err(failed)?,
        other => dial(other, TIMEOUT).map_err(failed)?,
    };
    Session::open(end, introduction(host)).map_err(|error| ConnectError::Session {
        endpoint: endpoint.to_string(),
        error,
    })
}

/// An executor inside this process. All of its sessions share an engine.
#[cfg(feature = "inproc")]
fn inproc() -> Result<Box<dyn GuestEnd>, String> {
    use std::sync::OnceLock;
    use vgpu_engine::Engine;

    static ENGINE: OnceLock<Arc<dyn Engine>> = OnceLock::new();
    let engine = match ENGINE.get() {
        Some(engine) => Arc::clone(engine),
        None => Arc::clone(ENGINE.get_or_init({
            let engine = engine_inside()?;
            || engine
        })),
    };
    let end = vgpu_executor::inproc::start(engine).map_err(|e| e.to_string())?;
    Ok(Box::new(end))
}

#[cfg(feature = "inproc")]
fn threads() -> usize {
    let threads = std::env::var("VGPU_THREADS").ok();
    threads.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// The CPU engine.
#[cfg(all(feature = "inproc", not(feature = "inproc-cuda")))]
fn engine_inside() -> Result<Arc<dyn vgpu_engine::Engine>, String> {
    let engine = vgpu_cpu::CpuEngine::new(threads(), None).map_err(|e| e.to_string())?;
    Ok(Arc::new(engine))
}

/// The engine that `VGPU_ENGINE` asks for, as `vgpu serve --engine` does; the CPU engine, if it does not.
#[cfg(feature = "inproc-cuda")]
fn engine_inside() -> Result<Arc<dyn vgpu_engine::Engine>, String> {
    let kind = std::env::var("VGPU_ENGINE").unwrap_or_else(|_| "cpu".to_owned());
    let kind = kind
        .parse()
        .map_err(|error| format!("VGPU_ENGINE={kind}: {error}"))?;
    vgpu_executor::engine::start(kind, threads().into(), None).map_err(|error| format!("{error:#}"))
}

#[cfg(not(feature = "inproc"))]
fn inproc() -> Result<Box<dyn GuestEnd>, String> {
    Err("this build of the plugin has no executor inside".to_owned())
}

/// Who we are, for the executor's log.
fn introduction(host: &Host) -> String {
    let program = std::env::current_exe().ok();
    let program = program
        .as_deref()
        .and_then(|path| path.file_name())
        .map(|name| name.to_string_lossy());
    format!(
        "{}[{}], ggml {}, ggml-vgpu {}",
        program.as_deref().unwrap_or("unknown"),
        std::process::id(),
        host.release(),
        env!("CARGO_PKG_VERSION"),
    )
}
