//! The events of [`super::random_events`], and how often each happens.

use std::fmt;
use std::time::Duration;

use vgpu_gguf::Rng;

/// A guest gives up a host without a heartbeat after 10 s (docs/life-events.md).
const STALL: Duration = Duration::from_secs(10);

/// What happens in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Nothing,
    GuestKilled,
    GuestStopped,
    GuestStoppedForLong,
    GuestEnds,
    GuestForks,
    ExecutorKilled,
    ExecutorRestarted,
    ExecutorStopped,
    ExecutorStoppedForLong,
    ExecutorFrozen,
    ModelsLoadedAgain,
    QuotaExceeded,
    Reloaded,
    Observed,
    PeerTalksNonsense,
    ConnectionCut,
    NetworkStops,
    GuestDoesNotRead,
    Blackhole,
    SessionKilled,
    Drained,
    LimitsSet,
}

/// How often each event happens, in relation to the others.
const WEIGHTS: [(Event, u64); 23] = [
    (Event::Nothing, 3),
    (Event::GuestKilled, 10),
    (Event::GuestStopped, 6),
    (Event::GuestStoppedForLong, 1),
    (Event::GuestEnds, 6),
    (Event::GuestForks, 8),
    (Event::ExecutorKilled, 3),
    (Event::ExecutorRestarted, 2),
    (Event::ExecutorStopped, 5),
    (Event::ExecutorStoppedForLong, 1),
    (Event::ExecutorFrozen, 4),
    (Event::ModelsLoadedAgain, 6),
    (Event::QuotaExceeded, 6),
    (Event::Reloaded, 6),
    (Event::Observed, 6),
    (Event::PeerTalksNonsense, 6),
    (Event::ConnectionCut, 8),
    (Event::NetworkStops, 6),
    (Event::GuestDoesNotRead, 6),
    (Event::Blackhole, 1),
    (Event::SessionKilled, 6),
    (Event::Drained, 4),
    (Event::LimitsSet, 6),
];

/// The next event. With `keeps_executor`, none that ends the executor.
pub(super) fn random_event(rng: &mut Rng, keeps_executor: bool) -> Event {
    let weights = WEIGHTS.map(
        |(event, weight)| match keeps_executor && event.ends_executor() {
            true => (event, 0),
            false => (event, weight),
        },
    );
    let mut left = rng.below(weights.iter().map(|(_, weight)| weight).sum());
    for (event, weight) in weights {
        if left < weight {
            return event;
        }
        left -= weight;
    }
    Event::Nothing
}

impl Event {
    /// Whether the executor is another process after the event.
    pub(super) fn ends_executor(self) -> bool {
        matches!(self, Event::ExecutorKilled | Event::ExecutorRestarted)
    }

    /// How long a program whose work the event ends may wait for its error, by docs/life-events.md.
    /// Counted from the end of the event. A program whose work goes on has that time, too.
    pub(super) fn stated(self) -> Duration {
        match self {
            Event::ExecutorStoppedForLong | Event::Blackhole => STALL,
            Event::NetworkStops
            | Event::GuestDoesNotRead
            | Event::Nothing
            | Event::GuestKilled
            | Event::GuestStopped
            | Event::GuestStoppedForLong
            | Event::GuestEnds
            | Event::GuestForks
            | Event::ExecutorKilled
            | Event::ExecutorRestarted
            | Event::ExecutorStopped
            | Event::ExecutorFrozen
            | Event::ModelsLoadedAgain
            | Event::QuotaExceeded
            | Event::Reloaded
            | Event::Observed
            | Event::PeerTalksNonsense
            | Event::ConnectionCut
            | Event::SessionKilled
            | Event::Drained
            | Event::LimitsSet => Duration::ZERO,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Event::Nothing => "nothing",
            Event::GuestKilled => "guest killed",
            Event::GuestStopped => "guest stopped",
            Event::GuestStoppedForLong => "guest stopped for long",
            Event::GuestEnds => "guest replaced",
            Event::GuestForks => "guest forks",
            Event::ExecutorKilled => "executor killed",
            Event::ExecutorRestarted => "executor restarted",
            Event::ExecutorStopped => "executor stopped",
            Event::ExecutorStoppedForLong => "executor stopped for long",
            Event::ExecutorFrozen => "executor frozen",
            Event::ModelsLoadedAgain => "models loaded again",
            Event::QuotaExceeded => "quota exceeded",
            Event::Reloaded => "configuration reloaded",
            Event::Observed => "status and dump",
            Event::PeerTalksNonsense => "random bytes",
            Event::ConnectionCut => "connection cut",
            Event::NetworkStops => "network stops",
            Event::GuestDoesNotRead => "guest does not read",
            Event::Blackhole => "blackhole",
            Event::SessionKilled => "session killed",
            Event::Drained => "drained",
            Event::LimitsSet => "limits set",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_event_ends_an_executor_that_is_kept() {
        for keeps_executor in [true, false] {
            let mut rng = Rng::new(1, 9);
            let events: Vec<_> = (0..10_000)
                .map(|_| random_event(&mut rng, keeps_executor))
                .collect();
            for (event, _) in WEIGHTS {
                let is_left_out = keeps_executor && event.ends_executor();
                assert_eq!(events.contains(&event), !is_left_out, "{event}");
            }
        }
    }
}
