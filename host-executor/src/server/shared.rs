//! What the threads of a server share.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use vgpu_engine::Engine;
use vgpu_transport::link::stream::tls::{CertificateFault, Certificates};
use vgpu_transport::lock::lock;
use vgpu_transport::shm::liveness::Silence;

use crate::activity::Activities;
use crate::drain::Drain;
use crate::engine_monitor::EngineMonitor;
use crate::gpu_monitor::GpuWatch;
use crate::handshakes::Handshakes;
use crate::heartbeat::Heartbeat;
use crate::limits::Limits;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::log_limit::LogLimit;
use crate::peer::Peer;
use crate::pool::Pools;
use crate::sched::Scheduler;
use crate::session::{END_KINDS, SessionEnd};
use crate::session_log::SessionLog;
use crate::stats::Counters;
use crate::stop::StopFlag;
use crate::tenant::Tenant;
use crate::tenant_registry::TenantRegistry;
use crate::weights::WeightStore;

/// Threads of which it is known what they do: more than there are handshakes and sessions by
/// default. Each takes some hundred bytes.
const MAX_ACTIVITIES: usize = 1024;

/// The engine, the tenants, and the table of sessions.
pub(super) struct ServerState {
    pub(super) engine: Arc<dyn Engine>,
    pub(super) since: Instant,
    pub(super) scheduler: Arc<Scheduler>,
    pub(super) registry: TenantRegistry,
    /// The GPU of this machine that the engine does not use, and why.
    pub(super) unused_gpu: OnceLock<String>,
    /// What the driver says of the GPU of the engine.
    pub(super) gpu: OnceLock<GpuWatch>,
    pub(super) weights: OnceLock<WeightStore>,
    pub(super) limits: Limits,
    pub(super) pools: Pools,
    /// Guests served at once.
    pub(super) max_sessions: AtomicUsize,
    /// The certificates of TCP links.
    pub(super) certificates: OnceLock<Certificates>,
    pub(super) stop: StopFlag,
    pub(super) drain: Drain,
    last_id: AtomicU64,
    sessions: RankedMutex<BTreeMap<u64, Entry>>,
    /// Connections that have no session yet.
    pub(super) handshakes: Arc<Handshakes>,
    /// Limits the lines about guests that get no session.
    pub(super) refusal_log: LogLimit,
    /// Limits the lines about the sessions of each guest.
    pub(super) session_log: SessionLog,
    /// What each thread that serves a guest does.
    pub(super) activities: Arc<Activities>,
    /// Asks the engine for its memory, and whether it still works.
    pub(super) monitor: Arc<EngineMonitor>,
    /// How many sessions have ended, by [`END_KINDS`].
    pub(super) ended: [AtomicU64; END_KINDS.len()],
    /// Notified when a session has begun or ended, and when a handshake has failed.
    pub(super) changed: Condvar,
    /// What the watchdog has found last.
    found: Mutex<Found>,
    /// Of the watchdog, and of the thread that checks [`Health`](super::Health).
    pub(super) watchdog: Heartbeat,
    pub(super) main: Heartbeat,
}

/// What the watchdog finds.
#[derive(Debug, Clone, Default)]
pub(super) struct Found {
    /// What the engine has not come back from for long.
    pub(super) hang: Option<String>,
    /// Who has waited long for an engine that nobody has.
    pub(super) starved: Option<String>,
}

/// A session in the table of sessions.
pub(super) struct Entry {
    pub(super) peer: Peer,
    pub(super) since: Instant,
    pub(super) counters: Arc<Counters>,
    pub(super) tenant: Arc<Tenant>,
    /// The certificates that the guest has shown, in DER, its own first.
    pub(super) certificates: Vec<Vec<u8>>,
    pub(super) stop: StopFlag,
    /// How long the guest has had no heartbeat, where the link tells.
    pub(super) silence: Option<Silence>,
}

impl ServerState {
    /// # Errors
    /// No thread can be started.
    pub(super) fn new(
        engine: Arc<dyn Engine>,
        limits: Limits,
        max_sessions: usize,
    ) -> io::Result<ServerState> {
        let monitor = EngineMonitor::start(Arc::clone(&engine))?;
        Ok(ServerState {
            registry: TenantRegistry::new(engine.memory().total),
            since: Instant::now(),
            scheduler: Arc::default(),
            engine,
            unused_gpu: OnceLock::new(),
            gpu: OnceLock::new(),
            weights: OnceLock::new(),
            pools: Pools::new(&limits),
            limits,
            max_sessions: AtomicUsize::new(max_sessions),
            certificates: OnceLock::new(),
            stop: StopFlag::new(),
            drain: Drain::default(),
            last_id: AtomicU64::new(0),
            sessions: RankedMutex::new(Rank::Sessions, BTreeMap::new()),
            handshakes: Handshakes::new(limits.handshakes),
            refusal_log: LogLimit::new(10),
            session_log: SessionLog::default(),
            activities: Activities::new(MAX_ACTIVITIES),
            monitor,
            ended: [const { AtomicU64::new(0) }; END_KINDS.len()],
            changed: Condvar::new(),
            found: Mutex::default(),
            watchdog: Heartbeat::new(),
            main: Heartbeat::new(),
        })
    }

    /// Counts the end of a session, or of a connection that gets none.
    pub(super) fn count_end(&self, end: &SessionEnd) {
        self.ended[end.kind()].fetch_add(1, Ordering::Relaxed);
    }

    /// Publishes what the watchdog has found.
    pub(super) fn set_found(&self, found: Found) {
        *lock(&self.found) = found;
        self.watchdog.beat();
    }

    /// What the watchdog has found last.
    pub(super) fn found(&self) -> Found {
        lock(&self.found).clone()
    }

    /// Takes each lock that admission, status and shutdown need, and releases it. Returns only if
    /// no thread keeps one of them.
    pub(super) fn probe_locks(&self) {
        drop(self.sessions());
        let _ = self.handshakes.ids();
        let _ = self.registry.tenants();
        let _ = self.registry.total();
        self.scheduler.probe();
        self.monitor.probe();
    }

    /// The table of sessions.
    pub(super) fn sessions(&self) -> RankedGuard<'_, BTreeMap<u64, Entry>> {
        self.sessions.lock()
    }

    /// Why a guest with these certificates could not connect now.
    pub(super) fn fault_of(&self, shown: &[Vec<u8>]) -> Option<CertificateFault> {
        self.certificates.get()?.check_guest(shown).err()
    }

    /// Ends all open sessions, because the time `limit` of a drain has passed. Returns their
    /// number.
    pub(super) fn end_drained(&self, limit: Duration) -> usize {
        let sessions = self.sessions();
        sessions.values().for_each(|entry| entry.stop.drain(limit));
        sessions.len()
    }

    /// Makes all that wait for `changed` check their conditions again.
    pub(super) fn wake_waiters(&self) {
        // Under the lock: a thread between its check and its wait would miss the notification.
        let sessions = self.sessions();
        self.changed.notify_all();
        drop(sessions);
    }

    /// A session number that this server has not used.
    pub(super) fn new_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }
}
