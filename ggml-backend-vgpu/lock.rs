//! The ranks of the plugin's locks.

use vgpu_transport::lock::{self, LockRank};

pub(crate) use vgpu_transport::lock::RankedGuard;

/// A mutex with a rank of the plugin.
pub(crate) type RankedMutex<T> = lock::RankedMutex<Rank, T>;

/// The place of a lock in the order, lowest first. `session` says what each lock is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// `iface::registry`, while the registry is made: the executor is asked for its devices.
    Registry,
    /// `DeviceContext::current`.
    Device,
    /// `Backend::encoder`.
    Encoder,
    /// `WeightUpload::state`.
    Upload,
    /// The files of mappings (`weights::mapped_file`), which are opened and read under this lock.
    MappedFiles,
    /// `SharedConnection::graphs`.
    Graphs,
    /// `SharedConnection::connection`.
    Connection,
    /// `Session::open_uploads`, `Event::point`.
    Innermost,
}

impl LockRank for Rank {
    fn level(self) -> usize {
        self as usize
    }
}

/// Checks, with debug assertions, that the thread holds no lock of this rank or a higher one:
/// `what` may take long.
pub(crate) fn expect_unlocked(rank: Rank, what: &str) {
    lock::expect_unlocked(rank.level(), what);
}
