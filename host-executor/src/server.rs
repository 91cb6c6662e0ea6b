//! The server: guests come in through doors, each gets a thread and a session.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tracing::{error, info, info_span, warn};
use vgpu_engine::Engine;
use vgpu_transport::link::HostEnd;

use crate::doors::{DoorId, Doors};
use crate::identity::Identity;
use crate::limits::Limits;
use crate::roster::{Roster, Rules, TooMuchPromised};
use crate::sched::Scheduler;
use crate::session::{Ending, Session, Stop, dismiss};
use crate::stats::{Counters, Stats};
use crate::status::Watch;
use crate::tenant::{LinkKind, Tenant};
use crate::weights::Weights;

/// Guests beyond the limit that are told so at once. More are turned away without a word.
const DISMISSALS: usize = 16;

/// How often a shutdown that waits for running graphs says so.
const REMINDER: Duration = Duration::from_secs(5);

/// Where guests come in: a listener of some link.
pub trait Door: Send + 'static {
    /// Waits up to `timeout` for a guest. Nothing the guest does may hold this up.
    fn knock(&mut self, timeout: Duration) -> io::Result<Option<Guest>>;
}

/// A guest that has connected.
pub struct Guest {
    /// Who it is, as far as the host can know without asking.
    pub peer: Peer,
    /// Brings the link up, on the guest's own thread: this may wait for the guest.
    pub open: Open,
}

/// Brings a link up.
pub type Open = Box<dyn FnOnce() -> Result<Box<dyn HostEnd>, Box<dyn Error>> + Send>;

/// Who a guest is, by the word of the host's kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The endpoint it came in through.
    pub endpoint: String,
    /// The kind of link.
    pub link: LinkKind,
    /// Its virtual machine, by vsock number, where the link tells.
    pub machine: Option<u32>,
    /// Its process and user, where the link tells.
    pub process: Option<Process>,
    /// The certificate that it has shown, once it has.
    pub certificate: Option<Identity>,
}

/// A process of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its process id; 0 when it is in a namespace that the host cannot see into.
    pub pid: i32,
    /// Its user id.
    pub uid: u32,
    /// The name of its program, where that could be found out.
    pub program: Option<String>,
}

#[cfg(test)]
impl Peer {
    /// Somebody.
    pub(crate) fn test() -> Peer {
        Peer {
            endpoint: "test".into(),
            link: LinkKind::Unix,
            machine: None,
            process: None,
            certificate: None,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.endpoint)?;
        if let Some(Process { pid, uid, program }) = &self.process {
            let program = program.as_deref().unwrap_or("?");
            write!(f, " {program} pid {pid} uid {uid}")?;
        }
        Ok(())
    }
}

/// A running session, for people and for metrics.
#[derive(Debug, Clone)]
pub struct SessionInfo {
    /// Its number.
    pub id: u64,
    /// Who the guest is.
    pub peer: Peer,
    /// What the host's configuration calls the guest.
    pub tenant: String,
    /// What the guest calls itself; `None` until it has said hello.
    pub guest: Option<String>,
    /// How long it has been there.
    pub age: Duration,
    /// What it has done.
    pub stats: Stats,
}

/// Serves guests on one engine until it is shut down.
pub struct Server {
    shared: Arc<Shared>,
    doors: Doors,
}

pub(crate) struct Shared {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) since: Instant,
    scheduler: Arc<Scheduler>,
    pub(crate) roster: Roster,
    pub(crate) weights: OnceLock<Weights>,
    limits: Limits,
    /// Guests served at once.
    max_sessions: AtomicUsize,
    stop: Stop,
    last_id: AtomicU64,
    sessions: Mutex<BTreeMap<u64, Entry>>,
    /// A session has ended.
    ended: Condvar,
}

pub(crate) struct Entry {
    pub(crate) peer: Peer,
    pub(crate) since: Instant,
    pub(crate) counters: Arc<Counters>,
    pub(crate) tenant: Arc<Tenant>,
}

