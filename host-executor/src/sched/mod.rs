//! Several guests on one device: a graph gets a turn, and gives way in between to whoever is owed more.
//!
//! [`queue`] is the rule. Here are the threads that follow it: a session's thread that wants to run a graph either finds
//! the device free, which costs it a lock, or sleeps until the one before hands the device over.

mod queue;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vgpu_engine::{Plan, RunStatus, RunError, Turn};

pub(crate) use queue::{Party, Terms};
use queue::{Queue, Ticket};

/// Hands out turns on one device.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    state: Mutex<State>,
    /// The turn of whoever has the device.
    turn: Turn,
}

#[derive(Debug, Default)]
struct State {
    queue: Queue,
    last_ticket: u64,
    /// Who has the device, or has been handed it and wakes up.
    holder: Option<Holder>,
    sleepers: BTreeMap<Ticket, Arc<Condvar>>,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    party: Party,
    ticket: Ticket,
    /// By the clock of the turn.
    since: Duration,
    /// What the queue knows of the time since then.
    told: Duration,
}

/// Where the time of a graph went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Times {
    /// Waiting for the device, before and in between.
    pub(crate) queued: Duration,
    /// On the device.
    pub(crate) ran: Duration,
    /// Turns that it took.
    pub(crate) turns: u64,
}

impl Times {
    fn add(&mut self, more: Times) {
        self.queued += more.queued;
        self.ran += more.ran;
        self.turns += more.turns;
    }
}

/// What became of a plan's run.
#[must_use]
pub(crate) enum Ran {
    /// It is over.
    Done(Result<(), RunError>, Times),
    /// The device works on the end of it.
    UnderWay(Flight),
}

/// The end of a run, which the device works on; nobody else has it until then.
#[must_use]
pub(crate) struct Flight {
    held: Held,
    /// For the last turn.
    queued: Duration,
    /// Of the turns before.
    times: Times,
}

impl Flight {
    /// Waits for the end of a run of `plan`. `after_turn` is told as in [`Scheduler::run`].
    pub(crate) fn land(
        self,
        plan: &mut dyn Plan,
        after_turn: impl FnOnce(Times),
    ) -> (Result<(), RunError>, Times) {
        let Flight {
            held,
            queued,
            mut times,
        } = self;
        let outcome = plan.wait();
        let turn = held.end(queued, true);
        times.add(turn);
        after_turn(turn);
        (outcome, times)
    }
}

impl Scheduler {
    /// Runs a plan, in as many turns as that takes, until the device has been handed all of it. `after_turn` is told where
    /// the time of each turn went that is over.
    pub(crate) fn run(
        self: &Arc<Self>,
        party: Party,
        terms: Terms,
        plan: &mut dyn Plan,
        mut after_turn: impl FnMut(Times),
    ) -> Ran {
        let mut times = Times::default();
        let mut wait_began = self.turn.now();
        let ticket = self.enter(party, terms);
        loop {
            let mut held = self.wait(party, ticket);
            let start = self.turn.now();
            let queued = start.saturating_sub(wait_began);
            held.start = start;
            let progress = plan.launch(&self.turn);
            if progress == Ok(RunStatus::InFlight) {
                return Ran::UnderWay(Flight {
                    held,
                    queued,
                    times,
                });
            }
            let turn = held.end(queued, progress != Ok(RunStatus::Yielded));
            wait_began = self.turn.now();
            times.add(turn);
            after_turn(turn);
            match progress {
                Ok(RunStatus::Yielded) => {}
                Ok(_) => return Ran::Done(Ok(()), times),
                Err(error) => return Ran::Done(Err(error), times),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, party: Party, terms: Terms) -> Ticket {
        let mut state = self.lock();
        state.last_ticket += 1;
        let ticket = Ticket(state.last_ticket);
        let now = self.turn.now();
        let State { holder, queue, .. } = &mut *state;
        if let Some(holder) = holder {
            let more = now.saturating_sub(holder.since + holder.told);
            holder.told += more;
            queue.progress(holder.party, more);
        }
        queue.enter(party, terms, ticket);
        match state.holder {
            None => state.hand_over(&self.turn),
            Some(holder) => {
                let ran = now.saturating_sub(holder.since);
                let cut = state.queue.cut(holder.party, ran);
                self.turn.set_end(cut.map(|cut| holder.since + cut));
            }
        }
        ticket
    }

    /// Sleeps until the device is the ticket's.
    fn wait(self: &Arc<Self>, party: Party, ticket: Ticket) -> Held {
        let mut state = self.lock();
        let mut bell = None;
        while state.holder.is_none_or(|holder| holder.ticket != ticket) {
            let bell = bell.get_or_insert_with(|| {
                let bell = Arc::new(Condvar::new());
                state.sleepers.insert(ticket, Arc::clone(&bell));
                bell
            });
            state = bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if bell.is_some() {
            state.sleepers.remove(&ticket);
        }
        Held {
            scheduler: Arc::clone(self),
            party,
            ticket,
            start: self.turn.now(),
            is_done: true,
        }
    }
}

impl State {
    /// Gives the device, which nobody has, to whoever is next.
    fn hand_over(&mut self, turn: &Turn) {
        self.holder = self.queue.next().map(|(party, ticket)| Holder {
            party,
            ticket,
            since: turn.now(),
            told: Duration::ZERO,
        });
        let Some(holder) = self.holder else { return };
        let allowance = self.queue.allowance(holder.party);
        turn.set_end(allowance.map(|allowance| holder.since + allowance));
        if let Some(bell) = self.sleepers.get(&holder.ticket) {
            bell.notify_one();
        }
    }
}

/// The device, until this is dropped: by a panic in the engine, too.
struct Held {
    scheduler: Arc<Scheduler>,
    party: Party,
    ticket: Ticket,
    start: Duration,
    is_done: bool,
}

impl Held {
    /// Gives the device up, for good or not, after a turn that was waited for so long.
    fn end(mut self, queued: Duration, is_done: bool) -> Times {
        self.is_done = is_done;
        Times {
            queued,
            ran: self.scheduler.turn.now().saturating_sub(self.start),
            turns: 1,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Scheduler { turn, .. } = &*self.scheduler;
        let mut state = self.scheduler.lock();
        let took = turn.now().saturating_sub(self.start);
        state
            .queue
            .used(self.party, self.ticket, took, self.is_done);
        state.hand_over(turn);
    }
}

#[cfg(test)]
mod tests;
