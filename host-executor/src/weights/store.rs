//! The entries of the weight store, and the thread that hashes.
#![forbid(unsafe_code)]

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

use super::disk::{CacheError, CachedExtent, ContentKey, Disk};
use super::options::{CacheOptions, Sharing};
use super::uploads::{self, Slot, Uploads};

/// Bytes that are hashed at once: fits the caches of a core.
const CHUNK: usize = 256 << 10;

/// The shared weights of one engine. Clones share the store.
#[derive(Clone)]
pub struct WeightStore {
    shared: Arc<Shared>,
    /// When the last clone is dropped, the thread ends.
    jobs: Sender<Job>,
}

struct Shared {
    sharing: Sharing,
    entries: Mutex<Entries>,
    uploads: Uploads,
    disk: Option<Disk>,
    counters: Counters,
}

#[derive(Default)]
struct Entries {
    by_key: HashMap<Key, Entry>,
    /// When `by_key` has this many entries, entries of freed extents are removed.
    sweep_at: usize,
}

/// A content of an origin. `None`: shared by all origins.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    origin: Option<Arc<str>>,
    hash: ContentHash,
}

struct Entry {
    len: u64,
    extent: Weak<dyn Extent>,
    /// Origins that have uploaded the content, or have proven that they have it.
    known_to: Vec<Arc<str>>,
}

/// What the store has done since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WeightStoreStats {
    /// Bytes that guests did not have to send.
    pub not_sent: u64,
    /// Part of `not_sent` that came from the cache on disk.
    pub from_disk: u64,
    /// Bytes that were sent and turned out to be duplicates.
    pub merged: u64,
    /// Bytes hashed.
    pub hashed: u64,
    /// Known extents in device memory.
    pub extents: u64,
    /// Bytes of `extents`.
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

/// The extents of a sealed buffer, to be hashed.
struct Job {
    origin: Arc<str>,
    buffer: BufferId,
    /// Offsets and extents. Weak, so that the queue keeps no memory of a guest that has
    /// disconnected.
    extents: Vec<(u64, Weak<dyn Extent>)>,
    inbox: Weak<Inbox>,
}

/// Duplicates that the store has found for a session.
#[derive(Default)]
struct Inbox {
    is_full: AtomicBool,
    merges: Mutex<Vec<Merge>>,
}

/// The bytes at `offset` of a buffer are a duplicate of `extent`.
pub(crate) struct Merge {
    pub(crate) buffer: BufferId,
    pub(crate) offset: u64,
    pub(crate) extent: Arc<dyn Extent>,
}

/// Where the bytes of a content are.
pub(crate) enum Source {
    Memory(Arc<dyn Extent>),
    Disk(CachedExtent),
}

/// The result of a lookup.
pub(crate) enum LookupResult {
    /// The origin may have the content.
    Granted(Source),
    /// The origin has to prove that it has the content.
    NeedsProof(Source),
    /// The content is unknown.
    Missing,
}

/// Access of one session to the store.
pub(crate) struct SessionStore {
    weights: WeightStore,
    origin: Arc<str>,
    inbox: Arc<Inbox>,
}

impl WeightStore {
    /// A store without entries, with the contents of the cache on disk. Starts the hashing thread.
    ///
    /// # Errors
    /// [`CacheError`] if the cache cannot be opened or the thread cannot be started.
    pub fn new(sharing: Sharing, cache: Option<CacheOptions>) -> Result<WeightStore, CacheError> {
        let disk = cache.map(Disk::open).transpose()?;
        let shared = Arc::new(Shared {
            sharing,
            entries: Mutex::default(),
            uploads: Uploads::default(),
            disk,
            counters: Counters::default(),
        });
        let (jobs, queue) = mpsc::channel();
        let worker = Arc::clone(&shared);
        thread::Builder::new()
            .name("vgpu-weights".into())
            .spawn(move || worker.work(&queue))
            .map_err(CacheError::Thread)?;
        Ok(WeightStore { shared, jobs })
    }

    /// What the store has done so far.
    pub fn stats(&self) -> WeightStoreStats {
        let counters = &self.shared.counters;
        let entries = self.shared.entries();
        let live = entries.by_key.values().filter(|entry| entry.is_live());
        let (extents, bytes) = live.fold((0, 0), |(n, sum), entry| (n + 1, sum + entry.len));
        WeightStoreStats {
            not_sent: counters.not_sent.load(Ordering::Relaxed),
            from_disk: counters.from_disk.load(Ordering::Relaxed),
            merged: counters.merged.load(Ordering::Relaxed),
            hashed: counters.hashed.load(Ordering::Relaxed),
            extents,
            bytes,
            disk_bytes: self.shared.disk.as_ref().map_or(0, Disk::bytes),
        }
    }

    /// Access for a session of `origin`. `None` if nothing is shared.
    pub(crate) fn for_origin(&self, origin: &str) -> Option<SessionStore> {
        (self.shared.sharing != Sharing::Off).then(|| SessionStore {
            weights: self.clone(),
            origin: origin.into(),
            inbox: Arc::default(),
        })
    }
}

impl SessionStore {
    /// The lengths of the contents that this session may look up.
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

