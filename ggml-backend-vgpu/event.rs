//! Events: points in the work of a backend that others can wait for.
//!
//! The requests of a session are numbered and done in order, so that an event is a session and a
//! request number.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::session::{Session, SessionError};

/// An event. An event that was never recorded has passed.
#[derive(Default)]
pub(crate) struct Event {
    /// The session, and the last request before the event.
    point: Mutex<Option<(Arc<Session>, u64)>>,
}

impl Event {
    /// Puts the event behind all requests of the session so far.
    pub(crate) fn record(&self, session: &Arc<Session>) {
        *self.point() = Some((Arc::clone(session), session.last_request()));
    }

    /// Waits until the requests before the event are done.
    pub(crate) fn synchronize(&self) {
        let point = self.point().clone();
        if let Some((session, request)) = point {
            match session.wait_for(request) {
                // The loss was logged when it happened, and the next graph reports it.
                Ok(()) | Err(SessionError::Lost(_)) => {}
                Err(error) => tracing::error!("cannot wait for an event: {error}"),
            }
        }
    }

    /// Orders the later requests of `session` behind the event.
    pub(crate) fn wait_on(&self, session: &Arc<Session>) {
        let is_elsewhere = self
            .point()
            .as_ref()
            .is_some_and(|(other, _)| !Arc::ptr_eq(other, session));
        // A session does everything in order. The executor cannot order two sessions, so the guest
        // waits.
        if is_elsewhere {
            self.synchronize();
        }
    }

    fn point(&self) -> MutexGuard<'_, Option<(Arc<Session>, u64)>> {
        self.point.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
