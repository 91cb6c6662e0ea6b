//! What a session stores about its buffers for weights.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use vgpu_engine::Extent;
use vgpu_transport::ir::BufferId;
use vgpu_transport::wire::ContentHash;

use super::extent_upload::{ExtentUpload, PATIENCE};
use crate::weights::{SessionStore, Source};

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
    pub(super) reserved: HashMap<ContentHash, Arc<dyn Extent>>,
    /// Bytes of `reserved`. At most the size of the buffer: what a session keeps alive has been
    /// charged to its tenant.
    pub(super) reserved_bytes: u64,
    /// How long the session may still wait for other guests that upload the same.
    pub(super) patience: Duration,
}

/// A proof of possession that the guest has been asked for.
pub(super) struct Challenge {
    pub(super) range: BufferRange,
    pub(super) hash: ContentHash,
    pub(super) nonce: ContentHash,
    pub(super) source: Source,
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

    /// Bytes that are a copy shared with another buffer, in all buffers.
    pub(super) fn shared(&self) -> u64 {
        self.buffers.values().map(|buffer| buffer.shared).sum()
    }
}

impl WeightBuffer {
    /// A buffer without extents.
    pub(super) fn new(is_sealed: bool) -> WeightBuffer {
        WeightBuffer {
            extents: BTreeMap::new(),
            is_sealed,
            lookups: 0,
            not_sent: 0,
            shared: 0,
            reserved: HashMap::new(),
            reserved_bytes: 0,
            patience: PATIENCE,
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
