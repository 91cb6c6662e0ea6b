//! A device of a backend: which nodes it computes, and computing graphs.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use vgpu_ggml_abi as abi;

use crate::library::Library;
use crate::tensors::Graph;

/// The graphs in a row that a backend has to fail before the device counts as lost. Most backends
/// end the process when the device is lost; the others fail every graph from then on.
const LOST_AFTER: u32 = 3;

/// The graphs in a row that a backend has failed.
#[derive(Debug, Default)]
pub(crate) struct Failures(AtomicU32);

impl Failures {
    /// Counts a graph that has ended with this status. A lack of memory says nothing of the device.
    fn count(&self, status: c_int) {
        if status == abi::GGML_STATUS_FAILED as c_int {
            self.0.fetch_add(1, Ordering::Relaxed);
        } else if status == abi::GGML_STATUS_SUCCESS as c_int {
            self.0.store(0, Ordering::Relaxed);
        }
    }

    /// Why the device is lost, if it is.
    pub(crate) fn reason(&self) -> Option<String> {
        let count = self.0.load(Ordering::Relaxed);
        (count >= LOST_AFTER)
            .then(|| format!("the backend of ggml has failed {count} graphs in a row"))
    }
}

/// A device of a backend, with a queue for graphs.
pub(crate) struct Device {
    /// The ggml and the backend that the device belongs to.
    pub(crate) ggml: &'static Library,
    pub(crate) device: NonNull<abi::ggml_backend_device>,
    pub(crate) backend: NonNull<abi::ggml_backend>,
    pub(crate) is_cpu: bool,
    /// Held while the backend computes: ggml's backends have one user at a time.
    pub(crate) computing: Mutex<()>,
    pub(crate) failures: Failures,
}

// SAFETY: the device object is constant. The backend object is used under the lock only.
unsafe impl Send for Device {}
// SAFETY: as for `Send`.
unsafe impl Sync for Device {}

impl Device {
    /// Whether the device computes this node.
    ///
    /// # Safety
    /// `node` and the tensors that it points to must be valid, with their places.
    pub(crate) unsafe fn supports(&self, node: *const abi::ggml_tensor) -> bool {
        let device = self.device.as_ptr();
        // SAFETY: the device object is constant and never freed, and the node is valid (this
        // function's contract).
        unsafe {
            (*device)
                .iface
                .supports_op
                .is_some_and(|supports| supports(device, node))
        }
    }

    /// Computes a graph. All results are in memory on return.
    ///
    /// # Errors
    /// `enum ggml_status` of the backend.
    ///
    /// # Safety
    /// The tensors of the graph and their buffers must exist, and nothing may access them during
    /// the call.
    pub(crate) unsafe fn compute(&self, graph: &mut Graph) -> Result<(), c_int> {
        let _computing = self
            .computing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let backend = self.backend.as_ptr();
        // SAFETY: the lock makes this the only call. The graph is valid (this function's contract),
        // and the backend keeps no pointer to it behind `synchronize`.
        unsafe {
            let iface = &(*backend).iface;
            let Some(compute) = iface.graph_compute else {
                return Err(abi::GGML_STATUS_FAILED as c_int);
            };
            let status = compute(backend, graph.as_mut_ptr()) as c_int;
            if let Some(synchronize) = iface.synchronize {
                synchronize(backend);
            }
            self.failures.count(status);
            match status {
                0 => Ok(()),
                status => Err(status),
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: the object owns the backend, and plans keep the device alive.
        unsafe { (self.ggml.functions().backend_free)(self.backend.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_that_fails_every_graph_is_lost() {
        let [failed, no_memory, success] = [
            abi::GGML_STATUS_FAILED as c_int,
            abi::GGML_STATUS_ALLOC_FAILED as c_int,
            abi::GGML_STATUS_SUCCESS as c_int,
        ];
        let failures = Failures::default();
        for status in [
            failed, failed, success, failed, failed, no_memory, no_memory,
        ] {
            failures.count(status);
            assert_eq!(failures.reason(), None);
        }
        failures.count(failed);
        assert!(failures.reason().unwrap().contains("3 graphs in a row"));
    }
}
