//! Launching kernels, one by one and with timing events.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use tracing::warn;
use vgpu_engine::EngineError;

use super::error::reason;
use super::kernels::Kernels;
use super::stream::Stream;
use crate::device::{KernelId, Launch};

/// Launches kernels on a stream.
pub(super) struct Launcher {
    stream: Arc<Stream>,
    kernels: Arc<Kernels>,
    sm_count: u32,
    /// Whether the GPU has cooperative launches.
    is_cooperative: bool,
}

impl Launcher {
    /// Launches of `kernels` on `stream`, on a GPU with `sm_count` SMs.
    pub(super) fn new(
        stream: Arc<Stream>,
        kernels: Arc<Kernels>,
        sm_count: u32,
        is_cooperative: bool,
    ) -> Launcher {
        Launcher {
            stream,
            kernels,
            sm_count,
            is_cooperative,
        }
    }

    /// The largest grid of a cooperative launch: blocks per SM by occupancy, times the SMs (CUDA
    /// programming guide, "Cooperative Groups", "Grid Synchronization"). 0 if there is none.
    pub(super) fn max_cooperative_blocks(
        &self,
        kernel: KernelId,
        threads: u32,
        shared: u32,
    ) -> u32 {
        match self.is_cooperative {
            true => self.blocks_per_sm(kernel, threads, shared) * self.sm_count,
            false => 0,
        }
    }

    /// The blocks of a kernel that an SM runs at a time, by its registers, threads and shared
    /// memory. 0 if the driver does not say.
    pub(super) fn blocks_per_sm(&self, kernel: KernelId, threads: u32, shared: u32) -> u32 {
        let context = self.stream.context();
        let Ok(_entered) = context.enter() else {
            return 0;
        };
        let mut per_sm = 0;
        // SAFETY: `per_sm` is a valid place for the result; the function is of this context.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut per_sm,
                self.kernels.function(kernel),
                threads as c_int,
                shared as usize,
            )
        };
        match context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code) {
            Ok(()) => per_sm.max(0) as u32,
            Err(error) => {
                warn!("the occupancy of a kernel is unknown: {error}");
                0
            }
        }
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`] if a cooperative launch has more blocks than fit on the GPU.
    ///
    /// # Safety
    /// The addresses in the parameters are of memory that the kernel may use, until the stream is
    /// synchronised.
    pub(super) unsafe fn launch(&self, launch: &Launch) -> Result<(), EngineError> {
        let context = self.stream.context();
        let _entered = context.enter()?;
        let function = self.kernels.function(launch.kernel);
        let ([gx, gy, gz], [tx, ty, tz]) = (launch.grid, launch.threads);
        if launch.cooperative {
            // Every kernel has one parameter, a structure. The driver knows its size.
            let mut params: [*mut c_void; 1] = [launch.params.as_ptr().cast_mut().cast()];
            // SAFETY: `function` is of the context that is entered; `params` points to one
            // structure of the size that the kernel takes, which the driver copies before it
            // returns. The caller guarantees that the kernel may use the addresses in it until the
            // stream is synchronised.
            let code = unsafe {
                sys::cuLaunchCooperativeKernel(
                    function,
                    gx,
                    gy,
                    gz,
                    tx,
                    ty,
                    tz,
                    launch.shared,
                    self.stream.raw(),
                    params.as_mut_ptr(),
                )
            };
            return match code {
                CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
                | CUresult::CUDA_ERROR_NOT_SUPPORTED => Err(EngineError::Unsupported {
                    op: "a cooperative launch",
                    why: reason(code),
                }),
                code => context.check("cuLaunchCooperativeKernel", code),
            };
        }
        let mut size = launch.params.len();
        let mut extra = [
            sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT as usize as *mut c_void,
            launch.params.as_ptr().cast_mut().cast(),
            sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT as usize as *mut c_void,
            ptr::from_mut(&mut size).cast(),
            ptr::null_mut(), // CU_LAUNCH_PARAM_END
        ];
        // SAFETY: `function` is of the context that is entered; `extra` names a buffer of `size`
        // bytes, which the driver copies before it returns. The caller guarantees that the kernel
        // may use the addresses in it until the stream is synchronised.
        context.check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                tx,
                ty,
                tz,
                launch.shared,
                self.stream.raw(),
                ptr::null_mut(),
                extra.as_mut_ptr(),
            )
        })
    }

    /// Launches kernels one after the other, waits, and returns the seconds that each took.
    ///
    /// # Errors
    /// As for [`Launcher::launch`]; also an error of a kernel.
    ///
    /// # Safety
    /// As for [`Launcher::launch`], for each of them.
    pub(super) unsafe fn time(&self, launches: &[Launch]) -> Result<Vec<f64>, EngineError> {
        let _entered = self.stream.context().enter()?;
        let mut events = Vec::with_capacity(launches.len() + 1);
        events.push(TimedEvent::new(&self.stream)?);
        events[0].record()?;
        for launch in launches {
            // SAFETY: `launch` is one of the `launches`. The caller guarantees that the addresses
            // in its parameters are of memory that its kernel may use until the stream is
            // synchronised, below.
            unsafe { self.launch(launch)? };
            let event = TimedEvent::new(&self.stream)?;
            event.record()?;
            events.push(event);
        }
        self.stream.synchronize()?;
        events.windows(2).map(|two| two[1].since(&two[0])).collect()
    }
}

/// A CUDA event with a time stamp. The context is current to the thread that uses the event.
struct TimedEvent<'a> {
    stream: &'a Stream,
    raw: sys::CUevent,
}

impl<'a> TimedEvent<'a> {
    /// Creates an event.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver has no resources for the event.
    fn new(stream: &'a Stream) -> Result<TimedEvent<'a>, EngineError> {
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as c_uint;
        // SAFETY: `raw` is a valid place for the handle.
        let code = unsafe { sys::cuEventCreate(&mut raw, flags) };
        stream.context().check("cuEventCreate", code)?;
        Ok(TimedEvent { stream, raw })
    }

    /// Records the event behind all work that was asked for.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver reports an error, of this call or of earlier work.
    fn record(&self) -> Result<(), EngineError> {
        // SAFETY: this object owns the event and borrows the stream, and both are of the stream's
        // context.
        let code = unsafe { sys::cuEventRecord(self.raw, self.stream.raw()) };
        self.stream.context().check("cuEventRecord", code)
    }

    /// Seconds from `earlier` to this event, to about half a microsecond (CUDA driver API,
    /// `cuEventElapsedTime`). The stream has reached both.
    ///
    /// # Errors
    /// As for [`record`](TimedEvent::record).
    fn since(&self, earlier: &TimedEvent<'_>) -> Result<f64, EngineError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events were recorded on the same stream; `milliseconds` is a place for the
        // result.
        let code = unsafe { sys::cuEventElapsedTime(&mut milliseconds, earlier.raw, self.raw) };
        self.stream.context().check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for TimedEvent<'_> {
    fn drop(&mut self) {
        // SAFETY: this object owns the event. The driver keeps what pending work needs of it; in a
        // lost context the call fails, and the event goes with the context.
        unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}
