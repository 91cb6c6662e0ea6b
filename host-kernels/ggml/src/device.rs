//! A device of a backend: which nodes it computes, and computing graphs.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vgpu_engine::work::Speed;
use vgpu_ggml_abi as abi;
use vgpu_transport::lock::{self, Guard, LockRank, lock_at};

use crate::allocator::Allocator;
use crate::library::Library;
use crate::pace::Paces;
use crate::placement::{Placement, RunCounts};
use crate::repack::Layouts;

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

    /// Whether the backend copies to and from tensors in the order of its graphs.
    pub(crate) fn copies_in_order(&self) -> bool {
        // SAFETY: the backend exists. Its table does not change.
        let iface = unsafe { &self.raw.as_ref().iface };
        iface.synchronize.is_some()
            && iface.set_tensor_async.is_some()
            && iface.get_tensor_async.is_some()
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: the object owns the backend, which computes and copies nothing: its last user is
        // `BackendDevice::renew`, which has waited for it, or a `Flight` or `Underway`, which keep
        // the device and wait for what they have given to the backend.
        unsafe { (self.ggml.functions().backend_free)(self.raw.as_ptr()) };
    }
}

/// The rank of the backend of a device, which logs and allocates.
#[derive(Debug, Clone, Copy)]
struct BackendRank;

impl LockRank for BackendRank {
    fn level(self) -> usize {
        lock::DEVICES
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
    /// The threads of a backend that computes on the CPU.
    pub(crate) threads: usize,
    /// Whether a backend must not outlive a buffer that it has computed with. In ggml, a context
    /// frees its backend together with its buffers. The Vulkan backend of ggml 0.25.1 on Mesa 22.3
    /// uses freed memory if its backend computes another graph after that.
    pub(crate) renews_backend: bool,
    /// Whether the backend keeps a work buffer that no plan needs any more.
    pub(crate) has_idle_work_buffer: AtomicBool,
    pub(crate) failures: Failures,
    /// ggml's name of the device.
    pub(crate) name: String,
    pub(crate) placement: Placement,
    /// Buffer types for weights.
    pub(crate) layouts: Layouts,
    /// What has run, here and on the other engine.
    pub(crate) used: RunCounts,
    /// How fast the device is at least.
    pub(crate) speed: Speed,
    /// How long plans take.
    pub(crate) paces: Paces,
    /// How often somebody has waited for the backend (`ggml_backend_synchronize`).
    pub(crate) waits: AtomicU64,
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

    /// Whether the backend may compute after the call that has asked for it.
    pub(crate) fn is_asynchronous(&self) -> bool {
        let backend = lock_at(BackendRank, &self.backend).raw;
        // SAFETY: the lock makes this the only access, and the backend exists.
        unsafe { backend.as_ref().iface.synchronize.is_some() }
    }

    /// The backend, for calls that nobody interrupts.
    pub(crate) fn queue(&self) -> Queue<'_> {
        Queue {
            device: self,
            current: lock_at(BackendRank, &self.backend),
        }
    }

    /// Replaces the backend by a new one, which has no work buffer. Returns whether there is one.
    fn renew(&self, current: &mut Backend) -> bool {
        // The old one may still compute.
        self.wait_for(current);
        let threads = if self.is_cpu { self.threads } else { 0 };
        // SAFETY: the device belongs to the library.
        let new = unsafe { Backend::new(self.ggml, self.device, threads) };
        // Plans have left writes to the queue's order.
        let new = new.filter(|new| self.allocator.staging().is_none() || new.copies_in_order());
        match new {
            Some(new) => *current = new,
            None => return false,
        }
        true
    }

    /// A plan with a large work buffer is gone. A backend keeps the largest work buffer that it has
    /// needed until it is freed: now, or if it computes, before the next graph.
    pub(crate) fn give_work_buffer_back(&self) {
        let current = self.backend.try_lock().ok();
        let is_new = current.is_some_and(|mut current| self.renew(&mut current));
        if !is_new {
            self.has_idle_work_buffer.store(true, Ordering::Relaxed);
        }
    }

