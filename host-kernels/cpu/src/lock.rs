//! The ranks of the engine's locks under which others are taken. The other ones are innermost.
#![forbid(unsafe_code)]

use vgpu_transport::lock::{self, LockRank};

/// The place of a lock in the order, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rank {
    /// The segments of a buffer that shares bytes (`weights`). Copies are charged under this lock.
    Segments,
    /// The parts of a base that are in use (`weights::extent`): pages are discarded under it.
    Uses,
    /// The thread team, by one run at a time (`runner`).
    Running,
    /// The memory of a thread of the team, during a run (`gemm`).
    ThreadMemory,
}

impl LockRank for Rank {
    fn level(self) -> usize {
        match self {
            Rank::Segments => lock::CHARGING,
            _ => lock::ENGINES + self as usize,
        }
    }
}
