//! What sessions ask and report of the weight store, and the thread that hashes.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};
use vgpu_engine::Extent;
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{ContentHash, MAX_LENGTHS};

use super::cache::Cache;
use super::content::ContentKey;
use super::disk::{CacheError, CachedExtent};
use super::entries::{Entries, Entry, Key};
use super::fair_queue::FairQueue;
use super::hash_job::{Hashed, Inbox, Job, Merge, hash_part};
use super::options::{CacheOptions, Sharing};
use super::priority;
use super::uploads::{self, CandidateExtents, Uploads};
use crate::lock::{Rank, RankedGuard, RankedMutex};
#[cfg(feature = "server")]
use crate::seqlock::text_of;
use crate::seqlock::{SeqLock, words_of};

/// Wrong proofs of a session, and of a prover in [`PROOF_WINDOW`], after which the store
/// does not ask for further proofs: the guest has to send its weights.
pub(crate) const MAX_WRONG_PROOFS: u32 = 16;

/// Extents that are queued with one lock of the queue.
const QUEUED_AT_ONCE: usize = 256;

/// Entries that are looked at for the lengths of a sharing domain.
const MAX_STEPS: usize = 4 * MAX_LENGTHS;

/// Entries that are counted at a time.
const COUNTED_AT_ONCE: usize = 1024;

/// How long the wrong proofs of a prover count.
const PROOF_WINDOW: Duration = Duration::from_secs(60);

/// The shared weights of one engine. Clones share the store.
#[derive(Clone)]
pub struct WeightStore {
    shared: Arc<StoreState>,
    /// When the last clone is dropped, the thread ends.
    _handle: Arc<Handle>,
}

/// Ends the hashing thread when dropped.
struct Handle(Arc<StoreState>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.queue.lock().has_ended = true;
        self.0.has_jobs.notify_all();
    }
}

/// What waits for the hashing thread.
#[derive(Default)]
struct Queue {
    jobs: FairQueue<Job>,
    has_ended: bool,
}

/// When the present window of each prover began, and its wrong proofs since.
type WrongProofs = HashMap<Arc<str>, (Instant, u32)>;

/// The words of what the hashing thread does: since when (0: nothing), bytes done before, bytes of
/// the extent, and the sharing domain.
const HASHING: usize = 3 + DOMAIN;
const DOMAIN: usize = 8;

/// An extent of which the hashing thread hashes a part now.
#[cfg(feature = "server")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HashingNow {
    /// Whose extent it is.
    pub(crate) domain: String,
    /// Bytes that were hashed before this part.
    pub(crate) done: u64,
    /// Bytes of the extent.
    pub(crate) size: u64,
    /// How long the thread has worked on this part.
    pub(crate) age: Duration,
}

struct StoreState {
    start: Instant,
    /// What the hashing thread does.
    hashing: SeqLock<HASHING>,
    sharing: Sharing,
    entries: RankedMutex<Entries>,
    uploads: Uploads,
    queue: RankedMutex<Queue>,
    has_jobs: Condvar,
    /// Those of all devices.
    wrong_proofs: Arc<RankedMutex<WrongProofs>>,
    cache: Option<Arc<Cache>>,
    counters: Counters,
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

/// Where the bytes of a content are.
pub(crate) enum Source {
    Memory(Arc<dyn Extent>),
    Disk(CachedExtent),
}

/// As [`Source`], but keeps no memory.
pub(crate) enum WeakSource {
    Memory(Weak<dyn Extent>),
    Disk(CachedExtent),
}

/// The result of a lookup.
pub(crate) enum LookupResult {
    /// The sharing domain may have the content.
    Granted(Source),
    /// The sharing domain has to prove that it has the content.
    NeedsProof,
    /// The content is unknown.
    Missing,
}

/// The sessions that share weights without a proof.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SharingDomain<'a> {
    pub(crate) name: &'a str,
    /// Whether it has one session, and ends with it: no later session has access to its weights.
    pub(crate) is_of_session: bool,
}

