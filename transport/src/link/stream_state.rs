//! What a link over a byte stream has sent and received, for diagnosis.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The figures of one end of a stream, which other threads read without a lock.
#[derive(Debug)]
pub struct StreamFigures {
    start: Instant,
    sent: AtomicU64,
    received: AtomicU64,
    queued: AtomicU64,
    /// The last request that was answered.
    reply: AtomicU64,
    /// The last request that is done, as this end knows.
    retired: AtomicU64,
    /// When the socket has last taken bytes, when bytes have last arrived, and when the last reply
    /// was queued: milliseconds after `start`, plus 1. 0: never.
    times: [AtomicU64; 3],
}

/// [`StreamFigures`] at about one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamState {
    /// Bytes that the socket has taken, and for how long it has taken none.
    pub sent: (u64, Option<Duration>),
    /// Bytes that have arrived and were read, and for how long none have.
    pub received: (u64, Option<Duration>),
    /// Bytes that the socket has not taken yet.
    pub queued: u64,
    /// The last request with a reply, and how long ago the reply was queued. `None` at the guest's
    /// end.
    pub reply: Option<(u64, Duration)>,
    /// The last request that is done, as this end knows.
    pub retired: u64,
}

impl Default for StreamFigures {
    fn default() -> StreamFigures {
        StreamFigures {
            start: Instant::now(),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            reply: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            times: [const { AtomicU64::new(0) }; 3],
        }
    }
}

impl StreamFigures {
    /// The socket has taken so many bytes.
    pub(super) fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        self.mark(0);
    }

    /// So many bytes have arrived.
    pub(super) fn received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
        self.mark(1);
    }

    /// The reply to `request` is queued.
    pub(super) fn replied(&self, request: u64) {
        self.reply.store(request, Ordering::Relaxed);
        self.mark(2);
    }

    /// The requests up to this one are done.
    pub(super) fn retired(&self, request: u64) {
        self.retired.store(request, Ordering::Relaxed);
    }

    /// So many bytes wait for the socket now.
    pub(super) fn queued(&self, bytes: usize) {
        self.queued.store(bytes as u64, Ordering::Relaxed);
    }

    fn mark(&self, event: usize) {
        self.times[event].store(self.now() + 1, Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }

    /// The figures now.
    pub fn read(&self) -> StreamState {
        let figure = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let [sent, received, reply] = [0, 1, 2].map(|event| {
            let at = figure(&self.times[event]).checked_sub(1)?;
            Some(Duration::from_millis(self.now().saturating_sub(at)))
        });
        StreamState {
            sent: (figure(&self.sent), sent),
            received: (figure(&self.received), received),
            queued: figure(&self.queued),
            reply: reply.map(|age| (figure(&self.reply), age)),
            retired: figure(&self.retired),
        }
    }
}

impl fmt::Display for StreamState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = "";
        for (name, (bytes, age)) in [("sent", self.sent), ("received", self.received)] {
            write!(f, "{first}{name} {bytes} bytes")?;
            if let Some(age) = age {
                write!(f, ", the last ones {age:.1?} ago")?;
            }
            first = "; ";
        }
        write!(
            f,
            "; {} bytes wait for the socket; retired {}",
            self.queued, self.retired
        )?;
        match self.reply {
            Some((request, age)) => write!(f, "; last reply to request {request}, {age:.1?} ago"),
            None => Ok(()),
        }
    }
}
