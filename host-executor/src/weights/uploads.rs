//! Extents that guests upload, or have uploaded, by their first bytes.
//!
//! A guest that uploads the same bytes as another one of its sharing domain follows it: the session
//! compares each payload with the extent of the other guest, and needs no memory for bytes that are
//! equal. So guests that load one model at the same time need one copy, not one each until their
//! weights have been hashed. Bytes are compared, not hashes: a lone guest pays nothing but the hash
//! of the first bytes of each extent.
//!
//! A guest that is ahead of the one that it follows waits, but only for a limited time. A guest
//! whose bytes differ copies what was equal, and uploads the rest by itself.
//!
//! Extents of other sharing domains are never compared, whatever [`Sharing`](super::Sharing) says:
//! the time of a comparison tells how many bytes are equal.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Weak};
use std::thread;
use std::time::{Duration, Instant};

use vgpu_engine::Extent;
use vgpu_transport::wire::ContentHash;

use crate::lock::{Rank, RankedGuard, RankedMutex};

/// How many extents with the same first bytes and length are compared with a new one.
pub(crate) const MAX_COMPARED: usize = 8;

/// The bytes by which extents are found that may be equal.
pub(crate) const FIRST_BYTES: usize = 4096;

/// How long a session waits for a list that another one has, which calls the engine meanwhile: for
/// the copy of at most one extent. If a call of the engine hangs, others upload by themselves.
const MAX_LIST_WAIT: Duration = Duration::from_secs(10);

/// Entries of freed extents that a table keeps, besides as many as it has others, before it looks
/// for them.
pub(super) const MAX_FREED: usize = 64;

/// Extents by domain, length and first bytes.
pub(super) struct Uploads {
    state: RankedMutex<UploadTable>,
}

#[derive(Default)]
struct UploadTable {
    candidates: HashMap<Key, Arc<CandidateExtents>>,
    /// When there are this many entries, those without extents are removed.
    sweep_at: usize,
}

/// What extents that may be equal have in common.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) domain: Arc<str>,
    /// Length in bytes.
    pub(super) len: u64,
    /// The hash of the first bytes.
    pub(super) start: ContentHash,
}

/// Extents that may be equal.
pub(crate) struct CandidateExtents {
    list: RankedMutex<List>,
    /// How long a session waits for the list.
    max_wait: Duration,
}

/// What a session gets that wants to add an extent.
pub(crate) enum Locked<'a> {
    /// The list, to which nobody else adds meanwhile.
    List(RankedGuard<'a, List>),
    /// Others have added extents since.
    Changed,
    /// Another session keeps the list, or this one is to end.
    Busy,
}

/// The extents of one [`CandidateExtents`].
#[derive(Default)]
pub(crate) struct List {
    uploads: Vec<Upload>,
    /// How many extents were added so far.
    added: u64,
}

/// An extent of a [`List`].
#[derive(Clone)]
struct Upload {
    extent: Weak<dyn Extent>,
    /// The session that uploads it, by its number.
    session: u64,
    upload_end: Arc<UploadEnd>,
}

/// An extent that the session of another guest, or of this one, uploads or has uploaded.
#[derive(Clone)]
pub(crate) struct FollowedUpload {
    pub(crate) extent: Arc<dyn Extent>,
    /// The session that uploads it, by its number.
    pub(crate) session: u64,
    upload_end: Arc<UploadEnd>,
}

/// An extent that this session uploads. Dropping it tells the followers not to wait any more.
pub(crate) struct UploadLeader {
    pub(crate) extent: Arc<dyn Extent>,
    upload_end: Arc<UploadEnd>,
}

/// Wakes the followers of an upload.
struct UploadEnd {
    progress: RankedMutex<UploadProgress>,
    changed: Condvar,
}

/// What followers wait for.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct UploadProgress {
    /// How often the extent got more bytes.
    advances: u64,
    has_ended: bool,
}

impl Default for Uploads {
    fn default() -> Uploads {
        Uploads {
            state: RankedMutex::new(Rank::Weights, UploadTable::default()),
        }
    }
}

impl Default for CandidateExtents {
    fn default() -> CandidateExtents {
        CandidateExtents {
            list: RankedMutex::new(Rank::Upload, List::default()),
            max_wait: MAX_LIST_WAIT,
        }
    }
}

impl Default for UploadEnd {
    fn default() -> UploadEnd {
        UploadEnd {
            progress: RankedMutex::new(Rank::Weights, UploadProgress::default()),
            changed: Condvar::new(),
        }
    }
}

impl Uploads {
    /// The extents of `key`: none if the key is new.
    pub(super) fn candidates(&self, key: Key) -> Arc<CandidateExtents> {
        let mut state = self.state.lock();
        if state.candidates.len() > state.sweep_at {
            // An entry that a session uses stays. No other entry can be locked.
            let is_used = |entry: &mut Arc<CandidateExtents>| {
                Arc::get_mut(entry).is_none_or(|entry| entry.list.get_mut().has_extents())
            };
            state.candidates.retain(|_, entry| is_used(entry));
            state.sweep_at = 2 * state.candidates.len() + MAX_FREED;
        }
        Arc::clone(state.candidates.entry(key).or_default())
    }
}

