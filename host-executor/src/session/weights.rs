//! Buffers for weights of a session, and what it asks the store for.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use tracing::{debug, info, warn};
use vgpu_engine::{EngineError, Extent};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::{
    ContentHash, Lengths, MAX_EXTENTS, MAX_QUERIED, MIN_EXTENT, Reply, Request,
};

use super::ending::Violation;
use super::{Answer, Ending, MODEL_SCALE, Session};
use crate::weights::{Found, Held, Lookup, Source};

/// What a session knows of its weights.
#[derive(Default)]
pub(super) struct Weights {
    /// The store, if this session shares anything.
    held: Option<Held>,
    buffers: HashMap<BufferId, WeightBuffer>,
    /// What the guest is to prove with its next request.
    challenge: Option<Challenge>,
}

/// A buffer for weights.
#[derive(Default)]
struct WeightBuffer {
    /// First byte to length. Disjoint.
    extents: BTreeMap<u64, u64>,
    is_sealed: bool,
    /// How often something was attached.
    attachments: usize,
    /// Bytes that came so.
    not_sent: u64,
    /// Bytes of it that are another buffer's, too.
    shared: u64,
    /// What the guest has asked for and may take.
    kept: HashMap<ContentHash, Arc<dyn Extent>>,
    /// Bytes of these: no more than the buffer has, so that nobody keeps what nobody is charged for.
    kept_bytes: u64,
}

struct Challenge {
    place: Place,
    hash: ContentHash,
    nonce: ContentHash,
    source: Source,
}

/// Bytes of a buffer.
#[derive(Debug, Clone, Copy)]
struct Place {
    buffer: BufferId,
    offset: u64,
    len: u64,
}

/// Why bytes did not come from the cache.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error(transparent)]
    Memory(#[from] EngineError),
}

impl Weights {
    pub(super) fn new(held: Option<Held>) -> Weights {
        Weights {
            held,
            ..Weights::default()
        }
    }

    /// The buffer is gone, or for other things.
    pub(super) fn forget(&mut self, buffer: BufferId) {
        self.buffers.remove(&buffer);
    }

    /// The guest did something else than prove what it was asked to.
    pub(super) fn forget_challenge(&mut self) {
        self.challenge = None;
    }

    /// Bytes that are held for another buffer first.
    pub(super) fn shared(&self) -> u64 {
        self.buffers.values().map(|buffer| buffer.shared).sum()
    }
}

impl Session {
    /// Executes a request on weights.
    pub(super) fn weights_request(
        &mut self,
        request: u64,
        kind: &'static str,
        message: &Request,
    ) -> Result<Answer, Ending> {
        let challenge = self.weights.challenge.take();
        match *message {
            Request::Weights { buffer } => self.make_weights(request, buffer),
            Request::Lookup {
                buffer,
                offset,
                len,
                hash,
            } => {
                let place = Place {
                    buffer,
                    offset,
                    len,
                };
                self.lookup(request, kind, place, hash)
            }
            Request::Query { buffer, ref wanted } => self.query(request, kind, buffer, &wanted.0),
            Request::Attach {
                buffer,
                offset,
                len,
                hash,
            } => {
                let place = Place {
                    buffer,
                    offset,
                    len,
                };
                let kept = self.check_extent(kind, place)?.kept.get(&hash);
                let kept = kept.filter(|extent| extent.size() == len);
                let extent = kept.ok_or(Violation::NotKept { buffer, len, hash })?;
                let source = Source::Memory(Arc::clone(extent));
                Ok(match self.place(place, &source) {
                    Ok(true) => Answer::Nothing,
                    Ok(false) => {
                        super::failed(request, kind, buffer.0, &EngineError::ForeignMemory)
                    }
                    Err(error) => super::failed(request, kind, buffer.0, &error),
                })
            }
            Request::Proof { proof } => {
                let challenge = challenge.ok_or(Violation::UnaskedProof)?;
                Ok(self.proof(request, challenge, proof))
            }
            Request::Extent {
                buffer,
                offset,
                len,
            } => {
                let place = Place {
                    buffer,
                    offset,
                    len,
                };
                self.name_extent(kind, place)?;
                Ok(Answer::Nothing)
            }
            Request::Seal { buffer } => {
                self.seal(kind, buffer)?;
                Ok(Answer::Nothing)
            }
            _ => Ok(Answer::Nothing),
        }
    }

