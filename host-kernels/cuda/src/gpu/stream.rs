//! The CUDA stream of a GPU, its events, and waiting for them.

use std::ffi::c_uint;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys;
use vgpu_engine::EngineError;
use vgpu_transport::lock::lock;

use super::completion::Completion;
use super::context::Context;
use super::error::{GpuError, check};
use crate::device::{Event, MappedHostMemory};

/// The number of CUDA events. A caller that waits for an older [`Event`] waits for a later one.
const EVENTS: u64 = 8;

/// The one stream of a GPU: all work runs in the order in which it was asked for.
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    events: Mutex<EventRing>,
    /// The completion word, if the GPU can write to host memory in stream order.
    completion: OnceLock<Completion>,
}

/// CUDA events, reused in turn.
struct EventRing {
    raw: [sys::CUevent; EVENTS as usize],
    last: u64,
}

// SAFETY: stream and events are driver handles, which any thread may use with the context current;
// every method enters the context first.
unsafe impl Send for Stream {}
// SAFETY: the driver synchronises calls of several threads on one stream, and `events` has a lock.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates the stream and its events in `context`, which is current to the calling thread.
    ///
    /// # Errors
    /// [`GpuError::Driver`] if the driver has no resources for the stream or an event.
    pub(super) fn new(context: Arc<Context>) -> Result<Stream, GpuError> {
        let mut raw = ptr::null_mut();
        let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: `raw` is a valid place for the handle; the context is current. The stream is not
        // destroyed by itself: it goes with the context.
        let code = unsafe { sys::cuStreamCreate(&mut raw, non_blocking) };
        check("cuStreamCreate", code)?;
        let mut events = [ptr::null_mut(); EVENTS as usize];
        for event in &mut events {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint
                | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint;
            // SAFETY: `event` is a valid place for the handle; the context is current. Events go
            // with the context, too.
            let code = unsafe { sys::cuEventCreate(event, flags) };
            check("cuEventCreate", code)?;
        }
        Ok(Stream {
            context,
            raw,
            events: Mutex::new(EventRing {
                raw: events,
                last: 0,
            }),
            completion: OnceLock::new(),
        })
    }

    /// Polls a word of host memory before it waits in the driver, if the GPU can write there.
    /// `word` is 4 zero bytes that nothing else uses.
    ///
    /// # Safety
    /// The context is current to the calling thread, and `word` is mapped for as long as the
    /// context exists.
    pub(super) unsafe fn set_completion(&self, word: MappedHostMemory) {
        // SAFETY: `self.raw` is a stream of `self.context`, which the caller has made current. The
        // caller guarantees that `word` stays mapped while the context exists, and `synchronize`
        // uses the result only while the context is entered.
        if let Some(completion) = unsafe { Completion::new(word, self.raw) } {
            let _ = self.completion.set(completion);
        }
    }

    /// The context of the stream.
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's handle, valid while the context exists.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Records an event behind all work that was asked for.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the driver reports an error, of this call or of earlier work.
    pub(super) fn record_event(&self) -> Result<Event, EngineError> {
        let _entered = self.context.enter()?;
        let mut events = lock(&self.events);
        let next = events.last + 1;
        let event = events.raw[(next % EVENTS) as usize];
        // SAFETY: event and stream belong to the context, which is entered.
        self.context.check("cuEventRecord", unsafe {
            sys::cuEventRecord(event, self.raw)
        })?;
        events.last = next;
        Ok(Event(next))
    }

    /// Waits for an event, or for a later event that has taken its place.
    ///
    /// # Errors
    /// As for [`Stream::record_event`].
    pub(super) fn wait_event(&self, event: Event) -> Result<(), EngineError> {
        let _entered = self.context.enter()?;
        let raw = {
            let events = lock(&self.events);
            events.raw[(event.0 % EVENTS) as usize]
        };
        // SAFETY: the event belongs to the context, which stays entered while this call waits.
        self.context.check("cuEventSynchronize", unsafe {
            sys::cuEventSynchronize(raw)
        })
    }

    /// Waits for all work that was asked for.
    ///
    /// # Errors
    /// As for [`Stream::record_event`].
    pub(super) fn synchronize(&self) -> Result<(), EngineError> {
        let _entered = self.context.enter()?;
        // SAFETY: the context is entered, so it is current, and stays while this call waits.
        let is_done = { self.completion.get() }.is_some_and(|word| unsafe { word.wait(self.raw) });
        if is_done {
            return Ok(());
        }
        // SAFETY: the stream belongs to the context, which is entered.
        self.context.check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(self.raw)
        })
    }
}
