//! Graphs that share a turn.
//!
//! The thread of a session that waits for the device *offers* its plan. The thread that gets the
//! device takes the offers with an equal [key](Plan::batch_key) along, runs all of these plans as
//! one batch, and hands each back: to its session if it is done, or to the offers if it has
//! yielded. A plan is passed by value, so it has one owner at any time.
//!
//! **Who waits for whom.** After a batch, its programs usually return at once with their next
//! graphs. The first of them waits for the others, so that they run together again, at most a
//! [part](super::offers::WAIT_PART) of the time that the batch took, only while no other graph
//! waits, and not for a program that was slower than that the last time. A graph that only graphs
//! with the same products wait for keeps the device until it is done: they can run with its next
//! graph, and in the middle of this one they could not.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use vgpu_engine::{Engine, Plan, RunError, RunStatus, Turn};

use super::offers::{Offer, Outcome, part};
use super::queue::{Entitlement, TenantId, Ticket};
use super::scheduler::{
    Alone, DeviceGuard, DeviceState, InFlight, RunState, Scheduler, TurnEvent, Waiter,
};
use super::times::Times;
use crate::lock::expect_unlocked;

/// From how many times the work of the graph that has the device on a graph of a tenant that is
/// ahead takes no part.
const LARGE_WORK: u64 = 4;

/// A plan that runs in a batch if others are there.
pub(crate) struct Batchable<'a> {
    pub(crate) engine: &'a dyn Engine,
    pub(crate) plan: &'a mut Box<dyn Plan>,
    /// The number of the session.
    pub(crate) program: u64,
    /// Whether the plan may run with others.
    pub(crate) is_allowed: bool,
}

/// Takes the place of a plan that the scheduler has. If it stays there, because the batch of the
/// plan has panicked, the graph is compiled again.
struct Placeholder;

impl Plan for Placeholder {
    fn launch(&mut self, _: &Turn) -> Result<RunStatus, RunError> {
        Err(RunError::Stale)
    }

    fn plan_bytes(&self) -> u64 {
        0
    }

    fn is_current(&self) -> bool {
        false
    }
}

/// What the thread of a graph wakes up for.
enum Wakeup {
    /// Its graph has the device. The plan of the graph, and those that run with it.
    Holds(Offer, Vec<(Ticket, Offer)>),
    /// Its graph had a turn with another one.
    RanWithAnother(Outcome),
    /// Its graph is not wanted any more, and has left the queue. The plan of the graph, and the
    /// times of turns that the thread has not heard of.
    Withdrawn(Box<dyn Plan>, Times),
}

