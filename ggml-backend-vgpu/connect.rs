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

/// An executor inside this process, with the CPU engine.
#[cfg(feature = "inproc")]
fn inproc() -> Result<Box<dyn GuestEnd>, String> {
    use std::sync::OnceLock;
    use vgpu_kernels::Engine;
    use vgpu_kernels::cpu::CpuEngine;

    static ENGINE: OnceLock<Arc<CpuEngine>> = OnceLock::new();
    let engine = match ENGINE.get() {
        Some(engine) => Arc::clone(engine),
        None => {
            let threads = std::env::var("VGPU_THREADS")
                .ok()
                .and_then(|n| n.parse().ok())
                .unwrap_or(0);
            let engine = Arc::new(CpuEngine::new(threads, None).map_err(|e| e.to_string())?);
            Arc::clone(ENGINE.get_or_init(|| engine))
        }
    };
    let engine: Arc<dyn Engine> = engine;
    let end = vgpu_executor::inproc::start(engine).map_err(|e| e.to_string())?;
    Ok(Box::new(end))
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