    /// Waits until the backend, which the caller has the lock of, has done all that it was given.
    fn wait_for(&self, backend: &Backend) {
        let raw = backend.raw.as_ptr();
        // SAFETY: the backend exists, and the caller has it alone.
        unsafe {
            if let Some(synchronize) = (*raw).iface.synchronize {
                self.waits.fetch_add(1, Ordering::Relaxed);
                synchronize(raw);
            }
        }
    }
}

/// The backend of a device, which nobody else calls as long as this exists. It does what it is
/// given in order.
pub(crate) struct Queue<'a> {
    device: &'a BackendDevice,
    current: Guard<'a, Backend>,
}

impl Queue<'_> {
    /// Makes the backend ready for a graph: a new one takes its place if the old one keeps memory
    /// that nobody needs, or must not compute again.
    ///
    /// # Errors
    /// `enum ggml_status`, if the device makes no new backend.
    pub(crate) fn make_ready(&mut self) -> Result<(), c_int> {
        let device = self.device;
        let has_idle = device.has_idle_work_buffer.swap(false, Ordering::Relaxed);
        let must_renew = has_idle || device.renews_backend && device.allocator.has_freed();
        match must_renew && !device.renew(&mut self.current) {
            true => Err(device.failed()),
            false => Ok(()),
        }
    }

    /// Gives the backend a graph. All results are in memory after [`Queue::synchronize`].
    ///
    /// # Errors
    /// `enum ggml_status` of the backend.
    ///
    /// # Safety
    /// The graph, its tensors and their buffers must exist, and nothing may access them, until
    /// [`Queue::synchronize`] has returned.
    pub(crate) unsafe fn compute(&mut self, graph: *mut abi::ggml_cgraph) -> Result<(), c_int> {
        let backend = self.current.raw.as_ptr();
        // SAFETY: the lock makes this the only call. The graph is valid, also after this call until
        // the backend has computed it (this function's contract).
        unsafe {
            let Some(compute) = (*backend).iface.graph_compute else {
                return Err(self.device.failed());
            };
            let status = compute(backend, graph) as c_int;
            self.device.failures.count(status);
            match status {
                0 => Ok(()),
                status => Err(status),
            }
        }
    }

    /// Gives the backend a copy of `len` bytes at `from` to byte `offset` of a tensor. Only for a
    /// backend that [copies in order](Backend::copies_in_order).
    ///
    /// # Safety
    /// The tensor is one of a buffer of the device and has these bytes. It and the bytes at `from`
    /// must exist, and nothing may change either, until [`Queue::synchronize`] has returned.
    pub(crate) unsafe fn write(
        &mut self,
        to: *mut abi::ggml_tensor,
        offset: u64,
        from: *const c_void,
        len: usize,
    ) {
        let backend = self.current.raw.as_ptr();
        // SAFETY: the lock makes this the only call. For the rest, the contract of this function.
        unsafe {
            if let Some(set) = (*backend).iface.set_tensor_async {
                set(backend, to, from, offset as usize, len);
            }
        }
    }

    /// Gives the backend a copy of `len` bytes from byte `offset` of a tensor to `to`. Only for a
    /// backend that [copies in order](Backend::copies_in_order).
    ///
    /// # Safety
    /// The tensor is one of a buffer of the device and has these bytes. It and the bytes at `to`,
    /// which are writable, must exist, and nothing may access the latter, until
    /// [`Queue::synchronize`] has returned.
    pub(crate) unsafe fn read(
        &mut self,
        from: *const abi::ggml_tensor,
        offset: u64,
        to: *mut c_void,
        len: usize,
    ) {
        let backend = self.current.raw.as_ptr();
        // SAFETY: the lock makes this the only call. For the rest, the contract of this function.
        unsafe {
            if let Some(get) = (*backend).iface.get_tensor_async {
                get(backend, from, to, offset as usize, len);
            }
        }
    }

    /// Waits until the backend has done all that it was given.
    pub(crate) fn synchronize(&mut self) {
        self.device.wait_for(&self.current);
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