    /// Looks a content up.
    pub(crate) fn find(&self, wanted: ContentKey) -> LookupResult {
        let shared = &self.weights.shared;
        let key = shared.key(&self.origin, wanted.hash);
        let in_memory = shared.entries().by_key.get(&key).and_then(|entry| {
            let extent = entry.extent.upgrade()?;
            (entry.len == wanted.len).then(|| (extent, entry.known_to.contains(&self.origin)))
        });
        if let Some((extent, is_known)) = in_memory {
            let source = Source::Memory(extent);
            return match is_known {
                true => LookupResult::Granted(source),
                false => LookupResult::NeedsProof(source),
            };
        }
        let disk = shared.disk.as_ref();
        match disk.and_then(|disk| disk.find(key.origin.as_deref(), wanted)) {
            Some(cached) if key.origin.is_some() => LookupResult::Granted(Source::Disk(cached)),
            // The cache does not store which origins have uploaded a content.
            Some(cached) => LookupResult::NeedsProof(Source::Disk(cached)),
            None => LookupResult::Missing,
        }
    }

    /// Records that the origin has proven to have a content.
    pub(crate) fn proven(&self, hash: ContentHash) {
        let shared = &self.weights.shared;
        let key = shared.key(&self.origin, hash);
        if let Some(entry) = shared.entries().by_key.get_mut(&key) {
            entry.make_known_to(&self.origin);
        }
    }

    /// Counts bytes that the guest did not have to send.
    pub(crate) fn count_saved(&self, bytes: u64, is_from_disk: bool) {
        let counters = &self.weights.shared.counters;
        counters.not_sent.fetch_add(bytes, Ordering::Relaxed);
        if is_from_disk {
            counters.from_disk.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// The extents of this origin that have `len` bytes and begin with `start`.
    pub(crate) fn uploads_like(&self, len: u64, start: &[u8]) -> Arc<Slot> {
        let key = uploads::Key {
            origin: Arc::clone(&self.origin),
            len,
            start: ContentHash(*blake3::hash(start).as_bytes()),
        };
        self.weights.shared.uploads.slot(key)
    }

    /// Queues the extents of a sealed buffer for hashing. [`merges`](SessionStore::merges) returns
    /// the duplicates.
    pub(crate) fn hash_later(&self, buffer: BufferId, extents: &[(u64, Arc<dyn Extent>)]) {
        let weak = |(offset, extent): &(u64, Arc<dyn Extent>)| (*offset, Arc::downgrade(extent));
        let job = Job {
            origin: Arc::clone(&self.origin),
            buffer,
            extents: extents.iter().map(weak).collect(),
            inbox: Arc::downgrade(&self.inbox),
        };
        if self.weights.jobs.send(job).is_err() {
            warn!(
                "weights are no longer shared: the hashing thread has ended; this is a bug of the \
                 host"
            );
        }
    }

    /// The duplicates that have been found since the last call.
    pub(crate) fn merges(&self) -> Vec<Merge> {
        // Pairs with the release in `Shared::enter`. A merge that is missed now is seen by the next
        // call.
        match self.inbox.is_full.swap(false, Ordering::AcqRel) {
            true => std::mem::take(&mut *lock(&self.inbox.merges)),
            false => Vec::new(),
        }
    }

    /// Counts bytes that a merge has freed.
    pub(crate) fn count_merged(&self, bytes: u64) {
        let merged = &self.weights.shared.counters.merged;
        merged.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Source {
    /// The proof of possession for `nonce`: the keyed hash of all bytes.
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

    /// The origin whose entries a session of `origin` uses. `None`: those of all origins.
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

    /// The hashing thread.
    fn work(&self, queue: &Receiver<Job>) {
        while let Ok(job) = queue.recv() {
            let began = Instant::now();
            let (mut bytes, mut count) = (0, 0);
            for (offset, extent) in &job.extents {
                let Some(extent) = extent.upgrade() else {
                    continue; // freed
                };
                bytes += extent.size();
                count += 1;
                match hash(blake3::Hasher::new(), extent.as_ref()) {
                    Ok(hash) => self.enter(&job, *offset, extent, hash),
                    Err(error) => warn!("weights cannot be hashed: {error}"),
                }
            }
            self.counters.hashed.fetch_add(bytes, Ordering::Relaxed);
            let took = began.elapsed();
            debug!(origin = %job.origin, count, bytes, ?took, "weights hashed");
        }
    }

    /// Makes an extent an entry, or reports it as a duplicate.
    fn enter(&self, job: &Job, offset: u64, extent: Arc<dyn Extent>, hash: ContentHash) {
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
                // The merge frees the pages of this extent, so no reference may be left.
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

/// Feeds an extent to `hasher`.
fn hash(mut hasher: blake3::Hasher, extent: &dyn Extent) -> Result<ContentHash, EngineError> {
    let size = extent.size();
    let mut chunk = vec![0; CHUNK.min(usize::try_from(size).unwrap_or(CHUNK))];
    let mut at = 0;
    while at < size {
        let len = (size - at).min(CHUNK as u64);
        let part = &mut chunk[..len as usize];
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
