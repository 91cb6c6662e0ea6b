//! Several guests on one device: a graph gets a turn, and gives way in between to whoever is owed more.
//!
//! [`queue`] is the rule. Here are the threads that follow it: a session's thread that wants to run a graph either finds
//! the device free, which costs it a lock, or sleeps until the one before hands the device over.

mod queue;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vgpu_kernels::{Plan, Progress, RunError, Turn};

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

impl Scheduler {
    /// Runs a plan to its end, in as many turns as that takes. `after_turn` is told where the time went so far.
    pub(crate) fn run(
        &self,
        party: Party,
        terms: Terms,
        plan: &mut dyn Plan,
        mut after_turn: impl FnMut(Times),
    ) -> (Result<(), RunError>, Times) {
        let mut times = Times::default();
        let mut wait_began = self.turn.now();
        let ticket = self.enter(party, terms);
        loop {
            let mut held = self.wait(party, ticket);
            let start = self.turn.now();
            times.queued += start.saturating_sub(wait_began);
            held.start = start;
            let progress = plan.advance(&self.turn);
            let end = self.turn.now();
            times.ran += end.saturating_sub(start);
            times.turns += 1;
            wait_began = end;
            held.is_done = progress != Ok(Progress::Yielded);
            drop(held);
            after_turn(times);
            match progress {
                Ok(Progress::Yielded) => {}
                Ok(Progress::Done) => return (Ok(()), times),
                Err(error) => return (Err(error), times),
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
    fn wait(&self, party: Party, ticket: Ticket) -> Held<'_> {
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
            scheduler: self,
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
struct Held<'a> {
    scheduler: &'a Scheduler,
    party: Party,
    ticket: Ticket,
    start: Duration,
    is_done: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let Scheduler { turn, .. } = self.scheduler;
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
