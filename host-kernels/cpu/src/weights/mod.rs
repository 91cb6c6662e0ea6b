//! Memory for weights that buffers of several guests share.
//!
//! A buffer for weights begins with a region of its own, its *base*, like any other buffer. Once it
//! is frozen, parts of it can be offered to other buffers as *extents*. A buffer that attaches an
//! extent records that these bytes are elsewhere, and the pages of its own base for them are never
//! touched, or are freed. Attached extents need no further mappings and no page faults, and weights
//! keep their huge pages.
//!
//! Plans ask for the [address](WeightRegion::locate) of a tensor when they are compiled. Before a
//! write to bytes that other buffers may read, the bytes are copied: copy-on-write, by extents.
//! When the address of any byte changes, [`moves`](WeightRegion::moves) changes, and plans that
//! were compiled before do not run again.
//!
//! An extent may begin before the memory is frozen: then the buffer appends its bytes from the
//! first to the last, and others read what exists already.
//!
//! An extent may outlive the buffer that it was offered from. Pages of a base are freed when
//! neither its buffer nor an extent needs them, and the base itself with the last of these. A
//! buffer that has moved bytes into a segment does not need the pages under the segment. So each
//! byte of a buffer has one place, and the pages in memory are at most those of all buffers, but
//! for the two pages at the ends of an extent.

mod extent;
mod page_set;
mod segments;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::lock::{Guard, get_mut, lock_at};

use crate::lock::Rank;
use crate::region::{Budget, Region};
use extent::BaseRegion;
pub(crate) use extent::CpuExtent;
use segments::{ALIGN, Backing, COPIED_AT_ONCE, CopyBudget, Segment, WeightRegionState};
use vgpu_engine::{CopyAccount, EngineError, Extent};

/// The memory of a buffer for weights.
pub(super) struct WeightRegion {
    base: Arc<BaseRegion>,
    copies: CopyBudget,
    state: Mutex<WeightRegionState>,
}

impl WeightRegion {
    /// `size > 0` zero bytes; `None` if the mapping fails.
    pub(super) fn create(size: usize, budget: &Arc<Budget>) -> Option<WeightRegion> {
        Some(WeightRegion {
            base: Arc::new(BaseRegion::new(Region::for_budget(budget, size)?)),
            copies: CopyBudget::new(budget),
            state: Mutex::default(),
        })
    }

    /// Keeps `lease` until the base is unmapped, unless the base has one.
    pub(super) fn hold(&self, lease: Box<dyn Any + Send + Sync>) {
        self.base.hold(lease);
    }

    /// Charges `account`, too, for copies from now on, unless there is an account.
    pub(super) fn charge_copies(&self, account: Arc<dyn CopyAccount>) {
        self.copies.set_account(account);
    }