impl Scheduler {
    /// As [`Scheduler::run`], for a plan that runs with others of its kind if they wait.
    pub(crate) fn run_batchable(
        self: &Arc<Self>,
        tenant: TenantId,
        entitlement: Entitlement,
        batchable: Batchable<'_>,
        mut observe: impl FnMut(TurnEvent),
        mut is_cancelled: impl FnMut() -> bool,
    ) -> RunState {
        let Batchable {
            engine,
            plan,
            program,
            is_allowed,
        } = batchable;
        let key = match plan.batch_key() {
            Some(key) if is_allowed && engine.max_batch() > 1 => key,
            _ => return self.run(tenant, entitlement, plan.as_mut(), observe, is_cancelled),
        };
        let mut times = Times::default();
        let wait_began = self.turn.now();
        observe(TurnEvent::Waits);
        let offer = Offer {
            tenant,
            program,
            key,
            work: plan.batch_work().max(1),
            plan: std::mem::replace(plan, Box::new(Placeholder)),
            since: wait_began,
            took: Duration::ZERO,
        };
        let most = engine.max_batch();
        let ticket = self.enter(tenant, entitlement, |state, ticket, now| {
            state.batches.returned(program, now);
            state.batches.most = most;
            state.batches.offers.insert(ticket, offer);
        });
        loop {
            let (turn, outcome) = match self.wait_batched(ticket, most, &mut is_cancelled) {
                Wakeup::Holds(own, others) => {
                    observe(TurnEvent::Begins);
                    let batch = Batch {
                        scheduler: self,
                        start: self.turn.now(),
                        own: (ticket, Some(own)),
                        others,
                    };
                    match batch.run(engine, &mut is_cancelled) {
                        Ran::Ended(turn, ended) => (turn, ended),
                        Ran::InFlight(guard, queued, own) => {
                            give_back(plan, Some(own));
                            return RunState::InFlight(InFlight {
                                guard,
                                queued,
                                times,
                            });
                        }
                    }
                }
                Wakeup::RanWithAnother(outcome) => {
                    observe(TurnEvent::Begins);
                    match outcome {
                        Outcome::Yielded(mut turn) => {
                            let waiter = Waiter::new(self, ticket, None);
                            let cancelled = is_cancelled();
                            let mut state = self.lock();
                            waiter.end(&mut state);
                            let taken = { cancelled }
                                .then(|| self.withdraw(&mut state, ticket))
                                .flatten();
                            drop(state);
                            let ended = taken.map(|(plan, more)| {
                                turn.add(more);
                                Ended::Cancelled(Some(plan))
                            });
                            (turn, ended)
                        }
                        Outcome::Cancelled(plan, turn) => {
                            (turn, Some(Ended::Cancelled(Some(plan))))
                        }
                        Outcome::Done(plan, outcome, turn) => {
                            (turn, Some(Ended::Done(plan, outcome)))
                        }
                    }
                }
                Wakeup::Withdrawn(own, turn) => (turn, Some(Ended::Cancelled(Some(own)))),
            };
            times.add(turn);
            observe(TurnEvent::Ended(turn));
            match outcome {
                None => observe(TurnEvent::Waits),
                Some(Ended::Cancelled(own)) => {
                    give_back(plan, own);
                    return RunState::Cancelled(times);
                }
                Some(Ended::Done(own, outcome)) => {
                    give_back(plan, own);
                    return RunState::Done(outcome, times);
                }
            }
        }
    }

    /// Sleeps until the graph with this ticket has the device, has had a turn with another one, or
    /// is not wanted any more. A graph in a running batch stays there until the end of the turn.
    fn wait_batched(
        self: &Arc<Self>,
        ticket: Ticket,
        most: usize,
        is_cancelled: &mut dyn FnMut() -> bool,
    ) -> Wakeup {
        let mut waiter = Waiter::new(self, ticket, None);
        let mut state = self.lock();
        let found = loop {
            if let Some(outcome) = state.batches.outcomes.remove(&ticket) {
                break Wakeup::RanWithAnother(outcome);
            }
            if state.holder.is_some_and(|holder| holder.ticket == ticket) {
                let waiting = state.queue.waiting();
                let DeviceState { queue, batches, .. } = &mut *state;
                let own = { batches.offers.remove(&ticket) }
                    .expect("a graph is an offer until a thread has its plan");
                let others_wait = batches.count(own.key.products, None, None) < waiting;
                let mut joining = Vec::new();
                for (&ticket, offer) in &batches.offers {
                    let member = (offer.tenant, ticket);
                    // A graph with much more work keeps this one waiting as a graph would that
                    // cannot share the turn.
                    let is_large = offer.work / LARGE_WORK > own.work;
                    if joining.len() + 1 < most
                        && offer.key == own.key
                        && queue.join_turn(member, own.tenant, others_wait || is_large)
                    {
                        joining.push(ticket);
                    }
                }
                let others: Vec<(Ticket, Offer)> = { joining.into_iter() }
                    .filter_map(|ticket| Some((ticket, batches.offers.remove(&ticket)?)))
                    .collect();
                batches.work = own.work;
                let each = others.iter().map(|(_, offer)| (offer.tenant, offer.work));
                batches.others = each.collect();
                break Wakeup::Holds(own, others);
            }
            state = waiter.sleep(state);
            if waiter.is_to_ask() {
                drop(state);
                let cancelled = is_cancelled();
                state = self.lock();
                if cancelled && let Some((plan, times)) = self.withdraw(&mut state, ticket) {
                    break Wakeup::Withdrawn(plan, times);
                }
            }
        };
        waiter.end(&mut state);
        found
    }

