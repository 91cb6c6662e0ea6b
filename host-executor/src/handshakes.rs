//! Connections whose handshake is not complete: how many there may be, in all and of one origin.
//!
//! Such a connection has a thread and a socket, but no place in the table of sessions. Beyond a
//! limit, the oldest connection of the same origin is closed. An origin therefore cannot keep out
//! another one with connections that it leaves half open.
//!
//! Connections that end without a session cost processor time, which is charged to their origin
//! ([`debts`]): further connections of the origin wait, and are closed if they would wait too long.
//! So are worker processes that end soon after their start, with or without a session.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::Shutdown;
use rustix::time::{ClockId, clock_gettime};
use tracing::warn;

use debts::{Debts, OF_CONNECTIONS, OF_WORKERS};

use crate::limits::HandshakeLimits;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::log_limit::LogLimit;

mod debts;

/// Processor time to accept a connection and to start its thread, which other threads spend.
const ACCEPT_COST: Duration = Duration::from_micros(100);

/// Processor time to start and end the worker process of a connection.
const WORKER_COST: Duration = Duration::from_millis(50);

/// A worker process with a session pays for its start and end while it runs: a hundredth of the
/// time that it has lived. After 5 s, nothing is left.
const WORKER_TERM: u32 = 100;

/// Connections without a session that are remembered. Those of a worker are taken with each report.
const MAX_FAILED: usize = 256;

/// How often a connection that waits looks whether the executor stops.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The connections whose handshake is not complete.
#[derive(Debug)]
pub(crate) struct Handshakes {
    limits: HandshakeLimits,
    state: RankedMutex<PendingTable>,
    /// Notified when a handshake has ended.
    ended: Condvar,
    log: LogLimit,
    /// For connections that are closed at once.
    refusal_log: LogLimit,
}

#[derive(Debug)]
struct PendingTable {
    /// By the number of the connection, which grows in the order of arrival.
    pending: BTreeMap<u64, Pending>,
    /// Of connections that have ended without a session, by origin.
    debts: Debts,
    /// Of worker processes that have ended soon, by origin.
    worker_debts: Debts,
    /// Connections that have ended without a session: the last [`MAX_FAILED`] that nobody has
    /// taken.
    failed: VecDeque<u64>,
}

#[derive(Debug)]
struct Pending {
    origin: String,
    /// Shutting this socket down ends the handshake.
    socket: Option<Arc<OwnedFd>>,
    /// Whether the link is open, and only the first message is missing.
    is_open: bool,
    /// Whether the socket has been shut down, so that the thread of the connection is about to end.
    is_cancelled: bool,
}

/// What is closed to make room.
#[derive(Debug, PartialEq, Eq)]
enum Room {
    /// Nothing: there is room.
    Free,
    /// The connection of this number.
    Of(u64),
    /// The new connection: no other can be closed.
    None,
}

impl PendingTable {
    fn new() -> PendingTable {
        PendingTable {
            pending: BTreeMap::new(),
            debts: Debts::new(OF_CONNECTIONS),
            worker_debts: Debts::new(OF_WORKERS),
            failed: VecDeque::new(),
        }
    }

    /// How long a connection of this origin has to wait now. `None`: too long.
    fn wait_of(&self, origin: &str, now: Instant) -> Option<Duration> {
        let wait = self.debts.wait(origin, now)?;
        Some(wait.max(self.worker_debts.wait(origin, now)?))
    }

    fn live(&self) -> impl DoubleEndedIterator<Item = (&u64, &Pending)> {
        self.pending.iter().filter(|(_, one)| !one.is_cancelled)
    }