impl CandidateExtents {
    /// The extents that exist, and how many were added so far. `None` if another session keeps the
    /// list for too long, or once `is_over` returns `true`.
    pub(crate) fn extents(&self, is_over: &dyn Fn() -> bool) -> Option<(Vec<FollowedUpload>, u64)> {
        let list = self.lock(is_over)?;
        let followed = |upload: &Upload| {
            let extent = upload.extent.upgrade()?;
            let upload_end = Arc::clone(&upload.upload_end);
            Some(FollowedUpload {
                extent,
                session: upload.session,
                upload_end,
            })
        };
        let extents = list.uploads.iter().filter_map(followed).collect();
        Some((extents, list.added))
    }

    /// Locks the list, so that no extent is added meanwhile, unless an extent was added since
    /// `added` were. Waits as [`extents`](CandidateExtents::extents) does.
    pub(crate) fn lock_unchanged(&self, added: u64, is_over: &dyn Fn() -> bool) -> Locked<'_> {
        match self.lock(is_over) {
            Some(list) if list.added == added => Locked::List(list),
            Some(_) => Locked::Changed,
            None => Locked::Busy,
        }
    }

    /// Whoever has the list calls the engine, which may hang: nobody waits without end.
    fn lock(&self, is_over: &dyn Fn() -> bool) -> Option<RankedGuard<'_, List>> {
        const LONGEST_PAUSE: Duration = Duration::from_millis(5);
        let begin = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            if let Some(list) = self.list.try_lock() {
                return Some(list);
            }
            if begin.elapsed() >= self.max_wait || is_over() {
                return None;
            }
            thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

impl List {
    /// Adds an extent that the session with the number `session` uploads, unless the list is full.
    pub(crate) fn add(&mut self, extent: &Arc<dyn Extent>, session: u64) -> UploadLeader {
        let lead = UploadLeader {
            extent: Arc::clone(extent),
            upload_end: Arc::default(),
        };
        self.uploads.retain(Upload::exists);
        if self.uploads.len() < MAX_COMPARED {
            self.uploads.push(Upload {
                extent: Arc::downgrade(extent),
                session,
                upload_end: Arc::clone(&lead.upload_end),
            });
            self.added += 1;
        }
        lead
    }

    fn has_extents(&self) -> bool {
        self.uploads.iter().any(Upload::exists)
    }
}

impl Upload {
    fn exists(&self) -> bool {
        self.extent.strong_count() > 0
    }
}

impl FollowedUpload {
    /// Waits until the extent has more than `done` bytes, its upload has ended, or `limit` is
    /// over.
    pub(crate) fn wait(&self, done: u64, limit: Duration) {
        let UploadEnd { progress, changed } = &*self.upload_end;
        let end = Instant::now() + limit;
        loop {
            // The engine is asked without the lock. The progress is read first: bytes that are
            // added after the engine's answer change it.
            let seen = *progress.lock();
            if seen.has_ended || self.extent.filled() > done {
                return;
            }
            let mut now = progress.lock();
            while *now == seen {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return;
                }
                now = now.wait_timeout(changed, left);
            }
        }
    }
}

impl UploadLeader {
    /// Tells the followers that the extent has more bytes.
    pub(crate) fn advance(&self) {
        self.upload_end.change(|progress| progress.advances += 1);
    }
}

impl Drop for UploadLeader {
    fn drop(&mut self) {
        self.upload_end.change(|progress| progress.has_ended = true);
    }
}

impl UploadEnd {
    fn change(&self, change: impl FnOnce(&mut UploadProgress)) {
        change(&mut self.progress.lock());
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_another_session_keeps_is_not_waited_for_without_end() {
        let short = CandidateExtents {
            max_wait: Duration::from_millis(20),
            ..CandidateExtents::default()
        };
        let long = CandidateExtents::default();
        let begin = Instant::now();
        thread::scope(|scope| {
            for candidates in [&short, &long] {
                let (has_it, keeps_it) = std::sync::mpsc::channel();
                let (ends, is_ended) = std::sync::mpsc::channel::<()>();
                scope.spawn(move || {
                    let _list = candidates.list.lock();
                    has_it.send(()).expect("the other waits");
                    // A call of the engine that hangs.
                    let _ = is_ended.recv();
                });
                keeps_it.recv().expect("it has the list");
                let is_long = candidates.max_wait > short.max_wait;
                // The session with the long limit is to end.
                let is_over = || is_long;
                assert!(candidates.extents(&is_over).is_none());
                assert!(matches!(
                    candidates.lock_unchanged(0, &is_over),
                    Locked::Busy
                ));
                drop(ends);
            }
        });
        assert!(begin.elapsed() >= 2 * short.max_wait);
        let (extents, added) = long.extents(&|| false).expect("nobody has the list");
        assert!(extents.is_empty() && added == 0);
        assert!(matches!(long.lock_unchanged(0, &|| false), Locked::List(_)));
        assert!(matches!(long.lock_unchanged(1, &|| false), Locked::Changed));
    }
}