/// Access of one session to the store.
pub(crate) struct SessionStore {
    weights: WeightStore,
    domain: Arc<str>,
    /// Whether the domain ends with the session.
    is_of_session: bool,
    /// Who answers for wrong proofs, in all its sessions: a tenant, or where an unnamed guest
    /// connects from.
    prover: Arc<str>,
    inbox: Arc<Inbox>,
}

impl WeightStore {
    /// A store without entries, with the contents of the cache on disk. Starts the hashing thread.
    ///
    /// # Errors
    /// [`CacheError`] if the cache cannot be opened or the thread cannot be started.
    pub fn new(sharing: Sharing, cache: Option<CacheOptions>) -> Result<WeightStore, CacheError> {
        let cache = cache.map(Cache::open).transpose()?.map(Arc::new);
        let wrong_proofs = RankedMutex::new(Rank::Weights, HashMap::new());
        let store = WeightStore::with(sharing, cache, Arc::new(wrong_proofs));
        store.map_err(CacheError::Thread)
    }

    /// A store without entries for the weights of another engine, with the same cache on disk and
    /// the same count of wrong proofs. Starts a hashing thread of its own.
    ///
    /// # Errors
    /// The thread cannot be started.
    #[cfg(feature = "server")]
    pub(crate) fn for_another_engine(&self) -> io::Result<WeightStore> {
        let StoreState {
            sharing,
            cache,
            wrong_proofs,
            ..
        } = self.shared.as_ref();
        WeightStore::with(*sharing, cache.clone(), Arc::clone(wrong_proofs))
    }

    fn with(
        sharing: Sharing,
        cache: Option<Arc<Cache>>,
        wrong_proofs: Arc<RankedMutex<WrongProofs>>,
    ) -> io::Result<WeightStore> {
        let shared = Arc::new(StoreState {
            start: Instant::now(),
            hashing: SeqLock::default(),
            sharing,
            entries: RankedMutex::new(Rank::Weights, Entries::default()),
            uploads: Uploads::default(),
            queue: RankedMutex::new(Rank::Weights, Queue::default()),
            has_jobs: Condvar::new(),
            wrong_proofs,
            cache,
            counters: Counters::default(),
        });
        let worker = Arc::clone(&shared);
        thread::Builder::new()
            .name("vgpu-weights".into())
            .spawn(move || {
                priority::lower();
                worker.work();
            })?;
        let _handle = Arc::new(Handle(Arc::clone(&shared)));
        Ok(WeightStore { shared, _handle })
    }

    /// What the store has done so far.
    pub fn stats(&self) -> WeightStoreStats {
        let counters = &self.shared.counters;
        let (mut extents, mut bytes, mut last) = (0, 0, None);
        loop {
            // Guests wait for this lock.
            let part = self.shared.entries().count(last.as_ref(), COUNTED_AT_ONCE);
            extents += part.0;
            bytes += part.1;
            last = part.2;
            if last.is_none() {
                break;
            }
        }
        WeightStoreStats {
            not_sent: counters.not_sent.load(Ordering::Relaxed),
            from_disk: counters.from_disk.load(Ordering::Relaxed),
            merged: counters.merged.load(Ordering::Relaxed),
            hashed: counters.hashed.load(Ordering::Relaxed),
            extents,
            bytes,
            disk_bytes: self.shared.cache.as_ref().map_or(0, |disk| disk.bytes()),
        }
    }

    /// Extents that wait to be hashed, and their bytes. `None` if the queue is locked now.
    #[cfg(feature = "server")]
    pub(crate) fn backlog(&self) -> Option<(usize, u64)> {
        Some(self.shared.queue.try_lock()?.jobs.waiting())
    }

    /// What the hashing thread does now. Takes no lock. `None`: it waits for work.
    #[cfg(feature = "server")]
    pub(crate) fn hashing(&self) -> Option<HashingNow> {
        let [since, done, size, domain @ ..] = self.shared.hashing.read()?;
        let since = Duration::from_nanos(since.checked_sub(1)?);
        Some(HashingNow {
            domain: text_of(&domain),
            done,
            size,
            age: self.shared.start.elapsed().saturating_sub(since),
        })
    }