    /// Makes room for a connection of `origin`. Beyond the limit of one origin, this takes the
    /// oldest connection of the origin; beyond the limit of all, one of the [kind](kind_of) of
    /// origins that has most, and of these the oldest of an origin that has most. So many addresses
    /// take the place of no user or virtual machine.
    fn room(&self, origin: &str, limits: HandshakeLimits) -> Room {
        // A cancelled connection counts until its thread has ended.
        if self.pending.len() >= limits.all.saturating_mul(2) {
            return Room::None;
        }
        let mut counts = BTreeMap::<&str, usize>::new();
        for (_, one) in self.live() {
            *counts.entry(&one.origin).or_default() += 1;
        }
        let own = counts.get(origin).copied().unwrap_or_default();
        let from = if own >= limits.of_one_origin {
            origin
        } else if counts.values().sum::<usize>() >= limits.all {
            let mut of_kinds = BTreeMap::<&str, usize>::new();
            for (origin, count) in &counts {
                *of_kinds.entry(kind_of(origin)).or_default() += count;
            }
            // The oldest of equals: the first that has the largest count.
            let largest = self.live().map(|(_, one)| one.origin.as_str()).rev();
            let size = |origin: &&str| (of_kinds[kind_of(origin)], counts[origin]);
            largest.max_by_key(size).unwrap_or(origin)
        } else {
            return Room::Free;
        };
        let mut candidates = self.live().filter(|(_, one)| one.origin == from);
        let oldest = candidates.find(|(_, one)| one.socket.is_some());
        oldest.map_or(Room::None, |(&id, _)| Room::Of(id))
    }

    /// A connection has ended without a session.
    fn record_failed(&mut self, id: u64) {
        self.failed.truncate(MAX_FAILED - 1);
        self.failed.push_front(id);
    }

    fn cancel(&mut self, id: u64) {
        if let Some(one) = self.pending.get_mut(&id) {
            one.is_cancelled = true;
            if let Some(socket) = one.socket.take() {
                // Fails if the peer has closed the connection already.
                let _ = rustix::net::shutdown(socket, Shutdown::Both);
            }
        }
    }
}

/// What an origin is: `uid`, `tcp`, `cid`, `vm` or `vsock`.
fn kind_of(origin: &str) -> &str {
    origin.split([':', ' ']).next().unwrap_or(origin)
}

impl Handshakes {
    pub(crate) fn new(limits: HandshakeLimits) -> Arc<Handshakes> {
        Arc::new(Handshakes {
            limits,
            state: RankedMutex::new(Rank::Handshakes, PendingTable::new()),
            ended: Condvar::new(),
            log: LogLimit::new(1),
            refusal_log: LogLimit::new(1),
        })
    }

