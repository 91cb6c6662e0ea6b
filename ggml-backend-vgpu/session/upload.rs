//! The upload of the weights of a buffer: what need not be sent, because the executor has it.
//!
//! A [`WeightUpload`] is the one owner of the state of an upload:
//!
//! ```text
//!              first write, ggml uses the buffer for weights
//!  Unwritten ─────────────────────────────────────────────────► Open ──► Sealed
//!      │                                                            the next graph
//!      └───► NotWeights    any other first use
//! ```
//!
//! Every write to an open upload of at least [`MIN_EXTENT`] bytes is first looked up by its hash,
//! if the executor has weights of this length. If the executor has the bytes, they are not sent.
//! Otherwise they are sent, and named as a unit that the executor can offer to others. The hash
//! comes
//!
//! - from the hash cache, if the program has mapped the file that it reads the weights from;
//! - else from the bytes, if the link is slower than hashing;
//! - else from nowhere: the bytes are sent, and the executor finds duplicates by itself.
//!
//! The first graph after an upload ends it: the model is loaded. A background thread then computes
//! the hashes that the hash cache lacks, for the next load.

use std::collections::HashSet;
use std::sync::Arc;

use vgpu_transport::bytes::Bytes;
use vgpu_transport::wire::{ContentHash, MAX_EXTENTS, MAX_QUERIED, MIN_EXTENT};

use super::allocation::Allocation;
use super::error::SessionError;
use super::shared::SharedConnection;
use super::weight_requests;
use crate::load_progress::SharedBytes;
use crate::lock::{Rank, RankedMutex};
use crate::weights::background_hash::{UnstoredHash, store_in_background};
use crate::weights::mapped_file::{FileRange, MappedFile};
use crate::weights::{content_hash, keyed_hash};

/// The state of the upload of one buffer.
pub(super) struct WeightUpload {
    /// Whether bytes of unknown hash are hashed to look them up.
    hashes_first: bool,
    state: RankedMutex<UploadPhase>,
}

enum UploadPhase {
    /// Nothing was written to the buffer, and no graph has used it.
    Unwritten,
    /// The buffer is not for weights, or the executor does not share weights.
    NotWeights,
    /// Weights are being written.
    Open(OpenUpload),
    /// The weights are complete. Later writes are ordinary writes.
    Sealed,
}

/// An upload that is under way.
#[derive(Default)]
struct OpenUpload {
    /// The lengths of the weights that the executor has, in bytes.
    lengths: HashSet<u64>,
    /// The number of units looked up or named so far.
    extents: usize,
    /// The files whose known hashes were queried.
    queried: Vec<Arc<MappedFile>>,
    /// Hash and length of the bytes that the executor reserves for this buffer.
    reserved: HashSet<(ContentHash, u64)>,
    /// The parts of files whose hashes are stored when the upload ends.
    unstored: Vec<UnstoredHash>,
    /// Bytes sent.
    sent: u64,
    /// Bytes that the executor had.
    not_sent: u64,
}

impl WeightUpload {
    /// For a new buffer.
    pub(super) fn new(hashes_first: bool) -> WeightUpload {
        WeightUpload {
            hashes_first,
            state: RankedMutex::new(Rank::Upload, UploadPhase::Unwritten),
        }
    }

    /// The buffer is used for something else than weights: its content must not be replaced any
    /// more.
    pub(super) fn mark_not_weights(&self) {
        let mut state = self.state.lock();
        if matches!(*state, UploadPhase::Unwritten) {
            *state = UploadPhase::NotWeights;
        }
    }

