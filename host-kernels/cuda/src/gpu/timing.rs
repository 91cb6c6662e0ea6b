//! Events that know when the device has come to them.

use std::ptr;

use cudarc::driver::sys;

use super::Gpu;
use vgpu_engine::EngineError;

/// An event of a device whose context is that of this thread.
pub(crate) struct TimedEvent<'a> {
    gpu: &'a Gpu,
    event: sys::CUevent,
}

impl<'a> TimedEvent<'a> {
    pub(crate) fn new(gpu: &'a Gpu) -> Result<TimedEvent<'a>, EngineError> {
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: the driver writes the handle.
        gpu.done("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut event, flags)
        })?;
        Ok(TimedEvent { gpu, event })
    }

    /// Puts it behind all that the device was asked for.
    pub(crate) fn record(&self) -> Result<(), EngineError> {
        // SAFETY: event and stream are there.
        self.gpu.done("cuEventRecord", unsafe {
            sys::cuEventRecord(self.event, self.gpu.stream)
        })
    }

    /// Seconds from `earlier` to this one, both of which the device has come to. To about half a microsecond.
    pub(crate) fn since(&self, earlier: &TimedEvent<'_>) -> Result<f64, EngineError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are there; the driver writes the time.
        self.gpu.done("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&mut milliseconds, earlier.event, self.event)
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for TimedEvent<'_> {
    fn drop(&mut self) {
        // SAFETY: ours. The driver keeps what it still needs of it; of a broken context it says so, and nothing is left.
        unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}
