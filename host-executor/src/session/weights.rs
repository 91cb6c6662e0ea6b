//! Requests on weights: buffers for weights, and what a session asks the store for.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use tracing::{debug, info, warn};
use vgpu_engine::{EngineError, Extent};
use vgpu_transport::bytes::Bytes;
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::HostEnd;
use vgpu_transport::random;
use vgpu_transport::wire::{
    ContentHash, Indices, Lengths, MAX_EXTENTS, MAX_QUERIED, MIN_EXTENT, Reply, Request,
};

use super::answer::{Answer, failed};
use super::end_check::EndCheck;
use super::error::{SessionEnd, Violation};
use super::extent_upload::{ExtentUpload, WriteOutcome};
use super::state::{MODEL_SCALE, Session};
use super::weights_state::{
    BufferRange, Challenge, Reserved, SessionWeights, WeightBuffer, counted,
};
use crate::activity::ThreadState;
use crate::lock::expect_unlocked;
use crate::stop::StopFlag;
use crate::weights::{ContentKey, LookupResult, MAX_WRONG_PROOFS, Source, WeakSource};

/// Why an extent that the guest has reserved cannot be attached.
#[derive(Debug, thiserror::Error)]
#[error(
    "the {len} bytes with hash {hash} are no longer on the host: the guest has written more to the \
     buffer than the reservation left room for, and the last buffer with these bytes was freed"
)]
struct Withdrawn {
    len: u64,
    hash: ContentHash,
}

/// Why bytes cannot be read from the cache.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Memory(#[from] EngineError),
}

impl Session {
    /// Carries out a request on weights.
    pub(super) fn weights_request(
        &mut self,
        request: u64,
        kind: &'static str,
        message: &Request,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let challenge = self.weights.challenge.take();
        match *message {
            Request::Weights { buffer } => self.make_weights(request, buffer),
            Request::Lookup {
                buffer,
                offset,
                len,
                hash,
            } => {
                let range = BufferRange::new(buffer, offset, len);
                let end_check = EndCheck::new(link, stop);
                let answer = self.lookup(request, kind, range, hash, &end_check);
                end_check.check()?;
                answer
            }
            Request::Query { buffer, ref wanted } => self.query(request, kind, buffer, &wanted.0),
            Request::Attach {
                buffer,
                offset,
                len,
                hash,
            } => {
                let range = BufferRange::new(buffer, offset, len);
                let reserved = self.check_extent(kind, range)?.reserved.get(&hash);
                let reserved = reserved.filter(|reserved| reserved.len() == len);
                let reserved = reserved.ok_or(Violation::NotReserved { buffer, len, hash })?;
                let Some(extent) = reserved.extent() else {
                    return Ok(failed(request, kind, buffer.0, &Withdrawn { len, hash }));
                };
                let end_check = EndCheck::new(link, stop);
                let attached = self.attach(range, &Source::Memory(extent), &end_check);
                end_check.check()?;
                Ok(match attached {
                    Ok(true) => {
                        if let Some(weights) = self.weights.buffers.get_mut(&buffer) {
                            weights.attached(hash);
                        }
                        Answer::Nothing
                    }
                    Ok(false) => failed(request, kind, buffer.0, &EngineError::ForeignMemory),
                    Err(error) => failed(request, kind, buffer.0, &error),
                })
            }
            Request::Proof { proof } => {
                let challenge = challenge.ok_or(Violation::UnaskedProof)?;
                self.proof(request, challenge, proof, link, stop)
            }
            Request::Extent {
                buffer,
                offset,
                len,
            } => {
                let range = BufferRange::new(buffer, offset, len);
                self.name_extent(kind, range)?;
                Ok(Answer::Nothing)
            }
            Request::Seal { buffer } => {
                let end_check = EndCheck::new(link, stop);
                self.seal(kind, buffer, &end_check)?;
                end_check.check()?;
                Ok(Answer::Nothing)
            }
            _ => Ok(Answer::Nothing),
        }
    }

