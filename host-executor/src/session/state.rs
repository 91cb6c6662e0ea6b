//! The state of a session.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, warn};
use vgpu_engine::{Engine, MemoryInfo};
use vgpu_transport::wire::{DeviceCount, ProtocolVersion};

use super::buffers::Buffers;
use super::graphs::Graphs;
use super::outside::OutsideWork;
use super::weights_state::SessionWeights;
use crate::activity::{Activities, Activity, GraphInfo, ThreadState};
use crate::engine_monitor::EngineMonitor;
use crate::host_memory::HostMemory;
use crate::ledger::Ledger;
use crate::limits::Limits;
use crate::log_limit::{GUEST_LINES, LogLimit, SESSION_EVENTS};
use crate::policy::Policy;
use crate::pool::Pools;
use crate::sched::{Scheduler, Times, TurnEvent};
use crate::stats::{Counters, RequestKind, Stats};
use crate::tenant::{Tenant, new_tenant_id};
use crate::weights::{SharingDomain, WeightStore};

/// Buffers of at least this size belong to a model rather than to a graph; the log reports them at
/// the info level.
pub(super) const MODEL_SCALE: u64 = 64 << 20;

/// The host's side of one guest.
pub struct Session {
    /// The session's number, for people.
    pub(super) id: u64,
    /// The version of the messages, which HELLO chooses.
    pub(super) protocol: ProtocolVersion,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) scheduler: Arc<Scheduler>,
    pub(super) tenant: Arc<Tenant>,
    pub(super) limits: Limits,
    pub(super) pools: Pools,
    pub(super) counters: Arc<Counters>,
    pub(super) buffers: Buffers,
    pub(super) graphs: Graphs,
    pub(super) weights: SessionWeights,
    logged_events: u32,
    /// Limits the lines about all sessions of the tenant.
    pub(super) log: Arc<LogLimit>,
    /// What the thread of the session does, for others.
    pub(super) activity: Activity,
    pub(super) outside: OutsideWork,
    /// Asks the engine for its memory, for a session of a server.
    pub(super) monitor: Option<Arc<EngineMonitor>>,
    /// Other programs of the same virtual machine whose heartbeats have stopped.
    pub(super) silent: Option<Box<dyn Reclaim>>,
    /// The devices that the host has for the guest, for WELCOME.
    pub(super) devices: DeviceCount,
    /// Whether the host has a GPU that no engine uses, for WELCOME.
    pub(super) has_unused_gpu: bool,
    /// The registration of the link's memory with the device, once it has been tried.
    pub(super) pinned: Option<Option<Box<dyn Any + Send>>>,
    /// Whether the link can share memory with the guest.
    pub(super) can_share: bool,
}

/// Memory that a session can take from others that have no right to it any more.
pub(crate) trait Reclaim: Send {
    /// The bytes that they have.
    fn bytes(&self) -> u64;

    /// Ends those sessions, after a wait that shows that they are silent. Returns whether there
    /// were any.
    fn reclaim(&self) -> bool;
}

/// What the sessions of a server share.
pub(crate) struct SharedParts {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) scheduler: Arc<Scheduler>,
    pub(crate) limits: Limits,
    pub(crate) pools: Pools,
    pub(crate) monitor: Option<Arc<EngineMonitor>>,
    /// Limits the lines about all sessions of the tenant.
    pub(crate) log: Arc<LogLimit>,
    /// Other programs of the same virtual machine whose heartbeats have stopped.
    pub(crate) silent: Option<Box<dyn Reclaim>>,
    /// The devices that the server has for the guest.
    pub(crate) devices: DeviceCount,
    /// Whether the host has a GPU that no engine uses.
    pub(crate) has_unused_gpu: bool,
}

impl Session {
    /// A session of a guest that has the engine to itself. `id` is for people.
    pub fn new(id: u64, engine: Arc<dyn Engine>, limits: Limits) -> Session {
        let host = HostMemory::new(limits.host_memory, 1);
        let ledger = Ledger::new(engine.memory().total, host);
        let tenant = Tenant::unnamed(
            new_tenant_id(),
            "-".into(),
            Policy::default(),
            &ledger,
            Arc::default(),
        );
        let scheduler = Arc::new(Scheduler::new(engine.is_host_memory()));
        let shared = SharedParts {
            engine,
            scheduler,
            limits,
            pools: Pools::new(&limits),
            monitor: None,
            log: Arc::new(LogLimit::new(GUEST_LINES)),
            silent: None,
            devices: DeviceCount(1),
            has_unused_gpu: false,
        };
        let activity = Activities::new(1).begin(id, "-", "-");
        Session::of_tenant(id, shared, tenant, Arc::default(), activity)
    }

