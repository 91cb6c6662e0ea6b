//! What the threads of a server share.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, OnceLock};
use std::time::{Duration, Instant};

use vgpu_engine::Engine;
use vgpu_transport::link::stream::tls::{CertificateFault, Certificates};
use vgpu_transport::shm::liveness::Silence;

use super::device::DeviceState;
use crate::activity::Activities;
use crate::drain::Drain;
use crate::handshakes::Handshakes;
use crate::heartbeat::Heartbeat;
use crate::host_memory::HostMemory;
use crate::limits::Limits;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::log_limit::LogLimit;
use crate::machine_watch::MachineWatches;
use crate::peer::Peer;
use crate::pool::Pools;
use crate::sched::TenantId;
use crate::session::{END_KINDS, SessionEnd};
use crate::session_log::SessionLog;
use crate::stats::Counters;
use crate::stop::{StopFlag, StopReason};
use crate::tenant::Tenant;
use crate::tenant_registry::TenantRegistry;

/// Threads of which it is known what they do: more than there are handshakes and sessions by
/// default. Each takes some hundred bytes.
const MAX_ACTIVITIES: usize = 1024;

/// The devices, the tenants, and the table of sessions.
pub(super) struct ServerState {
    /// At least one.
    pub(super) devices: Vec<DeviceState>,
    pub(super) since: Instant,
    pub(super) registry: TenantRegistry,
    /// The GPU of this machine that no engine uses, and why.
    pub(super) unused_gpu: OnceLock<String>,
    /// The limits of the process and of handshakes.
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
    /// The virtual machines of the listeners.
    pub(super) machines: MachineWatches,
    /// How many sessions have ended, by [`END_KINDS`].
    pub(super) ended: [AtomicU64; END_KINDS.len()],
    /// Notified when a session has begun or ended, and when a handshake has failed.
    pub(super) changed: Condvar,
    /// Of the watchdog, and of the thread that checks [`Health`](super::Health).
    pub(super) watchdog: Heartbeat,
    pub(super) main: Heartbeat,
}

/// A session in the table of sessions.
pub(super) struct Entry {
    pub(super) peer: Peer,
    /// The index of the device.
    pub(super) device: usize,
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
    /// A state with a device for each engine, at least one, and with the limits of its sessions.
    /// The limits of the process are those of the first device.
    ///
    /// # Errors
    /// No engine is given, or no thread can be started.
    pub(super) fn new(
        engines: Vec<(Arc<dyn Engine>, Limits)>,
        max_sessions: usize,
    ) -> io::Result<ServerState> {
        let Some(&(_, limits)) = engines.first() else {
            let reason = "a server needs an engine";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        };
        let devices = { engines.into_iter() }
            .map(|(engine, limits)| DeviceState::new(engine, limits))
            .collect::<io::Result<Vec<_>>>()?;
        let totals = devices.iter().map(|device| device.engine.memory().total);
        Ok(ServerState {
            registry: TenantRegistry::new(
                totals,
                HostMemory::new(limits.host_memory, max_sessions),
            ),
            devices,
            since: Instant::now(),
            unused_gpu: OnceLock::new(),
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
            machines: MachineWatches::default(),
            ended: [const { AtomicU64::new(0) }; END_KINDS.len()],
            changed: Condvar::new(),
            watchdog: Heartbeat::new(),
            main: Heartbeat::new(),
        })
    }

    /// Counts the end of a session, or of a connection that gets none.
    pub(super) fn count_end(&self, end: &SessionEnd) {
        self.ended[end.kind()].fetch_add(1, Ordering::Relaxed);
    }

    /// Takes each lock that admission, status and shutdown need, and releases it. Returns only if
    /// no thread keeps one of them.
    pub(super) fn probe_locks(&self) {
        drop(self.sessions());
        let _ = self.handshakes.ids();
        let _ = self.registry.tenants();
        let _ = self.registry.total(&[]);
        self.devices.iter().for_each(DeviceState::probe_locks);
    }

    /// How much time a tenant owes on the device where it owes most, if any scheduler has something
    /// to remember of it.
    pub(super) fn debt(&self, tenant: TenantId) -> Option<Duration> {
        let devices = self.devices.iter();
        devices
            .filter_map(|device| device.scheduler.debt(tenant))
            .max()
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
        { sessions.values() }.for_each(|entry| entry.stop.set_for(StopReason::Drained(limit)));
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