    /// Turns a new buffer into one for weights. The content of the buffer is lost, unless the
    /// request is refused: then the buffer stays as it was.
    fn make_weights(&mut self, request: u64, buffer: BufferId) -> Result<Answer, SessionEnd> {
        let memory = self.buffers.get("WEIGHTS", buffer)?;
        // Also if they cannot be shared: the engine may choose a layout for weights.
        memory.charge_copies(self.tenant.copy_account(&self.engine));
        memory.mark_weights();
        let size = memory.size();
        let refused = |reason: &str| {
            Ok(Answer::Message(Reply::Refused {
                request,
                reason: reason.to_owned(),
            }))
        };
        let Some(store) = &self.weights.store else {
            return refused("this host does not share weights");
        };
        if !self.engine.supports_weights() || size < MIN_EXTENT {
            return refused("this memory cannot be shared");
        }
        // The first region, which extents can keep longer than the buffer, and what the engine maps
        // besides: copies of parts, or segments.
        let mappings = &self.pools.mappings;
        let further = self.engine.weight_mappings(size);
        let (first, copies) = match (
            mappings.take(self.tenant.id(), 1),
            mappings.take(self.tenant.id(), further),
        ) {
            (Ok(first), Ok(copies)) => (first, copies),
            (Err(error), _) | (_, Err(error)) => return refused(&error.to_string()),
        };
        expect_unlocked("Engine::alloc_weights");
        let new = match self.engine.alloc_weights(memory) {
            Ok(Some(new)) => new,
            Ok(None) => return refused("this memory cannot be shared"),
            Err(error) => {
                let what = format_args!("buffer {} cannot be shared: {error}", buffer.0);
                self.warn_of_weights(what);
                return refused(&format!("this memory cannot be shared: {error}"));
            }
        };
        new.mark_weights();
        new.hold(Box::new(first));
        new.charge_copies(self.tenant.copy_account(&self.engine));
        let lengths = store.lengths();
        self.graphs.forget_users(buffer);
        self.weights.forget(buffer);
        self.buffers.exchange(buffer, new);
        self.buffers.set_copies(buffer, copies);
        self.update_gauges();
        // From here on the reply is HELD, which makes the guest unmap the old memory.
        self.weights.buffers.insert(buffer, WeightBuffer::new());
        let lengths = Lengths(lengths);
        Ok(Answer::Message(Reply::Held { request, lengths }))
    }

    /// Looks up one extent by its hash, and attaches it to the buffer if the guest may have it.
    fn lookup(
        &mut self,
        request: u64,
        kind: &'static str,
        range: BufferRange,
        hash: ContentHash,
        end_check: &EndCheck<'_>,
    ) -> Result<Answer, SessionEnd> {
        let (tenant, engine) = (Arc::clone(&self.tenant), Arc::clone(&self.engine));
        let weights = self.check_extent(kind, range)?;
        let missing = Ok(Answer::Message(Reply::Missing { request }));
        if weights.is_sealed || weights.lookups >= MAX_EXTENTS {
            return missing;
        }
        let charge = |bytes| tenant.charge_host(bytes, engine.as_ref());
        if weights.charge_extent(charge).is_err() {
            return missing;
        }
        let Some(store) = &self.weights.store else {
            return missing;
        };
        let len = range.len;
        match store.find(ContentKey { hash, len }) {
            LookupResult::Granted(source) => {
                Ok(self.attach_and_reply(request, range, &source, end_check))
            }
            LookupResult::NeedsProof => {
                let wrong = self.weights.wrong_proofs;
                if wrong >= MAX_WRONG_PROOFS || !store.may_prove(Instant::now()) {
                    return missing;
                }
                let mut nonce = ContentHash([0; 32]);
                if let Err(error) = random::fill(&mut nonce.0) {
                    self.warn_of_weights(format_args!(
                        "no random challenge, the weights have to be sent: {error}"
                    ));
                    return missing;
                }
                self.weights.challenge = Some(Challenge { range, hash, nonce });
                Ok(Answer::Message(Reply::Prove { request, nonce }))
            }
            LookupResult::Missing => missing,
        }
    }

