//! The ranks of the executor's locks: the order in which a thread takes them.
//!
//! No thread calls an engine, waits for a guest, uses a file or writes to the log under one of
//! these locks: admission, status, metrics, reload and shutdown need them, and would hang with the
//! call. [`Rank::Telling`], [`Rank::Processes`] and [`Rank::Upload`] say where they are exceptions.
//! A build with debug assertions checks the order at each use, and that a thread holds none of
//! these locks where it begins a request, asks an engine for memory, frees memory, registers memory
//! with the device, compiles, launches or waits for a plan, asks how much memory is free, or
//! changes files of the weight cache ([`expect_unlocked`]).
//!
//! Locks that are not here are innermost: nothing else is locked, called or waited for under them
//! (`log_limit`, `engine_monitor`, `activity`, `service`). They count as one rank behind all others
//! (`vgpu_transport::lock`), so these checks see them, too.
#![forbid(unsafe_code)]

use vgpu_transport::lock::{self, LockRank};

pub(crate) use vgpu_transport::lock::RankedGuard;

/// A mutex with a rank of the executor.
pub(crate) type RankedMutex<T> = lock::RankedMutex<Rank, T>;

const _: () = assert!(lock::EXECUTOR + Rank::EngineCopies as usize == lock::CHARGING);
const _: () = assert!(lock::EXECUTOR + (Rank::SessionLog as usize) < lock::ENGINES);

/// The place of a lock in the order, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rank {
    /// The processes of virtual machines that are told of a drain (`isolate::drain`). A thread
    /// holds this lock while it waits for their answers, two seconds at most; only threads that
    /// tell them wait for it.
    Telling,
    /// The processes of a supervisor (`isolate::state`). A thread that gives workers their nice
    /// levels or their quotas reads what the kernel says of them, of the machine and of its control
    /// group (`/proc`, `/sys/fs/cgroup`) under this lock, and logs the quotas. Neither waits for
    /// another process.
    Processes,
    /// The table of sessions (`server::shared`). Held for a snapshot of all sessions, and to admit
    /// or remove one.
    Sessions,
    /// The connections without a session (`handshakes`).
    Handshakes,
    /// The rules of the configuration and their tenants (`tenant_registry`).
    Registry,
    /// The unnamed tenants (`tenant_registry`).
    Sources,
    /// The extents of a sharing domain that begin with the same bytes (`weights::uploads`). A
    /// session holds this lock while it copies bytes into the engine's memory, so that no other
    /// session uploads the same extent meanwhile. Only sessions of the domain that upload such an
    /// extent wait for it: for a limited time, and not once they are to end.
    Upload,
    /// The bytes of a buffer that shares bytes with others, in an engine, which charges copies of
    /// them to the guest and asks whether they are still wanted. The executor takes no lock of this
    /// rank. It asks the engine how much memory is free for a copy, and may pause the guest
    /// ([`expect_charging`]).
    EngineCopies,
    /// The memory accounts (`ledger`).
    Ledger,
    /// The host memory of all tenants beside devices with a memory of their own (`host_memory`).
    HostMemory,
    /// The queue of graphs (`sched`).
    Scheduler,
    /// Sums of a tenant (`tenant`).
    Totals,
    /// Mappings and descriptors (`pool`).
    Pool,
    /// Everything else of the weight store (`weights`). A thread holds one of these locks at most.
    Weights,
    /// The limits of log lines about sessions (`session_log`).
    SessionLog,
}

impl LockRank for Rank {
    fn level(self) -> usize {
        lock::EXECUTOR + self as usize
    }
}

/// Checks, with debug assertions, that the thread holds no lock of the executor: `what` calls an
/// engine, and may hang in a driver.
pub(crate) fn expect_unlocked(what: &str) {
    lock::expect_unlocked(lock::EXECUTOR, what);
}

/// As [`expect_unlocked`], where an engine asks whether copies are still wanted, under a lock of
/// its own at most ([`Rank::EngineCopies`]).
pub(crate) fn expect_copying(what: &str) {
    lock::expect_unlocked_but(lock::EXECUTOR, lock::CHARGING..lock::CHARGING + 1, what);
}

/// As [`expect_copying`], also for a session that uploads an extent ([`Rank::Upload`]), whose bytes
/// may need a copy.
pub(crate) fn expect_charging(what: &str) {
    let upload = Rank::Upload.level();
    lock::expect_unlocked_but(lock::EXECUTOR, upload..lock::CHARGING + 1, what);
}