    fn state(&self) -> RankedGuard<'_, PendingTable> {
        self.state.lock()
    }

    /// Begins the handshake of connection `id` from `origin`. The numbers of connections grow.
    /// `socket` is a duplicate of the connection's socket. `None`: there is no room, or the origin
    /// has caused too much work for nothing, and the connection is to be closed.
    pub(crate) fn begin(
        self: &Arc<Handshakes>,
        id: u64,
        origin: &str,
        socket: Option<OwnedFd>,
    ) -> Option<PendingHandshake> {
        let now = Instant::now();
        let mut state = self.state();
        let Some(wait) = state.wait_of(origin, now) else {
            state.debts.add(origin, ACCEPT_COST, now);
            state.record_failed(id);
            drop(state);
            if let Some(others) = self.refusal_log.allow(now) {
                warn!(
                    origin,
                    "a connection was closed at once, and {others} others since the last such \
                     line: earlier ones of this origin have ended without a session, or their \
                     processes within 5 s, and have cost more processor time than one origin may \
                     cause"
                );
            }
            return None;
        };
        let room = state.room(origin, self.limits);
        if let Room::Of(oldest) = room {
            state.cancel(oldest);
        }
        let is_admitted = room != Room::None;
        if is_admitted {
            let pending = Pending {
                origin: origin.to_owned(),
                socket: socket.map(Arc::new),
                is_open: false,
                is_cancelled: false,
            };
            state.pending.insert(id, pending);
        }
        if !is_admitted {
            state.record_failed(id);
        }
        let all = state.live().count();
        let own = state.live().filter(|(_, one)| one.origin == origin).count();
        drop(state);
        if room != Room::Free
            && let Some(others) = self.log.allow(now)
        {
            let HandshakeLimits {
                all: max,
                of_one_origin,
            } = self.limits;
            warn!(
                origin,
                "a connection was closed before its handshake was complete, and {others} others \
                 since the last such line: {own} are pending from this origin, the limit is \
                 {of_one_origin}; {all} in all, the limit is {max}"
            );
        }
        is_admitted.then(|| PendingHandshake {
            id,
            all: Arc::clone(self),
            start: now + wait,
            cost: Cost::Accepted,
        })
    }

    /// The numbers of the connections.
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.state().pending.keys().copied().collect()
    }

    /// Takes the numbers of connections that have ended without a session.
    pub(crate) fn take_failed(&self) -> Vec<u64> {
        std::mem::take(&mut self.state().failed).into()
    }

    /// A worker process that has had a session has ended, `lived` after its start. `origin` is that
    /// of the program that it was started for.
    pub(crate) fn worker_has_ended(&self, origin: &str, lived: Duration) {
        let cost = WORKER_COST.saturating_sub(lived / WORKER_TERM);
        let now = Instant::now();
        self.state().worker_debts.add(origin, cost, now);
    }

    /// What the worker processes of an origin have cost that have ended soon.
    #[cfg(test)]
    pub(crate) fn worker_debt(&self, origin: &str) -> Duration {
        self.state().worker_debts.of(origin, Instant::now())
    }

    /// Closes the connections whose link is not open, and waits until no connection is left. The
    /// threads of the others check the stop flag of the server.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        let ids: Vec<u64> = state
            .pending
            .iter()
            .filter(|(_, one)| !one.is_open)
            .map(|(&id, _)| id)
            .collect();
        ids.into_iter().for_each(|id| state.cancel(id));
        while !state.pending.is_empty() {
            state = state.wait(&self.ended);
        }
    }
}

/// A connection whose handshake is not complete. Dropped when the handshake has ended, however it
/// has ended.
#[derive(Debug)]
pub(crate) struct PendingHandshake {
    id: u64,
    all: Arc<Handshakes>,
    /// When the connection may be served.
    start: Instant,
    cost: Cost,
}

/// The processor time of a connection that ends without a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cost {
    Accepted,
    /// What the thread of the connection has used when it drops the handshake.
    Thread,
    /// What that thread had used when it gave the connection away.
    Measured(Duration),
    /// A worker process has been started.
    Worker,
    /// None: the connection has a session.
    Session,
}

impl PendingHandshake {
    /// Waits as long as earlier connections of the origin make it. Called on the thread of the
    /// connection, whose processor time is charged from now on. Returns whether the connection is
    /// still to be served: nobody has hung up, and it has not been closed to make room.
    pub(crate) fn wait_on_own_thread(&mut self, is_stopped: impl Fn() -> bool) -> bool {
        self.cost = Cost::Thread;
        let mut left = self.start.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        let one = self
            .all
            .state()
            .pending
            .get(&self.id)
            .map(|one| one.socket.clone());
        let socket = one.flatten();
        while !left.is_zero() {
            let pause = left.min(POLL_INTERVAL);
            let has_hung_up = match &socket {
                // Wakes also when the connection is closed to make room.
                Some(socket) => waits_for_hang_up(socket, pause),
                None => {
                    std::thread::sleep(pause);
                    false
                }
            };
            if has_hung_up || self.is_cancelled() || is_stopped() {
                return false;
            }
            left = self.start.saturating_duration_since(Instant::now());
        }
        true
    }

    /// A worker process is started for the connection.
    pub(crate) fn gets_a_worker(&mut self) {
        self.cost = Cost::Worker;
    }

    /// Another thread drops the handshake. Called on the thread of the connection.
    pub(crate) fn leaves_its_thread(&mut self) {
        if self.cost == Cost::Thread {
            self.cost = Cost::Measured(own_time());
        }
    }