    /// Reserves the known ones among the extents that the guest asks for.
    fn query(
        &mut self,
        request: u64,
        kind: &'static str,
        buffer: BufferId,
        wanted: &[(ContentHash, u64)],
    ) -> Result<Answer, SessionEnd> {
        let memory = self.buffers.get(kind, buffer)?;
        let mut room = self.weights.reservable(buffer, memory.as_ref());
        let weights = self.weights.buffers.get_mut(&buffer);
        let weights = weights.ok_or(Violation::NotForWeights { kind, buffer })?;
        if wanted.len() > MAX_QUERIED {
            let asked = wanted.len();
            return Err(Violation::TooMuchAsked { asked }.into());
        }
        let (tenant, engine) = (&self.tenant, self.engine.as_ref());
        let charge = |bytes| tenant.charge_host(bytes, engine);
        let mut known = Vec::new();
        for (index, &(hash, len)) in wanted.iter().enumerate() {
            let Some(store) = self.weights.store.as_ref().filter(|_| !weights.is_sealed) else {
                break;
            };
            let reserved = weights.reserved.get(&hash);
            let reserved = reserved.filter(|reserved| reserved.extent().is_some());
            let is_reserved = match reserved {
                Some(reserved) => reserved.len() == len,
                // An extent on disk is not reserved.
                None => match store.find_in_memory(ContentKey { hash, len }) {
                    Some(LookupResult::Granted(Source::Memory(extent)))
                        if counted(len) <= room && weights.charge_extent(charge).is_ok() =>
                    {
                        room -= counted(len);
                        weights.reserved.insert(hash, Reserved::new(extent));
                        true
                    }
                    _ => false,
                },
            };
            if is_reserved {
                known.push(index as u64);
            }
        }
        let indices = Indices(known);
        Ok(Answer::Message(Reply::Have { request, indices }))
    }

