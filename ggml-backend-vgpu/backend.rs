//! Backends: ordered queues of graphs and copies on a device. ggml's `ggml_backend_t`.
//!
//! A session executes its requests in order, so that every call is one-way: `graph_compute` returns
//! when the graph is on its way, and a read or a synchronisation waits for it.

use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::abi::ggml_cgraph;
use crate::device_context::{DeviceContext, DeviceError};
use crate::encode::{EncodeError, Encoder};
use crate::lock::{Rank, RankedMutex};
use crate::session::{BackendId, Session, SessionError};

/// A backend.
pub(crate) struct Backend {
    device: &'static DeviceContext,
    session: Arc<Session>,
    id: BackendId,
    name: CString,
    encoder: RankedMutex<Encoder>,
    /// Graphs that failed because the session is lost.
    lost_graphs: AtomicU64,
}

/// Why a graph was not submitted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ComputeError {
    /// The graph cannot be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The session is lost, or an earlier graph has failed.
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl Backend {
    /// A backend on the device's session.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] if the executor cannot be reached.
    pub(crate) fn new(device: &'static DeviceContext) -> Result<Backend, DeviceError> {
        let session = device.session()?;
        Ok(Backend {
            device,
            id: session.open_backend()?,
            session,
            name: CString::new(device.name()).unwrap_or_default(),
            encoder: RankedMutex::new(Rank::Encoder, Encoder::default()),
            lost_graphs: AtomicU64::new(0),
        })
    }

    /// The device that the backend belongs to.
    pub(crate) fn device(&self) -> &'static DeviceContext {
        self.device
    }

    /// The session that the backend belongs to.
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// The name of the device, for ggml. Valid as long as the backend.
    pub(crate) fn c_name(&self) -> &CStr {
        &self.name
    }

    /// Submits a graph. Returns when the graph is on its way. A graph with the uid of an earlier
    /// one is not encoded again: the same uid means the same nodes at the same addresses, because
    /// ggml sets a new uid whenever it splits or allocates a graph anew.
    ///
    /// # Errors
    ///
    /// [`ComputeError::Encode`] if a node cannot be encoded. [`ComputeError::Session`] if an
    /// earlier graph of the backend has failed or the session is lost.
    ///
    /// # Safety
    ///
    /// `cgraph` and everything that it points to must be a valid graph of this process's ggml that
    /// nobody changes during the call.
    pub(crate) unsafe fn compute(&self, cgraph: &ggml_cgraph) -> Result<(), ComputeError> {
        let key = (cgraph.uid != 0).then_some(cgraph.uid);
        let ggml_nodes = usize::try_from(cgraph.n_nodes).unwrap_or(0);
        if self.session.submit_known(self.id, key, ggml_nodes)? {
            return Ok(());
        }
        let began = Instant::now();
        let mut encoder = self.encoder.lock();
        // SAFETY: a valid graph that nobody changes: this function's contract.
        let encoded = unsafe { encoder.encode(self.device, &self.session, cgraph) }?;
        let submitted = match encoded {
            Some(graph) => {
                self.session
                    .submit(self.id, key, ggml_nodes, graph.image, graph.buffers, began)
            }
            None => Ok(()), // the graph has only views
        };
        encoder.clear();
        Ok(submitted?)
    }

    /// Logs that a graph was not computed. A program may submit graphs to a lost session without
    /// end: of these only the first, the tenth, the hundredth, ... is logged, and their number at
    /// the end.
    pub(crate) fn log_failure(&self, error: &ComputeError) {
        let name = self.device.name();
        if !matches!(error, ComputeError::Session(SessionError::Lost(_))) {
            tracing::error!("{name}: graph not computed: {error}");
            return;
        }
        let count = self.lost_graphs.fetch_add(1, Ordering::Relaxed) + 1;
        if count == 1 {
            tracing::error!("{name}: graph not computed: {error}");
        } else if is_power_of_ten(count) {
            tracing::error!("{name}: {count} graphs not computed since: {error}");
        }
    }

    /// Waits until everything before is done. Returns at once if it is. A failure is logged, and
    /// the next graph reports it.
    pub(crate) fn synchronize(&self) {
        match self.session.synchronize() {
            // The loss was logged when it happened.
            Ok(()) | Err(SessionError::Lost(_)) => {}
            Err(error) => tracing::error!("{}: cannot synchronise: {error}", self.device.name()),
        }
    }

    /// Writes the statistics of the session to the file that `VGPU_STATS` names, if it is set.
    fn write_stats(&self) {
        let Some(path) = std::env::var_os("VGPU_STATS").map(PathBuf::from) else {
            return;
        };
        let Some(stats) = self.session.stats() else {
            return;
        };
        let written = stats.write(
            &path,
            self.device.name(),
            &self.device.address().to_string(),
        );
        if let Err(error) = written {
            tracing::warn!("cannot write the statistics to {}: {error}", path.display());
        }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let lost = self.lost_graphs.load(Ordering::Relaxed);
        if lost > 1 && !is_power_of_ten(lost) {
            let name = self.device.name();
            tracing::error!("{name}: {lost} graphs not computed: the session was lost");
        }
        self.session.close_backend(self.id);
        self.write_stats();
    }
}

/// Whether `count` is 1, 10, 100, ...
fn is_power_of_ten(count: u64) -> bool {
    count
        .checked_ilog10()
        .is_some_and(|digits| count == 10u64.pow(digits))
}