    /// Takes the plan of a graph out of the queue, or its turn from it, which its thread has not
    /// begun. Returns the plan with the times of turns that the thread has not heard of, and of the
    /// wait. `None` if the graph is in a running batch: the graph leaves it at the end of the turn.
    fn withdraw(&self, state: &mut DeviceState, ticket: Ticket) -> Option<(Box<dyn Plan>, Times)> {
        let batches = &mut state.batches;
        let offer = batches.offers.remove(&ticket);
        let Some(Offer {
            tenant,
            plan,
            since,
            ..
        }) = offer
        else {
            // In a running batch, unless the run is over meanwhile.
            if matches!(
                batches.outcomes.get(&ticket),
                None | Some(Outcome::Yielded(_))
            ) {
                batches.cancelled.insert(ticket);
            }
            return None;
        };
        let mut times = match batches.outcomes.remove(&ticket) {
            Some(Outcome::Yielded(times)) => times,
            // The outcome of a graph that is offered is that it has yielded.
            _ => Times::default(),
        };
        times.queued += self.turn.now().saturating_sub(since);
        state.leave(tenant, ticket, &self.turn);
        Some((plan, times))
    }

    /// As [`withdraw`](Scheduler::withdraw), after a panic of the graph's thread. Returns the plan,
    /// if it is here. A plan in a running batch is dropped at the end of the turn.
    pub(super) fn abandon(&self, state: &mut DeviceState, ticket: Ticket) -> Option<Box<dyn Plan>> {
        if let Some((plan, _)) = self.withdraw(state, ticket) {
            return Some(plan);
        }
        let batches = &mut state.batches;
        match batches.outcomes.remove(&ticket) {
            Some(Outcome::Cancelled(plan, _)) => Some(plan),
            Some(Outcome::Done(plan, ..)) => plan,
            Some(Outcome::Yielded(_)) | None => {
                batches.abandoned.insert(ticket);
                None
            }
        }
    }
}

/// Puts a plan back where it was taken from.
fn give_back(to: &mut Box<dyn Plan>, plan: Option<Box<dyn Plan>>) {
    if let Some(plan) = plan {
        *to = plan;
    }
}

/// Why a run is over.
enum Ended {
    Cancelled(Option<Box<dyn Plan>>),
    Done(Option<Box<dyn Plan>>, Result<(), RunError>),
}

/// What has become of the plan of this thread in its turn.
enum Ran {
    /// The times of the turn, and why the run is over, if it is.
    Ended(Times, Option<Ended>),
    /// The device executes the rest of the plan, which had waited so long for the turn.
    InFlight(DeviceGuard, Duration, Box<dyn Plan>),
}

/// A batch that has the device. Dropping it hands the device over, also while a panic in the engine
/// unwinds.
struct Batch<'a> {
    scheduler: &'a Arc<Scheduler>,
    start: Duration,
    /// The graph of this thread, and its plan until the turn has ended.
    own: (Ticket, Option<Offer>),
    others: Vec<(Ticket, Offer)>,
}

