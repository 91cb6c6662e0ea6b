//! Draining: an executor that accepts no new sessions, and ends the open ones at a deadline.
#![forbid(unsafe_code)]

use std::sync::Mutex;
use std::time::{Duration, Instant};

use vgpu_transport::lock::lock;

use crate::operator_request::OperatorRequest;
use crate::status::DrainStatus;

/// Whether an executor drains. The lock is innermost.
#[derive(Debug, Default)]
pub(crate) struct Drain(Mutex<DrainState>);

#[derive(Debug, Default)]
struct DrainState {
    draining: Option<Draining>,
    /// Counts the calls of [`Drain::begin`] and [`Drain::undo`].
    changes: u64,
}

#[derive(Debug)]
struct Draining {
    since: Instant,
    /// The time that sessions have, from `since` or the last change, and its end.
    deadline: Option<(Duration, Instant)>,
    /// Whether sessions were told to end at the deadline.
    is_past: bool,
    /// Sessions that were ended at this deadline and at those before it.
    ended: u64,
}

impl Drain {
    /// From now on no session begins. Sessions that are open at `deadline`, if there is one, are to
    /// be ended then. A drain that has begun before keeps its start and its count of ended
    /// sessions, and gets the new deadline.
    pub(crate) fn begin(&self, deadline: Option<Duration>) {
        let now = Instant::now();
        // A time beyond what the clock can count is no deadline.
        let deadline = deadline.and_then(|limit| Some((limit, now.checked_add(limit)?)));
        self.with(|state| {
            let before = state.draining.as_ref();
            let (since, ended) = before.map_or((now, 0), |before| (before.since, before.ended));
            state.draining = Some(Draining {
                since,
                deadline,
                is_past: false,
                ended,
            });
            state.changes += 1;
        });
    }

    /// Sessions begin again. Returns whether the executor did drain.
    pub(crate) fn undo(&self) -> bool {
        self.with(|state| {
            state.changes += 1;
            state.draining.take().is_some()
        })
    }

    /// Whether no session begins.
    pub(crate) fn is_on(&self) -> bool {
        self.with(|state| state.draining.is_some())
    }

    /// What another executor has to be asked to do the same from now on, and a number that is
    /// another one after each change.
    pub(crate) fn request(&self) -> (OperatorRequest, u64) {
        self.with(|state| {
            let request = match &state.draining {
                None => OperatorRequest::Undrain,
                Some(draining) => {
                    let left =
                        |(_, end): (_, Instant)| end.saturating_duration_since(Instant::now());
                    OperatorRequest::drain(draining.deadline.map(left))
                }
            };
            (request, state.changes)
        })
    }

    /// The number of the last change that an executor need not be told that accepts sessions.
    pub(crate) fn changes_of_new(&self) -> u64 {
        self.with(|state| match state.draining {
            None => state.changes,
            // No change has this number.
            Some(_) => 0,
        })
    }

    /// The number of the last change.
    pub(crate) fn changes(&self) -> u64 {
        self.with(|state| state.changes)
    }

    /// The time that sessions had, if the deadline has passed and this is the first call since.
    pub(crate) fn take_due(&self) -> Option<Duration> {
        self.with(|state| {
            let draining = state.draining.as_mut()?;
            let (limit, end) = draining.deadline?;
            let is_due = !draining.is_past && Instant::now() >= end;
            is_due.then(|| {
                draining.is_past = true;
                limit
            })
        })
    }

    /// Counts sessions that were told to end at the deadline.
    pub(crate) fn add_ended(&self, count: usize) {
        self.with(|state| {
            if let Some(draining) = &mut state.draining {
                draining.ended = draining.ended.saturating_add(count as u64);
            }
        });
    }

    /// What the status says.
    pub(crate) fn status(&self) -> Option<DrainStatus> {
        self.with(|state| {
            let draining = state.draining.as_ref()?;
            let left = |end: Instant| end.saturating_duration_since(Instant::now());
            Some(DrainStatus {
                age: draining.since.elapsed().as_secs_f64(),
                left: draining.deadline.map(|(_, end)| left(end).as_secs_f64()),
                ended: draining.ended,
                untold: Vec::new(),
            })
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut DrainState) -> T) -> T {
        work(&mut lock(&self.0))
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
        // Another deadline, which is due, too.
        drain.begin(Some(Duration::from_millis(1)));
        assert_eq!(drain.status().unwrap().ended, 2);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(drain.take_due(), Some(Duration::from_millis(1)));
        drain.add_ended(1);
        drain.begin(None);
        assert_eq!(drain.status().unwrap().ended, 3);
        assert!(drain.undo() && !drain.undo() && !drain.is_on());
        // Longer than the clock can count.
        drain.begin(Some(Duration::MAX));
        assert_eq!(drain.status().unwrap().left, None);
        assert_eq!(drain.status().unwrap().ended, 0, "of an earlier drain");
    }

    #[test]
    fn other_executors_are_asked_for_the_time_that_is_left() {
        let drain = Drain::default();
        assert_eq!(drain.changes_of_new(), drain.changes());
        drain.begin(None);
        assert_ne!(drain.changes_of_new(), drain.changes());
        let (request, first) = drain.request();
        assert_eq!(request, OperatorRequest::drain(None));
        drain.begin(Some(Duration::from_secs(3600)));
        let (request, second) = drain.request();
        let OperatorRequest::Drain { deadline_ms } = request else {
            panic!("{request:?}");
        };
        assert!((3_500_000..=3_600_000).contains(&deadline_ms.unwrap()));
        drain.begin(Some(Duration::ZERO));
        assert_eq!(
            drain.request().0,
            OperatorRequest::drain(Some(Duration::ZERO))
        );
        drain.undo();
        assert_eq!(drain.request(), (OperatorRequest::Undrain, drain.changes()));
        assert!(first < second && second < drain.changes());
        assert_eq!(drain.changes_of_new(), drain.changes());
    }
}
