//! How long programs wait after the events of [`super::random_events`].

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::event::Event;

/// What a program that waits for nothing takes until its next token, besides the time of its work:
/// the processors of a busy machine compute for others meanwhile.
const SMALL: Duration = Duration::from_secs(3);

/// The same for 99 of 100 programs.
const SMALL_OF_MOST: Duration = Duration::from_secs(10);

/// So many programs have waited, at least, before the time of 99 of 100 is not that of one.
const MIN_COUNT_OF_MOST: usize = 20;

/// So many programs have waited, at least, before the median of an event means something.
const MIN_COUNT: usize = 5;

/// The times from the end of an event to the next token, or to the error, of each program that
/// worked meanwhile.
#[derive(Debug, Default)]
pub(super) struct Waits {
    times: BTreeMap<Event, Vec<Duration>>,
    /// The longest time, and the program that waited.
    longest: Option<(Duration, Event, &'static str)>,
}

impl Waits {
    pub(super) fn add(&mut self, event: Event, program: &'static str, waited: Duration) {
        self.times.entry(event).or_default().push(waited);
        if self.longest.is_none_or(|(longest, ..)| longest < waited) {
            self.longest = Some((waited, event, program));
        }
    }

    /// The median of each event is its stated time at most, and what a program that works takes
    /// until its next token: [`SMALL`], and `work`, the time in which a program that is alone loads
    /// its model and generates. So is the time of 99 of 100 programs, with [`SMALL_OF_MOST`].
    ///
    /// # Errors
    /// It is longer.
    pub(super) fn check(&self, work: Duration) -> Result<()> {
        for (event, waits) in &self.times {
            let times = Percentiles::of(waits);
            let most = event.stated() + SMALL + work;
            ensure!(
                waits.len() < MIN_COUNT || times.median <= most,
                "{event}: programs go on or fail after {times}, and the median may be {most:?}"
            );
            let most = event.stated() + SMALL_OF_MOST + work;
            ensure!(
                waits.len() < MIN_COUNT_OF_MOST || times.most_of_all <= most,
                "{event}: programs go on or fail after {times}, and 99 % may take {most:?}"
            );
        }
        Ok(())
    }
}

impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = { self.times.iter() }
            .map(|(event, waits)| format!("{event} {}", Percentiles::of(waits)))
            .collect::<Vec<_>>();
        f.write_str(&lines.join(", "))?;
        match self.longest {
            Some((waited, event, program)) => write!(
                f,
                "; the longest wait was that of {program} after {event}, {:.2} s",
                waited.as_secs_f64()
            ),
            None => Ok(()),
        }
    }
}

/// Of a list of times.
#[derive(Debug, PartialEq, Eq)]
struct Percentiles {
    median: Duration,
    /// The smallest time that 99 % of the times do not exceed.
    most_of_all: Duration,
    longest: Duration,
}

impl Percentiles {
    fn of(times: &[Duration]) -> Percentiles {
        let mut times = times.to_vec();
        times.sort_unstable();
        let at = |percent: usize| {
            let rank = (times.len() * percent).div_ceil(100);
            times.get(rank.saturating_sub(1)).copied()
        };
        let [median, most_of_all, longest] = [50, 99, 100].map(|at_| at(at_).unwrap_or_default());
        Percentiles {
            median,
            most_of_all,
            longest,
        }
    }
}

impl fmt::Display for Percentiles {
    /// Seconds: median, 99 % and maximum.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Percentiles {
            median,
            most_of_all,
            longest,
        } = self;
        let [median, most_of_all, longest] =
            [median, most_of_all, longest].map(Duration::as_secs_f64);
        write!(f, "{median:.2}/{most_of_all:.2}/{longest:.2} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_times() {
        let seconds = Duration::from_secs;
        let times: Vec<_> = (1..=200).rev().map(seconds).collect();
        let expected = Percentiles {
            median: seconds(100),
            most_of_all: seconds(198),
            longest: seconds(200),
        };
        assert_eq!(Percentiles::of(&times), expected);
        let alone = Percentiles::of(&[seconds(7)]);
        assert_eq!(alone.to_string(), "7.00/7.00/7.00 s");
    }

    #[test]
    fn longest_wait_has_its_program() {
        let mut all = Waits::default();
        for (program, wait) in [("a", 1), ("b", 4), ("c", 2)] {
            all.add(Event::GuestForks, program, Duration::from_secs(wait));
        }
        let end = "; the longest wait was that of b after guest forks, 4.00 s";
        assert!(all.to_string().ends_with(end), "{all}");
    }

    #[test]
    fn event_after_which_most_programs_wait_too_long_is_found() {
        let work = Duration::from_secs(1);
        let of = |event, waits: &[u64]| {
            let mut all = Waits::default();
            let waits = waits.iter().map(|&wait| Duration::from_secs(wait));
            waits.for_each(|wait| all.add(event, "a", wait));
            all.check(work).map_err(|error| error.to_string())
        };
        // One late program is no median, and the time of a stall is stated.
        assert_eq!(of(Event::GuestForks, &[1, 1, 4, 30, 4]), Ok(()));
        assert_eq!(of(Event::ExecutorStoppedForLong, &[14; 9]), Ok(()));
        assert_eq!(of(Event::GuestForks, &[30; MIN_COUNT - 1]), Ok(()));
        let error = of(Event::GuestForks, &[1, 1, 5, 30, 5]).unwrap_err();
        assert!(error.starts_with("guest forks: "), "{error}");
        assert!(error.contains(" 5.00/30.00/30.00 s"), "{error}");
        of(Event::ExecutorStoppedForLong, &[15; MIN_COUNT]).unwrap_err();
        let mut some = [1; MIN_COUNT_OF_MOST];
        some[3] = 11;
        assert_eq!(of(Event::GuestForks, &some), Ok(()));
        some[3] = 12;
        let error = of(Event::GuestForks, &some).unwrap_err();
        assert!(error.contains("99 % may take 11s"), "{error}");
        assert_eq!(of(Event::GuestForks, &some[1..]), Ok(()));
    }
}