impl Server {
    /// A server with no door yet, for at most `max_sessions` guests at once.
    pub fn new(engine: Arc<dyn Engine>, limits: Limits, max_sessions: usize) -> Server {
        Server {
            shared: Arc::new(Shared {
                roster: Roster::new(engine.memory().total),
                since: Instant::now(),
                scheduler: Arc::default(),
                engine,
                weights: OnceLock::new(),
                limits,
                max_sessions: AtomicUsize::new(max_sessions),
                stop: Stop::new(),
                last_id: AtomicU64::new(0),
                sessions: Mutex::default(),
                ended: Condvar::new(),
            }),
            doors: Doors::default(),
        }
    }

    /// Has guests that come from now on share weights. Can be said once.
    pub fn share_weights(&self, weights: Weights) {
        let _ = self.shared.weights.set(weights);
    }

    /// Has these rules hold from now on. Before the first ones, everybody may have everything.
    pub fn apply(&self, rules: Rules) -> Result<(), TooMuchPromised> {
        self.shared.roster.apply(rules)
    }

    /// Serves at most so many guests at once from now on.
    pub fn set_max_sessions(&self, max_sessions: usize) {
        self.shared
            .max_sessions
            .store(max_sessions, Ordering::Relaxed);
    }

    /// Lets guests in through `door` from now on.
    pub fn open(&mut self, door: impl Door) -> io::Result<DoorId> {
        self.open_for(None, door)
    }

    /// The same; whoever comes in is the guest of this name.
    pub fn open_for(&mut self, guest: Option<String>, mut door: impl Door) -> io::Result<DoorId> {
        let shared = Arc::clone(&self.shared);
        self.doors.open(self.shared.stop.clone(), move |patience| {
            if let Some(arrived) = door.knock(patience)? {
                shared.admit(shared.new_id(), guest.as_deref(), arrived);
            }
            Ok(())
        })
    }

    /// Lets nobody in through this door any more. Who is in stays.
    pub fn close(&mut self, door: DoorId) {
        self.doors.close(door);
    }

    /// What the server is doing, for somebody on another thread.
    pub fn watch(&self) -> Watch {
        Watch::new(Arc::clone(&self.shared) as _)
    }

    /// Serves a guest that came in elsewhere, under the number that it got there.
    pub(crate) fn receive(&self, id: u64, guest: Option<&str>, arrived: Guest) {
        self.shared.admit(id, guest, arrived);
    }

