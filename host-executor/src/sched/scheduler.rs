//! The threads that wait for the device, and the one that has it.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar};
use std::thread;
use std::time::Duration;

use vgpu_engine::{Plan, RunError, RunStatus, Turn};

use super::offers::Batches;
use super::queue::{Entitlement, Next, Queue, TenantId, Ticket};
use super::times::Times;
use crate::lock::{Rank, RankedGuard, RankedMutex, expect_unlocked};

/// The longest turn, also of a graph that no other graph waits for. A graph whose guest is gone has
/// the device for this long at most.
const MAX_TURN: Duration = Duration::from_millis(100);

/// How often a thread that waits for a turn asks whether its graph is still wanted: the graph that
/// has the device may never end.
const QUESTION_INTERVAL: Duration = Duration::from_millis(250);

/// Of how many processors a tenant is granted one for work outside of turns, while another tenant
/// is active. A tenant is granted one at least.
const PROCESSORS: usize = 8;

/// Grants turns on one device.
#[derive(Debug)]
pub(crate) struct Scheduler {
    state: RankedMutex<DeviceState>,
    /// How many processors a tenant is granted for work outside of turns.
    processors: u32,
    /// The turn that is in progress, shared with the plan that runs in it.
    pub(super) turn: Turn,
}

impl Scheduler {
    /// A scheduler whose device is idle. `has_caches`: the device computes with caches of the
    /// processor, which a turn of another guest fills.
    pub(crate) fn new(has_caches: bool) -> Scheduler {
        let of_machine = thread::available_parallelism().map_or(1, usize::from);
        let state = DeviceState {
            queue: Queue::new(has_caches),
            ..DeviceState::default()
        };
        Scheduler {
            processors: u32::try_from(of_machine / PROCESSORS).map_or(1, |granted| granted.max(1)),
            state: RankedMutex::new(Rank::Scheduler, state),
            turn: Turn::default(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct DeviceState {
    pub(super) queue: Queue,
    last_ticket: u64,
    /// The graph that has the device; its thread may still be waking up.
    pub(super) holder: Option<Holder>,
    /// Until when nobody has the device, on the clock of `Scheduler::turn`: [`Next::Hold`], or
    /// [`Batches::hold_for_members`].
    hold: Option<Duration>,
    pub(super) waiters: BTreeMap<Ticket, Arc<Condvar>>,
    pub(super) batches: Batches,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Holder {
    tenant: TenantId,
    pub(super) ticket: Ticket,
    /// Start of its turn, on the clock of `Scheduler::turn`.
    pub(super) since: Duration,
    /// Part of the time since then that has been reported to the queue.
    pub(super) reported: Duration,
}

/// What a run does, for its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnEvent {
    /// The run waits for a turn.
    Waits,
    /// A turn begins.
    Begins,
    /// A turn has ended, with these times. Without turns in them: the run waited, and was
    /// cancelled.
    Ended(Times),
}

/// State of a plan after [`Scheduler::run`].
#[must_use]
pub(crate) enum RunState {
    /// The run has ended.
    Done(Result<(), RunError>, Times),
    /// The device executes the rest of the plan asynchronously.
    InFlight(InFlight),
    /// The run was cancelled between two turns or before the first. The results are undefined.
    Cancelled(Times),
}

/// A run of which the device executes the rest. No other graph gets the device until the run has
/// ended.
#[must_use]
pub(crate) struct InFlight {
    pub(super) guard: DeviceGuard,
    /// Waiting time of the last turn.
    pub(super) queued: Duration,
    /// Times of the earlier turns.
    pub(super) times: Times,
}

impl InFlight {
    /// Waits until the run of `plan` has ended. Calls `observe` as [`Scheduler::run`] does.
    pub(crate) fn wait(
        self,
        plan: &mut dyn Plan,
        observe: impl FnOnce(TurnEvent),
    ) -> (Result<(), RunError>, Times) {
        let InFlight {
            guard,
            queued,
            mut times,
        } = self;
        expect_unlocked("Plan::wait");
        let outcome = plan.wait();
        let turn = guard.end(queued, true);
        times.add(turn);
        observe(TurnEvent::Ended(turn));
        (outcome, times)
    }
}

impl Scheduler {
    /// Runs a plan, in as many turns as it takes, until all of it has been handed to the device.
    /// Calls `observe` before each wait and at both ends of each turn, without a lock, and
    /// `is_cancelled` between two turns of the plan, at least once per [`MAX_TURN`] of device time,
    /// and once per [`QUESTION_INTERVAL`] while the plan waits for a turn, also without a lock.
    pub(crate) fn run(
        self: &Arc<Self>,
        tenant: TenantId,
        entitlement: Entitlement,
        plan: &mut dyn Plan,
        mut observe: impl FnMut(TurnEvent),
        mut is_cancelled: impl FnMut() -> bool,
    ) -> RunState {
        let mut times = Times::default();
        let mut wait_began = self.turn.now();
        let ticket = self.enter(tenant, entitlement, |_, _, _| {});
        loop {
            observe(TurnEvent::Waits);
            let Some(mut guard) = self.wait(tenant, ticket, &mut is_cancelled) else {
                let waited = Times::waited(self.turn.now().saturating_sub(wait_began));
                times.add(waited);
                observe(TurnEvent::Ended(waited));
                return RunState::Cancelled(times);
            };
            observe(TurnEvent::Begins);
            let start = self.turn.now();
            let queued = start.saturating_sub(wait_began);
            guard.start = start;
            expect_unlocked("Plan::launch");
            let status = plan.launch(&self.turn);
            if status == Ok(RunStatus::InFlight) {
                return RunState::InFlight(InFlight {
                    guard,
                    queued,
                    times,
                });
            }
            let yielded = status == Ok(RunStatus::Yielded);
            let cancelled = yielded && is_cancelled();
            let turn = guard.end(queued, !yielded || cancelled);
            wait_began = self.turn.now();
            times.add(turn);
            observe(TurnEvent::Ended(turn));
            match status {
                Ok(RunStatus::Yielded) if cancelled => return RunState::Cancelled(times),
                Ok(RunStatus::Yielded) => {}
                Ok(_) => return RunState::Done(Ok(()), times),
                Err(error) => return RunState::Done(Err(error), times),
            }
        }
    }

    /// How long the device still stays idle at most for a tenant that is about to return. `None` if
    /// it does not, and while another thread has the lock.
    #[cfg(any(feature = "server", test))]
    pub(crate) fn hold(&self) -> Option<Duration> {
        let until = self.state.try_lock()?.hold?;
        Some(until.saturating_sub(self.turn.now()))
    }

    /// Counts work of a tenant outside of turns: `took` of the time of one processor. Returns when
    /// it is paid for, which [`pause`](Scheduler::pause) takes.
    pub(crate) fn work_outside(
        &self,
        tenant: TenantId,
        entitlement: Entitlement,
        took: Duration,
    ) -> Duration {
        let work = (took, self.processors);
        let mut state = self.lock();
        { &mut state.queue }.work_outside(tenant, entitlement, work, self.turn.now())
    }

    /// How long a session does no work outside of turns, whose tenant has paid for it at the time
    /// `paid`. `None`: it may go on.
    pub(crate) fn pause(&self, tenant: TenantId, paid: Duration) -> Option<Duration> {
        self.lock().queue.pause(tenant, paid, self.turn.now())
    }

    /// How much time a tenant owes, for work outside of turns or for turns. `None`: nothing is lost
    /// if the tenant is forgotten.
    #[cfg(any(feature = "server", test))]
    pub(crate) fn debt(&self, tenant: TenantId) -> Option<Duration> {
        self.lock().queue.debt(tenant, self.turn.now())
    }

    /// The session of a program has ended: no batch waits for it.
    pub(crate) fn forget(&self, program: u64) {
        let mut state = self.lock();
        state.batches.forget(program);
        if state.holder.is_none() {
            state.hand_over(&self.turn);
        }
    }

    /// Takes the lock of the scheduler and releases it.
    #[cfg(feature = "server")]
    pub(crate) fn probe(&self) {
        drop(self.lock());
    }

    pub(super) fn lock(&self) -> RankedGuard<'_, DeviceState> {
        self.state.lock()
    }

    /// Adds a graph to the queue, with what `also` adds to the state.
    pub(super) fn enter(
        &self,
        tenant: TenantId,
        entitlement: Entitlement,
        also: impl FnOnce(&mut DeviceState, Ticket, Duration),
    ) -> Ticket {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = Ticket(state.last_ticket);
        let now = self.turn.now();
        let DeviceState {
            holder,
            queue,
            batches,
            ..
        } = &mut *state;
        if let Some(holder) = holder {
            let more = now.saturating_sub(holder.since + holder.reported);
            holder.reported += more;
            let (own, others) = batches.parts(more);
            queue.progress(holder.tenant, own);
            for (tenant, part) in others {
                queue.progress(tenant, part);
            }
        }
        queue.enter(tenant, entitlement, ticket, now);
        also(&mut state, ticket, now);
        match state.holder {
            None => state.hand_over(&self.turn),
            Some(holder) => {
                let ran = now.saturating_sub(holder.since);
                let cut =
                    { state.queue.cut(holder.tenant, ran) }.filter(|_| !state.only_members_wait());
                self.turn
                    .set_end(Some(holder.since + cut.unwrap_or(MAX_TURN).min(MAX_TURN)));
            }
        }
        ticket
    }

    /// Sleeps until the graph with this ticket has the device. `None`: the graph is not wanted any
    /// more, and has left the queue.
    fn wait(
        self: &Arc<Self>,
        tenant: TenantId,
        ticket: Ticket,
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Option<DeviceGuard> {
        let mut waiter = Waiter::new(self, ticket, Some(tenant));
        let mut state = self.lock();
        while state.holder.is_none_or(|holder| holder.ticket != ticket) {
            state = waiter.sleep(state);
            if waiter.is_to_ask() {
                drop(state);
                let cancelled = is_cancelled();
                state = self.lock();
                // Another thread may have given the device to this graph meanwhile.
                if cancelled {
                    state.leave(tenant, ticket, &self.turn);
                    waiter.end(&mut state);
                    return None;
                }
            }
        }
        waiter.end(&mut state);
        Some(DeviceGuard {
            scheduler: Arc::clone(self),
            tenant,
            ticket,
            start: self.turn.now(),
            is_done: true,
            alone: None,
        })
    }
}

/// A thread that waits until its graph has the device. Dropping it before [`end`](Waiter::end),
/// while a panic unwinds, takes the graph out of the queue.
pub(super) struct Waiter<'a> {
    scheduler: &'a Scheduler,
    ticket: Ticket,
    /// `None`: the plan of the graph is offered.
    tenant: Option<TenantId>,
    has_ended: bool,
    /// Set from the first sleep on.
    wakeup: Option<Arc<Condvar>>,
    /// When the thread asks next whether its graph is still wanted, on the clock of
    /// `Scheduler::turn`.
    question: Duration,
}

impl<'a> Waiter<'a> {
    pub(super) fn new(
        scheduler: &'a Scheduler,
        ticket: Ticket,
        tenant: Option<TenantId>,
    ) -> Waiter<'a> {
        Waiter {
            scheduler,
            ticket,
            tenant,
            has_ended: false,
            wakeup: None,
            question: scheduler.turn.now() + QUESTION_INTERVAL,
        }
    }

    /// Sleeps until another thread wakes this one, until the next question, or until the end of a
    /// hold, which this thread ends. The first call makes the graph one of the waiters, until
    /// [`end`](Waiter::end).
    pub(super) fn sleep<'s>(
        &mut self,
        mut state: RankedGuard<'s, DeviceState>,
    ) -> RankedGuard<'s, DeviceState> {
        let turn = &self.scheduler.turn;
        let wakeup = self.wakeup.get_or_insert_with(|| {
            let wakeup = Arc::new(Condvar::new());
            state.waiters.insert(self.ticket, Arc::clone(&wakeup));
            wakeup
        });
        let hold = state.hold;
        let end = hold.map_or(self.question, |until| until.min(self.question));
        let mut state = state.wait_timeout(wakeup, end.saturating_sub(turn.now()));
        if let Some(until) = hold
            && state.hold == hold
            && turn.now() >= until
        {
            state.hand_over(turn);
        }
        state
    }

