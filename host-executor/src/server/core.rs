//! The server: its listeners, its rules, its shutdown.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tracing::{Level, info, warn};
use vgpu_engine::Engine;
use vgpu_transport::link::stream::tls::Certificates;

use super::guest_thread;
use super::shared::{Entry, ServerState};
use super::watchdog;
use crate::dump_thread::write_into_log;
#[cfg(feature = "cuda")]
use crate::engine::AddressError;
#[cfg(feature = "cuda")]
use crate::gpu_monitor::GpuMonitor;
use crate::limits::Limits;
use crate::listener::threads::ListenerThreads;
use crate::listener::{GuestListener, IncomingGuest, ListenerId};
use crate::peer::Peer;
use crate::stats::Stats;
use crate::status::{StatusHandle, StatusSource as _};
use crate::stop::StopReason;
use crate::tenant_registry::{Rules, RulesError};
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

/// Serves guests on its devices until it is shut down.
pub struct Server {
    shared: Arc<ServerState>,
    listeners: ListenerThreads,
    is_stopped: bool,
}

impl Server {
    /// A server with one device and without listeners, for at most `max_sessions` sessions at once.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn new(engine: Arc<dyn Engine>, limits: Limits, max_sessions: usize) -> io::Result<Server> {
        Server::with_devices(vec![(engine, limits)], max_sessions)
    }

    /// A server without listeners, with a device for each engine and with the limits of its
    /// sessions, for at most `max_sessions` sessions at once. A guest sees the devices in this
    /// order. The limits of the process are those of the first device.
    ///
    /// # Errors
    /// No engine is given, or no thread can be started.
    pub fn with_devices(
        engines: Vec<(Arc<dyn Engine>, Limits)>,
        max_sessions: usize,
    ) -> io::Result<Server> {
        Ok(Server {
            shared: Arc::new(ServerState::new(engines, max_sessions)?),
            listeners: ListenerThreads::default(),
            is_stopped: false,
        })
    }

    /// Reports requests and turns that last long ([`Limits::slow`]) in the log, on a thread of its
    /// own. Calls `on_stuck` with the reason when the engine hangs ([`Limits::turn_time`]): no
    /// session of this process can compute any more, and some cannot end.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn watch(&self, on_stuck: impl Fn(&str) + Send + 'static) -> io::Result<()> {
        watchdog::start(&self.shared, on_stuck)
    }

    /// A handle that says, on any thread, whether the server makes progress. From this call on, the
    /// status expects that a thread [checks](Health::check) it about once a second.
    pub fn health(&self) -> Health {
        self.shared.main.beat();
        Health(Arc::clone(&self.shared))
    }

    /// Sets what the status says of a GPU of this machine that no engine uses: the GPU and the
    /// reason. Later calls have no effect.
    pub fn set_unused_gpu(&self, text: &str) {
        let _ = self.shared.unused_gpu.set(text.to_owned());
    }

    /// Reads once a second, on a thread of its own, what the driver says of the GPU of the engine
    /// of a device, by its index. `find` returns the PCI address of the GPU, or says why there is
    /// none. Later calls for the device have no effect.
    ///
    /// # Errors
    /// No thread can be started.
    #[cfg(feature = "cuda")]
    pub fn watch_gpu(
        &self,
        device: usize,
        find: impl FnMut() -> Result<String, AddressError> + Send + 'static,
    ) -> io::Result<()> {
        if let Some(device) = self.shared.devices.get(device) {
            let _ = device.gpu.set(GpuMonitor::of_cuda(find)?);
        }
        Ok(())
    }

    /// Sets the weight store of sessions that begin from now on. Each device has a store of its
    /// own, and all have the cache on disk. Later calls have no effect.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn share_weights(&self, weights: WeightStore) -> io::Result<()> {
        for device in &self.shared.devices[1..] {
            let _ = device.weights.set(weights.for_another_engine()?);
        }
        let _ = self.shared.devices[0].weights.set(weights);
        Ok(())
    }

    /// Applies rules. Without any, every guest may use all memory.
    ///
    /// # Errors
    /// [`RulesError`] if the quotas exceed an engine's memory, or a guest is given a device that
    /// there is not: nothing has changed.
    pub fn apply(&self, rules: Rules) -> Result<(), RulesError> {
        rules.check_devices(self.shared.devices.len())?;
        Ok(self.shared.registry.apply(rules)?)
    }

    /// Bytes of memory of the engine that has least among those of `devices`, or of all if none is
    /// named.
    pub fn memory_total(&self, devices: &[usize]) -> u64 {
        self.shared.registry.total(devices)
    }

    /// Accepts no new sessions from now on. [`Health::end_drained`] ends those that are open at
    /// `deadline`, if there is one.
    pub fn drain(&self, deadline: Option<Duration>) {
        self.shared.drain.begin(deadline);
    }

    /// Accepts sessions again. Returns whether the server did drain.
    pub fn undrain(&self) -> bool {
        self.shared.drain.undo()
    }

    /// Ends a session, because an operator wants it. Returns the name of its guest; `None`: there
    /// is no session with this number.
    pub fn kill_session(&self, id: u64) -> Option<String> {
        let sessions = self.shared.sessions();
        let entry = sessions.get(&id)?;
        entry.stop.set_for(StopReason::Killed);
        Some(entry.tenant.name().to_owned())
    }

    /// Ends the open sessions, because the time `limit` of a supervisor's drain has passed.
    pub(crate) fn end_drained(&self, limit: Duration) {
        self.shared.end_drained(limit);
    }

    /// Ends the open sessions of a guest that the rules name no longer. Returns their number.
    /// Nothing happens if the rules name the guest.
    pub fn end_removed(&self, guest: &str) -> usize {
        let sessions = self.shared.sessions();
        let is_of_guest = |entry: &&Entry| entry.tenant.name() == guest;
        let removed = { sessions.values() }
            .filter(is_of_guest)
            .filter(|entry| entry.tenant.is_removed());
        removed
            .map(|entry| entry.stop.set_for(StopReason::Removed))
            .count()
    }

    /// Removes all guests of a worker, and ends their sessions.
    pub(crate) fn remove_guests(&self) {
        let nobody = Rules {
            guests: Vec::new(),
            unnamed: None,
            overcommit: false,
        };
        // First: a program that is in its handshake gets no session afterwards.
        if let Err(error) = self.shared.registry.apply(nobody) {
            warn!("the rules without guests are refused: {error}; this is a bug of the host");
        }
        let sessions = self.shared.sessions();
        sessions
            .values()
            .for_each(|entry| entry.stop.set_for(StopReason::Removed));
    }

    /// Sets the certificates that guests over TCP are checked against. Later calls have no effect.
    pub fn use_certificates(&self, certificates: Certificates) {
        let _ = self.shared.certificates.set(certificates);
    }

    /// Ends the sessions whose guests could not connect with their certificates any more. Returns
    /// their number.
    pub fn recheck_certificates(&self) -> usize {
        let sessions = self.shared.sessions();
        let refused = sessions.iter().filter_map(|(&id, entry)| {
            let fault = self.shared.fault_of(&entry.certificates)?;
            entry.stop.set_for(StopReason::Refused(fault.clone()));
            Some((id, entry.peer.clone(), fault))
        });
        let refused: Vec<_> = refused.collect();
        drop(sessions);
        for (id, peer, fault) in &refused {
            warn!(session = id, %peer, "the session is ended: {fault}");
        }
        refused.len()
    }

    /// Changes how many guests are served at once. Connected guests stay.
    pub fn set_max_sessions(&self, max_sessions: usize) {
        self.shared
            .max_sessions
            .store(max_sessions, Ordering::Relaxed);
        self.shared.registry.set_places(max_sessions);
    }

    /// Says that all sessions are of one guest, which may have all of the host memory, until the
    /// next call of [`set_max_sessions`](Server::set_max_sessions).
    pub fn serve_one_guest(&self) {
        self.shared.registry.set_places(1);
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
        listener: impl GuestListener,
    ) -> io::Result<ListenerId> {
        let shared = Arc::clone(&self.shared);
        let stop = self.shared.stop.clone();
        if let Some(machine) = listener.machine() {
            shared.machines.add(machine);
        }
        self.listeners
            .start(stop, listener, move |listener, timeout| {
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

    /// The numbers of the connections that have ended without a session since the last call, at
    /// most the last 256.
    pub(crate) fn take_without_session(&self) -> Vec<u64> {
        self.shared.handshakes.take_failed()
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
        let end = Instant::now() + timeout;
        let mut sessions = self.shared.sessions();
        while sessions.keys().eq(known)
            && self.shared.handshakes.ids() == pending
            && !is_over.load(Ordering::Relaxed)
        {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            sessions = sessions.wait_timeout(&self.shared.changed, left);
        }
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
    /// returns when all sessions have ended, or when those that are left do nothing new for
    /// [`Limits::slow`].
    pub fn shutdown(mut self) -> Shutdown {
        self.stop()
    }

    fn stop(&mut self) -> Shutdown {
        if std::mem::replace(&mut self.is_stopped, true) {
            return Shutdown::Complete;
        }
        self.shared.stop.set();
        for device in &self.shared.devices {
            device.monitor.close();
        }
        self.listeners.close_all();
        self.shared.handshakes.close();
        let slow = self.shared.limits.slow;
        let period = (slow / 4).min(REMINDER_INTERVAL);
        let (mut before, mut unchanged) = (Vec::new(), Duration::ZERO);
        let (mut last_look, mut last_line) = (Instant::now(), Instant::now());
        let mut sessions = self.shared.sessions();
        while !sessions.is_empty() {
            sessions = sessions.wait_timeout(&self.shared.changed, period);
            // A process that could not run is not blamed for that time.
            let passed = last_look.elapsed().min(2 * period);
            last_look = Instant::now();
            let left = self.shared.activities.snapshot();
            let left = left.iter().filter(|one| sessions.contains_key(&one.id));
            let steps: Vec<_> = left.map(|one| (one.id, one.steps)).collect();
            unchanged = match steps == before {
                true => unchanged + passed,
                false => Duration::ZERO,
            };
            before = steps;
            if unchanged >= slow && !sessions.is_empty() {
                let count = sessions.len();
                drop(sessions);
                let why = format!("{count} sessions do not end, and did nothing new for {slow:?}");
                write_into_log(Level::ERROR, &self.shared.dump());
                return Shutdown::Stuck(why);
            }
            if last_line.elapsed() >= REMINDER_INTERVAL {
                last_line = Instant::now();
                let count = sessions.len();
                drop(sessions);
                info!("waiting for {count} sessions to end");
                sessions = self.shared.sessions();
            }
        }
        drop(sessions);
        for left_out in self.shared.session_log.rest() {
            warn!("{left_out}");
        }
        Shutdown::Complete
    }
}

/// How a shutdown has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shutdown {
    /// All sessions have ended.
    Complete,
    /// Some sessions do not end, for the given reason: their threads hang in a call of the engine.
    /// Only the end of the process ends them.
    Stuck(String),
}

/// Says whether a server makes progress.
#[derive(Clone)]
pub struct Health(Arc<ServerState>);

impl Health {
    /// Returns only if no thread keeps one of the locks that admission, status and shutdown need.
    pub fn check(&self) {
        self.0.probe_locks();
        self.0.main.beat();
    }

    /// Ends the open sessions if the server drains and the deadline has passed. Returns how many
    /// were told to end.
    pub fn end_drained(&self) -> usize {
        let Some(limit) = self.0.drain.take_due() else {
            return 0;
        };
        let count = self.0.end_drained(limit);
        self.0.drain.add_ended(count);
        if count > 0 {
            warn!("the deadline of the drain has passed: {count} sessions are ended");
        }
        count
    }

    /// Why an engine cannot work again in this process, as of its last answer. Does not call the
    /// engine.
    pub fn fatal_error(&self) -> Option<String> {
        let mut devices = self.0.devices.iter();
        devices.find_map(|device| device.monitor.fatal_error())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}
