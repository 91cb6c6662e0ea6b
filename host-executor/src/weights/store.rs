//! The entries, and the thread that hashes.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Instant;

use tracing::{debug, info, warn};
use vgpu_engine::{EngineError, Extent};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{ContentHash, MAX_LENGTHS};

use super::Sharing;
use super::disk::{CacheError, CacheOptions, Cached, Disk};

/// Bytes hashed at once: what fits a processor's own caches.
const PIECE: usize = 256 << 10;

/// The weights of one engine's guests. Clones are the same.
#[derive(Clone)]
pub struct Weights {
    shared: Arc<Shared>,
    /// When the last one is dropped, the thread ends.
    jobs: Sender<Job>,
}

struct Shared {
    sharing: Sharing,
    entries: Mutex<Entries>,
    disk: Option<Disk>,
    counters: Counters,
}

#[derive(Default)]
struct Entries {
    by_key: HashMap<Key, Entry>,
    /// When `by_key` has become this large, what is gone is swept out of it.
    sweep_at: usize,
}

/// Content, in the name space of an origin, or of all.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    origin: Option<Arc<str>>,
    hash: ContentHash,
}

struct Entry {
    len: u64,
    extent: Weak<dyn Extent>,
    /// Who has uploaded it, or has proven to have it.
    known_to: Vec<Arc<str>>,
}

/// What the store has done since it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightsStats {
    /// Bytes that guests did not have to send.
    pub not_sent: u64,
    /// Of these, bytes that came from the cache on disk.
    pub from_disk: u64,
    /// Bytes that were sent and found to be there already.
    pub merged: u64,
    /// Bytes hashed.
    pub hashed: u64,
    /// Extents known and in memory.
    pub extents: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Bytes in the cache on disk.
    pub disk_bytes: u64,
}

#[derive(Default)]
struct Counters {
    not_sent: AtomicU64,
    from_disk: AtomicU64,
    merged: AtomicU64,
    hashed: AtomicU64,
}

/// Settled extents of a buffer, to be hashed.
struct Job {
    origin: Arc<str>,
    buffer: BufferId,
    /// Weak: what waits here keeps no memory of a guest that is gone.
    extents: Vec<(u64, Weak<dyn Extent>)>,
    inbox: Weak<Inbox>,
}

/// What the store has found out for a session.
#[derive(Default)]
struct Inbox {
    is_full: AtomicBool,
    merges: Mutex<Vec<Merge>>,
}

/// The bytes at `offset` of a buffer are those of an extent that is there already.
pub(crate) struct Merge {
    pub(crate) buffer: BufferId,
    pub(crate) offset: u64,
    pub(crate) extent: Arc<dyn Extent>,
}

/// Where bytes can be had.
pub(crate) enum Source {
    Memory(Arc<dyn Extent>),
    Disk(Cached),
}

/// The answer to a hash.
pub(crate) enum Found {
    Yes(Source),
    /// Only for those who have it.
    OnProof(Source),
    No,
}

/// What is looked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lookup {
    pub(crate) hash: ContentHash,
    pub(crate) len: u64,
}

/// The store as one session sees it.
pub(crate) struct Held {
    weights: Weights,
    origin: Arc<str>,
    inbox: Arc<Inbox>,
}

impl Weights {
    /// A store with nothing in memory, and what is on disk. Starts a thread.
    pub fn new(sharing: Sharing, cache: Option<CacheOptions>) -> Result<Weights, CacheError> {
        let disk = cache.map(Disk::open).transpose()?;
        let shared = Arc::new(Shared {
            sharing,
            entries: Mutex::default(),
            disk,
            counters: Counters::default(),
        });
        let (jobs, queue) = mpsc::channel();
        let worker = Arc::clone(&shared);
        thread::Builder::new()
            .name("vgpu-weights".into())
            .spawn(move || worker.work(&queue))
            .map_err(CacheError::Thread)?;
        Ok(Weights { shared, jobs })
    }

    /// What has come of it so far.
    pub fn stats(&self) -> WeightsStats {
        let counters = &self.shared.counters;
        let entries = self.shared.entries();
        let live = entries.by_key.values().filter(|entry| entry.is_live());
        let (extents, bytes) = live.fold((0, 0), |(n, sum), entry| (n + 1, sum + entry.len));
        WeightsStats {
            not_sent: counters.not_sent.load(Ordering::Relaxed),
            from_disk: counters.from_disk.load(Ordering::Relaxed),
            merged: counters.merged.load(Ordering::Relaxed),
            hashed: counters.hashed.load(Ordering::Relaxed),
            extents,
            bytes,
            disk_bytes: self.shared.disk.as_ref().map_or(0, Disk::bytes),
        }
    }

