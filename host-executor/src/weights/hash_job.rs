//! A job of the hashing thread, and what the thread reports to a session.
#![forbid(unsafe_code)]

use std::sync::Weak;
use std::sync::atomic::AtomicBool;

use vgpu_engine::{EngineError, Extent};
use vgpu_transport::ir::BufferId;

use super::hash_queue::QUANTUM;
use crate::lock::{Rank, RankedMutex};

/// Bytes that are hashed at once: fits the caches of a core.
const CHUNK: usize = 256 << 10;

/// An extent of a sealed buffer, to be hashed. A job keeps no memory of a guest that has
/// disconnected.
pub(super) struct Job {
    pub(super) buffer: BufferId,
    pub(super) offset: u64,
    pub(super) extent: Weak<dyn Extent>,
    /// The hash of the bytes so far.
    pub(super) hasher: Box<blake3::Hasher>,
    /// Bytes hashed so far.
    pub(super) done: u64,
    pub(super) inbox: Weak<Inbox>,
}

/// Duplicates that the store has found for a session.
pub(super) struct Inbox {
    pub(super) is_full: AtomicBool,
    pub(super) merges: RankedMutex<Vec<Merge>>,
}

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox {
            is_full: AtomicBool::new(false),
            merges: RankedMutex::new(Rank::Weights, Vec::new()),
        }
    }
}

/// The bytes at `offset` of a buffer are a duplicate of `extent`.
pub(crate) struct Merge {
    pub(crate) buffer: BufferId,
    pub(crate) offset: u64,
    /// Weak, so that a session that is busy keeps no memory.
    pub(crate) extent: Weak<dyn Extent>,
}

impl Job {
    /// Whether somebody still needs the result.
    pub(super) fn is_wanted(&self) -> bool {
        self.extent.strong_count() > 0
    }
}

/// Bytes that were hashed.
pub(super) struct Hashed {
    pub(super) bytes: u64,
    /// Whether these were the last bytes of the extent.
    pub(super) is_last: bool,
}

/// Feeds the bytes of an extent from `at` on to `hasher`, at most [`QUANTUM`]. `None` if the extent
/// was freed: it is kept only for the time of a chunk.
pub(super) fn hash_part(
    hasher: &mut blake3::Hasher,
    extent: &Weak<dyn Extent>,
    at: u64,
) -> Result<Option<Hashed>, EngineError> {
    let mut chunk = vec![0; CHUNK];
    let mut bytes = 0;
    loop {
        let Some(extent) = extent.upgrade() else {
            return Ok(None);
        };
        let left = extent.size() - at - bytes;
        if left == 0 || bytes >= QUANTUM {
            let is_last = left == 0;
            return Ok(Some(Hashed { bytes, is_last }));
        }
        let part = &mut chunk[..left.min(CHUNK as u64) as usize];
        extent.read(at + bytes, part)?;
        hasher.update(part);
        bytes += part.len() as u64;
    }
}
