//! Times of a graph on the device, and before it.
#![forbid(unsafe_code)]

use std::time::Duration;

/// Time that a graph took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Times {
    /// Waiting for the device, before the first turn and between turns.
    pub(crate) queued: Duration,
    /// Having the device.
    pub(crate) ran: Duration,
    /// Number of turns.
    pub(crate) turns: u64,
    /// The graphs that ran in these turns: one for each turn, and more in a batch.
    pub(crate) members: u64,
}

impl Times {
    /// Those of a graph that has waited so long, and has had no turn.
    pub(super) fn waited(queued: Duration) -> Times {
        Times {
            queued,
            ..Times::default()
        }
    }

    pub(super) fn add(&mut self, more: Times) {
        self.queued += more.queued;
        self.ran += more.ran;
        self.turns += more.turns;
        self.members += more.members;
    }
}
