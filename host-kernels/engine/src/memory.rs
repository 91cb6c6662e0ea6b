//! Memory of an engine.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vgpu_transport::bytes::{Bytes, BytesMut};

use crate::error::EngineError;

/// Total and free memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryInfo {
    /// Capacity of the device.
    pub total: u64,
    /// Bytes that allocations can still get.
    pub free: u64,
}

/// Memory that another process can map.
#[derive(Debug)]
pub struct SharedMemory {
    /// The memory. Dropping it frees the pages, even if another process still maps the file.
    pub memory: Arc<dyn Memory>,
    /// The memory file (memfd), sealed against shrinking and growing.
    pub file: OwnedFd,
    /// Size of the file in bytes.
    pub size: u64,
}

/// One allocation of an engine. Dropping it frees it.
///
/// The caller orders accesses with the plans of the same engine: no access overlaps the run of a
/// plan that uses this memory. Offsets and lengths are in bytes.
pub trait Memory: Send + Sync + Any {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the range does not lie inside; else what the device reports.
    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError>;

    /// Reads `out.len()` bytes at `offset` into `out`.
    ///
    /// # Errors
    /// As [`write`](Memory::write).
    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError>;

    /// Sets `len` bytes at `offset` to `value`.
    ///
    /// # Errors
    /// As [`write`](Memory::write).
    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError>;

    /// Copies `len` bytes at `source_offset` of `source` to `offset`. `source` is memory of the
    /// same engine and may be this memory. Ranges may overlap; the result is as with `memmove`.
    ///
    /// # Errors
    /// As [`write`](Memory::write), and [`EngineError::ForeignMemory`] if `source` belongs to
    /// another engine.
    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError>;

    /// Tells the engine that this memory holds weights: they are written once and read by many
    /// runs. The engine may store them in the layout that its kernels prefer; reads still return
    /// what was written. Plans may have to be compiled again.
    fn mark_weights(&self) {}

    /// Makes the present contents available as [extents](Extent). Later writes to this memory do
    /// not change the extents. Returns whether this memory supports extents.
    fn freeze(&self) -> bool {
        false
    }

