//! A device of a backend: which nodes it computes, and computing graphs.

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_ggml_abi as abi;
use vgpu_transport::lock::lock;

use crate::library::Library;
use crate::memory::Allocator;
use crate::placement::Placement;
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

/// A queue of a device for graphs: `ggml_backend_t`.
pub(crate) struct Backend {
    ggml: &'static Library,
    raw: NonNull<abi::ggml_backend>,
}

// SAFETY: ggml's scheduler moves backends between threads, too, so that none of their state belongs
// to a thread. `&mut` or a lock gives the backend one user at a time.
unsafe impl Send for Backend {}

impl Backend {
    /// A new backend of the device. `threads` is for a backend that computes on the CPU; 0 stands
    /// for the backend's default. `None` if the device makes none.
    ///
    /// # Safety
    /// `device` must be a device of `ggml`.
    pub(crate) unsafe fn new(
        ggml: &'static Library,
        device: NonNull<abi::ggml_backend_device>,
        threads: usize,
    ) -> Option<Backend> {
        let device = device.as_ptr();
        // SAFETY: the device object is constant and never freed (this function's contract), and its
        // function takes the object itself. A null parameter stands for the default.
        let raw = unsafe { NonNull::new((*device).iface.init_backend?(device, ptr::null()))? };
        if threads > 0 {
            type SetThreads = unsafe extern "C" fn(*mut abi::ggml_backend, c_int);
            // SAFETY: `ggml-backend.h` declares the function with this name and type
            // (`ggml_backend_set_n_threads_t`). The backend is new and belongs to the library.
            unsafe {
                let set = ggml.proc_address::<SetThreads>(c"ggml_backend_set_n_threads");
                if let Some(set) = set {
                    set(raw.as_ptr(), threads as c_int);
                }
            }
        }
        Some(Backend { ggml, raw })
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: the object owns the backend, which computes nothing: `BackendDevice::compute`
        // returns after `synchronize`.
        unsafe { (self.ggml.functions().backend_free)(self.raw.as_ptr()) };
    }
}

/// A device of a backend library, with a queue for graphs.
pub(crate) struct BackendDevice {
    /// The ggml and the backend that the device belongs to.
    pub(crate) ggml: &'static Library,
    pub(crate) device: NonNull<abi::ggml_backend_device>,
    /// Locked while it computes: ggml's backends have one user at a time.
    pub(crate) backend: Mutex<Backend>,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) is_cpu: bool,
    /// Whether a backend must not outlive a buffer that it has computed with. In ggml, a context
    /// frees its backend together with its buffers. The Vulkan backend of ggml 0.25.1 on Mesa 22.3
    /// uses freed memory if its backend computes another graph after that.
    pub(crate) renews_backend: bool,
    pub(crate) failures: Failures,
    /// ggml's name of the device.
    pub(crate) name: String,
    pub(crate) placement: Placement,
}

// SAFETY: the device object belongs to the backend's library, which is never unloaded, and not to a
// thread.
unsafe impl Send for BackendDevice {}
// SAFETY: the device object is constant: no method of `BackendDevice` changes it through `&self`.
unsafe impl Sync for BackendDevice {}

impl BackendDevice {
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

    /// Counts a graph that no backend could compute.
    fn failed(&self) -> c_int {
        let status = abi::GGML_STATUS_FAILED as c_int;
        self.failures.count(status);
        status
    }

    /// Whether kernels access no byte behind `tensor`: neither behind rows of quantised
    /// blocks, which some backends read in larger units, nor behind a result, where some keep what
    /// they have converted. ggml's own allocator gives a tensor as many bytes as the backend wants.
    /// Guests give it `bytes`, and may have another tensor behind.
    ///
    /// # Safety
    /// As for [`BackendDevice::supports`].
    pub(crate) unsafe fn keeps_within(&self, tensor: *const abi::ggml_tensor, bytes: u64) -> bool {
        // SAFETY: the tensor is valid (this function's contract).
        unsafe { self.allocator.tensor_bytes(tensor) <= bytes }
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
        let mut current = lock(&self.backend);
        if self.renews_backend && self.allocator.has_freed() {
            // SAFETY: the device belongs to the library. Threads are for the CPU backend only.
            match unsafe { Backend::new(self.ggml, self.device, 0) } {
                Some(new) => *current = new,
                None => return Err(self.failed()),
            }
        }
        let backend = current.raw.as_ptr();
        // SAFETY: the lock makes this the only call. The graph is valid (this function's contract),
        // and the backend keeps no pointer to it behind `synchronize`.
        unsafe {
            let iface = &(*backend).iface;
            let Some(compute) = iface.graph_compute else {
                return Err(self.failed());
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
