//! What a session stores about its buffers for weights.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use vgpu_engine::{EngineError, Extent, Memory};
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::ContentHash;

use super::buffers::Buffers;
use super::extent_upload::{ExtentUpload, MAX_UPLOAD_WAIT};
use crate::tenant::Charge;
use crate::weights::SessionStore;

/// Bytes of host memory that are charged for an extent which a buffer has named or reserved: the
/// extent itself, and its entries in the tables of the session, of the engine and of the store.
pub(super) const EXTENT_BYTES: u64 = 1024;

/// Extents that are charged at once.
const CHARGED_EXTENTS: usize = 64;

/// The buffers for weights of a session.
#[derive(Default)]
pub(super) struct SessionWeights {
    /// The weight store, if this session shares weights.
    pub(super) store: Option<SessionStore>,
    pub(super) buffers: HashMap<BufferId, WeightBuffer>,
    /// The extent that the guest uploads to each buffer, if it is not complete.
    pub(super) uploads: HashMap<BufferId, ExtentUpload>,
    /// What the guest has to prove with its next request.
    pub(super) challenge: Option<Challenge>,
    /// How many proofs of the guest were wrong.
    pub(super) wrong_proofs: u32,
}

/// A buffer for weights.
pub(super) struct WeightBuffer {
    /// Offset to length of each named extent. Extents are disjoint.
    pub(super) extents: BTreeMap<u64, u64>,
    /// Whether the guest has declared the buffer complete.
    pub(super) is_sealed: bool,
    /// Number of extents that came from the store.
    pub(super) lookups: usize,
    /// Bytes of these extents.
    pub(super) not_sent: u64,
    /// Bytes of the buffer that are a copy shared with another buffer.
    pub(super) shared: u64,
    /// Extents that the guest has asked for and may attach.
    pub(super) reserved: HashMap<ContentHash, Reserved>,
    /// How long the session may still wait for other guests that upload the same.
    pub(super) wait_left: Duration,
    /// Charges for extents, each for [`CHARGED_EXTENTS`].
    charges: Vec<Charge>,
}

/// An extent that the guest may attach to a buffer.
pub(super) struct Reserved {
    extent: Weak<dyn Extent>,
    len: u64,
    /// Keeps the extent alive, as long as the buffer has room for it: what a session keeps alive
    /// has been charged to its tenant.
    held: Option<Arc<dyn Extent>>,
}

impl Reserved {
    pub(super) fn new(extent: Arc<dyn Extent>) -> Reserved {
        Reserved {
            extent: Arc::downgrade(&extent),
            len: extent.size(),
            held: Some(extent),
        }
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The extent, if it still exists.
    pub(super) fn extent(&self) -> Option<Arc<dyn Extent>> {
        self.extent.upgrade()
    }
}

/// A proof of possession that the guest has been asked for. A challenge keeps no memory alive.
pub(super) struct Challenge {
    pub(super) range: BufferRange,
    pub(super) hash: ContentHash,
    pub(super) nonce: ContentHash,
}

/// Bytes of a buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct BufferRange {
    pub(super) buffer: BufferId,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl BufferRange {
    pub(super) fn new(buffer: BufferId, offset: u64, len: u64) -> BufferRange {
        BufferRange {
            buffer,
            offset,
            len,
        }
    }
}

impl SessionWeights {
    pub(super) fn new(store: Option<SessionStore>) -> SessionWeights {
        SessionWeights {
            store,
            ..SessionWeights::default()
        }
    }

    /// The buffer has been freed, or no longer holds weights.
    pub(super) fn forget(&mut self, buffer: BufferId) {
        self.buffers.remove(&buffer);
        self.uploads.remove(&buffer);
    }

    /// The guest has sent another request than the PROOF that it was asked for.
    pub(super) fn forget_challenge(&mut self) {
        self.challenge = None;
    }

