//! Who is next: the rule alone, without threads and without a clock.
//!
//! Every guest has a virtual time: the time that its graphs have had the device, divided by its weight. The guest
//! whose virtual time is least behind runs next (start-time fair queueing), so that over any stretch in which two
//! guests always want the device, their times on it are as their weights. What is charged is time as measured, not as
//! guessed.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// What a guest may use before it stops for one that is owed time.
pub(crate) const SLICE: Duration = Duration::from_millis(2);

/// The least that a turn lasts, whoever comes: a switch costs some ten microseconds and warm caches.
pub(crate) const LEAST: Duration = Duration::from_micros(500);

/// How much of the time that it did not use a guest may claim when it comes back. A guest that decodes is away for a
/// moment after each token; without this it would lose those moments to whoever never leaves.
const CREDIT: Duration = Duration::from_millis(5);

/// Virtual nanoseconds of a nanosecond at weight 1: rounding is far below what can be measured, whatever the weight.
const SCALE: u128 = 1 << 20;

/// Guests remembered though they want nothing, before those that owe nothing are forgotten.
const REMEMBERED: usize = 256;

/// A guest, to the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Party(pub(crate) u64);

/// A graph that wants the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ticket(pub(crate) u64);

/// What a guest may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Its part of the device, against those of the others. At least 1.
    pub(crate) weight: u32,
    /// Graphs of it that may be under way at once. At least 1.
    pub(crate) in_flight: usize,
}

/// The graphs that want the device, and what each guest has had of it.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    parties: BTreeMap<Party, State>,
    /// Virtual time of the guest that was furthest behind when it got its turn. Never goes back.
    now: u128,
}

#[derive(Debug)]
struct State {
    terms: Terms,
    time: u128,
    waiting: VecDeque<Waiting>,
    /// Graphs that have had a turn and are not done.
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

    /// The place in `waiting` of the graph that may run next.
    fn next(&self) -> Option<usize> {
        match self.started < self.terms.in_flight {
            true => (!self.waiting.is_empty()).then_some(0),
            false => self.waiting.iter().position(|w| w.started),
        }
    }

    fn virtual_time(&self, real: Duration) -> u128 {
        real.as_nanos() * SCALE / u128::from(self.terms.weight.max(1))
    }

    fn real_time(&self, time: u128) -> Duration {
        let nanos = time * u128::from(self.terms.weight.max(1)) / SCALE;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl Queue {
    /// A graph wants the device for the first time.
    pub(crate) fn enter(&mut self, party: Party, terms: Terms, ticket: Ticket) {
        if self.parties.len() > REMEMBERED {
            let now = self.now;
            self.parties.retain(|_, s| !s.is_idle() || s.time > now);
        }
        let now = self.now;
        let state = self.parties.entry(party).or_insert(State {
            terms,
            time: 0,
            waiting: VecDeque::new(),
            started: 0,
        });
        state.terms = terms;
        if state.is_idle() {
            let earliest = now.saturating_sub(state.virtual_time(CREDIT));
            state.time = state.time.max(earliest);
        }
        let started = false;
        state.waiting.push_back(Waiting { ticket, started });
    }

    /// The graph that gets the device now; it is waiting no longer.
    pub(crate) fn next(&mut self) -> Option<(Party, Ticket)> {
        let party = self.first()?;
        let state = self.parties.get_mut(&party)?;
        let place = state.next()?;
        let waiting = state.waiting.remove(place)?;
        self.now = self.now.max(state.time);
        if !waiting.started {
            state.started += 1;
        }
        Some((party, waiting.ticket))
    }

    /// The turn of a graph is over, in which it used the device for `took` that was not told yet. One that is not done waits again, ahead of its
    /// guest's others.
    pub(crate) fn used(&mut self, party: Party, ticket: Ticket, took: Duration, is_done: bool) {
        let Some(state) = self.parties.get_mut(&party) else {
            return;
        };
        state.time += state.virtual_time(took);
        if is_done {
            state.started = state.started.saturating_sub(1);
            let time = state.time;
            // Nobody wants the device: what was used too much was nobody's loss.
            if self.parties.values().all(State::is_idle) {
                self.now = self.now.max(time);
            }
        } else {
            let started = true;
            state.waiting.push_front(Waiting { ticket, started });
        }
    }

    /// The device has been used for `more` by a graph whose turn goes on. Told before somebody enters, so that he is
    /// placed by what is so now.
    pub(crate) fn progress(&mut self, party: Party, more: Duration) {
        let ready = self.first().and_then(|first| self.parties.get(&first));
        let ready = ready.map_or(u128::MAX, |state| state.time);
        if let Some(state) = self.parties.get_mut(&party) {
            state.time += state.virtual_time(more);
            self.now = self.now.max(state.time.min(ready));
        }
    }

    /// How long `party`, whose turn begins now, may keep the device; `None` while nobody else wants it.
    pub(crate) fn allowance(&self, party: Party) -> Option<Duration> {
        let next = self.parties.get(&self.first()?)?;
        let own = self.parties.get(&party)?;
        let ahead = own.real_time(next.time.saturating_sub(own.time));
        Some((ahead + SLICE).max(LEAST))
    }

    /// How far into its turn `party` is to stop, now that somebody has come who may be owed more. It has run for `ran`,
    /// all of which was told.
    pub(crate) fn cut(&self, party: Party, ran: Duration) -> Option<Duration> {
        let next = self.parties.get(&self.first()?)?;
        let own = self.parties.get(&party)?;
        let more = match next.time < own.time {
            true => Duration::ZERO,
            false => own.real_time(next.time - own.time) + SLICE,
        };
        Some((ran + more).max(LEAST))
    }

    /// The guest that is furthest behind among those that have a graph which may run.
    fn first(&self) -> Option<Party> {
        let ready = self.parties.iter().filter(|(_, s)| s.next().is_some());
        ready.min_by_key(|(_, s)| s.time).map(|(&party, _)| party)
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