    /// How long the connection still has to wait, because others of its origin have ended without a
    /// session since it came, or their processes soon. `None`: too long, the connection is to be
    /// closed.
    pub(crate) fn owed(&self) -> Option<Duration> {
        let state = self.all.state();
        match state.pending.get(&self.id) {
            Some(one) => state.wait_of(&one.origin, Instant::now()),
            None => Some(Duration::ZERO),
        }
    }

    /// The connection has got a session, and its handshake is over.
    pub(crate) fn session_begins(mut self) {
        self.cost = Cost::Session;
    }

    /// The link is open, and only the first message is missing.
    pub(crate) fn link_is_open(&self) {
        if let Some(one) = self.all.state().pending.get_mut(&self.id) {
            one.is_open = true;
        }
    }

    /// Whether the connection has been closed to make room for another one.
    pub(crate) fn is_cancelled(&self) -> bool {
        let state = self.all.state();
        state
            .pending
            .get(&self.id)
            .is_none_or(|one| one.is_cancelled)
    }
}

impl Drop for PendingHandshake {
    fn drop(&mut self) {
        let cost = match self.cost {
            Cost::Accepted => ACCEPT_COST,
            Cost::Thread => ACCEPT_COST + own_time(),
            Cost::Worker => ACCEPT_COST + WORKER_COST,
            Cost::Measured(time) => ACCEPT_COST + time,
            Cost::Session => Duration::ZERO,
        };
        let mut state = self.all.state();
        if let Some(ended) = state.pending.remove(&self.id) {
            state.debts.add(&ended.origin, cost, Instant::now());
            if self.cost != Cost::Session {
                state.record_failed(self.id);
            }
        }
        drop(state);
        self.all.ended.notify_all();
    }
}

/// Waits up to `timeout` for the end of a connection. Returns whether it has ended.
fn waits_for_hang_up(socket: impl AsFd, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    let timeout = Timespec::try_from(timeout).ok();
    // The kernel reports hang-ups and errors in any case. A signal is no hang-up.
    matches!(rustix::event::poll(&mut fds, timeout.as_ref()), Ok(1..))
}

