//! Events: points in a stream that others can wait for.
//!
//! The requests of a session are numbered and done in order, so an event is a session and a number.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::{ggml_backend_dev_t, ggml_backend_event, ggml_backend_event_t};
use crate::ffi::object;
use crate::session::{Session, SessionError};

/// What ggml's event object points to.
#[derive(Default)]
pub(crate) struct Event {
    /// Where it was recorded last. Nothing before the first time, which counts as passed.
    point: Mutex<Option<(Arc<Session>, u64)>>,
}

impl Event {
    /// An event that has passed, in ggml's form.
    pub(crate) fn init(device: ggml_backend_dev_t) -> ggml_backend_event_t {
        Box::into_raw(Box::new(ggml_backend_event {
            device,
            context: Box::into_raw(Box::new(Event::default())).cast(),
        }))
    }

    /// The event behind ggml's object; `None` when that is null.
    ///
    /// # Safety
    ///
    /// `event` must be null or made by [`Event::init`] and not yet freed.
    pub(crate) unsafe fn of<'a>(event: ggml_backend_event_t) -> Option<&'a Event> {
        // SAFETY: the caller's promise; the context was set by `init`.
        unsafe {
            object(
                object(event.cast_const())?
                    .context
                    .cast_const()
                    .cast::<Event>(),
            )
        }
    }

    /// Frees ggml's object and what is behind it.
    ///
    /// # Safety
    ///
    /// As for [`Event::of`], and nobody may use the event after this.
    pub(crate) unsafe fn free(event: ggml_backend_event_t) {
        if !event.is_null() {
            // SAFETY: both boxes were made in `init`; the caller gives them up.
            drop(unsafe { Box::from_raw(Box::from_raw(event).context.cast::<Event>()) });
        }
    }

    /// Puts the event behind everything that the session has been asked for so far.
    pub(crate) fn record(&self, session: &Arc<Session>) {
        *self.point() = Some((Arc::clone(session), session.mark()));
    }

    /// Returns when the event has passed.
    pub(crate) fn synchronize(&self) {
        let point = self.point().clone();
        if let Some((session, mark)) = point {
            match session.wait_for(mark) {
                Ok(()) | Err(SessionError::Lost(_)) => {} // said when it was lost, reported by the next graph
                Err(error) => tracing::error!("waiting for an event: {error}"),
            }
        }
    }

    /// Lets what `session` is asked for from now on be done behind the event.
    pub(crate) fn hold(&self, session: &Arc<Session>) {
        let is_elsewhere = self
            .point()
            .as_ref()
            .is_some_and(|(of, _)| !Arc::ptr_eq(of, session));
        // A session does everything in order. What another one does, it cannot see: then we wait for it.
        if is_elsewhere {
            self.synchronize();
        }
    }

    fn point(&self) -> MutexGuard<'_, Option<(Arc<Session>, u64)>> {
        self.point.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
