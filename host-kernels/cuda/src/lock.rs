//! The ranks of the engine's locks under which others are taken. The other ones are innermost.
#![forbid(unsafe_code)]

use vgpu_transport::lock::{self, LockRank};

/// The place of a lock in the order, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rank {
    /// The pieces of a buffer of weights (`weights`). Copies are made under this lock, and the
    /// executor is asked whether they are still wanted.
    Weights,
    /// The context of the device (`engine`), which is opened again under this lock.
    Context,
    /// The repacked tensors of a memory (`repack::state`).
    Repacked,
    /// What the runs of a batch share (`plan::batch`).
    Batch,
    /// The graphs of a sequence of launches (`graph_exec`).
    Template,
    /// The chunks of the scratch memory (`scratch`).
    Scratch,
    /// Allocations, one at a time (`allocator`).
    Admission,
    /// The uploads that are not launched yet (`upload_batch`).
    Uploads,
    /// The buffer of uploads (`gpu::memory`).
    Staging,
    /// The graphs of the driver (`gpu::graph`).
    Graphs,
}

impl LockRank for Rank {
    fn level(self) -> usize {
        match self {
            Rank::Weights => lock::CHARGING,
            _ => lock::ENGINES + self as usize,
        }
    }
}

const _: () = assert!(lock::ENGINES + (Rank::Graphs as usize) < lock::DEVICES);
