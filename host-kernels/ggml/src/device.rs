//! A device of a backend: which nodes it computes, and computing graphs.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use vgpu_ggml_abi as abi;

use crate::library::Library;
use crate::tensors::Graph;

/// A device of a backend, with a queue for graphs.
pub(crate) struct Device {
    /// The ggml and the backend that the device belongs to.
    pub(crate) ggml: &'static Library,
    pub(crate) device: NonNull<abi::ggml_backend_device>,
    pub(crate) backend: NonNull<abi::ggml_backend>,
    pub(crate) is_cpu: bool,
    /// Held while the backend computes: ggml's backends have one user at a time.
    pub(crate) computing: Mutex<()>,
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
