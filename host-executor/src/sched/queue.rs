//! The scheduling rule: start-time fair queueing, without threads and without a clock.
//!
//! Every tenant has a virtual time: the time that its graphs have had the device, divided by its
//! weight. The tenant with the lowest virtual time runs next. Over any interval in which two
//! tenants always have graphs waiting, their times on the device are proportional to their weights.
//! Virtual time advances by measured time, not by estimates. (Goyal, Vin, Cheng: "Start-time Fair
//! Queuing", SIGCOMM 1996.)
//!
//! A guest that decodes has no graph waiting for a moment after each token. If another tenant has a
//! piece that no engine interrupts, and the piece began in each of these moments, the guest would
//! get one token for each piece, however long. So the device stays idle for a tenant that is about
//! to return and would still be behind then: [`Next::Hold`]. The tenant pays for that time as for
//! time on the device, so it gets no more than its share. (Iyer, Druschel: "Anticipatory
//! Scheduling", SOSP 2001.)
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How far a tenant may get ahead of a waiting one before its turn ends, if many tenants have
/// graphs.
pub(crate) const SLICE: Duration = Duration::from_millis(4);

/// The same for all tenants that have graphs together, of which each gets its part: 8 ms if there
/// are two. A turn begins with cold caches: by the rates in docs/performance.md, they cost a token
/// of 5 ms on a CPU up to 1 ms.
const ROUND: Duration = SLICE.saturating_mul(4);

/// The shortest turn. A switch costs about 10 µs and the contents of the caches.
pub(crate) const MIN_SLICE: Duration = Duration::from_micros(500);

/// The same where turns begin with cold caches, if it ends for a tenant that has come: by then most
/// of a turn has had the contents that it needs.
const MIN_WARM_SLICE: Duration = Duration::from_millis(2);

/// How far behind the others a tenant may start when it returns after a pause. A guest that decodes
/// pauses after each token; without this credit it would lose that time to tenants that never
/// pause.
const CREDIT: Duration = Duration::from_millis(5);

/// The longest pause between two graphs after which a tenant is expected to return as soon again.
const MAX_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause for which a tenant keeps the device although it is not behind, as a part of
/// the time that its last graph had the device: one of this many. On a CPU, a switch costs the
/// contents of the caches, which is more than such a pause.
const KEEP_PART: u32 = 12;

/// What must be left of a turn that a tenant keeps through a pause.
const MIN_KEPT: Duration = Duration::from_millis(1);

/// Virtual nanoseconds per nanosecond at weight 1. Makes rounding errors negligible for every
/// weight.
const SCALE: u128 = 1 << 20;

/// Number of tenants that are kept before idle ones without a lead are removed.
const MAX_IDLE_TENANTS: usize = 256;

/// How much work outside of turns a tenant may do beyond the time of its processors, while another
/// tenant is active: work that came at once after a pause.
const OUTSIDE_LEAD: Duration = SLICE;

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
    tenants: BTreeMap<TenantId, TenantQueue>,
    /// Virtual time of the system: that of the tenant that got the last turn. Never decreases.
    now: u128,
    /// Whether turns begin with cold caches of the processor, so that tenants keep their turns
    /// through short pauses.
    has_caches: bool,
    /// The tenant that got the last turn, and may keep it.
    last: Option<TenantId>,
}

/// What the device does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The device runs this graph, which is no longer in the queue.
    Run(TenantId, Ticket),
    /// The device stays idle until this time for a tenant about to return. This graph waits.
    Hold(Ticket, Duration),
    /// The device stays idle, as no graph waits.
    Idle,
}