    /// Waits until the sessions that are open are no longer these, or `is_over` says so, or for `timeout`.
    pub(crate) fn wait_for_change(&self, known: &[u64], is_over: &AtomicBool, timeout: Duration) {
        let sessions = self.shared.sessions();
        let is_same = |sessions: &mut BTreeMap<u64, Entry>| {
            sessions.keys().eq(known) && !is_over.load(Ordering::Relaxed)
        };
        let waited = self
            .shared
            .ended
            .wait_timeout_while(sessions, timeout, is_same);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Has whoever waits for a change look again.
    pub(crate) fn nudge(&self) {
        // With the lock, or somebody who has looked and does not wait yet would miss it.
        let sessions = self.shared.sessions();
        self.shared.ended.notify_all();
        drop(sessions);
    }

    /// The sessions that are open.
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

    /// Closes the doors, lets each session finish the request it executes and tell its guest, and
    /// returns when all have ended.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.stop.ask();
        self.doors.close_all();
        let mut sessions = self.shared.sessions();
        while !sessions.is_empty() {
            let (guard, wait) = self
                .shared
                .ended
                .wait_timeout(sessions, REMINDER)
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

impl Shared {
    pub(crate) fn sessions(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Gives a guest its thread.
    fn admit(self: &Arc<Shared>, id: u64, guest: Option<&str>, arrived: Guest) {
        let Guest { peer, open } = arrived;
        let counters = Arc::new(Counters::default());
        let (tenant, refused) = self.tenant_of(guest, &peer);
        let max_sessions = self.max_sessions.load(Ordering::Relaxed);
        let open_sessions = {
            let mut sessions = self.sessions();
            let count = sessions.len();
            if count >= max_sessions.saturating_add(DISMISSALS) {
                warn!(%peer, "turned away: {count} guests are here already");
                return;
            }
            sessions.insert(
                id,
                Entry {
                    peer: peer.clone(),
                    since: Instant::now(),
                    counters: Arc::clone(&counters),
                    tenant: Arc::clone(&tenant),
                },
            );
            count
        };
        let full = (open_sessions >= max_sessions).then_some(Ending::Full {
            sessions: open_sessions,
            limit: max_sessions,
        });
        let registration = Registration {
            id,
            shared: Arc::clone(self),
        };
        let door = guest.map(str::to_owned);
        let spawned = thread::Builder::new()
            .name(format!("vgpu-guest-{id}"))
            .spawn(move || {
                let shared = &registration.shared;
                let _span = info_span!("session", id, tenant = tenant.name(), %peer).entered();
                // Links are code too. A panic in one must not pass unnoticed; the thread is the guest's
                // own, so nobody else is touched.
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    let arrival = Arrival {
                        id,
                        door,
                        peer,
                        counters,
                        tenant,
                        refused,
                        full,
                    };
                    shared.serve(arrival, open);
                }));
                if outcome.is_err() {
                    error!("the session's thread has panicked, a bug of the host");
                }
            });
        if let Err(error) = spawned {
            error!("no thread for session {id}, its guest is turned away: {error}");
        }
    }

    /// Whose programs somebody's are, and why he may not come in, if so.
    fn tenant_of(&self, door: Option<&str>, peer: &Peer) -> (Arc<Tenant>, Option<Ending>) {
        match self.roster.admit(door, peer) {
            Ok(tenant) => (tenant, None),
            Err(why) => (self.roster.tenants().1, Some(Ending::Refused { why })),
        }
    }

    fn serve(&self, arrival: Arrival, open: Open) {
        let Arrival {
            id,
            door,
            mut peer,
            counters,
            mut tenant,
            mut refused,
            full,
        } = arrival;
        let mut link = match open() {
            Ok(link) => link,
            Err(error) => {
                warn!("the guest got no session: {error}");
                return;
            }
        };
        // Who it is by its certificate is known only now.
        if let Some(identity) = link.certificate().map(Identity::of) {
            info!("it has shown the certificate {identity}");
            peer.certificate = Some(identity);
            (tenant, refused) = self.tenant_of(door.as_deref(), &peer);
            if tenant.is_named() {
                info!("by its certificate it is guest {}", tenant.name());
            }
            if let Some(entry) = self.sessions().get_mut(&id) {
                entry.tenant = Arc::clone(&tenant);
                entry.peer.certificate.clone_from(&peer.certificate);
            }
        }
        let origin = match tenant.is_named() {
            true => format!("guest {}", tenant.name()),
            false => origin(id, &peer),
        };
        if let Some(ending) = refused.or(full) {
            warn!("turned away: {ending}");
            dismiss(link.as_mut(), &ending);
            return;
        }
        let engine = Arc::clone(&self.engine);
        let scheduler = Arc::clone(&self.scheduler);
        let session = Session::of_tenant(id, engine, scheduler, tenant, self.limits, counters);
        let session = match self.weights.get() {
            Some(weights) => session.sharing(weights, &origin),
            None => session,
        };
        session.run(link.as_mut(), &self.stop);
    }
}

/// Somebody who has come in, on his own thread.
struct Arrival {
    id: u64,
    /// Whose own door it was.
    door: Option<String>,
    peer: Peer,
    counters: Arc<Counters>,
    tenant: Arc<Tenant>,
    refused: Option<Ending>,
    full: Option<Ending>,
}

/// Who shares weights with a guest without further ado: programs of the same user of this machine, or of the same
/// virtual machine. Who is neither is alone.
fn origin(id: u64, peer: &Peer) -> String {
    let machine = peer.endpoint.strip_prefix("vm ");
    let machine = machine.and_then(|rest| rest.rsplit_once(" slot "));
    match (&peer.process, machine) {
        (Some(process), _) => format!("user {}", process.uid),
        (None, Some((name, _))) => format!("vm {name}"),
        (None, None) => format!("session {id}"),
    }
}

/// A session's place in the list. Given up however its thread ends.
struct Registration {
    id: u64,
    shared: Arc<Shared>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut sessions = self.shared.sessions();
        // Under the lock, so that nobody who adds up sees it twice, or not at all.
        if let Some(entry) = sessions.remove(&self.id) {
            let stats = entry.counters.snapshot();
            match entry.tenant.is_named() {
                true => entry.tenant.add_ended(&stats),
                false => self.shared.roster.tenants().1.add_ended(&stats),
            }
        }
        drop(sessions);
        self.shared.ended.notify_all();
    }
}