impl Batch<'_> {
    /// Runs the plans for a turn.
    fn run(mut self, engine: &dyn Engine, is_cancelled: &mut dyn FnMut() -> bool) -> Ran {
        expect_unlocked("Plan::launch");
        let turn = &self.scheduler.turn;
        let offers = { self.others.iter_mut() }.map(|(_, offer)| offer);
        let mut plans: Vec<&mut dyn Plan> = Vec::new();
        for offer in self.own.1.iter_mut().chain(offers) {
            plans.push(&mut *offer.plan);
        }
        let outcomes = match &mut plans[..] {
            [plan] => vec![plan.launch(turn)],
            plans => engine.launch_batch(plans, turn),
        };
        assert_eq!(outcomes.len(), plans.len(), "an outcome for each plan");
        if outcomes == [Ok(RunStatus::InFlight)] {
            drop(plans);
            let own = { self.own.1.take() }.expect("the plan of this thread");
            let queued = self.start.saturating_sub(own.since);
            return Ran::InFlight(self.guard(&own), queued, own.plan);
        }
        let mut outcomes: Vec<Result<RunStatus, RunError>> = outcomes
            .into_iter()
            .zip(plans)
            .map(|(outcome, plan)| match outcome {
                // No other graph gets the device until this one has ended.
                Ok(RunStatus::InFlight) => plan.wait().map(|()| RunStatus::Done),
                outcome => outcome,
            })
            .collect();
        let rest = outcomes.split_off(1);
        let own = outcomes.pop().expect("an outcome for each plan");
        let is_cancelled = own == Ok(RunStatus::Yielded) && is_cancelled();
        let (turn, plan) = self.end(&own, is_cancelled, rest);
        let ended = match own {
            Ok(RunStatus::Yielded) if is_cancelled => Some(Ended::Cancelled(plan)),
            Ok(RunStatus::Yielded) => None,
            Ok(_) => Some(Ended::Done(plan, Ok(()))),
            Err(error) => Some(Ended::Done(plan, Err(error))),
        };
        Ran::Ended(turn, ended)
    }

    /// The possession of the device for a plan that has it alone, until its results are there.
    fn guard(&self, own: &Offer) -> DeviceGuard {
        DeviceGuard {
            scheduler: Arc::clone(self.scheduler),
            tenant: own.tenant,
            ticket: self.own.0,
            start: self.start,
            is_done: true,
            alone: Some(Alone {
                program: own.program,
                products: own.key.products,
                took: own.took,
            }),
        }
    }

    /// Ends the turn, hands the plans of the others back, and the device over. Returns the times
    /// and the plan of this thread's graph, unless it is offered again.
    fn end(
        &mut self,
        own: &Result<RunStatus, RunError>,
        is_cancelled: bool,
        rest: Vec<Result<RunStatus, RunError>>,
    ) -> (Times, Option<Box<dyn Plan>>) {
        let mut state = self.scheduler.lock();
        let now = self.scheduler.turn.now();
        let (queued, work) = { &self.own.1 }.as_ref().map_or((Duration::ZERO, 0), |own| {
            (self.start.saturating_sub(own.since), own.work)
        });
        let mut ending = Ending::new(&mut state, self, work, now);
        let times = Times {
            queued,
            ran: part(ending.took_turn, work, ending.work),
            turns: 1,
            members: ending.members,
        };
        for ((ticket, offer), outcome) in std::mem::take(&mut self.others).into_iter().zip(rest) {
            ending.other(ticket, offer, outcome);
        }
        let (ticket, offer) = (self.own.0, self.own.1.take());
        let yielded = own == &Ok(RunStatus::Yielded) && !is_cancelled;
        let plan = offer.and_then(|offer| ending.member(ticket, offer, yielded));
        ending.finish(&self.scheduler.turn, now);
        (times, plan)
    }
}

impl Drop for Batch<'_> {
    /// After a panic: the plans are gone.
    fn drop(&mut self) {
        let Some(own) = self.own.1.take() else {
            return;
        };
        let mut state = self.scheduler.lock();
        let now = self.scheduler.turn.now();
        let mut ending = Ending::new(&mut state, self, own.work, now);
        for (ticket, offer) in self.others.drain(..) {
            let error = RunError::Kernel {
                node: 0,
                op: "batch",
                message: "the engine has panicked in a graph of another guest".into(),
            };
            ending.lost(ticket, offer, error);
        }
        drop(ending.member(self.own.0, own, false));
        ending.finish(&self.scheduler.turn, now);
    }
}

