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
use super::hash_queue::HashQueue;
use super::options::CacheOptions;
use super::priority;
use crate::lock::{Rank, RankedMutex};

/// What a file counts besides its bytes: two calls of `fsync`.
const COST_OF_FILE: u64 = 1 << 20;

/// In this time, each writer writes at most [`TIMES`] as many bytes as the cache has.
const WINDOW: Duration = Duration::from_secs(3600);
const TIMES: u64 = 4;

/// Writers whose bytes are remembered, before those of earlier windows are forgotten.
const MAX_WRITERS: usize = 1024;

/// The cache on disk, with its thread, which ends when this is dropped.
pub(super) struct Cache {
    disk: Arc<Disk>,
    queue: Arc<WriteQueue>,
}

/// What waits to be written.
struct WriteQueue {
    jobs: RankedMutex<HashQueue<Job>>,
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

/// The bytes of each writer in its present window.
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
            jobs: RankedMutex::new(Rank::Weights, HashQueue::default()),
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
        let mut is_queued = jobs.push(writer, content.len, job());
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
        let before = { self.writers.get(writer) }
            .filter(|(began, _)| now.saturating_duration_since(*began) < WINDOW)
            .map_or(0, |(_, bytes)| *bytes);
        before.saturating_add(len) <= self.limit.saturating_mul(TIMES)
    }

    /// Counts bytes that were written for a writer.
    fn count(&mut self, writer: &Arc<str>, bytes: u64, now: Instant) {
        if bytes == 0 {
            return;
        }
        let is_recent = |began: Instant| now.saturating_duration_since(began) < WINDOW;
        if self.writers.len() >= MAX_WRITERS {
            self.writers.retain(|_, (began, _)| is_recent(*began));
        }
        let window = { &mut self.writers }
            .entry(Arc::clone(writer))
            .or_insert((now, 0));
        if !is_recent(window.0) {
            *window = (now, 0);
        }
        window.1 = window.1.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_writer_writes_in_an_hour_is_limited() {
        let mut written = Written {
            limit: 100 / TIMES,
            writers: HashMap::new(),
        };
        let [one, two]: [Arc<str>; 2] = ["one".into(), "two".into()];
        let begin = Instant::now();
        let at = |minutes: u64| begin + Duration::from_secs(60 * minutes);
        written.count(&one, 60, at(0));
        assert!(written.may_write(&one, 40, at(10)) && !written.may_write(&one, 41, at(10)));
        written.count(&one, 40, at(10));
        assert!(!written.may_write(&one, 1, at(59)) && written.may_write(&one, 100, at(60)));
        assert!(written.may_write(&two, 100, at(10)), "of another writer");
        written.count(&one, 7, at(60));
        assert!(written.may_write(&one, 93, at(61)) && !written.may_write(&one, 94, at(61)));
        // Writers of earlier hours are forgotten.
        for i in 0..3 * MAX_WRITERS {
            let name: Arc<str> = format!("{i}").into();
            written.count(&name, 1, at(100 + i as u64));
        }
        assert!(written.writers.len() <= MAX_WRITERS + 1);
    }
}
