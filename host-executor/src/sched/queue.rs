//! The scheduling rule: start-time fair queuing, without threads and without a clock.
//!
//! Every tenant has a virtual time: the time that its graphs have had the device, divided by its
//! weight. The tenant with the lowest virtual time runs next. Over any interval in which two
//! tenants always have graphs waiting, their times on the device are proportional to their weights.
//! Virtual time advances by measured time, not by estimates. (Goyal, Vin, Cheng: "Start-time Fair
//! Queuing", SIGCOMM 1996.)
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How far a tenant may get ahead of a waiting one before its turn ends.
pub(crate) const SLICE: Duration = Duration::from_millis(2);

/// The shortest turn. A switch costs about 10 µs and the contents of the caches.
pub(crate) const MIN_SLICE: Duration = Duration::from_micros(500);

/// How far behind the others a tenant may start when it returns after a pause. A guest that decodes
/// pauses after each token; without this credit it would lose that time to tenants that never
/// pause.
const CREDIT: Duration = Duration::from_millis(5);

/// Virtual nanoseconds per nanosecond at weight 1. Makes rounding errors negligible for every
/// weight.
const SCALE: u128 = 1 << 20;

/// Number of tenants that are kept before idle ones without a lead are removed.
const MAX_IDLE_TENANTS: usize = 256;

/// Number of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(pub(crate) u64);

/// Number of a submitted graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ticket(pub(crate) u64);

/// What a tenant is granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entitlement {
    /// Share of the device's time, relative to the other tenants. At least 1.
    pub(crate) weight: u32,
    /// Graphs of the tenant that may be started and unfinished at once. At least 1.
    pub(crate) in_flight: usize,
}

/// The graphs that wait for the device, and the virtual time of each tenant.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    tenants: BTreeMap<TenantId, State>,
    /// Virtual time of the system: that of the tenant that got the last turn. Never decreases.
    now: u128,
}

#[derive(Debug)]
struct State {
    share: Entitlement,
    time: u128,
    waiting: VecDeque<Waiting>,
    /// Graphs that have had a turn and have not ended.
    started: usize,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    ticket: Ticket,
    started: bool,
}

impl State {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.started == 0
    }

    /// Index in `waiting` of the graph that may run next.
    fn next(&self) -> Option<usize> {
        match self.started < self.share.in_flight {
            true => (!self.waiting.is_empty()).then_some(0),
            false => self.waiting.iter().position(|w| w.started),
        }
    }

    fn virtual_time(&self, real: Duration) -> u128 {
        real.as_nanos() * SCALE / u128::from(self.share.weight.max(1))
    }

    fn real_time(&self, time: u128) -> Duration {
        let nanos = time * u128::from(self.share.weight.max(1)) / SCALE;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl Queue {
    /// Adds a graph that has had no turn yet.
    pub(crate) fn enter(&mut self, tenant: TenantId, share: Entitlement, ticket: Ticket) {
        if self.tenants.len() > MAX_IDLE_TENANTS {
            let now = self.now;
            self.tenants.retain(|_, s| !s.is_idle() || s.time > now);
        }
        let now = self.now;
        let state = self.tenants.entry(tenant).or_insert(State {
            share,
            time: 0,
            waiting: VecDeque::new(),
            started: 0,
        });
        state.share = share;
        if state.is_idle() {
            let earliest = now.saturating_sub(state.virtual_time(CREDIT));
            state.time = state.time.max(earliest);
        }
        let started = false;
        state.waiting.push_back(Waiting { ticket, started });
    }

    /// Takes the graph that gets the device now out of the queue.
    pub(crate) fn next(&mut self) -> Option<(TenantId, Ticket)> {
        let tenant = self.first()?;
        let state = self.tenants.get_mut(&tenant)?;
        let place = state.next()?;
        let waiting = state.waiting.remove(place)?;
        self.now = self.now.max(state.time);
        if !waiting.started {
            state.started += 1;
        }
        Some((tenant, waiting.ticket))
    }

    /// Ends the turn of a graph. `took`: time on the device that [`progress`](Queue::progress) has
    /// not reported. A graph that is not done waits again, ahead of the tenant's other graphs.
    pub(crate) fn used(&mut self, tenant: TenantId, ticket: Ticket, took: Duration, is_done: bool) {
        let Some(state) = self.tenants.get_mut(&tenant) else {
            return;
        };
        state.time += state.virtual_time(took);
        if is_done {
            state.started = state.started.saturating_sub(1);
            let time = state.time;
            // No tenant waits, so nobody has lost time to this one: its lead is forgiven.
            if self.tenants.values().all(State::is_idle) {
                self.now = self.now.max(time);
            }
        } else {
            let started = true;
            state.waiting.push_front(Waiting { ticket, started });
        }
    }

    /// Reports `more` time on the device by a graph whose turn goes on. Called before
    /// [`enter`](Queue::enter), so that the new graph is placed by current virtual times.
    pub(crate) fn progress(&mut self, tenant: TenantId, more: Duration) {
        let ready = self.first().and_then(|first| self.tenants.get(&first));
        let ready = ready.map_or(u128::MAX, |state| state.time);
        if let Some(state) = self.tenants.get_mut(&tenant) {
            state.time += state.virtual_time(more);
            self.now = self.now.max(state.time.min(ready));
        }
    }

    /// How long `tenant`, whose turn begins now, may keep the device. `None`: no other graph waits.
    pub(crate) fn allowance(&self, tenant: TenantId) -> Option<Duration> {
        let next = self.tenants.get(&self.first()?)?;
        let own = self.tenants.get(&tenant)?;
        let ahead = own.real_time(next.time.saturating_sub(own.time));
        Some((ahead + SLICE).max(MIN_SLICE))
    }

    /// When the turn of `tenant` is to end, from its start, after another graph has entered. The
    /// turn has lasted `ran`, all of which has been reported.
    pub(crate) fn cut(&self, tenant: TenantId, ran: Duration) -> Option<Duration> {
        let next = self.tenants.get(&self.first()?)?;
        let own = self.tenants.get(&tenant)?;
        let more = match next.time < own.time {
            true => Duration::ZERO,
            false => own.real_time(next.time - own.time) + SLICE,
        };
        Some((ran + more).max(MIN_SLICE))
    }

    /// The tenant with the lowest virtual time among those with a graph that may run.
    fn first(&self) -> Option<TenantId> {
        let ready = self.tenants.iter().filter(|(_, s)| s.next().is_some());
        ready.min_by_key(|(_, s)| s.time).map(|(&tenant, _)| tenant)
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
