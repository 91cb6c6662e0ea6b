//! Histograms of durations, with fixed buckets that can be added up.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets in seconds. One more bucket follows, without a bound.
pub(crate) const BOUNDS: [f64; 12] = [
    0.000_01, 0.000_1, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0, 10.0,
];

/// Counts durations. Any thread may add one.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

/// A snapshot of a histogram, whose figures may be taken a graph apart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "Counts", into = "Counts")]
pub(crate) struct Distribution {
    /// The upper bound of each bucket in seconds, and its count. The last bound is infinite.
    pub(crate) buckets: Vec<(f64, u64)>,
    /// Sum of all durations in seconds.
    pub(crate) sum: f64,
    pub(crate) count: u64,
}

/// A distribution in messages between processes, which all have the same bounds.
#[derive(Serialize, Deserialize)]
struct Counts {
    counts: Vec<u64>,
    sum: f64,
}

impl From<Distribution> for Counts {
    fn from(distribution: Distribution) -> Counts {
        let counts = distribution.buckets.into_iter().map(|(_, count)| count);
        Counts {
            counts: counts.collect(),
            sum: distribution.sum,
        }
    }
}

impl From<Counts> for Distribution {
    fn from(Counts { counts, sum }: Counts) -> Distribution {
        let counts = counts.into_iter().chain(std::iter::repeat(0));
        Distribution::new(counts, sum)
    }
}

impl Distribution {
    fn new(counts: impl Iterator<Item = u64>, sum: f64) -> Distribution {
        let bounds = BOUNDS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        Distribution {
            count: buckets.iter().fold(0, |sum, b| sum.saturating_add(b.1)),
            sum,
            buckets,
        }
    }

    /// Adds the durations of another distribution.
    pub(crate) fn add(&mut self, other: &Distribution) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            mine.1 = mine.1.saturating_add(theirs.1);
        }
        add_seconds(&mut self.sum, other.sum);
        self.count = self.count.saturating_add(other.count);
    }
}

/// Adds seconds that another process has counted. The sum stays finite, because JSON has no other
/// numbers.
pub(crate) fn add_seconds(sum: &mut f64, seconds: f64) {
    *sum = (*sum + seconds.max(0.0)).min(f64::MAX);
}

impl Default for Distribution {
    fn default() -> Distribution {
        Distribution::new(std::iter::repeat(0), 0.0)
    }
}

impl Histogram {
    pub(crate) fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = BOUNDS.partition_point(|&bound| bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Distribution {
        let counts = self.counts.iter().map(|n| n.load(Ordering::Relaxed));
        Distribution::new(
            counts,
            self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_in_the_bucket_whose_end_is_not_below_them() {
        let histogram = Histogram::default();
        for micros in [0, 10, 11, 1_000, 1_001, 20_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let read = histogram.read();
        let counts: Vec<u64> = read.buckets.iter().map(|b| b.1).collect();
        assert_eq!(counts, [2, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(read.count, 6);
        assert!((read.sum - 20.002_022).abs() < 1e-9);
        let told = serde_json::to_string(&read).unwrap();
        let heard: Distribution = serde_json::from_str(&told).unwrap();
        assert_eq!(heard, read);
        let mut both = Distribution::default();
        both.add(&read);
        both.add(&heard);
        assert_eq!((both.count, both.buckets[0].1), (12, 4));
    }
}
