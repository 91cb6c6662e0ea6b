//! Connections whose handshake is not complete: how many there may be, in all and of one origin.
//!
//! Such a connection has a thread and a socket, but no place in the table of sessions. Beyond a
//! limit, the oldest connection of the same origin is closed. An origin therefore cannot keep out
//! another one with connections that it leaves half open.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar};
use std::time::Instant;

use rustix::net::Shutdown;
use tracing::warn;

use crate::limits::HandshakeLimits;
use crate::lock::{Rank, RankedGuard, RankedMutex};
use crate::log_limit::LogLimit;

/// The connections whose handshake is not complete.
#[derive(Debug)]
pub(crate) struct Handshakes {
    limits: HandshakeLimits,
    state: RankedMutex<PendingTable>,
    /// Notified when a handshake has ended.
    ended: Condvar,
    log: LogLimit,
}

#[derive(Debug, Default)]
struct PendingTable {
    /// By the number of the connection, which grows in the order of arrival.
    pending: BTreeMap<u64, Pending>,
}

#[derive(Debug)]
struct Pending {
    origin: String,
    /// Shutting this socket down ends the handshake.
    socket: Option<OwnedFd>,
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
    fn live(&self) -> impl Iterator<Item = (&u64, &Pending)> {
        self.pending.iter().filter(|(_, one)| !one.is_cancelled)
    }

    /// Makes room for a connection of `origin`. Beyond the limit of one origin, this takes the
    /// oldest connection of the origin; beyond the limit of all, the oldest of the origin that has
    /// most.
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
            let most = counts.iter().max_by_key(|(_, count)| **count);
            most.map_or(origin, |(origin, _)| origin)
        } else {
            return Room::Free;
        };
        let mut candidates = self.live().filter(|(_, one)| one.origin == from);
        let oldest = candidates.find(|(_, one)| one.socket.is_some());
        oldest.map_or(Room::None, |(&id, _)| Room::Of(id))
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

impl Handshakes {
    pub(crate) fn new(limits: HandshakeLimits) -> Arc<Handshakes> {
        Arc::new(Handshakes {
            limits,
            state: RankedMutex::new(Rank::Handshakes, PendingTable::default()),
            ended: Condvar::new(),
            log: LogLimit::new(1),
        })
    }

    fn state(&self) -> RankedGuard<'_, PendingTable> {
        self.state.lock()
    }

    /// Begins the handshake of connection `id` from `origin`. The numbers of connections grow.
    /// `socket` is a duplicate of the connection's socket. `None`: there is no room, and the
    /// connection is to be closed.
    pub(crate) fn begin(
        self: &Arc<Handshakes>,
        id: u64,
        origin: &str,
        socket: Option<OwnedFd>,
    ) -> Option<PendingHandshake> {
        let mut state = self.state();
        let room = state.room(origin, self.limits);
        if let Room::Of(oldest) = room {
            state.cancel(oldest);
        }
        let is_admitted = room != Room::None;
        if is_admitted {
            let pending = Pending {
                origin: origin.to_owned(),
                socket,
                is_open: false,
                is_cancelled: false,
            };
            state.pending.insert(id, pending);
        }
        let all = state.live().count();
        let own = state.live().filter(|(_, one)| one.origin == origin).count();
        drop(state);
        if room != Room::Free
            && let Some(others) = self.log.allow(Instant::now())
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
        })
    }

    /// The numbers of the connections.
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.state().pending.keys().copied().collect()
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
}

impl PendingHandshake {
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
        self.all.state().pending.remove(&self.id);
        self.all.ended.notify_all();
    }
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
