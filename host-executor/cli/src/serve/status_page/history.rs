//! The figures of the last ten minutes.
//!
//! Samples hold counters that only grow. A rate between two samples is therefore right however far
//! they are apart: when nobody has looked for a while, the curve shows the mean of that time.

use std::collections::VecDeque;
use std::sync::Arc;

use vgpu_executor::status::{Status, Usage};

/// The time that curves show, in seconds.
pub(super) const WINDOW: f64 = 600.0;

/// Points of a curve.
pub(super) const POINTS: usize = 150;

/// The time for present rates, in seconds.
const PRESENT: f64 = 10.0;

/// Samples are at least so far apart, in seconds: several browsers cause no more of them than one.
const MIN_DISTANCE: f64 = 0.9;

/// Counters of a guest, or what they have grown by in `seconds`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Counts {
    pub(super) seconds: f64,
    pub(super) tokens: f64,
    pub(super) graphs: f64,
    pub(super) busy: f64,
    pub(super) queued: f64,
    pub(super) turns: f64,
    pub(super) batch_members: f64,
    pub(super) bytes_in: f64,
    pub(super) bytes_out: f64,
}

impl Counts {
    fn of(usage: &Usage, uptime: f64) -> Counts {
        Counts {
            seconds: uptime,
            tokens: usage.tokens as f64,
            graphs: usage.graphs as f64,
            busy: usage.busy,
            queued: usage.queued,
            turns: usage.turns as f64,
            batch_members: usage.batch_members as f64,
            bytes_in: usage.bytes_in as f64,
            bytes_out: usage.bytes_out as f64,
        }
    }

    fn with(self, other: Counts, how: impl Fn(f64, f64) -> f64) -> Counts {
        Counts {
            seconds: how(self.seconds, other.seconds),
            tokens: how(self.tokens, other.tokens),
            graphs: how(self.graphs, other.graphs),
            busy: how(self.busy, other.busy),
            queued: how(self.queued, other.queued),
            turns: how(self.turns, other.turns),
            batch_members: how(self.batch_members, other.batch_members),
            bytes_in: how(self.bytes_in, other.bytes_in),
            bytes_out: how(self.bytes_out, other.bytes_out),
        }
    }

    /// A figure for each second.
    pub(super) fn rate(&self, figure: f64) -> Option<f64> {
        (self.seconds > 0.0).then(|| figure / self.seconds)
    }

    /// A figure for each graph. `None` for less than one: the counters between two samples are
    /// taken as if they had grown evenly, so that there may be a small part of a graph beside all
    /// of its time.
    pub(super) fn each(&self, figure: f64) -> Option<f64> {
        (self.graphs > 1.0 - 1e-6).then(|| figure / self.graphs)
    }

    /// What both have grown by together.
    pub(super) fn and(&self, before: &Counts) -> Counts {
        self.with(*before, |own, before| own + before)
    }

    /// The mean size of a batch.
    pub(super) fn batch(&self) -> Option<f64> {
        (self.turns > 0.0).then(|| self.batch_members / self.turns)
    }
}

/// The counters of all guests at one time.
#[derive(Debug)]
struct Sample {
    at: f64,
    guests: Vec<(Arc<str>, Counts)>,
}

/// The counters of the last ten minutes.
#[derive(Debug, Default)]
pub(in crate::serve) struct History {
    samples: VecDeque<Sample>,
}

impl History {
    /// Keeps the counters of a snapshot.
    pub(in crate::serve) fn record(&mut self, status: &Status) {
        let at = status.uptime;
        let last = self.samples.back();
        if last.is_some_and(|last| at - last.at < MIN_DISTANCE) {
            return;
        }
        let known = |name: &str| {
            let known = last?.guests.iter().find(|(known, _)| **known == *name)?;
            Some(Arc::clone(&known.0))
        };
        let guests = status.guests.iter().map(|guest| {
            let name = known(&guest.name).unwrap_or_else(|| guest.name.as_str().into());
            (name, Counts::of(&guest.usage, at))
        });
        let guests = guests.collect();
        self.samples.push_back(Sample { at, guests });
        // One sample before the window, so that its beginning has a rate.
        while self
            .samples
            .get(1)
            .is_some_and(|second| second.at <= at - WINDOW)
        {
            self.samples.pop_front();
        }
    }

    /// What a guest's counters have grown by in each of [`POINTS`] equal parts of the window, the
    /// oldest first. `None`: not known.
    pub(super) fn curve(&self, guest: &str) -> Vec<Option<Counts>> {
        let Some(last) = self.samples.back() else {
            return vec![None; POINTS];
        };
        let series = self.series(guest);
        let step = WINDOW / POINTS as f64;
        let parts = (0..POINTS).map(|i| {
            let begin = last.at - WINDOW + i as f64 * step;
            growth(&series, begin, begin + step)
        });
        parts.collect()
    }