    fn make_weights(&mut self, request: u64, buffer: BufferId) -> Result<Answer, Ending> {
        let memory = self.buffers.get("WEIGHTS", buffer)?;
        // Whether or not others get them, too.
        memory.mark_weights();
        let size = memory.size();
        let refused = |reason: &str| {
            Ok(Answer::Message(Reply::Refused {
                request,
                reason: reason.to_owned(),
            }))
        };
        let Some(held) = &self.weights.held else {
            return refused("this host does not share weights");
        };
        if !self.engine.supports_weights() || size < MIN_EXTENT {
            return refused("this memory cannot be shared");
        }
        let lengths = Lengths(held.lengths());
        self.graphs.forget_users(buffer);
        self.weights.forget(buffer);
        let failed = |error: EngineError| Ending::Engine(error.to_string());
        // One goes before the other comes, so that there is room for both.
        let nothing = self.engine.alloc(0).map_err(failed)?;
        drop(self.buffers.replace(buffer, nothing));
        let memory = self.engine.alloc_weights(size).map_err(failed)?;
        let is_for_weights = memory.is_some();
        let memory = match memory {
            Some(memory) => memory,
            None => self.engine.alloc(size).map_err(failed)?,
        };
        memory.mark_weights();
        self.buffers.replace(buffer, memory);
        self.count_holdings();
        if !is_for_weights {
            return refused("this memory cannot be shared");
        }
        self.weights.buffers.insert(buffer, WeightBuffer::default());
        Ok(Answer::Message(Reply::Held { request, lengths }))
    }

    fn lookup(
        &mut self,
        request: u64,
        kind: &'static str,
        place: Place,
        hash: ContentHash,
    ) -> Result<Answer, Ending> {
        let weights = self.check_extent(kind, place)?;
        let missing = Ok(Answer::Message(Reply::Missing { request }));
        if weights.is_sealed || weights.attachments >= MAX_EXTENTS {
            return missing;
        }
        let Some(held) = &self.weights.held else {
            return missing;
        };
        let len = place.len;
        match held.find(Lookup { hash, len }) {
            Found::Yes(source) => Ok(self.attach(request, place, &source)),
            Found::OnProof(source) => {
                let mut nonce = ContentHash([0; 32]);
                if let Err(error) = getrandom(&mut nonce.0) {
                    warn!("no proof can be asked for: {error}");
                    return missing;
                }
                self.weights.challenge = Some(Challenge {
                    place,
                    hash,
                    nonce,
                    source,
                });
                Ok(Answer::Message(Reply::Prove { request, nonce }))
            }
            Found::No => missing,
        }
    }

    /// Keeps what is there of what the guest asks for.
    fn query(
        &mut self,
        request: u64,
        kind: &'static str,
        buffer: BufferId,
        wanted: &[(ContentHash, u64)],
    ) -> Result<Answer, Ending> {
        let size = self.buffers.get(kind, buffer)?.size();
        let weights = self.weights.buffers.get_mut(&buffer);
        let weights = weights.ok_or(Violation::NotForWeights { kind, buffer })?;
        if wanted.len() > MAX_QUERIED {
            let asked = wanted.len();
            return Err(Violation::TooMuchAsked { asked }.into());
        }
        let mut places = Vec::new();
        for (place, &(hash, len)) in wanted.iter().enumerate() {
            let Some(held) = self.weights.held.as_ref().filter(|_| !weights.is_sealed) else {
                break;
            };
            let is_kept = match weights.kept.get(&hash) {
                Some(kept) => kept.size() == len,
                None => match held.find(Lookup { hash, len }) {
                    Found::Yes(Source::Memory(extent)) if len <= size - weights.kept_bytes => {
                        weights.kept_bytes += len;
                        weights.kept.insert(hash, extent);
                        true
                    }
                    _ => false,
                },
            };
            if is_kept {
                places.push(place as u64);
            }
        }
        let places = Lengths(places);
        Ok(Answer::Message(Reply::Have { request, places }))
    }

    fn proof(&mut self, request: u64, challenge: Challenge, proof: ContentHash) -> Answer {
        let Challenge {
            place,
            hash,
            nonce,
            source,
        } = challenge;
        let is_right = match source.proof(nonce) {
            // Hashes of the crate are compared in the same time, whatever they are.
            Ok(expected) => {
                blake3::Hash::from_bytes(expected.0) == blake3::Hash::from_bytes(proof.0)
            }
            Err(error) => {
                warn!("a proof cannot be checked: {error}");
                false
            }
        };
        if !is_right {
            if self.is_loud() {
                warn!(%hash, "the guest does not have the weights that it has asked for");
            }
            return Answer::Message(Reply::Missing { request });
        }
        if let Some(held) = &self.weights.held {
            held.proven(hash);
        }
        self.attach(request, place, &source)
    }

    /// Puts bytes that are there where the guest wants them, and says so.
    fn attach(&mut self, request: u64, place: Place, source: &Source) -> Answer {
        Answer::Message(match self.place(place, source) {
            Ok(true) => Reply::Done { request },
            Ok(false) => Reply::Missing { request },
            Err(error) => {
                warn!("weights cannot be shared: {error}");
                Reply::Missing { request }
            }
        })
    }