    /// Whether the thread is to ask now whether its graph is still wanted. The next question is one
    /// interval later.
    pub(super) fn is_to_ask(&mut self) -> bool {
        let now = self.scheduler.turn.now();
        let is_due = now >= self.question;
        if is_due {
            self.question = now + QUESTION_INTERVAL;
        }
        is_due
    }

    /// The thread waits no longer.
    pub(super) fn end(mut self, state: &mut DeviceState) {
        self.has_ended = true;
        if self.wakeup.is_some() {
            state.waiters.remove(&self.ticket);
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let mut state = self.scheduler.lock();
        state.waiters.remove(&self.ticket);
        match self.tenant {
            Some(tenant) => state.leave(tenant, self.ticket, &self.scheduler.turn),
            None => {
                let plan = self.scheduler.abandon(&mut state, self.ticket);
                drop(state);
                drop(plan);
            }
        }
    }
}

impl DeviceState {
    /// Whether all graphs that wait are of the tenant of the graph that has the device, and have
    /// the same products.
    fn only_members_wait(&self) -> bool {
        let (Some(holder), Some(products)) = (self.holder, self.batches.products) else {
            return false;
        };
        let (tenant, ticket) = (Some(holder.tenant), Some(holder.ticket));
        let members = self.batches.count(products, tenant, ticket);
        members > 0 && members == self.queue.waiting()
    }