    /// What a guest's counters have grown by lately. `None`: the only sample is the newest one, or
    /// those before it are too old to say.
    pub(super) fn present(&self, guest: &str) -> Option<Counts> {
        let end = self.samples.back()?.at;
        let before = self.samples.iter().rev().nth(1)?.at;
        if end - before > 2.0 * PRESENT {
            return None;
        }
        growth(&self.series(guest), end - PRESENT, end)
    }

    /// A guest's counters, the oldest first. A guest that a sample does not have had done nothing
    /// then.
    fn series(&self, guest: &str) -> Vec<Counts> {
        let samples = self.samples.iter().map(|sample| {
            let found = sample.guests.iter().find(|(name, _)| **name == *guest);
            found.map_or_else(
                || Counts {
                    seconds: sample.at,
                    ..Counts::default()
                },
                |(_, counts)| *counts,
            )
        });
        samples.collect()
    }
}

/// What counters have grown by between two times, as far as there are samples. `None`: there are
/// none.
fn growth(series: &[Counts], begin: f64, end: f64) -> Option<Counts> {
    let begin = begin.max(series.first()?.seconds);
    let end = end.min(series.last()?.seconds);
    if end <= begin {
        return None;
    }
    let (before, after) = (at(series, begin)?, at(series, end)?);
    // Counters are smaller than before only if the guest is a new one.
    Some(after.with(before, |after, before| (after - before).max(0.0)))
}

/// The counters at a time, as if they had grown evenly between two samples.
fn at(series: &[Counts], time: f64) -> Option<Counts> {
    let next = series.partition_point(|counts| counts.seconds < time);
    let (Some(after), Some(before)) = (series.get(next), series.get(next.saturating_sub(1))) else {
        return series.last().copied();
    };
    let whole = after.seconds - before.seconds;
    let part = match whole > 0.0 {
        true => (time - before.seconds) / whole,
        false => 1.0,
    };
    Some(before.with(*after, |before, after| before + part * (after - before)))
}

#[cfg(test)]
mod tests {
    use vgpu_executor::status::{EngineStatus, GuestStatus, SessionEnds, WeightsStatus};

    use super::*;

    /// A snapshot in which alice has run `graphs` graphs of 4 tokens.
    fn status(uptime: f64, graphs: u64) -> Status {
        Status {
            version: String::new(),
            uptime,
            engine: EngineStatus {
                name: "cpu".into(),
                description: String::new(),
                memory_total: 0,
                memory_free: 0,
                kept_scratch: 0,
                unused_gpu: None,
                gpu: None,
                turn: None,
                hang: None,
                fallback: None,
                weights: WeightsStatus::default(),
            },
            further_engines: Vec::new(),
            guests: vec![GuestStatus {
                name: "alice".into(),
                quota: None,
                weight: 1,
                sessions: 1,
                usage: Usage {
                    graphs,
                    tokens: 4 * graphs,
                    busy: graphs as f64 / 100.0,
                    ..Usage::default()
                },
                by_device: Vec::new(),
                devices: Vec::new(),
            }],
            sessions: Vec::new(),
            ended: SessionEnds::default(),
            draining: None,
        }
    }

    #[test]
    fn rates_follow_from_counters_however_far_apart() {
        let mut history = History::default();
        assert_eq!(history.present("alice"), None);
        history.record(&status(100.0, 0));
        assert_eq!(history.present("alice"), None, "one sample has no rate");
        history.record(&status(102.0, 20));
        let present = history.present("alice").unwrap();
        assert_eq!(present.rate(present.graphs), Some(10.0));
        assert_eq!(present.rate(present.tokens), Some(40.0));
        assert_eq!(present.each(present.busy), Some(0.01));
        assert_eq!(present.batch(), None, "no turn");
        // Nobody looks for five minutes: the mean of this time.
        history.record(&status(402.0, 620));
        let curve = history.curve("alice");
        assert_eq!(curve.len(), POINTS);
        let rates = curve
            .iter()
            .flatten()
            .map(|part| part.graphs / part.seconds);
        let rates: Vec<f64> = rates.collect();
        assert!(rates.len() > 70, "{}", rates.len());
        for rate in &rates[2..] {
            assert!((rate - 2.0).abs() < 1e-6, "{rates:?}");
        }
        // The present is not known until there is another sample soon after.
        assert_eq!(history.present("alice"), None);
        history.record(&status(404.0, 640));
        let present = history.present("alice").unwrap();
        assert!(present.rate(present.graphs).unwrap() > 2.0);
        assert_eq!(history.present("bob").unwrap().graphs, 0.0);
    }

    #[test]
    fn samples_are_few_and_recent() {
        let mut history = History::default();
        for i in 0..10_000u64 {
            history.record(&status(i as f64 / 4.0, i));
        }
        let count = history.samples.len();
        assert!((590..=610).contains(&count), "{count}");
        assert!(history.curve("alice").iter().all(Option::is_some));
        // The name is kept once.
        let name = &history.samples[0].guests[0].0;
        assert_eq!(Arc::strong_count(name), count);
    }
}
