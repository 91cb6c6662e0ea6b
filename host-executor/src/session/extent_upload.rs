//! The upload of one extent: the session compares the bytes with those that another guest uploads,
//! or has uploaded, and needs no memory for them while they are equal.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use vgpu_engine::{EngineError, Extent, Memory};
use vgpu_transport::bytes::Bytes;

use crate::activity::{Activity, ThreadState};
use crate::weights::SessionStore;
use crate::weights::uploads::{
    CandidateExtents, FIRST_BYTES, FollowedUpload, Locked, MAX_COMPARED, UploadLeader,
};

/// Bytes that are compared at once: two such parts fit the first cache of a core.
const CHUNK: usize = 16 << 10;

/// Chunks that are copied or compared between two questions whether the session is to end: 4 MiB.
const CHUNKS_AT_ONCE: usize = 256;

/// How long a session waits at once for the guest that it follows.
const MAX_WAIT: Duration = Duration::from_millis(500);

/// How long a session waits in all for other guests while it uploads a buffer, besides the time
/// that the bytes of the buffer take at [`MIN_RATE`].
pub(super) const MAX_UPLOAD_WAIT: Duration = Duration::from_secs(2);

/// The bytes per second at which a guest that others follow does not use up the time that they wait
/// in all.
const MIN_RATE: u64 = 128 << 20;

/// An extent that the guest has named and uploads from its first byte to its last.
pub(super) struct ExtentUpload {
    /// The session that uploads, by its number.
    session: u64,
    range: Span,
    /// Bytes that the guest has sent.
    done: u64,
    role: Role,
    /// Extents that have turned out to be different, or too slow.
    left: Vec<Weak<dyn Extent>>,
    ours: Vec<u8>,
    theirs: Vec<u8>,
}

/// Bytes of the buffer.
struct Span {
    offset: u64,
    len: u64,
}

/// Where the bytes are.
enum Role {
    /// There are none yet.
    Named,
    /// In the memory of the buffer, where others may read them.
    Leads(UploadLeader),
    /// All bytes so far are equal to those of another extent, and only there.
    Follows(FollowedUpload, Arc<CandidateExtents>),
    /// In the memory of the buffer, which others do not use.
    Alone,
}

/// What a write has led to.
pub(super) enum WriteOutcome {
    /// The extent is not complete.
    Incomplete,
    /// The extent is complete, and so many of its bytes are those of another extent.
    Complete { shared: u64 },
    /// The next byte is not that of the extent that this one follows, or comes too late there:
    /// [`leave`](ExtentUpload::leave) is next.
    Differs,
}

impl ExtentUpload {
    /// The session `session` has named the extent of `len` bytes at `offset` of its buffer.
    pub(super) fn new(session: u64, offset: u64, len: u64) -> ExtentUpload {
        ExtentUpload {
            session,
            range: Span { offset, len },
            done: 0,
            role: Role::Named,
            left: Vec::new(),
            ours: Vec::new(),
            theirs: Vec::new(),
        }
    }

    /// Whether `len` bytes at `offset` are the next ones of the extent.
    pub(super) fn continues_with(&self, offset: u64, len: u64) -> bool {
        let next = self.range.offset + self.done;
        offset == next && len <= self.range.len - self.done
    }

    /// Whether `len` bytes at `offset` are part of the extent.
    pub(super) fn overlaps(&self, offset: u64, len: u64) -> bool {
        offset < self.range.offset + self.range.len && self.range.offset < offset + len
    }

    /// Bytes that another guest's memory holds for this upload.
    pub(super) fn followed_bytes(&self) -> u64 {
        match &self.role {
            Role::Follows(followed, _) => followed.extent.size(),
            Role::Named | Role::Leads(_) | Role::Alone => 0,
        }
    }

    /// Takes the next bytes of the extent from `rest`. Waits for another guest at most as long as
    /// `wait_left` says, from which the time is subtracted. `activity`: of the session, which
    /// executes a request.
    ///
    /// # Errors
    /// What the engine reports.
    pub(super) fn write(
        &mut self,
        memory: &dyn Memory,
        store: &SessionStore,
        activity: &Activity,
        wait_left: &mut Duration,
        rest: &mut Bytes<'_>,
    ) -> Result<WriteOutcome, EngineError> {
        while !rest.is_empty() {
            match &self.role {
                Role::Named => self.start(memory, store, rest)?,
                Role::Leads(lead) => {
                    memory.append(&lead.extent, *rest)?;
                    lead.advance();
                    self.advance(rest.len(), rest);
                }
                Role::Alone => {
                    memory.write(self.range.offset + self.done, *rest)?;
                    self.advance(rest.len(), rest);
                }
                Role::Follows(..) => {
                    if !self.follow(activity, wait_left, rest)? {
                        return Ok(WriteOutcome::Differs);
                    }
                }
            }
        }
        if self.done < self.range.len {
            return Ok(WriteOutcome::Incomplete);
        }
        let shared = match &self.role {
            // An upload follows only where its buffer has nothing yet: no bytes are copied.
            Role::Follows(followed, _) => {
                memory.attach(self.range.offset, &followed.extent, &|| false)?
            }
            Role::Named | Role::Leads(_) | Role::Alone => 0,
        };
        Ok(WriteOutcome::Complete { shared })
    }