    /// Under this lock the uses of the base are locked, and copies are charged to the account.
    fn state(&self) -> Guard<'_, WeightRegionState> {
        lock_at(Rank::Segments, &self.state)
    }

    fn size(&self) -> u64 {
        self.base.region.len() as u64
    }

    /// A number that changes whenever an address that was returned before may have become invalid.
    pub(super) fn moves(&self) -> u64 {
        self.state().moves
    }

    pub(super) fn is_unmodified(&self) -> bool {
        let state = self.state();
        state.is_frozen && !state.is_written
    }

    /// Makes the present contents available as extents.
    pub(super) fn freeze(&self) {
        let mut state = self.state();
        if !state.is_frozen {
            state.is_frozen = true;
            // Bytes that were not appended are what the memory has there, and stay so.
            for extent in state.offered.values() {
                extent.fill_up_to(extent.len);
            }
            // Plans that write were compiled without copy-on-write.
            state.moves += 1;
        }
    }

    /// The address of the bytes of `range`, contiguous, for reading. The range lies inside.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the bytes are in several segments and cannot be merged;
    /// [`EngineError::Cancelled`] once `is_cancelled` has returned `true`.
    pub(super) fn locate(
        &self,
        range: Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<*mut u8, EngineError> {
        let mut state = self.state();
        if let Some(address) = state.find(&self.base, &range) {
            return Ok(address);
        }
        state.gather(&self.base, &self.copies, range, is_cancelled)
    }

    /// As [`locate`](WeightRegion::locate), for writing: no other buffer shares the bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if shared bytes cannot be copied; [`EngineError::Cancelled`]
    /// once `is_cancelled` has returned `true`.
    pub(super) fn own(
        &self,
        range: Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<*mut u8, EngineError> {
        let mut state = self.state();
        let address = state.gather(&self.base, &self.copies, range, is_cancelled)?;
        state.is_written |= state.is_frozen;
        Ok(address)
    }

    /// Copies the bytes of `range` that other buffers share, if there are any, for a write that
    /// comes next.
    ///
    /// # Errors
    /// As [`own`](WeightRegion::own).
    pub(super) fn unshare(
        &self,
        range: Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        let may_copy = self.state().may_copy(&self.base, &range);
        match may_copy {
            true => self.own(range, is_cancelled).map(drop),
            false => Ok(()),
        }
    }

    /// The addresses and lengths of the contiguous parts of `range`, in order. The range lies
    /// inside.
    pub(super) fn parts(&self, range: Range<u64>) -> Vec<(*mut u8, usize)> {
        let state = self.state();
        let mut parts = Vec::new();
        let mut at = range.start;
        let mut part = |address: *mut u8, len: u64| {
            if len > 0 {
                parts.push((address, len as usize));
            }
        };
        for (&start, segment) in state.touched(&range) {
            let (from, to) = (start.max(range.start), (start + segment.len).min(range.end));
            part(self.base.at(at), from - at);
            part(segment.at(from - start), to - from);
            at = to;
        }
        part(self.base.at(at), range.end - at);
        parts
    }

    /// Whether neither a segment nor a page that lies inside `range` has bytes of this memory.
    pub(super) fn is_untouched(&self, range: Range<u64>) -> bool {
        let state = self.state();
        state.touched(&range).next().is_none() && self.base.is_untouched(&range)
    }

    /// Bytes of the pages that were written, and of all segments outside these pages. At most the
    /// size.
    pub(super) fn bytes_in_use(&self) -> u64 {
        let state = self.state();
        let uses = self.base.uses();
        let segments = state.segments.iter();
        let segments =
            segments.map(|(&start, segment)| uses.untouched_bytes(&(start..start + segment.len)));
        (uses.touched_bytes() + segments.sum::<u64>()).min(self.size())
    }

    /// Part of the frozen contents as an extent. The range lies inside. An extent of exactly this
    /// range that exists already is returned.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the memory is not frozen, was written since, or if the range
    /// is empty or overlaps another extent.
    pub(super) fn extent(&self, offset: u64, len: u64) -> Result<Arc<CpuExtent>, EngineError> {
        let mut state = self.state();
        let is_unmodified = state.is_frozen && !state.is_written;
        let offered = state.offered.get(&offset);
        let attached = state.segments.get(&offset).and_then(Segment::shared);
        let known = offered.or(attached).filter(|extent| extent.len == len);
        match known {
            Some(known) if is_unmodified => Ok(Arc::clone(known)),
            _ => self.offer(&mut state, offset..offset + len, len, is_unmodified),
        }
    }

    /// Begins an extent of memory that is not frozen. The range lies inside.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the memory is frozen, or if the range is empty or overlaps
    /// bytes that are shared. Extents in use are still offered then.
    pub(super) fn begin_extent(
        &self,
        offset: u64,
        len: u64,
    ) -> Result<Arc<CpuExtent>, EngineError> {
        let range = offset..offset + len;
        let mut state = self.state();
        let may_begin = !state.is_frozen;
        let in_use = match may_begin {
            true => state.withdraw(&range),
            false => Vec::new(),
        };
        // Plans that write were compiled without copy-on-write.
        state.moves += 1;
        let begun = self.offer(&mut state, range, 0, may_begin);
        if begun.is_err() {
            state.offer_again(in_use);
        }
        begun
    }

    /// Offers `range`, of which `filled` bytes exist, as an extent.
    fn offer(
        &self,
        state: &mut WeightRegionState,
        range: Range<u64>,
        filled: u64,
        may_offer: bool,
    ) -> Result<Arc<CpuExtent>, EngineError> {
        let (offset, len) = (range.start, range.end - range.start);
        let mut uses = self.base.uses();
        let fits = may_offer
            && len > 0
            && state.touched(&range).next().is_none()
            && uses.extents_in(&range).next().is_none();
        if !fits {
            let size = self.size();
            return Err(EngineError::OutOfBounds { offset, len, size });
        }
        uses.insert(range);
        let extent = CpuExtent::new(Arc::clone(&self.base), offset, len, filled);
        let extent = Arc::new(extent);
        state.offered.insert(offset, Arc::clone(&extent));
        Ok(extent)
    }

    /// Writes the next bytes of an extent that [`begin_extent`](WeightRegion::begin_extent) has
    /// begun.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the extent has fewer bytes left, or was withdrawn.
    pub(super) fn append(
        &self,
        extent: &Arc<CpuExtent>,
        data: Bytes<'_>,
    ) -> Result<(), EngineError> {
        let state = self.state();
        let (filled, len) = (extent.filled(), data.len() as u64);
        let offered = state.offered.get(&extent.offset);
        let is_offered = offered.is_some_and(|offered| Arc::ptr_eq(offered, extent));
        if !is_offered || len > extent.len - filled {
            let (offset, size) = (extent.offset + filled, extent.end());
            return Err(EngineError::OutOfBounds { offset, len, size });
        }
        let start = extent.offset + filled;
        self.base.touch(&(start..start + len));
        // SAFETY: an offered extent lies in this base and is disjoint from segments. The bytes
        // after the filled ones are not read through the extent, and the lock of the state, held
        // here, excludes other writers. No Rust reference points to them.
        unsafe { BytesMut::from_raw(self.base.at(start), data.len()) }.copy_from(data);
        extent.fill_up_to(filled + len);
        Ok(())
    }

    /// Replaces the bytes at `offset` by those of `extent`; they lie inside. Returns the number of
    /// bytes that are now shared: none if tensors would be aligned in another way than in one
    /// region. Frozen memory must already have the same bytes there.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if overlapping segments cannot be merged;
    /// [`EngineError::OutOfBounds`] if the extent is not complete, or if it overlaps the range in
    /// this memory, which is not frozen; [`EngineError::Cancelled`] once `is_cancelled` has
    /// returned `true`.
    pub(super) fn attach(
        &self,
        offset: u64,
        extent: &Arc<CpuExtent>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, EngineError> {
        let len = extent.len;
        let range = offset..offset + len;
        let mut state = self.state();
        if state.is_written {
            return Ok(0);
        }
        let overlaps = Arc::ptr_eq(&extent.base, &self.base)
            && extent.offset < range.end
            && range.start < extent.end();
        match overlaps {
            true if state.is_frozen => return Ok(0),
            _ if overlaps || extent.filled() < len => {
                let size = extent.filled();
                return Err(EngineError::OutOfBounds { offset, len, size });
            }
            _ => {}
        }
        let is_inside = |(&start, segment): (&u64, &Segment)| {
            range.start <= start && start + segment.len <= range.end
        };
        let is_aligned = offset % ALIGN == extent.offset % ALIGN;
        if !is_aligned || !state.touched(&range).all(is_inside) {
            // Bytes that were merged for a plan stay contiguous.
            if state.is_frozen {
                return Ok(0);
            }
            let to = state.gather(&self.base, &self.copies, range, is_cancelled)?;
            let (mut rest, mut done) = (extent.bytes(), 0);
            while !rest.is_empty() {
                if is_cancelled() {
                    return Err(EngineError::Cancelled);
                }
                let (part, after) = rest.split_at(rest.len().min(COPIED_AT_ONCE as usize));
                // SAFETY: `gather` has returned the address of `extent.len` mapped bytes, which
                // stay mapped while the lock of the state is held, and `part` is the part of as
                // many bytes that begins with byte `done`. No Rust reference points to them.
                unsafe { BytesMut::from_raw(to.wrapping_add(done), part.len()) }.copy_from(part);
                (rest, done) = (after, done + part.len());
            }
            return Ok(0);
        }
        state.withdraw(&range);
        state.segments.retain(|&start, _| !range.contains(&start));
        let segment = Segment {
            len: extent.len,
            backing: Backing::Shared(Arc::clone(extent)),
        };
        state.segments.insert(offset, segment);
        state.moves += 1;
        let unneeded = state.pages_under(&self.base, &range);
        self.base.release(unneeded);
        Ok(extent.len)
    }
}

impl Drop for WeightRegion {
    fn drop(&mut self) {
        let state = get_mut(&mut self.state);
        state.offered.clear();
        self.base.release(0..self.base.region.len() as u64);
    }
}
