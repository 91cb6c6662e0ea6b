//! The CUDA context of a GPU.
//!
//! Every GPU has a context of its own, not the process's primary context, so that the context can
//! be destroyed after a sticky error without harm to other users of the GPU in this process. A
//! context is current per thread (CUDA programming guide, "Driver API", "Context"), so every method
//! that calls the driver begins with [`Context::enter`].

use std::ffi::c_uint;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use cudarc::driver::sys::{self, CUresult};
use tracing::warn;
use vgpu_engine::EngineError;

use super::error::{GpuError, check, is_sticky, reason};

/// A context, and whether it still works.
pub(super) struct Context {
    raw: sys::CUcontext,
    /// The first sticky error.
    lost: OnceLock<String>,
    /// Whether the context is destroyed, or about to be.
    is_destroyed: AtomicBool,
    /// Whether the driver has destroyed the context.
    is_gone: AtomicBool,
    /// The number of calls that use the context.
    calls: AtomicUsize,
}

// SAFETY: `raw` is a driver handle. The driver allows any thread to use a context that the thread
// has made current, which `enter` does. All other fields are `Send`.
unsafe impl Send for Context {}
// SAFETY: the driver synchronises calls of several threads in one context, and the counter of calls
// is atomic.
unsafe impl Sync for Context {}

impl Context {
    /// Creates a context on `device` and makes it current to the calling thread.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver cannot create the context.
    pub(super) fn new(device: sys::CUdevice) -> Result<Context, GpuError> {
        let mut raw = ptr::null_mut();
        // A thread that waits for longer than `Completion` polls sleeps in the driver.
        let flags = sys::CUctx_flags::CU_CTX_MAP_HOST as c_uint
            | sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as c_uint;
        // SAFETY: `raw` is a valid place for the handle; `cuInit` has succeeded, since there is a
        // `device`. On success the driver makes the new context current.
        let code = unsafe { sys::cuCtxCreate_v2(&mut raw, flags, device) };
        check("cuCtxCreate", code)?;
        let context = Context {
            raw,
            lost: OnceLock::new(),
            is_destroyed: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
        };
        // SAFETY: `raw` was created above, and only `destroy` destroys it.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(raw) })?;
        Ok(context)
    }

    /// Makes the context current to the calling thread. The context is not destroyed before the
    /// returned guard is dropped.
    ///
    /// # Errors
    /// [`EngineError::DeviceLost`] if the context is destroyed.
    pub(super) fn enter(&self) -> Result<Entered<'_>, EngineError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let entered = Entered(self);
        // SeqCst here and in `destroy` puts the counter and the flag into one order: either
        // `destroy` sees this call in `calls` and waits, or this call sees `is_destroyed`.
        if self.is_destroyed.load(Ordering::SeqCst) {
            let reason = self.lost.get().cloned().unwrap_or_default();
            return Err(EngineError::DeviceLost { reason });
        }
        // SAFETY: `destroy` waits until `calls` is 0, so `raw` is alive while `entered` is.
        let code = unsafe { sys::cuCtxSetCurrent(self.raw) };
        self.check("cuCtxSetCurrent", code)?;
        Ok(entered)
    }

    /// The result of a driver call in this context. Notes a sticky error.
    ///
    /// # Errors
    /// [`EngineError::Device`] if `code` is not `CUDA_SUCCESS`.
    pub(super) fn check(&self, call: &'static str, code: CUresult) -> Result<(), EngineError> {
        let outcome = check(call, code).map_err(|error| EngineError::Device {
            message: error.to_string(),
        });
        if outcome.is_err() && is_sticky(code) {
            self.lost
                .get_or_init(|| format!("{call}: {}", reason(code)));
        }
        outcome
    }

    /// The sticky error that has made the context unusable, if there was one.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Marks the context as lost and destroys it.
    pub(super) fn abandon(&self) {
        self.lost.get_or_init(|| "the device was abandoned".into());
        self.destroy();
    }

    /// Destroys the context with everything in it, once no call uses it. Later calls of `enter`
    /// fail.
    pub(super) fn destroy(&self) {
        if self.is_destroyed.swap(true, Ordering::SeqCst) {
            return;
        }
        while self.calls.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        // SAFETY: this object owns `raw`. `calls` is 0 and `is_destroyed` is set, so no thread uses
        // `raw`, and no thread will.
        let code = unsafe { sys::cuCtxDestroy_v2(self.raw) };
        match code {
            CUresult::CUDA_SUCCESS => self.is_gone.store(true, Ordering::SeqCst),
            code => warn!("a context is not destroyed: {}", reason(code)),
        }
    }

    /// Whether the driver has destroyed the context, with all that belongs to it.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::SeqCst)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// A call that uses the context.
pub(super) struct Entered<'a>(&'a Context);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}