    /// Takes a graph out of the queue, or its turn from it, which its thread has not begun: the
    /// next graph gets the turn.
    pub(super) fn leave(&mut self, tenant: TenantId, ticket: Ticket, turn: &Turn) {
        let now = turn.now();
        match self.holder.filter(|holder| holder.ticket == ticket) {
            Some(holder) => {
                let took = now.saturating_sub(holder.since + holder.reported);
                self.queue.used(tenant, ticket, took, true, now);
                self.hand_over(turn);
            }
            None => {
                self.queue.withdraw(tenant, ticket, now);
                // The thread of this graph may be the one that waits for the end of a hold.
                if self.holder.is_none() {
                    self.hand_over(turn);
                }
            }
        }
    }

    /// Gives the idle device to the next graph of the queue, now or after a hold.
    pub(super) fn hand_over(&mut self, turn: &Turn) {
        let since = turn.now();
        (self.holder, self.hold) = (None, None);
        let (waiting, is_full) = (self.queue.waiting(), self.queue.is_full());
        if let Some((ticket, until)) = self.batches.hold_for_members(waiting, is_full, since) {
            self.hold = Some(until);
            self.wake(ticket);
            return;
        }
        match self.queue.next(since) {
            Next::Idle => {}
            Next::Hold(ticket, until) => {
                self.hold = Some(until);
                // The thread of this graph waits for the end of the hold.
                self.wake(ticket);
            }
            Next::Run(tenant, ticket) => self.begin(tenant, ticket, turn, since),
        }
    }