    /// Part of the contents at the time of [`freeze`](Memory::freeze). Extents of one memory do not
    /// overlap. A range that [is begun](Memory::begin_extent) or [attached](Memory::attach) as one
    /// extent already is that extent.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the range does not lie inside;
    /// [`EngineError::ForeignMemory`] if this memory does not support extents.
    fn extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        let _ = (offset, len);
        Err(EngineError::ForeignMemory)
    }

    /// As [`extent`](Memory::extent). Where bytes have to be copied for the extent, `is_cancelled`
    /// is asked every few MiB, as by [`compile`](crate::Engine::compile). By default nothing is
    /// copied, or too little to ask.
    ///
    /// # Errors
    /// As [`extent`](Memory::extent), and [`EngineError::Cancelled`] once `is_cancelled` has
    /// returned `true`.
    fn extent_unless(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Arc<dyn Extent>, EngineError> {
        let _ = is_cancelled;
        self.extent(offset, len)
    }

    /// Begins an extent of this memory, which is not frozen. [`append`](Memory::append) writes its
    /// bytes, from the first to the last, and others can read them from then on. Any other write to
    /// the range, and another extent that begins in it, withdraws the extent: it ends, or keeps its
    /// bytes as a copy for those who use it.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the range does not lie inside, is shared already, or has
    /// bytes that an extent of its own would lose; [`EngineError::ForeignMemory`] if this memory
    /// does not support extents.
    fn begin_extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        let _ = (offset, len);
        Err(EngineError::ForeignMemory)
    }

    /// Writes the next bytes of an extent that [`begin_extent`](Memory::begin_extent) of this
    /// memory has begun.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the extent has fewer bytes left, or was withdrawn;
    /// [`EngineError::ForeignMemory`] if it is not an extent of this memory.
    fn append(&self, extent: &Arc<dyn Extent>, data: Bytes<'_>) -> Result<(), EngineError> {
        let _ = (extent, data);
        Err(EngineError::ForeignMemory)
    }

    /// Whether no page that lies inside the range was ever written.
    fn is_untouched(&self, offset: u64, len: u64) -> bool {
        let _ = (offset, len);
        false
    }

    /// Bytes that this memory needs: pages written, and bytes of attached extents. At most the
    /// size.
    fn bytes_in_use(&self) -> u64 {
        self.size()
    }

    /// Gives this memory bytes of its own in a range that is written next, where the range is
    /// shared with [extents](Extent). A write does the same, at once and without an end before the
    /// last byte. Here `is_cancelled` is asked every few MiB, as by
    /// [`compile`](crate::Engine::compile). Plans may have to be compiled again.
    ///
    /// # Errors
    /// As [`write`](Memory::write), and [`EngineError::Cancelled`] once `is_cancelled` has returned
    /// `true`.
    fn unshare(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        let _ = (offset, len, is_cancelled);
        Ok(())
    }

    /// Replaces the contents at `offset` by those of `extent`, sharing pages with the extent where
    /// possible. Returns the number of bytes that are shared. If this memory is frozen, it must
    /// already hold the same bytes. Plans may have to be compiled again. Where bytes have to be
    /// copied, `is_cancelled` is asked every few MiB, as by [`compile`](crate::Engine::compile).
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the range does not lie inside;
    /// [`EngineError::ForeignMemory`] if either side does not support extents;
    /// [`EngineError::Cancelled`] once `is_cancelled` has returned `true`.
    fn attach(
        &self,
        offset: u64,
        extent: &Arc<dyn Extent>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, EngineError> {
        let _ = (offset, extent, is_cancelled);
        Err(EngineError::ForeignMemory)
    }

    /// Whether this memory is frozen and has not been written since.
    fn is_unmodified(&self) -> bool {
        false
    }

    /// Keeps `lease` for as long as the process has a mapping for this memory, which
    /// [extents](Extent) can make longer than the life of the memory. Only the first lease is kept.
    /// By default it is dropped: memory without extents has no mapping of its own or unmaps it when
    /// it is dropped.
    fn hold(&self, lease: Box<dyn Any + Send + Sync>) {
        drop(lease);
    }

    /// The mappings of the process that this memory for weights takes at most from now on besides
    /// its first one: no more than [`weight_mappings`](crate::Engine::weight_mappings).
    fn max_mappings(&self) -> usize {
        MAX_COPIES
    }

    /// Charges `account` for the engine's memory that this memory takes from now on besides its
    /// size: for copies of bytes that it shares with [extents](Extent), and of weights in another
    /// layout. Only the first account is kept. By default it is dropped: memory makes no copies.
    fn charge_copies(&self, account: Arc<dyn CopyAccount>) {
        drop(account);
    }

    /// For engines to downcast to their own type.
    fn as_any(&self) -> &dyn Any;
}

/// Who pays for the [copies](Memory::charge_copies) that memory makes.
pub trait CopyAccount: Send + Sync {
    /// Charges `bytes`, then calls `allocate`, which takes as many bytes of the engine's memory.
    /// Dropping the returned value gives them back: the caller has freed them before. May ask the
    /// engine for its memory.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] with the figures of the account, and the errors of `allocate`.
    fn charge(
        &self,
        bytes: u64,
        allocate: &mut dyn FnMut() -> Result<(), EngineError>,
    ) -> Result<Box<dyn Any + Send + Sync>, EngineError>;
}

/// The mappings of the process that memory for weights takes at most besides its first one: for
/// bytes that were written after [`freeze`](Memory::freeze) while extents kept the old ones.
pub const MAX_COPIES: usize = 15;

/// Bytes in memory of an engine that do not change once they exist. The pages stay allocated while
/// an extent refers to them.
pub trait Extent: Send + Sync + Any {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Bytes from the first one on that exist: all, but for an extent that was
    /// [begun](Memory::begin_extent) and is not complete.
    fn filled(&self) -> u64 {
        self.size()
    }

    /// Reads `out.len()` bytes at `offset` into `out`. May run concurrently with anything else.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the range does not lie inside the
    /// [filled](Extent::filled) part; else what the device reports.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError>;

    /// For engines to downcast to their own type.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

impl fmt::Debug for dyn Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extent({} bytes)", self.size())
    }
}

impl fmt::Debug for dyn Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.size())
    }
}
