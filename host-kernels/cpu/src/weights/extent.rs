//! The first region of a buffer for weights, and the extents of it that other buffers share.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use memmap2::UncheckedAdvice;
use vgpu_transport::bytes::Bytes;
use vgpu_transport::lock::{Guard, lock_at};

use super::page_set::PageSet;
use crate::lock::Rank;
use crate::region::{Region, page};
use vgpu_engine::{EngineError, Extent, check_range};

/// The first region of a buffer for weights.
pub(super) struct BaseRegion {
    pub(super) region: Region,
    uses: Mutex<Uses>,
    /// Declared after `region`, so that the region is unmapped before the lease is dropped.
    lease: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// What needs the pages of a base.
#[derive(Default)]
pub(super) struct Uses {
    /// The pages with bytes of the buffer itself. All other pages of the buffer are zero, or the
    /// buffer has their bytes in a segment.
    touched: PageSet,
    /// The first byte of each extent, and one past its last. Disjoint.
    extents: BTreeMap<u64, u64>,
}

/// Bytes of a base. The filled part does not change while the extent exists.
pub(crate) struct CpuExtent {
    pub(super) base: Arc<BaseRegion>,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Bytes that exist. Only the buffer increases it, after it has written them.
    filled: AtomicU64,
}

impl BaseRegion {
    /// The base of a new buffer.
    pub(super) fn new(region: Region) -> BaseRegion {
        BaseRegion {
            region,
            uses: Mutex::default(),
            lease: OnceLock::new(),
        }
    }

    /// Keeps `lease` until the base is unmapped, unless the base has one.
    pub(super) fn hold(&self, lease: Box<dyn Any + Send + Sync>) {
        // A second lease is dropped.
        let _ = self.lease.set(lease);
    }

    /// The address of byte `offset`.
    pub(super) fn at(&self, offset: u64) -> *mut u8 {
        self.region.as_ptr().wrapping_add(offset as usize)
    }

    pub(super) fn uses(&self) -> Guard<'_, Uses> {
        lock_at(Rank::Uses, &self.uses)
    }

    /// The buffer has bytes of its own in `range` from now on.
    pub(super) fn touch(&self, range: &Range<u64>) {
        self.uses().touched.insert(pages(range));
    }

    /// Whether the buffer never had bytes of its own in a page that lies inside `range`.
    pub(super) fn is_untouched(&self, range: &Range<u64>) -> bool {
        let inside = range.start.div_ceil(page())..range.end / page();
        !self.uses().touched.has_any(inside)
    }

    /// Frees the pages of `range` that no extent uses. `range` begins and ends at page boundaries,
    /// and the buffer does not need its bytes.
    pub(super) fn release(&self, range: Range<u64>) {
        let mut uses = self.uses();
        uses.touched.remove(pages(&range));
        self.discard_unused(&uses, range);
    }

    /// Frees the pages of `range` that no extent uses and the buffer has not touched.
    fn discard_unused(&self, uses: &Uses, range: Range<u64>) {
        let discard = |range: Range<u64>| {
            // SAFETY: the callers pass pages that the buffer does not need, and the loop below
            // leaves out the pages of all extents, which `uses` keeps locked. So no one reads the
            // bytes that are discarded.
            unsafe { self.region.discard(range, UncheckedAdvice::DontNeed) };
        };
        let mut at = range.start;
        for (&start, &end) in uses.extents_in(&range) {
            discard(at..(start - start % page()).min(range.end));
            at = at.max(end.next_multiple_of(page()));
        }
        discard(at..range.end);
    }
}

/// The pages that `range` overlaps.
fn pages(range: &Range<u64>) -> Range<u64> {
    range.start / page()..range.end.div_ceil(page())
}

impl Uses {
    /// Bytes of the pages with bytes of the buffer itself.
    pub(super) fn touched_bytes(&self) -> u64 {
        self.touched.count() * page()
    }

    /// Bytes of `range`, which is a segment, outside the pages with bytes of the buffer itself.
    /// Only the first and the last page of a segment can have such bytes.
    pub(super) fn untouched_bytes(&self, range: &Range<u64>) -> u64 {
        let pages = pages(range);
        let ends = [pages.start, (pages.end - 1).max(pages.start)];
        let ends = &ends[..1 + usize::from(ends[1] > ends[0])];
        let touched = ends
            .iter()
            .filter(|&&end| self.touched.has_any(end..end + 1));
        let inside = |page_number: &u64| {
            let start = (page_number * page()).max(range.start);
            ((page_number + 1) * page()).min(range.end) - start
        };
        range.end - range.start - touched.map(inside).sum::<u64>()
    }

    /// Adds an extent.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        self.extents.insert(range.start, range.end);
    }

    /// The extents that overlap `range`.
    pub(super) fn extents_in(&self, range: &Range<u64>) -> impl Iterator<Item = (&u64, &u64)> {
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
    /// `filled` of the `len` bytes exist. The caller adds the extent to the uses of `base`.
    pub(super) fn new(base: Arc<BaseRegion>, offset: u64, len: u64, filled: u64) -> CpuExtent {
        CpuExtent {
            base,
            offset,
            len,
            filled: AtomicU64::new(filled),
        }
    }

    /// One past the last byte, in the base.
    pub(super) fn end(&self) -> u64 {
        self.offset + self.len
    }

    /// All bytes, of which only the [filled](Extent::filled) ones may be read.
    pub(super) fn bytes(&self) -> Bytes<'_> {
        // SAFETY: an extent is inside its base, and the extent keeps the mapping of the base alive.
        unsafe { Bytes::from_raw(self.base.at(self.offset), self.len as usize) }
    }

    /// The buffer has written all bytes up to `filled`.
    pub(super) fn fill_up_to(&self, filled: u64) {
        self.filled.store(filled, Ordering::Release);
    }
}

impl Extent for CpuExtent {
    fn size(&self) -> u64 {
        self.len
    }

    fn filled(&self) -> u64 {
        self.filled.load(Ordering::Acquire)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
        check_range(offset, out.len() as u64, self.filled())?;
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
        let mut uses = self.base.uses();
        uses.extents.remove(&self.offset);
        // The buffer needs the pages that it has touched: the bytes of the extent too, unless it
        // has moved them into a segment.
        let len = self.base.region.len() as u64;
        for gap in uses.touched.gaps(pages(&(self.offset..self.end()))) {
            let range = gap.start * page()..(gap.end * page()).min(len);
            self.base.discard_unused(&uses, range);
        }
    }
}
