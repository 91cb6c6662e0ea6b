//! Draining: an executor that accepts no new sessions, and ends the open ones at a deadline.
#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::status::DrainStatus;

/// Whether an executor drains. The lock is innermost.
#[derive(Debug, Default)]
pub(crate) struct Drain(Mutex<Option<Draining>>);

#[derive(Debug)]
struct Draining {
    since: Instant,
    /// The time that sessions have, from `since` or the last change, and its end.
    deadline: Option<(Duration, Instant)>,
    /// Sessions that were ended at the deadline. `None`: none were told to end yet.
    ended: Option<u64>,
}

impl Drain {
    /// From now on no session begins. Those that are open at `deadline`, if there is one, are to be
    /// ended then. A drain that has begun before keeps its start and gets the new deadline.
    pub(crate) fn begin(&self, deadline: Option<Duration>) {
        let now = Instant::now();
        // A time beyond what the clock can count is no deadline.
        let deadline = deadline.and_then(|limit| Some((limit, now.checked_add(limit)?)));
        self.with(|state| {
            let since = state.as_ref().map_or(now, |draining| draining.since);
            *state = Some(Draining {
                since,
                deadline,
                ended: None,
            });
        });
    }

    /// Sessions begin again. Returns whether the executor did drain.
    pub(crate) fn undo(&self) -> bool {
        self.with(|state| state.take().is_some())
    }

    /// Whether no session begins.
    pub(crate) fn is_on(&self) -> bool {
        self.with(|state| state.is_some())
    }

    /// The time that sessions had, if the deadline has passed and this is the first call since.
    pub(crate) fn take_due(&self) -> Option<Duration> {
        self.with(|state| {
            let draining = state.as_mut()?;
            let (limit, end) = draining.deadline?;
            let is_due = draining.ended.is_none() && Instant::now() >= end;
            is_due.then(|| {
                draining.ended = Some(0);
                limit
            })
        })
    }

    /// Counts sessions that were told to end at the deadline.
    pub(crate) fn add_ended(&self, count: usize) {
        self.with(|state| {
            if let Some(ended) = state.as_mut().and_then(|draining| draining.ended.as_mut()) {
                *ended = ended.saturating_add(count as u64);
            }
        });
    }

    /// What the status says.
    pub(crate) fn status(&self) -> Option<DrainStatus> {
        self.with(|state| {
            let draining = state.as_ref()?;
            let left = |end: Instant| end.saturating_duration_since(Instant::now());
            Some(DrainStatus {
                age: draining.since.elapsed().as_secs_f64(),
                left: draining.deadline.map(|(_, end)| left(end).as_secs_f64()),
                ended: draining.ended.unwrap_or(0),
            })
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Option<Draining>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_due_once() {
        let drain = Drain::default();
        assert!(!drain.is_on() && drain.status().is_none());
        drain.begin(None);
        assert!(drain.is_on());
        assert_eq!(drain.take_due(), None, "there is no deadline");
        drain.begin(Some(Duration::from_secs(3600)));
        assert_eq!(drain.take_due(), None, "it has not passed");
        let left = drain.status().and_then(|status| status.left).unwrap();
        assert!((3500.0..=3600.0).contains(&left), "{left}");
        drain.begin(Some(Duration::ZERO));
        assert_eq!(drain.take_due(), Some(Duration::ZERO));
        drain.add_ended(2);
        assert_eq!(drain.take_due(), None, "it has been due before");
        assert_eq!(drain.status().unwrap().ended, 2);
        assert!(drain.undo() && !drain.undo() && !drain.is_on());
        // Longer than the clock can count.
        drain.begin(Some(Duration::MAX));
        assert_eq!(drain.status().unwrap().left, None);
    }
}