    /// Access for a session of `domain`, for whose wrong proofs `prover` answers. `None` if nothing
    /// is shared.
    pub(crate) fn for_domain(
        &self,
        domain: SharingDomain<'_>,
        prover: &str,
    ) -> Option<SessionStore> {
        (self.shared.sharing != Sharing::Off).then(|| SessionStore {
            weights: self.clone(),
            domain: domain.name.into(),
            is_of_session: domain.is_of_session,
            prover: prover.into(),
            inbox: Arc::default(),
        })
    }
}

impl SessionStore {
    /// The lengths of the contents that this session may look up, the longest first: they have the
    /// most bytes.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        let shared = &self.weights.shared;
        let domain = shared.domain_of(&self.domain);
        let in_memory = shared.entries().lengths(&domain, MAX_LENGTHS, MAX_STEPS);
        let on_disk = { shared.cache.as_ref() }.map(|disk| disk.lengths(domain.as_deref()));
        let lengths: BTreeSet<u64> = { in_memory.into_iter() }
            .chain(on_disk.unwrap_or_default())
            .collect();
        lengths.into_iter().rev().take(MAX_LENGTHS).collect()
    }

    /// Looks a content up.
    pub(crate) fn find(&self, wanted: ContentKey) -> LookupResult {
        self.find_in_memory(wanted)
            .unwrap_or_else(|| self.find_on_disk(wanted))
    }

    /// Looks a content up in the memory of the engine. `None` if it is not there.
    pub(crate) fn find_in_memory(&self, wanted: ContentKey) -> Option<LookupResult> {
        let shared = &self.weights.shared;
        let key = shared.key(&self.domain, wanted.hash);
        let (extent, is_known) = shared.entries().by_key.get(&key).and_then(|entry| {
            // An extent that is not wanted must not be dropped under this lock.
            let extent = Some(&entry.extent).filter(|_| entry.len == wanted.len)?;
            Some((extent.upgrade()?, entry.known_to.contains(&self.domain)))
        })?;
        // The bytes of a device that is lost are gone before their guests are.
        (extent.filled() == wanted.len).then_some(match is_known {
            true => LookupResult::Granted(Source::Memory(extent)),
            false => LookupResult::NeedsProof,
        })
    }

    fn find_on_disk(&self, wanted: ContentKey) -> LookupResult {
        let shared = &self.weights.shared;
        let key = shared.key(&self.domain, wanted.hash);
        let disk = shared.cache.as_ref();
        match disk.and_then(|disk| disk.find(key.domain.as_deref(), wanted)) {
            Some(cached) if key.domain.is_some() => LookupResult::Granted(Source::Disk(cached)),
            // The cache does not store which sharing domains have uploaded a content.
            Some(_) => LookupResult::NeedsProof,
            None => LookupResult::Missing,
        }
    }

    /// The content for which a proof is to be checked, if it exists.
    pub(crate) fn find_unproven(&self, wanted: ContentKey) -> Option<WeakSource> {
        let shared = &self.weights.shared;
        let key = shared.key(&self.domain, wanted.hash);
        let in_memory = shared.entries().by_key.get(&key).and_then(|entry| {
            let is_wanted = entry.len == wanted.len && entry.is_live();
            is_wanted.then(|| WeakSource::Memory(Weak::clone(&entry.extent)))
        });
        in_memory.or_else(|| {
            let cached = shared.cache.as_ref()?.find(key.domain.as_deref(), wanted)?;
            Some(WeakSource::Disk(cached))
        })
    }

    /// The proof of possession for `nonce`: the keyed hash of all bytes. The bytes count like those
    /// that are hashed for the sharing domain. `None` if `may_go_on` has returned `false`, or if
    /// the content was freed.
    pub(crate) fn check_proof(
        &self,
        source: &WeakSource,
        nonce: ContentHash,
        mut may_go_on: impl FnMut() -> bool,
    ) -> io::Result<Option<ContentHash>> {
        let shared = &self.weights.shared;
        let mut hasher = blake3::Hasher::new_keyed(&nonce.0);
        match source {
            WeakSource::Memory(extent) => {
                let mut done = 0;
                while may_go_on() {
                    let step = hash_part(&mut hasher, extent, done).map_err(io::Error::other)?;
                    let Some(step) = step else {
                        return Ok(None);
                    };
                    shared.queue.lock().jobs.used(&self.domain, step.bytes);
                    done += step.bytes;
                    if step.is_last {
                        return Ok(Some(ContentHash(*hasher.finalize().as_bytes())));
                    }
                }
                Ok(None)
            }
            WeakSource::Disk(cached) => {
                shared.queue.lock().jobs.used(&self.domain, cached.len);
                cached.hash(hasher, &mut may_go_on)
            }
        }
    }

    /// Whether the prover may prove that it has a content.
    pub(crate) fn may_prove(&self, now: Instant) -> bool {
        let wrong = self.weights.shared.wrong_proofs.lock();
        wrong.get(&self.prover).is_none_or(|&(began, count)| {
            now.saturating_duration_since(began) >= PROOF_WINDOW || count < MAX_WRONG_PROOFS
        })
    }

    /// Counts a wrong proof of the prover.
    pub(crate) fn count_wrong_proof(&self, now: Instant) {
        let mut wrong = self.weights.shared.wrong_proofs.lock();
        let is_recent = |began: &Instant| now.saturating_duration_since(*began) < PROOF_WINDOW;
        wrong.retain(|_, (began, _)| is_recent(began));
        wrong.entry(Arc::clone(&self.prover)).or_insert((now, 0)).1 += 1;
    }

    /// Records that the sharing domain has proven to have a content.
    pub(crate) fn proven(&self, hash: ContentHash) {
        let shared = &self.weights.shared;
        let key = shared.key(&self.domain, hash);
        if let Some(entry) = shared.entries().by_key.get_mut(&key) {
            entry.make_known_to(&self.domain);
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

    /// The extents of this sharing domain that have `len` bytes and begin with `start`.
    pub(crate) fn uploads_like(&self, len: u64, start: &[u8]) -> Arc<CandidateExtents> {
        let key = uploads::Key {
            domain: Arc::clone(&self.domain),
            len,
            start: ContentHash(*blake3::hash(start).as_bytes()),
        };
        self.weights.shared.uploads.candidates(key)
    }

    /// Queues the extents of a sealed buffer for hashing. [`merges`](SessionStore::merges) returns
    /// the duplicates.
    pub(crate) fn hash_later(&self, buffer: BufferId, extents: &[(u64, Arc<dyn Extent>)]) {
        let shared = &self.weights.shared;
        // Nobody would find a file in a folder of a domain that ends.
        let is_cached = !self.is_of_session || shared.domain_of(&self.domain).is_none();
        let writer = Some(&self.prover).filter(|_| is_cached && shared.cache.is_some());
        let mut not_queued = 0;
        for part in extents.chunks(QUEUED_AT_ONCE) {
            let sizes: Vec<u64> = part.iter().map(|(_, extent)| extent.size()).collect();
            let mut queue = shared.queue.lock();
            for ((offset, extent), size) in part.iter().zip(sizes) {
                let job = || Job::new((buffer, *offset), extent, &self.inbox, writer);
                let mut is_queued = queue.jobs.push(&self.domain, size, job());
                // Extents that were freed since do not count.
                let jobs = &mut queue.jobs;
                if !is_queued && jobs.make_room(&self.domain, Instant::now(), Job::is_wanted) > 0 {
                    is_queued = queue.jobs.push(&self.domain, size, job());
                }
                not_queued += usize::from(!is_queued);
            }
        }
        shared.has_jobs.notify_one();
        if not_queued > 0 {
            debug!(
                not_queued,
                "too many weights of this guest wait to be hashed: not shared"
            );
        }
    }

    /// The duplicates that have been found since the last call.
    pub(crate) fn merges(&self) -> Vec<Merge> {
        // Pairs with the release in `StoreState::enter`. A merge that is missed now is seen by the
        // next call.
        match self.inbox.is_full.swap(false, Ordering::AcqRel) {
            true => std::mem::take(&mut *self.inbox.merges.lock()),
            false => Vec::new(),
        }
    }

    /// Counts bytes that a merge has freed.
    pub(crate) fn count_merged(&self, bytes: u64) {
        let merged = &self.weights.shared.counters.merged;
        merged.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for SessionStore {
    fn drop(&mut self) {
        if self.is_of_session {
            // Otherwise guests that connect again and again fill the memory with what waits.
            let removed = self.weights.shared.queue.lock().jobs.remove(&self.domain);
            drop(removed);
        }
    }
}

impl WeakSource {
    /// The source, if it still exists.
    pub(crate) fn upgrade(self) -> Option<Source> {
        match self {
            WeakSource::Memory(extent) => extent.upgrade().map(Source::Memory),
            WeakSource::Disk(cached) => Some(Source::Disk(cached)),
        }
    }
}

impl StoreState {
    fn entries(&self) -> RankedGuard<'_, Entries> {
        self.entries.lock()
    }

    /// The sharing domain whose entries a session of `domain` uses. `None`: those of all sharing
    /// domains.
    fn domain_of(&self, domain: &Arc<str>) -> Option<Arc<str>> {
        match self.sharing {
            Sharing::All => None,
            Sharing::Tenant | Sharing::Off => Some(Arc::clone(domain)),
        }
    }

    fn key(&self, domain: &Arc<str>, hash: ContentHash) -> Key {
        let domain = self.domain_of(domain);
        Key { domain, hash }
    }

    /// The hashing thread.
    fn work(&self) {
        let mut queue = self.queue.lock();
        while !queue.has_ended {
            let Some((domain, mut job)) = queue.jobs.pop() else {
                queue = queue.wait(&self.has_jobs);
                continue;
            };
            drop(queue);
            self.publish(&domain, &job);
            let hashed = self.hash_next(&domain, &mut job);
            self.hashing.write([0; HASHING]);
            // This may be the last reference to the extent, which must not be dropped under a lock.
            let size = job.extent.upgrade().map_or(0, |extent| extent.size());
            queue = self.queue.lock();
            queue.jobs.used(&domain, hashed.bytes);
            if !hashed.is_last {
                let left = size.saturating_sub(job.done);
                queue.jobs.put_back(&domain, left, job);
            }
        }
    }

    /// Publishes that the hashing thread, which calls this, begins a part of a job.
    fn publish(&self, domain: &str, job: &Job) {
        let mut words = [0; HASHING];
        let since = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX - 1);
        words[..3].copy_from_slice(&[since + 1, job.done, job.size]);
        words[3..].copy_from_slice(&words_of::<DOMAIN>(domain));
        self.hashing.write(words);
    }

    /// Hashes the next bytes of a job, and enters its extent after the last ones.
    fn hash_next(&self, domain: &Arc<str>, job: &mut Job) -> Hashed {
        const DONE: Hashed = Hashed {
            bytes: 0,
            is_last: true,
        };
        let Some(extent) = job.extent.upgrade() else {
            return DONE; // freed
        };
        if job.done == 0 && self.entries().has(&extent) {
            return DONE; // another buffer has it, too
        }
        drop(extent);
        let mut hasher = job.hasher.take().unwrap_or_default();
        match hash_part(&mut hasher, &job.extent, job.done) {
            Ok(Some(hashed)) => {
                job.done += hashed.bytes;
                if hashed.is_last
                    && let Some(extent) = job.extent.upgrade()
                {
                    let hash = ContentHash(*hasher.finalize().as_bytes());
                    debug!(%domain, bytes = job.done, "weights hashed");
                    self.enter(domain, job, extent, hash);
                }
                job.hasher = Some(hasher);
                // Counted when the extent is an entry.
                self.counters
                    .hashed
                    .fetch_add(hashed.bytes, Ordering::Relaxed);
                hashed
            }
            Ok(None) => DONE,
            Err(error) => {
                warn!("weights cannot be hashed: {error}");
                DONE
            }
        }
    }

    /// Makes an extent an entry, or reports it as a duplicate.
    fn enter(&self, domain: &Arc<str>, job: &Job, extent: Arc<dyn Extent>, hash: ContentHash) {
        let key = self.key(domain, hash);
        let known = {
            let mut entries = self.entries();
            match entries.live(&key) {
                Some((entry, first)) => {
                    entry.make_known_to(domain);
                    Some(first)
                }
                None => {
                    entries.insert(
                        key.clone(),
                        Entry {
                            len: extent.size(),
                            extent: Arc::downgrade(&extent),
                            known_to: vec![Arc::clone(domain)],
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
                    inbox.merges.lock().push(Merge {
                        buffer: job.buffer,
                        offset: job.offset,
                        extent: Arc::downgrade(&first),
                    });
                    inbox.is_full.store(true, Ordering::Release);
                }
            }
            Some(_) => {}
            None => {
                if let (Some(disk), Some(writer)) = (&self.cache, &job.writer) {
                    let len = extent.size();
                    let content = ContentKey { hash, len };
                    disk.put_later(writer, key.domain, content, &job.extent);
                }
            }
        }
    }
}

impl Drop for StoreState {
    fn drop(&mut self) {
        let counters = &self.counters;
        let [not_sent, merged, hashed] = [&counters.not_sent, &counters.merged, &counters.hashed]
            .map(|c| c.load(Ordering::Relaxed));
        if not_sent + merged > 0 {
            info!(not_sent, merged, hashed, "weights shared");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::priority::NICE;
    use super::*;

    const ALICE: SharingDomain<'_> = SharingDomain {
        name: "guest alice",
        is_of_session: false,
    };

    /// The nice levels of the threads of this process with the name of the hashing thread.
    fn levels() -> Vec<i32> {
        let tasks = fs::read_dir("/proc/self/task").expect("the threads of this process");
        let stats =
            tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok());
        let hashing = stats.filter(|stat| stat.contains("(vgpu-weights)"));
        // The 17th word after the name (proc_pid_stat(5)).
        let level = |stat: String| stat.rsplit_once(')')?.1.split(' ').nth(17)?.parse().ok();
        hashing.filter_map(level).collect()
    }

    #[test]
    fn hashing_leaves_the_processors_to_guests_that_compute() {
        let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
        let begin = Instant::now();
        while !levels().contains(&NICE) {
            let found = levels();
            assert!(begin.elapsed() < Duration::from_secs(60), "{found:?}");
            thread::sleep(Duration::from_millis(1));
        }
        drop(store);
    }

    /// An extent whose first read waits until the test lets it go on.
    #[cfg(feature = "server")]
    struct Held {
        is_reading: std::sync::mpsc::Sender<()>,
        may_go_on: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    }

    #[cfg(feature = "server")]
    impl Extent for Held {
        fn size(&self) -> u64 {
            4096
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), vgpu_engine::EngineError> {
            self.is_reading.send(()).expect("the test waits");
            let may_go_on = vgpu_transport::lock::lock(&self.may_go_on);
            // Fails when the test has ended.
            let _ = may_go_on.recv();
            Ok(())
        }

        fn into_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync> {
            self
        }
    }

    /// What a dump says of the hashing thread, while the read of a device hangs.
    #[cfg(feature = "server")]
    #[test]
    fn hashing_thread_says_whose_extent_it_hashes_and_since_when() {
        let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
        assert_eq!(store.hashing(), None);
        let session = store.for_domain(ALICE, ALICE.name).unwrap();
        let (is_reading, reads) = std::sync::mpsc::channel();
        let (go_on, may_go_on) = std::sync::mpsc::channel();
        let held: Arc<dyn Extent> = Arc::new(Held {
            is_reading,
            may_go_on: may_go_on.into(),
        });
        session.hash_later(BufferId(1), &[(0, Arc::clone(&held))]);
        reads.recv_timeout(Duration::from_secs(60)).expect("a read");
        thread::sleep(Duration::from_millis(2));
        let now = store.hashing().expect("an extent");
        assert_eq!(
            (now.domain.as_str(), now.done, now.size),
            ("guest alice", 0, 4096)
        );
        assert!(now.age >= Duration::from_millis(2), "{now:?}");
        go_on.send(()).unwrap();
        let begin = Instant::now();
        while let Some(now) = store.hashing() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{now:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// An extent that the thread of the cache can read only when the test lets it.
    struct Slow {
        byte: u8,
        is_reading: std::sync::mpsc::Sender<()>,
        may_go_on: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    }

    impl Extent for Slow {
        fn size(&self) -> u64 {
            4096
        }

        fn read(&self, _: u64, out: &mut [u8]) -> Result<(), vgpu_engine::EngineError> {
            if thread::current().name() == Some("vgpu-cache") {
                self.is_reading.send(()).expect("the test waits");
                let may_go_on = vgpu_transport::lock::lock(&self.may_go_on);
                // Fails when the test has ended.
                let _ = may_go_on.recv();
            }
            out.fill(self.byte);
            Ok(())
        }

        fn into_any(self: Arc<Self>) -> Arc<dyn std::any::Any + Send + Sync> {
            self
        }
    }

    #[test]
    fn a_slow_disk_keeps_no_weights_from_being_hashed() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = CacheOptions {
            folder: folder.path().join("weights"),
            size: 1 << 20,
        };
        let store = WeightStore::new(Sharing::Tenant, Some(cache)).expect("a store");
        let wait_for = |is_so: &dyn Fn(WeightStoreStats) -> bool| {
            let begin = Instant::now();
            while !is_so(store.stats()) {
                assert!(
                    begin.elapsed() < Duration::from_secs(60),
                    "{:?}",
                    store.stats()
                );
                thread::sleep(Duration::from_millis(1));
            }
        };
        let (is_reading, reads) = std::sync::mpsc::channel();
        let slow = |byte| {
            let (go_on, may_go_on) = std::sync::mpsc::channel();
            let extent: Arc<dyn Extent> = Arc::new(Slow {
                byte,
                is_reading: is_reading.clone(),
                may_go_on: may_go_on.into(),
            });
            (extent, go_on)
        };
        let session = store.for_domain(ALICE, ALICE.name).unwrap();
        let (first, first_goes_on) = slow(1);
        session.hash_later(BufferId(1), &[(0, Arc::clone(&first))]);
        reads.recv_timeout(Duration::from_secs(60)).expect("a read");
        // The disk hangs now. Weights of another guest, and of a session that ends.
        let bob = SharingDomain {
            name: "guest bob",
            ..ALICE
        };
        let of_session = SharingDomain {
            name: "session 1",
            is_of_session: true,
        };
        let (second, second_goes_on) = slow(2);
        let (third, _) = slow(3);
        let others = [(bob, &second), (of_session, &third)].map(|(domain, extent)| {
            let session = store.for_domain(domain, domain.name).unwrap();
            session.hash_later(BufferId(1), &[(0, Arc::clone(extent))]);
            session
        });
        wait_for(&|stats| stats.extents == 3);
        assert_eq!(store.stats().disk_bytes, 0);
        first_goes_on.send(()).unwrap();
        second_goes_on.send(()).unwrap();
        // The session's weights are in no folder: no other session could look them up.
        wait_for(&|stats| stats.disk_bytes == 2 * 4096);
        drop(others);
        drop(third);
        assert!(store.shared.queue.lock().jobs.waiting() == (0, 0));
    }

    #[test]
    fn what_waits_of_a_session_ends_with_it() {
        let store = WeightStore::new(Sharing::Tenant, None).expect("a store");
        let (is_reading, _reads) = std::sync::mpsc::channel();
        let slow = |byte| -> Arc<dyn Extent> {
            Arc::new(Slow {
                byte,
                is_reading: is_reading.clone(),
                may_go_on: std::sync::mpsc::channel().1.into(),
            })
        };
        let extents: Vec<(u64, Arc<dyn Extent>)> = (0..100).map(|i| (i, slow(i as u8))).collect();
        for is_of_session in [true, false] {
            let domain = SharingDomain {
                name: "session 1",
                is_of_session,
            };
            let session = store.for_domain(domain, "address").unwrap();
            let mut queue = store.shared.queue.lock();
            for (offset, extent) in &extents {
                let job = Job::new((BufferId(1), *offset), extent, &session.inbox, None);
                assert!(queue.jobs.push(&session.domain, 4096, job));
            }
            // The thread takes none of them.
            queue.has_ended = true;
            drop(queue);
            drop(session);
            let waiting = store.shared.queue.lock().jobs.waiting().0;
            assert_eq!(waiting, if is_of_session { 0 } else { 100 });
        }
    }
}
