//! The events of [`super::random_events`], and how often each happens.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Error, Result, ensure};
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
    IdsUsedUp,
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
    MachinePaused,
    MachinePausedForLong,
    MachineKilled,
    MachineProgramKilled,
}

/// How often each event happens, in relation to the others.
const WEIGHTS: [(Event, u64); 28] = [
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
    (Event::IdsUsedUp, 4),
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
    (Event::MachinePaused, 6),
    (Event::MachinePausedForLong, 1),
    (Event::MachineKilled, 6),
    (Event::MachineProgramKilled, 4),
];

/// The events that somebody has chosen by name: a bit for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chosen(u64);

impl Chosen {
    pub(crate) const ALL: Chosen = Chosen(u64::MAX);

    fn has(self, event: Event) -> bool {
        self.0 & Chosen::bit(event) != 0
    }

    fn bit(event: Event) -> u64 {
        1 << event as u32
    }
}

impl FromStr for Chosen {
    type Err = Error;

    /// Texts with commas between them. Each is the name of an event, or begins a word of the names
    /// of all events that it chooses.
    fn from_str(texts: &str) -> Result<Chosen> {
        let mut chosen = Chosen(0);
        for text in texts.split(',').map(str::trim) {
            let events = || WEIGHTS.into_iter().map(|(event, _)| event);
            let mut found: Vec<Event> = { events() }
                .filter(|event| event.to_string() == text)
                .collect();
            if found.is_empty() && !text.is_empty() {
                found.extend(events().filter(|event| {
                    let name = event.to_string();
                    name.starts_with(text) || name.contains(&format!(" {text}"))
                }));
            }
            let names: Vec<String> = events().map(|event| event.to_string()).collect();
            let names = names.join(", ");
            ensure!(!found.is_empty(), "{text:?} is none of the events: {names}");
            chosen.0 |= found.into_iter().map(Chosen::bit).sum::<u64>();
        }
        Ok(chosen)
    }
}

/// What may happen in a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Possible {
    weights: Vec<(Event, u64)>,
}

impl Possible {
    /// Of the chosen events those that leave the executor alone (`keeps_executor`), and those of a
    /// machine (`has_machine`).
    ///
    /// # Errors
    /// If none is left.
    pub(super) fn new(chosen: Chosen, keeps_executor: bool, has_machine: bool) -> Result<Possible> {
        let weights: Vec<(Event, u64)> = { WEIGHTS.into_iter() }
            .filter(|(event, _)| chosen.has(*event))
            .filter(|(event, _)| !(keeps_executor && event.ends_executor()))
            .filter(|(event, _)| has_machine || !event.is_of_machine())
            .collect();
        ensure!(
            !weights.is_empty(),
            "none of the chosen events may happen: {}",
            match has_machine {
                true => "all of them end the executor",
                false => "they need a virtual machine, or end the executor",
            }
        );
        Ok(Possible { weights })
    }

    /// The next event.
    pub(super) fn next(&self, rng: &mut Rng) -> Event {
        let mut left = rng.below(self.weights.iter().map(|(_, weight)| weight).sum());
        for (event, weight) in &self.weights {
            if left < *weight {
                return *event;
            }
            left -= weight;
        }
        Event::Nothing
    }
}

impl Event {
    /// Whether the executor is another process after the event.
    pub(super) fn ends_executor(self) -> bool {
        matches!(self, Event::ExecutorKilled | Event::ExecutorRestarted)
    }

    /// Whether the event needs a virtual machine.
    pub(super) fn is_of_machine(self) -> bool {
        matches!(
            self,
            Event::MachinePaused
                | Event::MachinePausedForLong
                | Event::MachineKilled
                | Event::MachineProgramKilled
        )
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
            | Event::IdsUsedUp
            | Event::QuotaExceeded
            | Event::Reloaded
            | Event::Observed
            | Event::PeerTalksNonsense
            | Event::ConnectionCut
            | Event::SessionKilled
            | Event::Drained
            | Event::LimitsSet
            | Event::MachinePaused
            | Event::MachinePausedForLong
            | Event::MachineKilled
            | Event::MachineProgramKilled => Duration::ZERO,
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
            Event::IdsUsedUp => "ids used up",
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
            Event::MachinePaused => "machine paused",
            Event::MachinePausedForLong => "machine paused for long",
            Event::MachineKilled => "machine killed",
            Event::MachineProgramKilled => "program of the machine killed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(texts: &str) -> Vec<String> {
        let chosen: Chosen = texts.parse().unwrap();
        let events = WEIGHTS.map(|(event, _)| event).into_iter();
        let events = events.filter(|event| chosen.has(*event));
        events.map(|event| event.to_string()).collect()
    }

    #[test]
    fn only_events_that_are_possible_happen() {
        let executor = "executor".parse().unwrap();
        for (chosen, keeps_executor, has_machine) in [
            (Chosen::ALL, true, true),
            (Chosen::ALL, false, true),
            (Chosen::ALL, false, false),
            (executor, true, true),
        ] {
            let possible = Possible::new(chosen, keeps_executor, has_machine).unwrap();
            let mut rng = Rng::new(1, 9);
            let events: Vec<_> = (0..10_000).map(|_| possible.next(&mut rng)).collect();
            for (event, _) in WEIGHTS {
                let is_left_out = keeps_executor && event.ends_executor()
                    || !has_machine && event.is_of_machine()
                    || !chosen.has(event);
                assert_eq!(events.contains(&event), !is_left_out, "{event}");
            }
        }
    }

    #[test]
    fn events_are_chosen_by_name_or_by_the_begin_of_a_word() {
        // Not the configuration that is reloaded.
        assert_eq!(chosen("fork,load"), ["guest forks", "models loaded again"]);
        assert_eq!(
            chosen("guest stopped, blackhole"),
            ["guest stopped", "blackhole"]
        );
        assert_eq!(
            chosen("guest stop"),
            ["guest stopped", "guest stopped for long"]
        );
        for wrong in ["", "fork,", "orks"] {
            let error = wrong.parse::<Chosen>().unwrap_err().to_string();
            assert!(
                error.contains("is none of the events: nothing, "),
                "{error}"
            );
        }
        let machine = "machine paused".parse().unwrap();
        let error = Possible::new(machine, false, false).unwrap_err();
        assert!(
            error.to_string().contains("need a virtual machine"),
            "{error}"
        );
    }
}
