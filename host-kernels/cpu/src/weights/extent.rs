//! The first region of a buffer for weights, and the extents of it that other buffers share.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::UncheckedAdvice;
use vgpu_transport::bytes::Bytes;

use crate::region::{Region, page};
use vgpu_engine::{EngineError, Extent, check_range};

/// The first region of a buffer for weights.
pub(super) struct BaseRegion {
    pub(super) region: Region,
    uses: Mutex<Uses>,
}

/// What needs the pages of a base.
pub(super) struct Uses {
    /// The buffer exists.
    pub(super) has_owner: bool,
    /// The first byte of each extent, and one past its last. Disjoint.
    extents: BTreeMap<u64, u64>,
}

/// Bytes of a base that do not change while the extent exists.
pub(crate) struct CpuExtent {
    pub(super) base: Arc<BaseRegion>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl BaseRegion {
    /// The base of a new buffer.
    pub(super) fn new(region: Region) -> BaseRegion {
        BaseRegion {
            region,
            uses: Mutex::new(Uses {
                has_owner: true,
                extents: BTreeMap::new(),
            }),
        }
    }

    /// The address of byte `offset`.
    pub(super) fn at(&self, offset: u64) -> *mut u8 {
        self.region.as_ptr().wrapping_add(offset as usize)
    }

    pub(super) fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the pages of `range` that no extent uses. `range` begins and ends at page boundaries,
    /// and the buffer does not need its bytes.
    pub(super) fn release(&self, range: Range<u64>) {
        let uses = self.uses();
        let discard = |range: Range<u64>| {
            // SAFETY: the buffer does not need the bytes of `range`, and the loop below leaves out
            // the pages of all extents, which `uses` keeps locked. So no one reads the bytes that
            // are discarded.
            unsafe { self.region.discard(range, UncheckedAdvice::DontNeed) };
        };
        let mut at = range.start;
        for (&start, &end) in uses.touched(&range) {
            discard(at..(start - start % page()).min(range.end));
            at = at.max(end.next_multiple_of(page()));
        }
        discard(at..range.end);
    }
}

impl Uses {
    /// Adds an extent.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        self.extents.insert(range.start, range.end);
    }

    /// The extents that overlap `range`.
    pub(super) fn touched(&self, range: &Range<u64>) -> impl Iterator<Item = (&u64, &u64)> {
        overlapping(&self.extents, range, |_, &end| end)
    }
}

/// The entries of `all` that overlap `range`. The keys of `all` are first bytes, `end` returns one
/// past the last byte of an entry, and the entries are disjoint.
pub(super) fn overlapping<'m, T>(
    all: &'m BTreeMap<u64, T>,
    range: &Range<u64>,
    end: impl Fn(u64, &T) -> u64,
) -> impl Iterator<Item = (&'m u64, &'m T)> {
    let before = all.range(..range.start).next_back();
    let before = before.filter(|&(&start, of)| end(start, of) > range.start);
    before.into_iter().chain(all.range(range.clone()))
}

impl CpuExtent {
    /// One past the last byte, in the base.
    pub(super) fn end(&self) -> u64 {
        self.offset + self.len
    }

    pub(super) fn bytes(&self) -> Bytes<'_> {
        // SAFETY: an extent is inside its base, and the extent keeps the mapping of the base alive.
        unsafe { Bytes::from_raw(self.base.at(self.offset), self.len as usize) }
    }
}

impl Extent for CpuExtent {
    fn size(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
        check_range(offset, out.len() as u64, self.len)?;
        let (_, rest) = self.bytes().split_at(offset as usize);
        rest.split_at(out.len()).0.copy_to(out);
        Ok(())
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Drop for CpuExtent {
    fn drop(&mut self) {
        let has_owner = {
            let mut uses = self.base.uses();
            uses.extents.remove(&self.offset);
            uses.has_owner
        };
        // An owner needs these pages, and frees them when it is dropped.
        if !has_owner {
            let len = self.base.region.len() as u64;
            let start = self.offset - self.offset % page();
            self.base
                .release(start..self.end().next_multiple_of(page()).min(len));
        }
    }
}