#[derive(Debug)]
struct TenantQueue {
    entitlement: Entitlement,
    time: u128,
    waiting: VecDeque<Waiting>,
    /// Graphs that have had a turn and have not ended.
    started: usize,
    /// The end of the last graph. While the tenant is idle only.
    idle_since: Duration,
    /// How long the tenant was idle before its last graph, if at most [`MAX_PAUSE`].
    pause: Option<Duration>,
    /// Virtual time of the tenant when its last graph got its first turn.
    began: u128,
    /// How long its last graph has had the device. While the tenant is idle only.
    graph: Duration,
    /// Since when the device stays idle for the tenant.
    hold: Option<Duration>,
    /// Whether the tenant has returned while the device stayed idle for it.
    is_kept: bool,
    /// Whether the tenant has had no turn since it last came: it was idle before.
    has_come: bool,
    /// When the work outside of turns would have ended, had the tenant done all of it on as many
    /// processors as it is granted. `None`: there was none.
    outside: Option<Duration>,
    /// The end of the last work outside of turns.
    worked: Option<Duration>,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    ticket: Ticket,
    started: bool,
}

impl TenantQueue {
    fn new(entitlement: Entitlement) -> TenantQueue {
        TenantQueue {
            entitlement,
            time: 0,
            waiting: VecDeque::new(),
            started: 0,
            idle_since: Duration::MAX,
            pause: None,
            began: 0,
            graph: Duration::ZERO,
            hold: None,
            is_kept: false,
            has_come: false,
            outside: None,
            worked: None,
        }
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.started == 0
    }

    /// Whether the tenant has a graph, or had one or other work a moment before `at`. A tenant that
    /// only owes time, and whose sessions all pause, takes nothing from others.
    fn is_active(&self, at: Duration) -> bool {
        let is_recent = |end: Duration| at.saturating_sub(MAX_PAUSE) <= end;
        let had_graph = self.idle_since != Duration::MAX && is_recent(self.idle_since);
        !self.is_idle() || had_graph || self.worked.is_some_and(is_recent)
    }

    /// What is lost if the tenant is forgotten at the time `at`, when the virtual time of the
    /// system is `now`: how much time it owes for work outside of turns, or for turns. `None`:
    /// nothing.
    fn debt(&self, at: Duration, now: u128) -> Option<Duration> {
        let outside = self.outside.unwrap_or_default().saturating_sub(at);
        let turns = self.real_time(self.time.saturating_sub(now));
        let debt = outside.max(turns);
        (self.is_active(at) || !debt.is_zero()).then_some(debt)
    }

    /// Index in `waiting` of the graph that may run next.
    fn next(&self) -> Option<usize> {
        match self.started < self.entitlement.in_flight {
            true => (!self.waiting.is_empty()).then_some(0),
            false => self.waiting.iter().position(|w| w.started),
        }
    }

    /// Until when the device is to stay idle for this tenant, if a tenant at the virtual time
    /// `next` could have the device instead.
    fn hold(&self, at: Duration, next: u128) -> Option<Duration> {
        let pause = self.pause.filter(|_| self.is_idle())?;
        let behind = self.real_time(next.saturating_sub(self.time));
        // Pauses differ. Not to wait can cost the tenant another piece like the one before.
        let slack = CREDIT + (behind / 4).min(MAX_PAUSE);
        let expected = self.idle_since + 2 * pause + slack;
        let behind_at_return = behind.saturating_sub((self.idle_since + pause).saturating_sub(at));
        if at >= expected || behind_at_return <= CREDIT {
            return None;
        }
        // What the tenant is behind by less than this, it does not lose when it returns.
        Some(expected.min(at + (behind - CREDIT) + Duration::from_nanos(1)))
    }

    /// Until when the device is to stay idle for this tenant, which had the last turn and has not
    /// used it up, if a tenant at the virtual time `next` could have the device instead.
    fn keep(&self, at: Duration, next: u128, slice: Duration) -> Option<Duration> {
        let pause = self.pause.filter(|_| self.is_idle())?;
        let end = self.idle_since + 2 * pause;
        let ahead = self.real_time(self.time.saturating_sub(next));
        let is_worth_it = pause * KEEP_PART <= self.graph && ahead + pause + MIN_KEPT <= slice;
        (is_worth_it && at < end).then_some(end)
    }

    fn virtual_time(&self, real: Duration) -> u128 {
        real.as_nanos() * SCALE / u128::from(self.entitlement.weight.max(1))
    }

