//! A job of the hashing thread, and what the thread reports to a session.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use vgpu_engine::{EngineError, Extent};
use vgpu_transport::ir::BufferId;

use super::fair_queue::QUANTUM;
use crate::lock::{Rank, RankedMutex};

/// Bytes that are hashed at once: fits the caches of a core.
const CHUNK: usize = 256 << 10;

/// An extent of a sealed buffer, to be hashed. A job keeps no memory of a guest that has
/// disconnected.
pub(super) struct Job {
    pub(super) buffer: BufferId,
    pub(super) offset: u64,
    pub(super) extent: Weak<dyn Extent>,
    /// Bytes of the extent.
    pub(super) size: u64,
    /// The hash of the bytes so far, once some are hashed: tens of thousands of jobs can wait, and
    /// a hash takes 2 KiB.
    pub(super) hasher: Option<Box<blake3::Hasher>>,
    /// Bytes hashed so far.
    pub(super) done: u64,
    pub(super) inbox: Weak<Inbox>,
    /// Who answers for what is written to the cache on disk. `None`: nothing is.
    pub(super) writer: Option<Arc<str>>,
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
    /// A job of which nothing is done.
    pub(super) fn new(
        (buffer, offset): (BufferId, u64),
        extent: &Arc<dyn Extent>,
        inbox: &Arc<Inbox>,
        writer: Option<&Arc<str>>,
    ) -> Job {
        Job {
            buffer,
            offset,
            extent: Arc::downgrade(extent),
            size: extent.size(),
            hasher: None,
            done: 0,
            inbox: Arc::downgrade(inbox),
            writer: writer.cloned(),
        }
    }

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

#[cfg(test)]
mod tests {
    use vgpu_cpu::CpuEngine;
    use vgpu_engine::Engine;

    use super::super::fair_queue::MAX_WAITING;
    use super::*;

    /// What a domain may have waiting is part of the constant in docs/SECURITY.md.
    #[test]
    fn jobs_of_a_domain_that_wait_take_a_few_mebibytes() {
        let engine = CpuEngine::new(1, Some(1 << 20)).expect("a thread and 1 MiB");
        let plain = engine.alloc(4096).expect("a page");
        let weights = engine.alloc_weights(&plain).expect("a page");
        let weights = weights.expect("memory for weights");
        weights.freeze();
        let extent = weights.extent(0, 4096).expect("all of it");
        let job = Job::new((BufferId(1), 0), &extent, &Arc::default(), None);
        let hasher = job.hasher.as_deref().map_or(0, size_of_val);
        let each = size_of::<(u64, Job)>() + hasher;
        assert!(MAX_WAITING * each <= 8 << 20, "{each} bytes for each job");
    }
}