    /// A session of a tenant that shares the engine. Other threads may read `counters`, and what
    /// `activity` publishes.
    pub(crate) fn of_tenant(
        id: u64,
        shared: SharedParts,
        tenant: Arc<Tenant>,
        counters: Arc<Counters>,
        activity: Activity,
    ) -> Session {
        let SharedParts {
            engine,
            scheduler,
            limits,
            pools,
            monitor,
            log,
            silent,
            devices,
            has_unused_gpu,
        } = shared;
        Session {
            id,
            outside: OutsideWork::new(&scheduler, &tenant, engine.is_host_memory()),
            protocol: ProtocolVersion::CURRENT,
            engine,
            scheduler,
            tenant,
            limits,
            pools,
            counters,
            buffers: Buffers::default(),
            graphs: Graphs::default(),
            weights: SessionWeights::default(),
            logged_events: 0,
            log,
            activity,
            monitor,
            silent,
            devices,
            has_unused_gpu,
            pinned: None,
            can_share: false,
        }
    }

    /// The same session, which shares weights with other sessions of `domain`.
    #[must_use]
    pub fn sharing(self, weights: &WeightStore, domain: &str) -> Session {
        let domain = SharingDomain {
            name: domain,
            is_of_session: false,
        };
        self.sharing_as(weights, domain, domain.name)
    }

    /// As [`sharing`](Session::sharing). `prover` answers for wrong proofs of contents, in all its
    /// sessions.
    #[must_use]
    pub(crate) fn sharing_as(
        mut self,
        weights: &WeightStore,
        domain: SharingDomain<'_>,
        prover: &str,
    ) -> Session {
        self.weights = SessionWeights::new(weights.for_domain(domain, prover));
        self
    }

    /// What the session has done so far.
    pub fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    /// The name that the guest gave in HELLO. `None` before HELLO.
    pub(super) fn guest(&self) -> Option<&str> {
        self.counters.guest.get().map(String::as_str)
    }

    /// What the guest sees as the memory of its device. A server's session does not call the engine
    /// for it, so that HELLO is answered while a call of another session hangs, and takes an answer
    /// that is a few milliseconds old. What an allocation would take from silent programs is free.
    pub(super) fn memory(&self) -> MemoryInfo {
        let MemoryInfo { total, free } = match &self.monitor {
            Some(monitor) => {
                let device = monitor.recent_memory(self.tenant.memory_change_count());
                self.tenant.memory_of(device)
            }
            None => self.tenant.memory_of(self.engine.memory()),
        };
        let silent = self.silent.as_ref().map_or(0, |silent| silent.bytes());
        MemoryInfo {
            total,
            free: free.saturating_add(silent).min(total),
        }
    }

    /// Whether the next event may be logged at the info or warn level. Counts the event, for this
    /// session and for all sessions of the tenant.
    pub(super) fn may_log(&mut self) -> bool {
        self.logged_events = self.logged_events.saturating_add(1);
        if self.logged_events > SESSION_EVENTS {
            self.log.add_suppressed(1);
            return false;
        }
        if !self.log.passes(Instant::now()) {
            return false;
        }
        if self.logged_events == SESSION_EVENTS {
            warn!(
                "{SESSION_EVENTS} events in this session; further events are logged at the \
                 debug level"
            );
        }
        true
    }

    /// Logs a problem of the host with weights, which a guest may cause any number of times.
    pub(super) fn warn_of_weights(&mut self, what: fmt::Arguments<'_>) {
        match self.may_log() {
            true => warn!("{what}"),
            false => debug!("{what}"),
        }
    }

    /// Publishes the numbers of buffers and graphs and their bytes.
    pub(super) fn update_gauges(&self) {
        let counters = &self.counters;
        counters.buffers.set(self.buffers.len() as u64);
        counters.buffer_bytes.set(self.buffers.bytes());
        counters.graphs.set(self.graphs.len() as u64);
        counters.weights_shared.set(self.weights.shared());
    }
}

/// Publishes what a run of a graph does, or another request that takes turns, and counts the turns.
/// The counters are current during a long graph.
pub(super) fn observe_turn(
    activity: &Activity,
    counters: &Counters,
    (request, kind): (u64, RequestKind),
    info: &GraphInfo,
    event: TurnEvent,
) {
    match event {
        TurnEvent::Waits => activity.request(ThreadState::WaitsForEngine, kind, request),
        TurnEvent::Begins => {
            activity.request(ThreadState::Executes, kind, request);
            activity.begin_turn(request, info);
        }
        TurnEvent::Ended(times) => {
            activity.end_turn();
            activity.count_turns(request, times.turns, times.queued);
            count_turn(counters, times);
        }
    }
}

/// Adds the times of a turn to the session's counters.
fn count_turn(counters: &Counters, turn: Times) {
    let nanoseconds = |time: Duration| time.as_nanos() as u64;
    counters.busy_nanoseconds.add(nanoseconds(turn.ran));
    counters.queued_nanoseconds.add(nanoseconds(turn.queued));
    counters.turns.add(turn.turns);
    counters.batch_members.add(turn.members);
}
