//! The server: its listeners, its rules, its shutdown.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tracing::{info, warn};
use vgpu_engine::Engine;
use vgpu_transport::link::stream::tls::Certificates;

use super::guest_thread;
use super::shared::{Entry, Shared};
use crate::limits::Limits;
use crate::listener::threads::ListenerThreads;
use crate::listener::{GuestListener, IncomingGuest, ListenerId};
use crate::peer::Peer;
use crate::stats::Stats;
use crate::status::StatusHandle;
use crate::tenant_registry::{QuotaError, Rules};
use crate::weights::WeightStore;

/// How often a shutdown that waits for sessions says so.
const REMINDER_INTERVAL: Duration = Duration::from_secs(5);

/// A running session, for people and for metrics.
#[derive(Debug, Clone)]
pub struct SessionInfo {
    /// The number of the session.
    pub id: u64,
    /// The guest at the other end of the link.
    pub peer: Peer,
    /// The guest's name in the configuration.
    pub tenant: String,
    /// The name that the guest gave in HELLO. `None` before HELLO.
    pub guest: Option<String>,
    /// Time since the guest connected.
    pub age: Duration,
    /// What the session has done.
    pub stats: Stats,
}

/// Serves guests on one engine until it is shut down.
pub struct Server {
    shared: Arc<Shared>,
    listeners: ListenerThreads,
}

impl Server {
    /// A server without listeners, for at most `max_sessions` guests at once.
    pub fn new(engine: Arc<dyn Engine>, limits: Limits, max_sessions: usize) -> Server {
        Server {
            shared: Arc::new(Shared::new(engine, limits, max_sessions)),
            listeners: ListenerThreads::default(),
        }
    }

    /// Sets the weight store of sessions that begin from now on. Later calls have no effect.
    pub fn share_weights(&self, weights: WeightStore) {
        let _ = self.shared.weights.set(weights);
    }

    /// Applies rules. Without any, every guest may use all memory.
    ///
    /// # Errors
    /// [`QuotaError`] if the quotas exceed the engine's memory: nothing has changed.
    pub fn apply(&self, rules: Rules) -> Result<(), QuotaError> {
        self.shared.registry.apply(rules)
    }

    /// Sets the certificates that guests over TCP are checked against. Later calls have no effect.
    pub fn use_certificates(&self, certificates: Certificates) {
        let _ = self.shared.certificates.set(certificates);
    }

    /// Ends the sessions whose guests could not connect with their certificates any more. Returns
    /// their number.
    pub fn recheck_certificates(&self) -> usize {
        let sessions = self.shared.sessions();
        let refused = sessions.iter().filter(|(id, entry)| {
            let fault = self.shared.fault_of(&entry.certificates);
            if let Some(fault) = &fault {
                warn!(session = *id, peer = %entry.peer, "the session is ended: {fault}");
                entry.stop.refuse(fault.to_string());
            }
            fault.is_some()
        });
        refused.count()
    }

    /// Changes how many guests are served at once. Connected guests stay.
    pub fn set_max_sessions(&self, max_sessions: usize) {
        self.shared
            .max_sessions
            .store(max_sessions, Ordering::Relaxed);
    }

    /// Accepts guests on a listener for all guests.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn listen(&mut self, listener: impl GuestListener) -> io::Result<ListenerId> {
        self.listen_for(None, listener)
    }

    /// Accepts guests on a listener. With a name, everyone who connects to the listener is that
    /// guest.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn listen_for(
        &mut self,
        guest: Option<String>,
        mut listener: impl GuestListener,
    ) -> io::Result<ListenerId> {
        let shared = Arc::clone(&self.shared);
        self.listeners
            .start(self.shared.stop.clone(), move |timeout| {
                if let Some(incoming) = listener.accept(timeout)? {
                    guest_thread::start(&shared, shared.new_id(), guest.as_deref(), incoming);
                }
                Ok(())
            })
    }

    /// Stops accepting on a listener and drops it. Connected guests stay.
    pub fn close(&mut self, listener: ListenerId) {
        self.listeners.close(listener);
    }

    /// A handle that takes snapshots of this server on any thread.
    pub fn status_handle(&self) -> StatusHandle {
        StatusHandle::new(Arc::clone(&self.shared) as _)
    }

    /// Serves a guest that another process has accepted, under the session number that it has
    /// there.
    pub(crate) fn serve_guest(&self, id: u64, guest: Option<&str>, incoming: IncomingGuest) {
        guest_thread::start(&self.shared, id, guest, incoming);
    }

    /// The numbers of the connections that have no session yet.
    pub fn pending(&self) -> Vec<u64> {
        self.shared.handshakes.ids()
    }

    /// Waits until the open sessions differ from `known`, or the connections that have no session
    /// from `pending`, until `is_over` is set, or `timeout` has passed.
    pub(crate) fn wait_for_change(
        &self,
        known: &[u64],
        pending: &[u64],
        is_over: &AtomicBool,
        timeout: Duration,
    ) {
        let sessions = self.shared.sessions();
        let is_same = |sessions: &mut BTreeMap<u64, Entry>| {
            sessions.keys().eq(known)
                && self.shared.handshakes.ids() == pending
                && !is_over.load(Ordering::Relaxed)
        };
        let waited = self
            .shared
            .changed
            .wait_timeout_while(sessions, timeout, is_same);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Makes [`wait_for_change`](Server::wait_for_change) check its conditions again.
    pub(crate) fn wake_waiters(&self) {
        self.shared.wake_waiters();
    }

    /// The open sessions.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let sessions = self.shared.sessions();
        sessions
            .iter()
            .map(|(&id, entry)| SessionInfo {
                id,
                peer: entry.peer.clone(),
                tenant: entry.tenant.name().to_owned(),
                guest: entry.counters.guest.get().cloned(),
                age: entry.since.elapsed(),
                stats: entry.counters.snapshot(),
            })
            .collect()
    }

    /// Closes the listeners, cancels the graphs that run, lets each session tell its guest, and
    /// returns when all sessions have ended.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.stop.set();
        self.listeners.close_all();
        self.shared.handshakes.close();
        let mut sessions = self.shared.sessions();
        while !sessions.is_empty() {
            let (guard, wait) = self
                .shared
                .changed
                .wait_timeout(sessions, REMINDER_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner);
            sessions = guard;
            if wait.timed_out() {
                info!("waiting for {} sessions to end", sessions.len());
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