    /// Begins the turn of a graph.
    fn begin(&mut self, tenant: TenantId, ticket: Ticket, turn: &Turn, since: Duration) {
        let holder = Holder {
            tenant,
            ticket,
            since,
            reported: Duration::ZERO,
        };
        self.holder = Some(holder);
        self.batches.begin(ticket);
        let allowance =
            { self.queue.allowance(holder.tenant) }.filter(|_| !self.only_members_wait());
        let allowance = allowance.unwrap_or(MAX_TURN).min(MAX_TURN);
        turn.set_end(Some(holder.since + allowance));
        self.wake(ticket);
    }

    pub(super) fn wake(&self, ticket: Ticket) {
        if let Some(wakeup) = self.waiters.get(&ticket) {
            wakeup.notify_one();
        }
    }
}

/// Possession of the device. Dropping this hands the device over, also while a panic in the engine
/// unwinds.
pub(super) struct DeviceGuard {
    pub(super) scheduler: Arc<Scheduler>,
    pub(super) tenant: TenantId,
    pub(super) ticket: Ticket,
    pub(super) start: Duration,
    pub(super) is_done: bool,
    /// Of a graph that could have run with others.
    pub(super) alone: Option<Alone>,
}

/// A graph that could have run in a batch, and has the device alone.
pub(super) struct Alone {
    pub(super) program: u64,
    pub(super) products: u64,
    /// How long its earlier turns have taken.
    pub(super) took: Duration,
}

impl DeviceGuard {
    /// Ends a turn that began after `queued` of waiting. `is_done`: the graph needs no further
    /// turn.
    fn end(mut self, queued: Duration, is_done: bool) -> Times {
        self.is_done = is_done;
        Times {
            queued,
            ran: self.scheduler.turn.now().saturating_sub(self.start),
            turns: 1,
            members: 1,
        }
    }
}

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        let Scheduler { turn, .. } = &*self.scheduler;
        let mut state = self.scheduler.lock();
        let now = turn.now();
        let reported = state.holder.map_or(self.start, |h| h.since + h.reported);
        let took = now.saturating_sub(reported);
        state
            .queue
            .used(self.tenant, self.ticket, took, self.is_done, now);
        if let Some(alone) = self.alone.take() {
            let took = alone.took + now.saturating_sub(self.start);
            state
                .batches
                .end(alone.products, [alone.program].into(), (took, now));
        }
        state.hand_over(turn);
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