    /// Puts bytes that are there where the guest wants them. `false` when they are not what they should be.
    fn place(&mut self, place: Place, source: &Source) -> Result<bool, EngineError> {
        let Place {
            buffer,
            offset,
            len,
        } = place;
        let (Some(memory), Some(weights), Some(held)) = (
            self.buffers.find(buffer),
            self.weights.buffers.get_mut(&buffer),
            &self.weights.held,
        ) else {
            return Ok(false);
        };
        let (shared, is_from_disk) = match source {
            Source::Memory(extent) => (memory.attach(offset, extent)?, false),
            Source::Disk(cached) => {
                let read = cached.read(|at, piece| {
                    memory
                        .write(offset + at, piece.into())
                        .map_err(ReadError::Memory)
                });
                match read {
                    Ok(true) => (0, true),
                    outcome => {
                        if let Err(error) = outcome {
                            warn!("weights cannot be read from disk: {error}");
                        }
                        // Nobody knows whose bytes these are.
                        memory.fill(offset, len, 0)?;
                        return Ok(false);
                    }
                }
            }
        };
        weights.name(offset, if is_from_disk { len } else { 0 }, len);
        weights.attachments += 1;
        weights.not_sent += len;
        weights.shared += shared;
        held.saved(len, is_from_disk);
        self.counters.weights_not_sent.add(len);
        self.count_holdings();
        Ok(true)
    }

    fn name_extent(&mut self, kind: &'static str, place: Place) -> Result<(), Ending> {
        let weights = self.check_extent(kind, place)?;
        if weights.is_sealed {
            return Ok(());
        }
        weights.name(place.offset, place.len, place.len);
        match weights.extents.len() > MAX_EXTENTS {
            true => Err(Violation::TooManyExtents(place.buffer).into()),
            false => Ok(()),
        }
    }

    /// An extent of the right size in a buffer for weights.
    fn check_extent(
        &mut self,
        kind: &'static str,
        place: Place,
    ) -> Result<&mut WeightBuffer, Violation> {
        let Place {
            buffer,
            offset,
            len,
        } = place;
        self.buffers.range(kind, buffer, offset, len)?;
        if len < MIN_EXTENT {
            return Err(Violation::ShortExtent { kind, len });
        }
        let weights = self.weights.buffers.get_mut(&buffer);
        weights.ok_or(Violation::NotForWeights { kind, buffer })
    }

    /// Freezes a buffer, and has its extents hashed.
    fn seal(&mut self, kind: &'static str, buffer: BufferId) -> Result<(), Ending> {
        let memory = Arc::clone(self.buffers.get(kind, buffer)?);
        let weights = self.weights.buffers.get_mut(&buffer);
        let weights = weights.ok_or(Violation::NotForWeights { kind, buffer })?;
        if std::mem::replace(&mut weights.is_sealed, true) {
            return Ok(());
        }
        weights.kept.clear();
        memory.freeze();
        let mut extents: Vec<(u64, Arc<dyn Extent>)> = Vec::new();
        for (offset, len) in std::mem::take(&mut weights.extents) {
            // What was attached over a named extent is not this buffer's to offer.
            match memory.extent(offset, len) {
                Ok(extent) => extents.push((offset, extent)),
                Err(error) => debug!("bytes {offset}..+{len} are not shared: {error}"),
            }
        }
        let (not_sent, shared) = (weights.not_sent, weights.shared);
        if let Some(held) = &self.weights.held {
            held.settle(buffer, &extents);
        }
        let size = memory.size();
        let (count, buffer) = (extents.len(), buffer.0);
        if size >= MODEL_SCALE && self.is_loud() {
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
        self.count_holdings();
        Ok(())
    }

    /// Gives back what turned out to be there twice.
    pub(super) fn merge_weights(&mut self) {
        let Some(held) = &self.weights.held else {
            return;
        };
        let merges = held.merges();
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
            match memory.attach(merge.offset, &merge.extent) {
                Ok(shared) => {
                    weights.shared += shared;
                    merged += shared;
                }
                Err(error) => debug!("weights stay where they are: {error}"),
            }
        }
        held.merged(merged);
        debug!(count = merges.len(), merged, "weights merged");
        self.count_holdings();
    }
}

impl WeightBuffer {
    /// `len` bytes are named as an extent (0: none), in place of whatever overlaps `covered` bytes.
    fn name(&mut self, offset: u64, len: u64, covered: u64) {
        let end = offset + covered;
        while let Some((&start, &other)) = self.extents.range(..end).next_back() {
            if start + other <= offset {
                break;
            }
            self.extents.remove(&start);
        }
        if len > 0 {
            self.extents.insert(offset, len);
        }
    }
}

/// Random bytes, from the kernel.
fn getrandom(out: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        match rustix::rand::getrandom(&mut out[done..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
