//! The thread that writes weights to the cache on disk.
//!
//! The hashing thread only queues what is to be written: a slow disk, or a guest that uploads
//! without end, delays nobody's hashing. Those who answer for sessions (tenants, or where unnamed
//! guests connect from) take turns by the bytes of their files, as domains do in hashing, and each
//! writes at most four times as many bytes in an hour as the cache has.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tracing::debug;
use vgpu_engine::Extent;

use super::content::ContentKey;
use super::disk::{CacheError, Disk};
use super::fair_queue::FairQueue;
use super::options::CacheOptions;
use super::priority;
use crate::lock::{Rank, RankedMutex};

/// What a file counts besides its bytes: two calls of `fsync`.
const COST_OF_FILE: u64 = 1 << 20;

/// A writer writes at most [`TIMES`] as many bytes as the cache has at once, and as many in this
/// time besides.
const PERIOD: Duration = Duration::from_secs(3600);
const TIMES: u64 = 2;

/// Writers whose bytes are remembered, before those are forgotten that may write all again.
const MAX_WRITERS: usize = 1024;

/// Contents of one writer that wait, and of all together. Further ones are not cached.
const MAX_OF_WRITER: usize = 1 << 14;
const MAX_OF_ALL: usize = 1 << 16;

/// The cache on disk, with its thread, which ends when this is dropped.
pub(super) struct Cache {
    disk: Arc<Disk>,
    queue: Arc<WriteQueue>,
}

/// What waits to be written.
struct WriteQueue {
    jobs: RankedMutex<FairQueue<Job>>,
    has_jobs: Condvar,
    has_ended: AtomicBool,
}

/// A content to be written.
struct Job {
    /// The domain whose folder gets the file. `None`: that of all domains.
    folder: Option<Arc<str>>,
    content: ContentKey,
    extent: Weak<dyn Extent>,
}

/// The bytes that writers have written, less what the time since has made up for.
struct Written {
    /// The bytes of the cache at most.
    limit: u64,
    writers: HashMap<Arc<str>, (Instant, u64)>,
}

impl Cache {
    /// Opens a cache, and starts its thread.
    ///
    /// # Errors
    /// As [`Disk::open`], and [`CacheError::Thread`].
    pub(super) fn open(options: CacheOptions) -> Result<Cache, CacheError> {
        let limit = options.size;
        let disk = Arc::new(Disk::open(options)?);
        let queue = Arc::new(WriteQueue {
            jobs: RankedMutex::new(Rank::Weights, FairQueue::with_limit(MAX_OF_WRITER)),
            has_jobs: Condvar::new(),
            has_ended: AtomicBool::new(false),
        });
        let cache = Cache {
            disk: Arc::clone(&disk),
            queue: Arc::clone(&queue),
        };
        thread::Builder::new()
            .name("vgpu-cache".into())
            .spawn(move || queue.work(&disk, limit))
            .map_err(CacheError::Thread)?;
        Ok(cache)
    }

    /// Queues an extent, to be written into the folder of the sharing domain `folder`, if the
    /// extent still exists then. `writer` answers for the session that has uploaded it.
    pub(super) fn put_later(
        &self,
        writer: &Arc<str>,
        folder: Option<Arc<str>>,
        content: ContentKey,
        extent: &Weak<dyn Extent>,
    ) {
        let job = || Job {
            folder: folder.clone(),
            content,
            extent: Weak::clone(extent),
        };
        let mut jobs = self.queue.jobs.lock();
        let mut is_queued = jobs.waiting().0 < MAX_OF_ALL && jobs.push(writer, content.len, job());
        if !is_queued && jobs.make_room(writer, Instant::now(), Job::is_wanted) > 0 {
            is_queued = jobs.push(writer, content.len, job());
        }
        drop(jobs);
        match is_queued {
            true => self.queue.has_jobs.notify_one(),
            false => debug!(%writer, "too many weights wait to be written: not cached"),
        }
    }
}

impl Deref for Cache {
    type Target = Disk;

    fn deref(&self) -> &Disk {
        &self.disk
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let jobs = self.queue.jobs.lock();
        self.queue.has_ended.store(true, Ordering::Relaxed);
        drop(jobs);
        self.queue.has_jobs.notify_all();
    }
}