    fn real_time(&self, time: u128) -> Duration {
        let nanos = time * u128::from(self.entitlement.weight.max(1)) / SCALE;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl Queue {
    /// A queue without graphs. `has_caches`: the device computes with caches of the processor.
    pub(crate) fn new(has_caches: bool) -> Queue {
        Queue {
            has_caches,
            ..Queue::default()
        }
    }

    /// Adds a graph that has had no turn yet, at the time `at`.
    pub(crate) fn enter(
        &mut self,
        tenant: TenantId,
        entitlement: Entitlement,
        ticket: Ticket,
        at: Duration,
    ) {
        let was_held = { &self.tenants }
            .get(&tenant)
            .is_some_and(|state| state.hold.is_some());
        self.end_holds(at);
        let now = self.now;
        let state = self.tenant(tenant, entitlement, at);
        let has_come = state.is_idle();
        if has_come {
            (state.is_kept, state.has_come) = (was_held, true);
            let pause = at.checked_sub(state.idle_since);
            state.pause = pause.filter(|&pause| pause <= MAX_PAUSE);
            let earliest = now.saturating_sub(state.virtual_time(CREDIT));
            state.time = state.time.max(earliest);
        }
        let started = false;
        state.waiting.push_back(Waiting { ticket, started });
        // One that comes in a pause of the tenant that keeps its turn does not wait for it.
        let pauses = |last: &TenantId| self.tenants.get(last).is_none_or(TenantQueue::is_idle);
        if has_come && self.last != Some(tenant) {
            self.last = self.last.filter(|last| !pauses(last));
        }
    }

    /// The state of a tenant, which may be new.
    fn tenant(
        &mut self,
        tenant: TenantId,
        entitlement: Entitlement,
        at: Duration,
    ) -> &mut TenantQueue {
        if self.tenants.len() > MAX_IDLE_TENANTS {
            let now = self.now;
            { &mut self.tenants }.retain(|_, state| state.debt(at, now).is_some());
        }
        let state = { self.tenants.entry(tenant) }.or_insert(TenantQueue::new(entitlement));
        state.entitlement = entitlement;
        state
    }

    /// Counts work that a tenant has done outside of turns until `at`: `took` of the time of one
    /// processor. `processors` is how many the tenant is granted. Returns when that work is paid
    /// for, which [`pause`](Queue::pause) takes: at once if no other tenant is active.
    ///
    /// This is no part of the virtual time. Work outside of turns delays the graphs of others by
    /// the processors that it keeps busy, and only sessions that work at the same time can keep
    /// more than one busy.
    pub(crate) fn work_outside(
        &mut self,
        tenant: TenantId,
        entitlement: Entitlement,
        (took, processors): (Duration, u32),
        at: Duration,
    ) -> Duration {
        let is_contended = self.is_contended(tenant, at);
        let state = self.tenant(tenant, entitlement, at);
        let began = at.saturating_sub(took);
        let paid = state.outside.map_or(began, |outside| outside.max(began));
        let paid = match is_contended {
            true => paid + took / processors.max(1),
            false => at,
        };
        (state.outside, state.worked) = (Some(paid), Some(at));
        paid
    }

    /// How much time a tenant owes at the time `at`. `None`: nothing is lost if the tenant is
    /// forgotten.
    #[cfg(any(feature = "server", test))]
    pub(crate) fn debt(&self, tenant: TenantId, at: Duration) -> Option<Duration> {
        self.tenants.get(&tenant)?.debt(at, self.now)
    }

    /// Whether another tenant is active.
    fn is_contended(&self, tenant: TenantId, at: Duration) -> bool {
        let mut others = self.tenants.iter().filter(|&(&other, _)| other != tenant);
        others.any(|(_, state)| state.is_active(at))
    }

    /// How long a session of a tenant does no work outside of turns, from `at` on, whose work so
    /// far is paid for at the time `paid`. `None`: it may go on, as no other tenant is active, or
    /// as the time is near.
    pub(crate) fn pause(&self, tenant: TenantId, paid: Duration, at: Duration) -> Option<Duration> {
        let left = paid.checked_sub(at + OUTSIDE_LEAD)?;
        (!left.is_zero() && self.is_contended(tenant, at)).then_some(left)
    }

    /// Decides what the idle device does from the time `at` on.
    pub(crate) fn next(&mut self, at: Duration) -> Next {
        self.end_holds(at);
        self.choose(at).unwrap_or(Next::Idle)
    }

    fn choose(&mut self, at: Duration) -> Option<Next> {
        let first = self.first()?;
        let time = self.tenants.get(&first)?.time;
        let tenant = self.continued(first).unwrap_or(first);
        let state = self.tenants.get(&tenant)?;
        let place = state.next()?;
        let ticket = state.waiting.get(place)?.ticket;
        let (slice, last) = (self.slice(1), self.last.filter(|_| self.has_caches));
        let mut until = None;
        for (&id, other) in &mut self.tenants {
            let end = other.hold(at, time);
            let end = end.or_else(|| other.keep(at, time, slice).filter(|_| last == Some(id)));
            other.hold = end.map(|_| at);
            until = until.into_iter().chain(end).min();
        }
        if let Some(until) = until {
            return Some(Next::Hold(ticket, until));
        }
        self.now = self.now.max(time);
        let state = self.tenants.get_mut(&tenant)?;
        let waiting = state.waiting.remove(place)?;
        if !waiting.started {
            state.started += 1;
            state.began = state.time;
        }
        (state.is_kept, state.has_come) = (false, false);
        self.last = Some(tenant);
        Some(Next::Run(tenant, ticket))
    }

    /// The tenant that had the last turn, if it may still get ahead of the `first` one that waits:
    /// the device has been kept for it, or it has another graph already. A tenant that has come and
    /// is behind does not wait for another graph, unless the device has been kept.
    fn continued(&self, first: TenantId) -> Option<TenantId> {
        let last = self.last?;
        let (state, first) = (self.tenants.get(&last)?, self.tenants.get(&first)?);
        let ahead = state.real_time(state.time.saturating_sub(first.time));
        let may_go_on = state.is_kept || self.has_caches && !self.is_ahead_of_newcomer(last);
        let is_ready = state.next().is_some() && ahead + MIN_SLICE <= self.slice(0);
        (may_go_on && is_ready).then_some(last)
    }

    /// Whether a tenant that has come, and has had no turn since, could run and is behind `tenant`.
    fn is_ahead_of_newcomer(&self, tenant: TenantId) -> bool {
        let time = self.tenants.get(&tenant).map_or(0, |state| state.time);
        let is_behind = |other: &TenantQueue| other.has_come && other.time < time;
        let mut others = self.tenants.values();
        others.any(|other| is_behind(other) && other.next().is_some())
    }

    /// Charges the tenants for which the device has stayed idle, also for the time in which the
    /// thread of the next graph woke up.
    fn end_holds(&mut self, at: Duration) {
        for state in self.tenants.values_mut() {
            if let Some(since) = state.hold.take() {
                state.time += state.virtual_time(at.saturating_sub(since));
            }
        }
    }

    /// Ends the turn of a graph at the time `at`. `took`: time on the device that
    /// [`progress`](Queue::progress) has not reported. A graph that is not done waits again, ahead
    /// of the tenant's other graphs.
    pub(crate) fn used(
        &mut self,
        tenant: TenantId,
        ticket: Ticket,
        took: Duration,
        is_done: bool,
        at: Duration,
    ) {
        let Some(state) = self.tenants.get_mut(&tenant) else {
            return;
        };
        state.time += state.virtual_time(took);
        if is_done {
            state.started = state.started.saturating_sub(1);
            state.idle_since = at;
            state.graph = state.real_time(state.time.saturating_sub(state.began));
            let time = state.time;
            // No tenant waits, so nobody has lost time to this one: its lead is forgiven.
            if self.tenants.values().all(TenantQueue::is_idle) {
                self.now = self.now.max(time);
            }
        } else {
            let started = true;
            state.waiting.push_front(Waiting { ticket, started });
        }
    }

    /// Starts a graph that shares the turn of a graph of `holder`, if its tenant may start it now.
    /// The graph is no longer in the queue then. `others_wait`: a graph that cannot share the turn
    /// waits, or the holder's would for this one, so a tenant that is further ahead than a turn
    /// gets no more time now.
    pub(crate) fn join_turn(
        &mut self,
        (tenant, ticket): (TenantId, Ticket),
        holder: TenantId,
        others_wait: bool,
    ) -> bool {
        let begins = self.tenants.get(&holder).map_or(0, |state| state.time);
        let slice = self.slice(0);
        let Some(state) = self.tenants.get_mut(&tenant) else {
            return false;
        };
        let ahead = state.real_time(state.time.saturating_sub(begins));
        if others_wait && ahead > slice {
            return false;
        }
        let place = state.waiting.iter().position(|w| w.ticket == ticket);
        let Some(place) = place else {
            return false;
        };
        let started = state.waiting[place].started;
        if !started && state.started >= state.entitlement.in_flight {
            return false;
        }
        state.waiting.remove(place);
        if !started {
            state.started += 1;
            state.began = state.time;
        }
        state.has_come = false;
        // The programs of a batch return one after the other: the turn is not kept for the first.
        self.last = None;
        true
    }

    /// Removes a graph that waits for a turn and is no longer wanted, at the time `at`.
    pub(crate) fn withdraw(&mut self, tenant: TenantId, ticket: Ticket, at: Duration) {
        let Some(state) = self.tenants.get_mut(&tenant) else {
            return;
        };
        let place = state.waiting.iter().position(|w| w.ticket == ticket);
        let removed = place.and_then(|place| state.waiting.remove(place));
        // A graph that has had no turn is none of those that have started and not ended.
        if removed.is_some_and(|waiting| waiting.started) {
            self.used(tenant, ticket, Duration::ZERO, true, at);
        }
    }

    /// Whether a tenant with waiting graphs may not start one more than those.
    pub(crate) fn is_full(&self) -> bool {
        let mut tenants = self.tenants.values();
        tenants.any(|state| {
            let graphs = state.waiting.iter().filter(|w| !w.started).count() + state.started;
            !state.waiting.is_empty() && graphs >= state.entitlement.in_flight
        })
    }

    /// The number of graphs that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.tenants.values().map(|state| state.waiting.len()).sum()
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

    /// What has been charged to a tenant, as time at its weight.
    #[cfg(test)]
    pub(crate) fn time_of(&self, tenant: TenantId) -> Duration {
        let state = &self.tenants[&tenant];
        state.real_time(state.time)
    }

    /// How long `tenant`, whose turn begins now, may keep the device. `None`: no other graph waits.
    pub(crate) fn allowance(&self, tenant: TenantId) -> Option<Duration> {
        Some(self.left(tenant)?.max(MIN_SLICE))
    }

    /// When the turn of `tenant` is to end, from its start, after another graph has entered. The
    /// turn has lasted `ran`, all of which has been reported.
    ///
    /// It ends at once for a tenant that has come and is behind. One more graph of a tenant that
    /// waits already ends nothing.
    pub(crate) fn cut(&self, tenant: TenantId, ran: Duration) -> Option<Duration> {
        let left = self.left(tenant)?;
        let more = match self.is_ahead_of_newcomer(tenant) {
            true if self.has_caches => left.min(MIN_WARM_SLICE.saturating_sub(ran)),
            true => Duration::ZERO,
            false => left,
        };
        Some((ran + more).max(MIN_SLICE))
    }

    /// How long `tenant` may still have the device, until it is ahead of one that waits. `None`: no
    /// other graph waits.
    fn left(&self, tenant: TenantId) -> Option<Duration> {
        let next = self.tenants.get(&self.first()?)?;
        let own = self.tenants.get(&tenant)?;
        let end = next.time + own.virtual_time(self.slice(0));
        Some(own.real_time(end.saturating_sub(own.time)))
    }

    /// How far a tenant may get ahead of a waiting one, if the tenants with graphs and `more` share
    /// the device.
    fn slice(&self, more: u32) -> Duration {
        let with_graphs = self.tenants.values().filter(|state| !state.is_idle());
        let count = with_graphs.fold(more, |count, _| count.saturating_add(1));
        (ROUND / count.max(2)).max(SLICE)
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