    /// Gives up reservations that do not fit into the room that their buffer has left: the buffer
    /// and what it reserves need at most the bytes that are charged for the buffer, and the pages
    /// at the ends of each extent ([`counted`]). A guest can still attach such an extent while
    /// another buffer keeps it.
    pub(super) fn trim_reservations(&mut self, buffers: &Buffers) {
        for (&id, weights) in &mut self.buffers {
            let held = weights.held_bytes();
            let Some(memory) = buffers.find(id).filter(|_| held > 0) else {
                continue;
            };
            let upload = self.uploads.get(&id);
            let mut over = held.saturating_sub(room(memory.as_ref(), upload));
            for reserved in weights.reserved.values_mut() {
                if over == 0 {
                    break;
                }
                if reserved.held.take().is_some() {
                    over = over.saturating_sub(counted(reserved.len));
                }
            }
        }
    }

    /// Whether an upload is unfinished.
    pub(super) fn has_uploads(&self) -> bool {
        !self.uploads.is_empty()
    }

    /// Bytes that a buffer can reserve.
    pub(super) fn reservable(&self, id: BufferId, memory: &dyn Memory) -> u64 {
        let held = self.buffers.get(&id).map_or(0, WeightBuffer::held_bytes);
        room(memory, self.uploads.get(&id)).saturating_sub(held)
    }

    /// Bytes that are a copy shared with another buffer, in all buffers.
    pub(super) fn shared(&self) -> u64 {
        self.buffers.values().map(|buffer| buffer.shared).sum()
    }
}

/// Bytes of a buffer for which it needs no memory yet.
fn room(memory: &dyn Memory, upload: Option<&ExtentUpload>) -> u64 {
    let followed = upload.map_or(0, ExtentUpload::followed_bytes);
    memory
        .size()
        .saturating_sub(memory.bytes_in_use() + counted(followed))
}

/// What an extent of `len` bytes, which another buffer has, takes of the room of a buffer.
///
/// A buffer uses whole pages. The first and the last page of an extent can also have bytes of the
/// buffer beside the extent, and count as used. These bytes of the extent are not counted a second
/// time: a model whose tensors do not begin at page boundaries fits exactly into its buffer. Where
/// two pages are more than half of the extent, half of the extent counts.
pub(super) fn counted(len: u64) -> u64 {
    let ends = 2 * rustix::param::page_size() as u64;
    len - ends.min(len / 2)
}

impl WeightBuffer {
    /// What the extents that the reservations keep alive take of the room of the buffer.
    fn held_bytes(&self) -> u64 {
        let held = self.reserved.values().filter(|r| r.held.is_some());
        held.map(|reserved| counted(reserved.len)).sum()
    }

    /// Charges one extent more than the buffer has named, reserved and taken from the store, with
    /// `charge`.
    ///
    /// # Errors
    /// That of `charge`: the tenant has not that much memory.
    pub(super) fn charge_extent(
        &mut self,
        charge: impl FnOnce(u64) -> Result<Charge, EngineError>,
    ) -> Result<(), EngineError> {
        let count = self.extents.len() + self.reserved.len() + self.lookups;
        if count >= self.charges.len() * CHARGED_EXTENTS {
            self.charges
                .push(charge(CHARGED_EXTENTS as u64 * EXTENT_BYTES)?);
        }
        Ok(())
    }

    /// The buffer itself keeps an extent alive, since it has attached the extent.
    pub(super) fn attached(&mut self, hash: ContentHash) {
        if let Some(reserved) = self.reserved.get_mut(&hash) {
            reserved.held = None;
        }
    }

    /// A buffer without extents.
    pub(super) fn new() -> WeightBuffer {
        WeightBuffer {
            extents: BTreeMap::new(),
            is_sealed: false,
            lookups: 0,
            not_sent: 0,
            shared: 0,
            reserved: HashMap::new(),
            wait_left: MAX_UPLOAD_WAIT,
            charges: Vec::new(),
        }
    }

    /// Names `len` bytes at `offset` as an extent (0: none). Removes the extents that overlap the
    /// `covered` bytes at `offset`.
    pub(super) fn name(&mut self, offset: u64, len: u64, covered: u64) {
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