impl Job {
    /// Whether the extent still exists.
    fn is_wanted(&self) -> bool {
        self.extent.strong_count() > 0
    }
}

impl WriteQueue {
    /// The thread.
    fn work(&self, disk: &Disk, limit: u64) {
        priority::lower();
        let mut written = Written {
            limit,
            writers: HashMap::new(),
        };
        let has_ended = || self.has_ended.load(Ordering::Relaxed);
        let mut jobs = self.jobs.lock();
        while !has_ended() {
            let Some((writer, job)) = jobs.pop() else {
                jobs = jobs.wait(&self.has_jobs);
                continue;
            };
            drop(jobs);
            let Job {
                folder,
                content,
                extent,
            } = job;
            let mut bytes = 0;
            if written.may_write(&writer, content.len, Instant::now()) {
                bytes = disk.put(folder.as_deref(), content, &extent, &has_ended);
                written.count(&writer, bytes, Instant::now());
            }
            jobs = self.jobs.lock();
            if bytes > 0 {
                jobs.used(&writer, bytes.saturating_add(COST_OF_FILE));
            }
        }
    }
}

impl Written {
    /// Whether a writer may write so many bytes now.
    fn may_write(&self, writer: &Arc<str>, len: u64, now: Instant) -> bool {
        let before = self
            .writers
            .get(writer)
            .map_or(0, |last| self.left(*last, now));
        before.saturating_add(len) <= self.most()
    }

    /// Counts bytes that were written for a writer.
    fn count(&mut self, writer: &Arc<str>, bytes: u64, now: Instant) {
        if bytes == 0 {
            return;
        }
        let mut writers = std::mem::take(&mut self.writers);
        if writers.len() >= MAX_WRITERS {
            writers.retain(|_, last| self.left(*last, now) > 0);
        }
        let last = writers.entry(Arc::clone(writer)).or_insert((now, 0));
        *last = (now, self.left(*last, now).saturating_add(bytes));
        self.writers = writers;
    }

    /// The bytes that a writer may write at once.
    fn most(&self) -> u64 {
        self.limit.saturating_mul(TIMES)
    }

    /// What is left of a count of bytes.
    fn left(&self, (since, bytes): (Instant, u64), now: Instant) -> u64 {
        let part = now.saturating_duration_since(since).as_secs_f64() / PERIOD.as_secs_f64();
        bytes.saturating_sub((self.most() as f64 * part) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_writer_writes_in_an_hour_is_limited() {
        let mut written = Written {
            limit: 600 / TIMES,
            writers: HashMap::new(),
        };
        let [one, two]: [Arc<str>; 2] = ["one".into(), "two".into()];
        let begin = Instant::now();
        let at = |minutes: u64| begin + Duration::from_secs(60 * minutes);
        assert!(written.may_write(&one, 600, at(0)) && !written.may_write(&one, 601, at(0)));
        written.count(&one, 600, at(0));
        assert!(!written.may_write(&one, 11, at(1)) && written.may_write(&one, 10, at(1)));
        assert!(written.may_write(&two, 600, at(1)), "of another writer");
        assert!(written.may_write(&one, 600, at(60)) && !written.may_write(&one, 601, at(120)));
        // As much as possible, at any time: never more than four times the cache in an hour.
        let mut all = vec![600];
        for minute in 1..200 {
            let mut bytes = 0;
            while written.may_write(&one, 1, at(minute)) {
                written.count(&one, 1, at(minute));
                bytes += 1;
            }
            all.push(bytes);
        }
        for hour in all.windows(60) {
            assert!(hour.iter().sum::<u64>() <= 4 * 600 / TIMES, "{hour:?}");
        }
        // Writers that may write all again are forgotten.
        for i in 0..3 * MAX_WRITERS {
            let name: Arc<str> = format!("{i}").into();
            written.count(&name, 1, at(1000 + i as u64));
        }
        assert!(written.writers.len() <= MAX_WRITERS + 1);
    }

    /// Part of the constant in docs/SECURITY.md.
    #[test]
    fn what_waits_to_be_written_takes_a_few_mebibytes() {
        let each = size_of::<(u64, Job)>();
        assert!(MAX_OF_ALL * each <= 8 << 20, "{each} bytes for each job");
    }
}