    /// Must be called before the buffer is written to. Opens the upload if this is the first write
    /// and ggml uses the buffer for weights. Returns whether this call has opened the upload.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(super) fn begin_write(
        &self,
        connection: &SharedConnection,
        to: &Allocation,
        is_for_weights: bool,
    ) -> Result<bool, SessionError> {
        let mut state = self.state.lock();
        if !matches!(*state, UploadPhase::Unwritten) {
            return Ok(false);
        }
        let upload = match is_for_weights && to.size() >= MIN_EXTENT {
            true => OpenUpload::begin(connection, to)?,
            false => None,
        };
        *state = upload.map_or(UploadPhase::NotWeights, UploadPhase::Open);
        Ok(matches!(*state, UploadPhase::Open(_)))
    }

    /// Offers `data` for `offset` of the buffer to the upload, if it is open. Returns whether the
    /// executor has put the bytes into the buffer, so that they need not be sent.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost, [`SessionError::Refused`] if the executor
    /// refuses.
    pub(super) fn offer(
        &self,
        connection: &SharedConnection,
        to: &Allocation,
        offset: u64,
        data: Bytes<'_>,
    ) -> Result<bool, SessionError> {
        match &mut *self.state.lock() {
            UploadPhase::Open(upload) => {
                upload.offer(connection, to, offset, data, self.hashes_first)
            }
            UploadPhase::Unwritten | UploadPhase::NotWeights | UploadPhase::Sealed => Ok(false),
        }
    }

    /// Ends the upload, if it is open. Returns what was sent and what was not. Returns `None`, and
    /// leaves the upload open, if another thread is writing to the buffer: then the model is not
    /// loaded yet.
    ///
    /// # Errors
    ///
    /// [`SessionError::Lost`] if the session is lost.
    pub(super) fn seal(
        &self,
        connection: &SharedConnection,
        to: &Allocation,
    ) -> Result<Option<SharedBytes>, SessionError> {
        let Some(mut state) = self.state.try_lock() else {
            return Ok(None);
        };
        match std::mem::replace(&mut *state, UploadPhase::Sealed) {
            UploadPhase::Open(upload) => {
                weight_requests::seal(connection, to.id())?;
                Ok(Some(upload.finish()))
            }
            other => {
                *state = other;
                Ok(Some(SharedBytes::default()))
            }
        }
    }
}

impl OpenUpload {
    /// Tells the executor. `None` if the executor does not share weights.
    fn begin(
        connection: &SharedConnection,
        to: &Allocation,
    ) -> Result<Option<OpenUpload>, SessionError> {
        let lengths = weight_requests::begin(connection, to)?;
        Ok(lengths.map(|lengths| OpenUpload {
            lengths: lengths.into_iter().collect(),
            ..OpenUpload::default()
        }))
    }

    /// As for [`WeightUpload::offer`]. Returns whether the executor has put the bytes into the
    /// buffer.
    fn offer(
        &mut self,
        connection: &SharedConnection,
        to: &Allocation,
        offset: u64,
        data: Bytes<'_>,
        hashes_first: bool,
    ) -> Result<bool, SessionError> {
        let len = data.len() as u64;
        if len < MIN_EXTENT || self.extents >= MAX_EXTENTS {
            self.sent += len;
            return Ok(false);
        }
        self.extents += 1;
        let range = FileRange::find(data.as_ptr(), data.len());
        let may_be_known = self.lengths.contains(&len);
        if let Some(range) = range.as_ref().filter(|_| may_be_known) {
            self.query_file(connection, to, range.file())?;
        }
        let cached = range.as_ref().and_then(FileRange::hash);
        if let Some(hash) = cached.filter(|&hash| self.reserved.contains(&(hash, len))) {
            weight_requests::attach(connection, to, offset, len, hash)?;
            self.not_sent += len;
            return Ok(true);
        }
        let hash = match cached {
            None if may_be_known && hashes_first => Some(content_hash(data)),
            cached => cached,
        };
        if let Some(range) = range.filter(|_| cached.is_none()) {
            self.unstored.push(UnstoredHash { range, hash });
        }
        if let Some(hash) = hash.filter(|_| may_be_known) {
            let proof = |nonce: ContentHash| keyed_hash(&nonce, data);
            if weight_requests::lookup(connection, to, offset, len, hash, proof)? {
                self.not_sent += len;
                return Ok(true);
            }
        }
        weight_requests::name_extent(connection, to, offset, len)?;
        self.sent += len;
        Ok(false)
    }

    /// Queries all known hashes of a file, once. A lookup of each part would cost a round trip
    /// each.
    fn query_file(
        &mut self,
        connection: &SharedConnection,
        to: &Allocation,
        file: &Arc<MappedFile>,
    ) -> Result<(), SessionError> {
        if self
            .queried
            .iter()
            .any(|queried| Arc::ptr_eq(queried, file))
        {
            return Ok(());
        }
        self.queried.push(Arc::clone(file));
        let wanted: Vec<_> = file
            .known_hashes()
            .into_iter()
            .filter(|(_, len)| self.lengths.contains(len))
            .take(MAX_EXTENTS)
            .collect();
        for chunk in wanted.chunks(MAX_QUERIED) {
            let indices = weight_requests::query(connection, to, chunk)?;
            self.reserved
                .extend(indices.into_iter().map(|index| chunk[index]));
        }
        Ok(())
    }

    /// Stores the hashes of the file parts. Returns what was sent and what was not.
    fn finish(self) -> SharedBytes {
        store_in_background(self.unstored);
        SharedBytes {
            not_sent: self.not_sent,
            all: self.not_sent + self.sent,
        }
    }
}