/// The processor time of this thread.
fn own_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    const LIMITS: HandshakeLimits = HandshakeLimits {
        all: 6,
        of_one_origin: 3,
    };

    /// Whether a connection may be served at once.
    fn is_now(ticket: &Option<PendingHandshake>) -> bool {
        ticket.as_ref().expect("room").start <= Instant::now()
    }

    /// Connections, and their other ends.
    struct Arrivals {
        handshakes: Arc<Handshakes>,
        last: u64,
    }

    impl Arrivals {
        fn new() -> Arrivals {
            Arrivals {
                handshakes: Handshakes::new(LIMITS),
                last: 0,
            }
        }

        fn arrive(&mut self, origin: &str) -> (Option<PendingHandshake>, UnixStream) {
            let (near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            self.last += 1;
            let ticket =
                self.handshakes
                    .begin(self.last, origin, Some(near.try_clone().unwrap().into()));
            (ticket, far)
        }
    }

    fn is_closed(far: &UnixStream) -> bool {
        matches!({ far }.read(&mut [0]), Ok(0))
    }

    #[test]
    fn an_origin_closes_its_own_oldest_connection_and_no_other() {
        let mut arrivals = Arrivals::new();
        let other = arrivals.arrive("b");
        let flood: Vec<_> = (0..5).map(|_| arrivals.arrive("a")).collect();
        assert!(!is_closed(&other.1));
        let closed: Vec<bool> = flood.iter().map(|(_, far)| is_closed(far)).collect();
        assert_eq!(closed, [true, true, false, false, false]);
        assert!(flood[0].0.as_ref().unwrap().is_cancelled());
        assert!(!flood[4].0.as_ref().unwrap().is_cancelled());
    }

    #[test]
    fn beyond_the_limit_of_all_the_largest_origin_loses_a_connection() {
        let mut arrivals = Arrivals::new();
        let small: Vec<_> = ["b", "c", "d"].map(|origin| arrivals.arrive(origin)).into();
        let large: Vec<_> = (0..3).map(|_| arrivals.arrive("a")).collect();
        let (new, _far) = arrivals.arrive("e");
        assert!(new.is_some());
        assert!(small.iter().all(|(_, far)| !is_closed(far)));
        let closed: Vec<bool> = large.iter().map(|(_, far)| is_closed(far)).collect();
        assert_eq!(closed, [true, false, false]);
    }

    #[test]
    fn many_addresses_take_the_place_of_no_user() {
        let mut arrivals = Arrivals::new();
        let user = arrivals.arrive("uid:7");
        let addresses: Vec<_> = (0..9)
            .map(|i| arrivals.arrive(&format!("tcp:10.0.0.{i}")))
            .collect();
        let (machine, _far) = arrivals.arrive("vsock at /run/vm1");
        assert!(machine.is_some());
        assert!(!is_closed(&user.1));
        // The oldest ones: there is room for the others, the user and the machine.
        let closed = addresses.iter().filter(|(_, far)| is_closed(far)).count();
        assert_eq!(closed, 11 - LIMITS.all);
        assert!(addresses[..closed].iter().all(|(_, far)| is_closed(far)));
    }

    #[test]
    fn threads_that_have_not_ended_count_and_connections_without_a_socket_stay() {
        let mut arrivals = Arrivals::new();
        let mut kept: Vec<_> = (0..50).map(|_| arrivals.arrive("a")).collect();
        // The threads of the cancelled connections still run.
        assert_eq!(arrivals.handshakes.ids().len(), 2 * LIMITS.all);
        assert!(kept.last().unwrap().0.is_none());
        kept.clear();
        assert!(arrivals.handshakes.ids().is_empty());
        let begin = |id| arrivals.handshakes.begin(id, "a", None);
        let kept: Vec<_> = (100..103).map(begin).collect();
        assert!(begin(103).is_none());
        drop(kept);
        assert!(begin(104).is_some());
    }

    #[test]
    fn connections_without_a_session_make_later_ones_of_their_origin_wait() {
        let mut arrivals = Arrivals::new();
        let end = |arrivals: &mut Arrivals, origin, count| {
            for _ in 0..count {
                let (mut ticket, _far) = arrivals.arrive(origin);
                ticket.as_mut().expect("room").gets_a_worker();
            }
        };
        end(&mut arrivals, "a", 11);
        let failed = arrivals.handshakes.take_failed();
        assert!(failed.into_iter().eq((1..=11).rev()));
        let (other, _far) = arrivals.arrive("b");
        assert!(is_now(&other));
        let (waiting, far) = arrivals.arrive("a");
        let mut waiting = waiting.expect("room");
        assert!(
            waiting.start > Instant::now() + Duration::from_millis(200),
            "more than 50 ms at a tenth"
        );
        // Neither a peer that hangs up nor one that is closed to make room is waited for.
        drop(far);
        assert!(!waiting.wait_on_own_thread(|| false));
        let (mut cancelled, _far) = arrivals.arrive("a");
        let id = cancelled.as_ref().expect("room").id;
        arrivals.handshakes.state().cancel(id);
        assert!(
            !cancelled
                .as_mut()
                .expect("room")
                .wait_on_own_thread(|| false)
        );
        let (stopped, _far) = arrivals.arrive("a");
        assert!(!stopped.expect("room").wait_on_own_thread(|| true));
        drop((waiting, cancelled));

        // Too much of it, and no connection is accepted.
        end(&mut arrivals, "c", 1);
        while arrivals.arrive("a").0.is_some() {
            end(&mut arrivals, "a", 1);
        }
        let (other, _far) = arrivals.arrive("b");
        assert!(is_now(&other));
        // A session costs nothing.
        for _ in 0..100 {
            let (session, _far) = arrivals.arrive("d");
            let mut session = session.expect("room");
            session.gets_a_worker();
            session.session_begins();
        }
        assert!(is_now(&arrivals.arrive("d").0));
    }

    #[test]
    fn worker_processes_that_end_at_once_are_paid_by_their_origin() {
        let mut arrivals = Arrivals::new();
        for _ in 0..100 {
            arrivals
                .handshakes
                .worker_has_ended("a", WORKER_COST * WORKER_TERM);
        }
        assert!(is_now(&arrivals.arrive("a").0), "each has lived for 5 s");
        for _ in 0..104 {
            arrivals.handshakes.worker_has_ended("a", Duration::ZERO);
        }
        assert!(!is_now(&arrivals.arrive("a").0), "5.2 s");
        for _ in 0..10 {
            arrivals.handshakes.worker_has_ended("a", Duration::ZERO);
        }
        assert!(arrivals.arrive("a").0.is_none(), "5.5 s");
        assert!(is_now(&arrivals.arrive("b").0));
    }

    #[test]
    fn connections_that_came_at_once_wait_for_each_other() {
        let handshakes = Handshakes::new(HandshakeLimits {
            all: 64,
            of_one_origin: 64,
        });
        let begin = |id, origin| handshakes.begin(id, origin, None).expect("room");
        let mut all: Vec<_> = (0..32).map(|id| begin(id, "a")).collect();
        let other = begin(32, "b");
        for mut one in all.drain(..11) {
            assert!(
                one.owed() < Some(Duration::from_millis(20)),
                "10 processes at most"
            );
            one.gets_a_worker();
        }
        // 550 ms, and less for the time that this test takes.
        let owed = all[0].owed();
        assert!(owed > Some(Duration::from_millis(200)), "{owed:?}");
        for mut one in all.drain(..2) {
            one.gets_a_worker();
        }
        assert_eq!(all[0].owed(), None, "650 ms");
        assert_eq!(other.owed(), Some(Duration::ZERO));
    }

    /// The thread that drops the handshake of a program of a worker has used more than the program.
    #[test]
    fn a_handshake_costs_what_its_own_thread_has_used() {
        let handshakes = Handshakes::new(LIMITS);
        let mut one = handshakes.begin(1, "a", None).expect("room");
        let thread = std::thread::spawn(move || {
            assert!(one.wait_on_own_thread(|| false));
            one.leaves_its_thread();
            one
        });
        let mut one = thread.join().expect("it has not waited");
        let Cost::Measured(time) = one.cost else {
            panic!("{:?}", one.cost);
        };
        while own_time() < time + Duration::from_millis(20) {}
        one.leaves_its_thread();
        assert_eq!(one.cost, Cost::Measured(time));
    }

    #[test]
    fn connections_that_are_closed_at_once_have_had_no_session() {
        let handshakes = Handshakes::new(LIMITS);
        for id in 1..14 {
            let one = handshakes.begin(id, "a", None);
            if let Some(mut one) = one {
                one.gets_a_worker();
            }
        }
        handshakes.take_failed();
        assert!(handshakes.begin(15, "a", None).is_none());
        let begin = |id| handshakes.begin(id, "b", None);
        let kept: Vec<_> = (16..19).map(begin).collect();
        assert!(kept.iter().all(Option::is_some));
        assert!(begin(19).is_none(), "no room");
        assert_eq!(handshakes.take_failed(), [19, 15]);
    }

    #[test]
    fn closing_waits_for_threads_and_cuts_only_unfinished_links() {
        let mut arrivals = Arrivals::new();
        let (first, first_far) = arrivals.arrive("a");
        let (second, second_far) = arrivals.arrive("a");
        let (first, second) = (first.unwrap(), second.unwrap());
        second.link_is_open();
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| arrivals.handshakes.close());
            while !is_closed(&first_far) {
                std::thread::yield_now();
            }
            drop(first);
            assert!(!is_closed(&second_far));
            assert!(!closing.is_finished());
            drop(second);
        });
    }
}