    /// Checks a proof of possession, and attaches the extent if the proof is right. The session
    /// hashes the whole extent for this, until the guest has gone.
    fn proof(
        &mut self,
        request: u64,
        challenge: Challenge,
        proof: ContentHash,
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Answer, SessionEnd> {
        let Challenge { range, hash, nonce } = challenge;
        let missing = Ok(Answer::Message(Reply::Missing { request }));
        let Some(store) = &self.weights.store else {
            return missing;
        };
        // The content may have been freed since the challenge, which kept nothing alive.
        let len = range.len;
        let Some(source) = store.find_unproven(ContentKey { hash, len }) else {
            return missing;
        };
        // Memory of the engine is read by the engine. Each part is a call of its own.
        let state = match &source {
            WeakSource::Memory(_) => ThreadState::CallsEngine,
            WeakSource::Disk(_) => ThreadState::Executes,
        };
        let (activity, outside) = (&self.activity, &self.outside);
        let end_check = EndCheck::new(link, stop);
        let may_go_on = || !outside.is_over(activity, state, &end_check);
        let checked = store.check_proof(&source, nonce, may_go_on);
        end_check.check()?;
        let is_right = match checked {
            // `blake3::Hash` compares in constant time.
            Ok(Some(expected)) => {
                blake3::Hash::from_bytes(expected.0) == blake3::Hash::from_bytes(proof.0)
            }
            // Freed while it was hashed: no fault of the guest.
            Ok(None) => return missing,
            Err(error) => {
                self.warn_of_weights(format_args!(
                    "a proof of possession cannot be checked: {error}"
                ));
                return missing;
            }
        };
        if !is_right {
            store.count_wrong_proof(Instant::now());
            self.weights.wrong_proofs += 1;
            if self.may_log() {
                warn!(%hash, "the guest cannot prove that it has the weights that it asks for");
            }
            return missing;
        }
        store.proven(hash);
        let Some(source) = source.upgrade() else {
            return missing;
        };
        let answer = self.attach_and_reply(request, range, &source, &end_check);
        end_check.check()?;
        Ok(answer)
    }

    /// Attaches known bytes to a range of a buffer, and tells the guest.
    fn attach_and_reply(
        &mut self,
        request: u64,
        range: BufferRange,
        source: &Source,
        end_check: &EndCheck<'_>,
    ) -> Answer {
        Answer::Message(match self.attach(range, source, end_check) {
            Ok(true) => Reply::Done { request },
            Ok(false) => Reply::Missing { request },
            // The guest is gone, which is no fault of the weights.
            Err(EngineError::Cancelled) => Reply::Missing { request },
            Err(error) => {
                let what = format_args!("known weights cannot be attached: {error}");
                self.warn_of_weights(what);
                Reply::Missing { request }
            }
        })
    }

    /// Copies or maps known bytes into a range of a buffer. Returns `false` if the source no longer
    /// has the bytes that its hash promises. Ends early if `end_check` finds that the session is to
    /// end.
    fn attach(
        &mut self,
        range: BufferRange,
        source: &Source,
        end_check: &EndCheck<'_>,
    ) -> Result<bool, EngineError> {
        let BufferRange {
            buffer,
            offset,
            len,
        } = range;
        let (Some(memory), Some(weights), Some(store)) = (
            self.buffers.find(buffer),
            self.weights.buffers.get_mut(&buffer),
            &self.weights.store,
        ) else {
            return Ok(false);
        };
        let (activity, outside) = (&self.activity, &self.outside);
        activity.continue_request(ThreadState::CallsEngine);
        let is_cancelled = || outside.is_over(activity, ThreadState::CallsEngine, end_check);
        let (shared, is_from_disk) = match source {
            Source::Memory(extent) => (memory.attach(offset, extent, &is_cancelled)?, false),
            Source::Disk(cached) => {
                memory.unshare(offset, len, &is_cancelled)?;
                activity.continue_request(ThreadState::Executes);
                let read = cached.read(|at, chunk| {
                    if is_cancelled() {
                        return Err(ReadError::Memory(EngineError::Cancelled));
                    }
                    let written = memory.write(offset + at, chunk.into());
                    activity.continue_request(ThreadState::Executes);
                    written.map_err(ReadError::Memory)
                });
                activity.continue_request(ThreadState::CallsEngine);
                match read {
                    Ok(true) => (0, true),
                    Err(ReadError::Memory(EngineError::Cancelled)) => {
                        return Err(EngineError::Cancelled);
                    }
                    outcome => {
                        let memory = Arc::clone(memory);
                        if let Err(error) = outcome {
                            let what = format_args!("weights cannot be read from disk: {error}");
                            self.warn_of_weights(what);
                        }
                        // The bytes failed the check and must not be visible to the guest.
                        memory.fill(offset, len, 0)?;
                        return Ok(false);
                    }
                }
            }
        };
        weights.name(offset, if is_from_disk { len } else { 0 }, len);
        weights.lookups += 1;
        weights.not_sent += len;
        weights.shared += shared;
        store.count_saved(len, is_from_disk);
        self.counters.weights_not_sent.add(len);
        self.update_gauges();
        Ok(true)
    }

    /// Names a range of a buffer that the guest uploads as one extent. Without memory for the entry
    /// the range is not named: its bytes are written as any others, and are not shared.
    fn name_extent(&mut self, kind: &'static str, range: BufferRange) -> Result<(), SessionEnd> {
        let (tenant, engine) = (Arc::clone(&self.tenant), Arc::clone(&self.engine));
        let weights = self.check_extent(kind, range)?;
        if weights.is_sealed {
            return Ok(());
        }
        let charge = |bytes| tenant.charge_host(bytes, engine.as_ref());
        if weights.charge_extent(charge).is_err() {
            return Ok(());
        }
        weights.name(range.offset, range.len, range.len);
        if weights.extents.len() > MAX_EXTENTS {
            return Err(Violation::TooManyExtents(range.buffer).into());
        }
        let upload = ExtentUpload::new(self.activity.session(), range.offset, range.len);
        self.weights.uploads.insert(range.buffer, upload);
        Ok(())
    }

    /// Writes bytes that the guest sends into a buffer that has the range. The next bytes of an
    /// extent that the guest uploads are compared with those of other guests first. The bytes are
    /// the payload of `link`. The end of the guest and `stop` end what is long: the comparison of
    /// all earlier bytes of an extent with those of other guests, and their copy.
    ///
    /// # Errors
    /// Why the session ends. The other result is what the engine reports.
    pub(super) fn write(
        &mut self,
        (buffer, offset): (BufferId, u64),
        link: &mut dyn HostEnd,
        stop: &StopFlag,
    ) -> Result<Result<(), EngineError>, SessionEnd> {
        let data = link.payload();
        let Some(memory) = self.buffers.find(buffer).map(Arc::as_ref) else {
            return Ok(Ok(()));
        };
        let SessionWeights {
            store,
            buffers,
            uploads,
            ..
        } = &mut self.weights;
        let (Some(store), Some(weights), Some(upload)) =
            (store, buffers.get_mut(&buffer), uploads.get_mut(&buffer))
        else {
            return Ok(memory.write(offset, data));
        };
        if !upload.continues_with(offset, data.len() as u64) {
            return Ok(memory.write(offset, data));
        }
        let wait_left = &mut weights.wait_left;
        let mut rest = data;
        let mut outcome = upload.write(memory, store, &self.activity, wait_left, &mut rest);
        if matches!(outcome, Ok(WriteOutcome::Differs)) {
            // The link, which has the payload, is asked for its guest meanwhile.
            let mut payload = vec![0; rest.len()];
            rest.copy_to(&mut payload);
            let end_check = EndCheck::new(link, stop);
            let (activity, outside) = (&self.activity, &self.outside);
            let state = ThreadState::Executes;
            let is_over = |may_pause: bool| match may_pause {
                true => outside.is_over(activity, state, &end_check),
                false => {
                    activity.continue_request(state);
                    end_check.is_near()
                }
            };
            let mut rest = Bytes::from(&payload[..]);
            while matches!(outcome, Ok(WriteOutcome::Differs)) {
                outcome = { upload.leave(memory, &mut rest, &is_over) }
                    .and_then(|()| upload.write(memory, store, activity, wait_left, &mut rest));
            }
            end_check.check()?;
        }
        match outcome {
            Ok(WriteOutcome::Incomplete | WriteOutcome::Differs) => {}
            Ok(WriteOutcome::Complete { shared }) => {
                uploads.remove(&buffer);
                if shared > 0 {
                    weights.shared += shared;
                    store.count_merged(shared);
                    self.update_gauges();
                }
            }
            Err(error) => {
                uploads.remove(&buffer);
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }

    /// Prepares the write of bytes that the guest sends: puts the bytes of an unfinished upload
    /// that the range overlaps into the buffer, and copies bytes that the range shares with other
    /// buffers. Ends early if `end_check` finds that the session is to end.
    ///
    /// # Errors
    /// What the engine reports.
    pub(super) fn unshare_for_write(
        &mut self,
        buffer: BufferId,
        offset: u64,
        len: u64,
        end_check: &EndCheck<'_>,
    ) -> Result<(), EngineError> {
        let Some(memory) = self.buffers.find(buffer) else {
            return Ok(());
        };
        let (activity, outside) = (&self.activity, &self.outside);
        let is_cancelled = || outside.is_over(activity, ThreadState::CallsEngine, end_check);
        let uploads = &mut self.weights.uploads;
        if let Some(upload) = uploads.get(&buffer) {
            if upload.continues_with(offset, len) {
                // What others may read already is written as a part of the upload.
                if upload.is_shared() {
                    return Ok(());
                }
            } else if upload.overlaps(offset, len)
                && let Some(upload) = uploads.remove(&buffer)
            {
                upload.finish_early(memory.as_ref(), &is_cancelled)?;
            }
        }
        memory.unshare(offset, len, &is_cancelled)
    }

    /// Puts the bytes of unfinished uploads into the buffers that a request accesses, other than by
    /// writing the next bytes. Ends early if `end_check` finds that the session is to end.
    ///
    /// # Errors
    /// The buffer, and what the engine reports.
    pub(super) fn finish_uploads_early(
        &mut self,
        message: &Request,
        end_check: &EndCheck<'_>,
    ) -> Result<(), (BufferId, EngineError)> {
        let buffers = match *message {
            Request::Read { buffer, .. }
            | Request::Fill { buffer, .. }
            | Request::Lookup { buffer, .. }
            | Request::Attach { buffer, .. }
            | Request::Extent { buffer, .. }
            | Request::Seal { buffer } => vec![buffer],
            Request::Copy { dst, src, .. } => vec![dst, src],
            // Graphs may use any buffer.
            Request::Graph { .. } | Request::Patch { .. } | Request::Submit { .. } => {
                self.weights.uploads.keys().copied().collect()
            }
            Request::Hello { .. }
            | Request::Alloc { .. }
            | Request::Free { .. }
            | Request::Write { .. }
            | Request::Forget { .. }
            | Request::Memory {}
            | Request::Fence {}
            | Request::Weights { .. }
            | Request::Query { .. }
            | Request::Proof { .. } => return Ok(()),
        };
        let (activity, outside) = (&self.activity, &self.outside);
        let is_cancelled = || outside.is_over(activity, ThreadState::CallsEngine, end_check);
        for buffer in buffers {
            let upload = self.weights.uploads.remove(&buffer);
            if let (Some(upload), Some(memory)) = (upload, self.buffers.find(buffer)) {
                let finished = upload.finish_early(memory.as_ref(), &is_cancelled);
                finished.map_err(|error| (buffer, error))?;
            }
        }
        Ok(())
    }

    /// Checks that a range is inside a buffer for weights and long enough for an extent.
    fn check_extent(
        &mut self,
        kind: &'static str,
        range: BufferRange,
    ) -> Result<&mut WeightBuffer, Violation> {
        let BufferRange { buffer, len, .. } = range;
        self.buffers.range(kind, buffer, range.offset, len)?;
        if len < MIN_EXTENT {
            return Err(Violation::ShortExtent { kind, len });
        }
        let weights = self.weights.buffers.get_mut(&buffer);
        weights.ok_or(Violation::NotForWeights { kind, buffer })
    }

    /// Freezes a buffer, and hands its extents to the store, which hashes them. Ends early if
    /// `end_check` finds that the session is to end: an engine may copy an extent.
    fn seal(
        &mut self,
        kind: &'static str,
        buffer: BufferId,
        end_check: &EndCheck<'_>,
    ) -> Result<(), SessionEnd> {
        let memory = Arc::clone(self.buffers.get(kind, buffer)?);
        let weights = self.weights.buffers.get_mut(&buffer);
        let weights = weights.ok_or(Violation::NotForWeights { kind, buffer })?;
        if std::mem::replace(&mut weights.is_sealed, true) {
            return Ok(());
        }
        weights.reserved.clear();
        memory.freeze();
        self.buffers.keep_copies(buffer, memory.max_mappings());
        let mut extents: Vec<(u64, Arc<dyn Extent>)> = Vec::new();
        let (activity, outside) = (&self.activity, &self.outside);
        for (offset, len) in std::mem::take(&mut weights.extents) {
            if outside.is_over(activity, ThreadState::CallsEngine, end_check) {
                return Ok(());
            }
            // An extent that came from the store belongs to the buffer that uploaded it.
            let state = ThreadState::CallsEngine;
            let is_cancelled = || outside.is_over(activity, state, end_check);
            match memory.extent_unless(offset, len, &is_cancelled) {
                Ok(extent) => extents.push((offset, extent)),
                Err(EngineError::Cancelled) => return Ok(()),
                Err(error) => debug!("{len} bytes at {offset} are not shared: {error}"),
            }
        }
        let (not_sent, shared) = (weights.not_sent, weights.shared);
        if let Some(store) = &self.weights.store {
            store.hash_later(buffer, &extents);
        }
        let size = memory.size();
        let (count, buffer) = (extents.len(), buffer.0);
        if size >= MODEL_SCALE && self.may_log() {
            info!(
                buffer,
                size,
                not_sent,
                shared,
                new = count,
                "weights complete"
            );
        } else {
            debug!(
                buffer,
                size,
                not_sent,
                shared,
                new = count,
                "weights complete"
            );
        }
        self.update_gauges();
        Ok(())
    }

    /// Replaces extents that the store has found to be duplicates by the first copy.
    pub(super) fn merge_weights(&mut self) {
        let Some(store) = &self.weights.store else {
            return;
        };
        let merges = store.merges();
        if merges.is_empty() {
            return;
        }
        let mut merged = 0;
        for merge in &merges {
            let memory = self.buffers.find(merge.buffer);
            let weights = self.weights.buffers.get_mut(&merge.buffer);
            let (Some(memory), Some(weights)) = (memory, weights) else {
                continue;
            };
            if !memory.is_unmodified() {
                continue;
            }
            let Some(extent) = merge.extent.upgrade() else {
                continue; // freed since
            };
            // Bytes of sealed memory are not copied here: parts that were merged stay as they are.
            match memory.attach(merge.offset, &extent, &|| false) {
                Ok(shared) => {
                    weights.shared += shared;
                    merged += shared;
                }
                Err(error) => debug!("duplicate weights cannot be merged: {error}"),
            }
        }
        store.count_merged(merged);
        debug!(count = merges.len(), merged, "weights merged");
        self.update_gauges();
    }
}

#[cfg(test)]
#[path = "weights_tests.rs"]
mod tests;