    /// The store for a session of `origin`; `None` when nothing is shared.
    pub(crate) fn of(&self, origin: &str) -> Option<Held> {
        (self.shared.sharing != Sharing::Off).then(|| Held {
            weights: self.clone(),
            origin: origin.into(),
            inbox: Arc::default(),
        })
    }
}

impl Held {
    /// The lengths of what this session may have.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        let shared = &self.weights.shared;
        let is_for_us = |key: &Key| {
            key.origin
                .as_ref()
                .is_none_or(|origin| *origin == self.origin)
        };
        let mut lengths: BTreeSet<u64> = shared
            .entries()
            .by_key
            .iter()
            .filter(|(key, entry)| is_for_us(key) && entry.is_live())
            .map(|(_, entry)| entry.len)
            .collect();
        if let Some(disk) = &shared.disk {
            lengths.extend(disk.lengths(shared.origin_of(&self.origin).as_deref()));
        }
        lengths.into_iter().take(MAX_LENGTHS).collect()
    }

    /// Looks a hash up.
    pub(crate) fn find(&self, wanted: Lookup) -> Found {
        let shared = &self.weights.shared;
        let key = shared.key(&self.origin, wanted.hash);
        let in_memory = shared.entries().by_key.get(&key).and_then(|entry| {
            let extent = entry.extent.upgrade()?;
            (entry.len == wanted.len).then(|| (extent, entry.known_to.contains(&self.origin)))
        });
        if let Some((extent, is_known)) = in_memory {
            let source = Source::Memory(extent);
            return match is_known {
                true => Found::Yes(source),
                false => Found::OnProof(source),
            };
        }
        let disk = shared.disk.as_ref();
        match disk.and_then(|disk| disk.find(key.origin.as_deref(), wanted)) {
            Some(cached) if key.origin.is_some() => Found::Yes(Source::Disk(cached)),
            // Nobody remembers whose it was.
            Some(cached) => Found::OnProof(Source::Disk(cached)),
            None => Found::No,
        }
    }

    /// The guest has proven to have this content.
    pub(crate) fn proven(&self, hash: ContentHash) {
        let shared = &self.weights.shared;
        let key = shared.key(&self.origin, hash);
        if let Some(entry) = shared.entries().by_key.get_mut(&key) {
            entry.make_known_to(&self.origin);
        }
    }

    /// So many bytes were not sent.
    pub(crate) fn saved(&self, bytes: u64, is_from_disk: bool) {
        let counters = &self.weights.shared.counters;
        counters.not_sent.fetch_add(bytes, Ordering::Relaxed);
        if is_from_disk {
            counters.from_disk.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Has extents of a buffer hashed; what comes of it is told by [`merges`](Held::merges).
    pub(crate) fn settle(&self, buffer: BufferId, extents: &[(u64, Arc<dyn Extent>)]) {
        let weak = |(offset, extent): &(u64, Arc<dyn Extent>)| (*offset, Arc::downgrade(extent));
        let job = Job {
            origin: Arc::clone(&self.origin),
            buffer,
            extents: extents.iter().map(weak).collect(),
            inbox: Arc::downgrade(&self.inbox),
        };
        if self.weights.jobs.send(job).is_err() {
            warn!("weights are not shared any more: their thread has ended, a bug of the host");
        }
    }

    /// What was found to be there twice since the last call.
    pub(crate) fn merges(&self) -> Vec<Merge> {
        // Pairs with the release in `Shared::settle`; what is missed now is seen by the next call.
        match self.inbox.is_full.swap(false, Ordering::AcqRel) {
            true => std::mem::take(&mut *lock(&self.inbox.merges)),
            false => Vec::new(),
        }
    }

    /// So many bytes were given back.
    pub(crate) fn merged(&self, bytes: u64) {
        let merged = &self.weights.shared.counters.merged;
        merged.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Source {
    /// The proof that whoever has these bytes gives for `nonce`.
    pub(crate) fn proof(&self, nonce: ContentHash) -> io::Result<ContentHash> {
        let hasher = blake3::Hasher::new_keyed(&nonce.0);
        match self {
            Source::Memory(extent) => hash(hasher, extent.as_ref()).map_err(io::Error::other),
            Source::Disk(cached) => cached.hash(hasher),
        }
    }
}

impl Shared {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        lock(&self.entries)
    }

    /// Whose entries somebody uses.
    fn origin_of(&self, origin: &Arc<str>) -> Option<Arc<str>> {
        match self.sharing {
            Sharing::All => None,
            Sharing::Tenant | Sharing::Off => Some(Arc::clone(origin)),
        }
    }

    fn key(&self, origin: &Arc<str>, hash: ContentHash) -> Key {
        let origin = self.origin_of(origin);
        Key { origin, hash }
    }

    /// The thread's life.
    fn work(&self, queue: &Receiver<Job>) {
        while let Ok(job) = queue.recv() {
            let began = Instant::now();
            let (mut bytes, mut count) = (0, 0);
            for (offset, extent) in &job.extents {
                let Some(extent) = extent.upgrade() else {
                    continue; // the guest is gone
                };
                bytes += extent.size();
                count += 1;
                match hash(blake3::Hasher::new(), extent.as_ref()) {
                    Ok(hash) => self.settle(&job, *offset, extent, hash),
                    Err(error) => warn!("weights cannot be hashed: {error}"),
                }
            }
            self.counters.hashed.fetch_add(bytes, Ordering::Relaxed);
            let took = began.elapsed();
            debug!(origin = %job.origin, count, bytes, ?took, "weights hashed");
        }
    }

    /// Makes an entry of an extent, or finds that there is one.
    fn settle(&self, job: &Job, offset: u64, extent: Arc<dyn Extent>, hash: ContentHash) {
        let key = self.key(&job.origin, hash);
        let known = {
            let mut entries = self.entries();
            match entries.live(&key) {
                Some((entry, first)) => {
                    entry.make_known_to(&job.origin);
                    Some(first)
                }
                None => {
                    entries.insert(
                        key.clone(),
                        Entry {
                            len: extent.size(),
                            extent: Arc::downgrade(&extent),
                            known_to: vec![Arc::clone(&job.origin)],
                        },
                    );
                    None
                }
            }
        };
        match known {
            Some(first) if !Arc::ptr_eq(&first, &extent) => {
                // Whoever merges gives pages back that nobody may hold on to.
                drop(extent);
                if let Some(inbox) = job.inbox.upgrade() {
                    lock(&inbox.merges).push(Merge {
                        buffer: job.buffer,
                        offset,
                        extent: first,
                    });
                    inbox.is_full.store(true, Ordering::Release);
                }
            }
            Some(_) => {}
            None => {
                if let Some(disk) = &self.disk {
                    disk.put(key.origin.as_deref(), hash, extent.as_ref());
                }
            }
        }
    }
}

impl Entries {
    fn live(&mut self, key: &Key) -> Option<(&mut Entry, Arc<dyn Extent>)> {
        let entry = self.by_key.get_mut(key)?;
        let extent = entry.extent.upgrade()?;
        Some((entry, extent))
    }

    fn insert(&mut self, key: Key, entry: Entry) {
        self.by_key.insert(key, entry);
        if self.by_key.len() > self.sweep_at {
            self.by_key.retain(|_, entry| entry.is_live());
            self.sweep_at = 2 * self.by_key.len() + 1024;
        }
    }
}

impl Entry {
    fn is_live(&self) -> bool {
        self.extent.strong_count() > 0
    }

    fn make_known_to(&mut self, origin: &Arc<str>) {
        if !self.known_to.contains(origin) {
            self.known_to.push(Arc::clone(origin));
        }
    }
}

/// The hash of an extent.
fn hash(mut hasher: blake3::Hasher, extent: &dyn Extent) -> Result<ContentHash, EngineError> {
    let size = extent.size();
    let mut piece = vec![0; PIECE.min(usize::try_from(size).unwrap_or(PIECE))];
    let mut at = 0;
    while at < size {
        let len = (size - at).min(PIECE as u64);
        let part = &mut piece[..len as usize];
        extent.read(at, part)?;
        hasher.update(part);
        at += len;
    }
    Ok(ContentHash(*hasher.finalize().as_bytes()))
}

impl Drop for Shared {
    fn drop(&mut self) {
        let counters = &self.counters;
        let [not_sent, merged, hashed] = [&counters.not_sent, &counters.merged, &counters.hashed]
            .map(|c| c.load(Ordering::Relaxed));
        if not_sent + merged > 0 {
            info!(not_sent, merged, hashed, "weights shared");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
