//! How durations are distributed, in buckets that Prometheus can add up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper ends of the buckets, in seconds; above the last there is one more.
pub(crate) const BOUNDS: [f64; 12] = [
    0.000_01, 0.000_1, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0, 10.0,
];

/// Counts durations, from any thread.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

/// What a histogram held at some time. Figures may be a graph apart.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Distribution {
    /// The upper end of each bucket and how many durations lie in it; the last has no end.
    pub(crate) buckets: Vec<(f64, u64)>,
    /// Of all durations, in seconds.
    pub(crate) sum: f64,
    pub(crate) count: u64,
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
        let bounds = BOUNDS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        Distribution {
            count: buckets.iter().map(|&(_, n)| n).sum(),
            sum: self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9,
            buckets,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_bucket_that_ends_at_or_above_them() {
        let histogram = Histogram::default();
        for micros in [0, 10, 11, 1_000, 1_001, 20_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let read = histogram.read();
        let counts: Vec<u64> = read.buckets.iter().map(|b| b.1).collect();
        assert_eq!(counts, [2, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(read.count, 6);
        assert!((read.sum - 20.002_022).abs() < 1e-9);
    }
}