    /// Whether other uploads have the bytes so far, or can have them.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.role, Role::Leads(_) | Role::Follows(..))
    }

    /// Ends the upload early: puts the bytes that the guest has sent into the memory of the buffer.
    ///
    /// # Errors
    /// What the engine reports, and [`EngineError::Cancelled`] once `is_cancelled`, which is asked
    /// every few MiB, has returned `true`.
    pub(super) fn finish_early(
        mut self,
        memory: &dyn Memory,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        match std::mem::replace(&mut self.role, Role::Alone) {
            Role::Follows(followed, _) => {
                self.copy(&followed, is_cancelled, |at, data| memory.write(at, data))
            }
            Role::Named | Role::Leads(_) | Role::Alone => Ok(()),
        }
    }

    /// Decides about an extent with the first bytes of it.
    fn start(
        &mut self,
        memory: &dyn Memory,
        store: &SessionStore,
        rest: &mut Bytes<'_>,
    ) -> Result<(), EngineError> {
        let first = FIRST_BYTES.min(usize::try_from(self.range.len).unwrap_or(FIRST_BYTES));
        if rest.len() < first {
            self.role = Role::Alone;
            return Ok(());
        }
        self.ours.resize(CHUNK, 0);
        self.theirs.resize(CHUNK, 0);
        let start = &mut self.ours[..first];
        rest.split_at(first).0.copy_to(start);
        let candidates = store.uploads_like(self.range.len, start);
        // An upload that follows another must not have pages of its own as well.
        let may_follow = memory.is_untouched(self.range.offset, self.range.len);
        // There are no earlier bytes.
        self.choose(memory, candidates, may_follow, rest, &|_| false)
    }

    /// Compares the next bytes with those of the extent that this upload follows. Returns whether
    /// this upload still follows that one.
    fn follow(
        &mut self,
        activity: &Activity,
        wait_left: &mut Duration,
        rest: &mut Bytes<'_>,
    ) -> Result<bool, EngineError> {
        let Role::Follows(followed, _) = &self.role else {
            return Ok(true);
        };
        let followed = followed.clone();
        if followed.extent.filled() <= self.done {
            let limit = (*wait_left).min(MAX_WAIT);
            let began = Instant::now();
            activity.wait_for_upload_of(followed.session);
            followed.wait(self.done, limit);
            activity.continue_request(ThreadState::Executes);
            *wait_left = wait_left.saturating_sub(began.elapsed());
        }
        let available = followed.extent.filled().saturating_sub(self.done);
        let comparable = rest
            .len()
            .min(usize::try_from(available).unwrap_or(usize::MAX));
        let equal = self.equal_bytes(&followed.extent, rest.split_at(comparable).0)?;
        self.advance(equal, rest);
        let at_least = Duration::from_nanos(equal as u64 * 1_000_000_000 / MIN_RATE);
        *wait_left = (*wait_left + at_least).min(MAX_UPLOAD_WAIT);
        Ok(rest.is_empty() || (equal == comparable && comparable > 0))
    }

    /// Leaves the extent that this upload follows: follows another one with the same bytes so far
    /// and next, or puts the bytes so far into the memory of the buffer.
    ///
    /// Compares and copies all bytes so far. Every few MiB of them, `is_over` is asked whether the
    /// session is to end; its argument says whether the session may pause, as it holds no lock.
    ///
    /// # Errors
    /// What the engine reports, and [`EngineError::Cancelled`] once `is_over` has returned `true`.
    pub(super) fn leave(
        &mut self,
        memory: &dyn Memory,
        rest: &mut Bytes<'_>,
        is_over: &dyn Fn(bool) -> bool,
    ) -> Result<(), EngineError> {
        let Role::Follows(followed, candidates) = &self.role else {
            return Ok(());
        };
        self.left.push(Arc::downgrade(&followed.extent));
        let candidates = Arc::clone(candidates);
        self.choose(memory, candidates, true, rest, is_over)
    }

    /// Follows another extent that begins with the bytes so far and the next ones, or uploads this
    /// extent for others to follow.
    fn choose(
        &mut self,
        memory: &dyn Memory,
        candidates: Arc<CandidateExtents>,
        may_follow: bool,
        rest: &mut Bytes<'_>,
        is_over: &dyn Fn(bool) -> bool,
    ) -> Result<(), EngineError> {
        let followed = match std::mem::replace(&mut self.role, Role::Alone) {
            Role::Follows(followed, _) => Some(followed),
            Role::Named | Role::Leads(_) | Role::Alone => None,
        };
        let followed = followed.as_ref();
        // Extents that others add meanwhile are compared as well, but not without end.
        for is_last in [false, false, true] {
            let Some((others, added)) = candidates.extents(&|| is_over(true)) else {
                break;
            };
            if may_follow && self.left.len() < MAX_COMPARED {
                for other in others {
                    if self.is_like(&other, followed, *rest, &|| is_over(true))? {
                        self.role = Role::Follows(other, candidates);
                        return Ok(());
                    }
                }
            }
            let mut list = match candidates.lock_unchanged(added, &|| is_over(true)) {
                Locked::List(list) => list,
                Locked::Changed if !is_last => continue,
                Locked::Changed | Locked::Busy => break,
            };
            let Ok(extent) = memory.begin_extent(self.range.offset, self.range.len) else {
                break; // part of it is shared already
            };
            if let Some(followed) = followed {
                // Under the lock of the list.
                let is_over = || is_over(false);
                self.copy(followed, &is_over, |_, data| memory.append(&extent, data))?;
            }
            // The next bytes are appended before others look, so that they have some to compare.
            memory.append(&extent, *rest)?;
            self.role = Role::Leads(list.add(&extent, self.session));
            self.advance(rest.len(), rest);
            return Ok(());
        }
        if let Some(followed) = followed {
            let is_over = || is_over(true);
            self.copy(followed, &is_over, |at, data| memory.write(at, data))?;
        }
        Ok(())
    }

    /// Whether `other` begins with the bytes so far, which are those of `followed`, and has at
    /// least some of the next ones.
    fn is_like(
        &mut self,
        other: &FollowedUpload,
        followed: Option<&FollowedUpload>,
        rest: Bytes<'_>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<bool, EngineError> {
        let was_left = |left: &Weak<dyn Extent>| {
            left.upgrade()
                .is_some_and(|left| Arc::ptr_eq(&left, &other.extent))
        };
        let available = other.extent.filled().saturating_sub(self.done);
        let next = rest
            .len()
            .min(CHUNK)
            .min(usize::try_from(available).unwrap_or(CHUNK));
        if next == 0 || self.left.iter().any(was_left) {
            return Ok(false);
        }
        if self.equal_bytes(&other.extent, rest.split_at(next).0)? < next {
            return Ok(false);
        }
        let Some(followed) = followed else {
            return Ok(true);
        };
        let mut is_equal = true;
        self.each_chunk(followed, is_over, |at, chunk, theirs| {
            other.extent.read(at, theirs)?;
            is_equal &= chunk == &*theirs;
            Ok(is_equal)
        })?;
        Ok(is_equal)
    }

    /// How many bytes of `data` are equal to the next ones of `extent`, which has as many. Chunks
    /// are compared as a whole.
    fn equal_bytes(
        &mut self,
        extent: &Arc<dyn Extent>,
        data: Bytes<'_>,
    ) -> Result<usize, EngineError> {
        let (mut rest, mut equal) = (data, 0);
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(rest.len().min(CHUNK));
            let (ours, theirs) = (
                &mut self.ours[..chunk.len()],
                &mut self.theirs[..chunk.len()],
            );
            // The guest may change the payload meanwhile: it is read once, and this is what counts.
            chunk.copy_to(ours);
            extent.read(self.done + equal as u64, theirs)?;
            if ours != theirs {
                break;
            }
            equal += chunk.len();
            rest = after;
        }
        Ok(equal)
    }

    /// Passes the bytes so far to `put`, with their offset in the buffer.
    fn copy(
        &mut self,
        followed: &FollowedUpload,
        is_over: &dyn Fn() -> bool,
        mut put: impl FnMut(u64, Bytes<'_>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let offset = self.range.offset;
        self.each_chunk(followed, is_over, |at, chunk, _| {
            put(offset + at, chunk.into())?;
            Ok(true)
        })
    }

    /// Passes the bytes so far to `take`, with their offset in the extent and with a chunk of the
    /// same size to use, until `take` returns `false`.
    ///
    /// # Errors
    /// Those of `take`, and [`EngineError::Cancelled`] once `is_over`, which is asked every few
    /// MiB, has returned `true`.
    fn each_chunk(
        &mut self,
        followed: &FollowedUpload,
        is_over: &dyn Fn() -> bool,
        mut take: impl FnMut(u64, &[u8], &mut [u8]) -> Result<bool, EngineError>,
    ) -> Result<(), EngineError> {
        let (mut at, mut chunks) = (0, 0usize);
        while at < self.done {
            chunks += 1;
            if chunks.is_multiple_of(CHUNKS_AT_ONCE) && is_over() {
                return Err(EngineError::Cancelled);
            }
            let len = (self.done - at).min(CHUNK as u64) as usize;
            let (ours, theirs) = (&mut self.ours[..len], &mut self.theirs[..len]);
            followed.extent.read(at, ours)?;
            if !take(at, ours, theirs)? {
                return Ok(());
            }
            at += len as u64;
        }
        Ok(())
    }

    fn advance(&mut self, count: usize, rest: &mut Bytes<'_>) {
        self.done += count as u64;
        *rest = rest.split_at(count).1;
    }
}