/// The end of a batch, under the lock of the scheduler.
struct Ending<'a> {
    state: &'a mut DeviceState,
    start: Duration,
    now: Duration,
    members: u64,
    /// The work of all members, to whom the turn is charged in proportion to their work.
    work: u64,
    /// How long the turn has taken.
    took_turn: Duration,
    /// The part of it that has not been reported to the queue.
    unreported: Duration,
    products: u64,
    /// The programs whose runs are over, and how long the longest of these runs has taken.
    absent: BTreeSet<u64>,
    took: Duration,
}

impl<'a> Ending<'a> {
    /// `own` is the work of the plan of this thread.
    fn new(state: &'a mut DeviceState, batch: &Batch<'_>, own: u64, now: Duration) -> Ending<'a> {
        let others = batch.others.iter().map(|(_, offer)| offer.work);
        let reported = state.holder.map_or(batch.start, |h| h.since + h.reported);
        Ending {
            start: batch.start,
            now,
            members: 1 + batch.others.len() as u64,
            work: others.fold(own, u64::saturating_add),
            took_turn: now.saturating_sub(batch.start),
            unreported: now.saturating_sub(reported),
            products: state.batches.products.unwrap_or_default(),
            absent: BTreeSet::new(),
            took: Duration::ZERO,
            state,
        }
    }

    /// Ends the turn of a member. Returns its plan, unless it has yielded and is offered again.
    fn member(&mut self, ticket: Ticket, offer: Offer, yielded: bool) -> Option<Box<dyn Plan>> {
        let key = offer.plan.batch_key().filter(|_| yielded);
        let (tenant, now) = (offer.tenant, self.now);
        let took = offer.took + now.saturating_sub(self.start);
        let DeviceState { queue, batches, .. } = &mut *self.state;
        let unreported = part(self.unreported, offer.work, self.work);
        queue.used(tenant, ticket, unreported, key.is_none(), now);
        let Some(key) = key else {
            self.absent.insert(offer.program);
            self.took = self.took.max(took);
            return Some(offer.plan);
        };
        let offer = Offer {
            key,
            since: now,
            took,
            ..offer
        };
        batches.offers.insert(ticket, offer);
        None
    }

    /// Ends the turn of a member of another thread.
    fn other(&mut self, ticket: Ticket, offer: Offer, outcome: Result<RunStatus, RunError>) {
        let times = Times {
            queued: self.start.saturating_sub(offer.since),
            ran: part(self.took_turn, offer.work, self.work),
            turns: 1,
            members: self.members,
        };
        let yielded = outcome == Ok(RunStatus::Yielded);
        let is_cancelled = self.state.batches.cancelled.remove(&ticket) && yielded;
        let plan = self.member(ticket, offer, yielded && !is_cancelled);
        self.tell(ticket, times, |times| match plan {
            None => Outcome::Yielded(times),
            Some(plan) if is_cancelled => Outcome::Cancelled(plan, times),
            plan => Outcome::Done(plan, outcome.map(|_| ()), times),
        });
    }

    /// Ends the turn of a member of another thread whose plan is lost.
    fn lost(&mut self, ticket: Ticket, offer: Offer, error: RunError) {
        self.state.batches.cancelled.remove(&ticket);
        drop(self.member(ticket, offer, false));
        self.tell(ticket, Times::default(), |times| {
            Outcome::Done(None, Err(error), times)
        });
    }

    /// Tells another thread what has become of its graph, in this turn and in those before that the
    /// thread has not heard of yet.
    fn tell(&mut self, ticket: Ticket, mut times: Times, outcome: impl FnOnce(Times) -> Outcome) {
        if self.state.batches.abandoned.remove(&ticket) {
            return;
        }
        let outcomes = &mut self.state.batches.outcomes;
        if let Some(Outcome::Yielded(before)) = outcomes.remove(&ticket) {
            times.add(before);
        }
        outcomes.insert(ticket, outcome(times));
        self.state.wake(ticket);
    }

    /// Hands the device over.
    fn finish(self, turn: &Turn, now: Duration) {
        let DeviceState { batches, .. } = &mut *self.state;
        batches.end(self.products, self.absent, (self.took, now));
        self.state.hand_over(turn);
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
