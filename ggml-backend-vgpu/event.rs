//! Events: points in the work of a backend that others can wait for.
//!
//! The requests of a session are numbered and done in order, so that an event is a session and a
//! request number.

use std::sync::Arc;

use vgpu_transport::fork::PerProcess;

use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::session::{Session, SessionError};

/// An event. An event that was never recorded has passed. In a forked child no event was.
#[derive(Default)]
pub(crate) struct Event {
    point: PerProcess<RankedMutex<Option<Point>>>,
}

/// The session, and the last request before the event.
type Point = (Arc<Session>, u64);

impl Event {
    /// Puts the event behind all requests of the session so far.
    pub(crate) fn record(&self, session: &Arc<Session>) {
        if let Some(request) = session.last_request() {
            *self.point() = Some((Arc::clone(session), request));
        }
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

    fn point(&self) -> RankedGuard<'_, Option<Point>> {
        let point = self
            .point
            .get_or_init(|| RankedMutex::new(Rank::Innermost, None));
        point.lock()
    }
}
