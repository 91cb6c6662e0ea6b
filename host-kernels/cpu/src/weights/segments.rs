//! Where the bytes of a buffer for weights are: in its base, in an extent of another buffer, or in
//! a region of their own.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use vgpu_transport::bytes::Bytes;

use super::extent::{BaseRegion, CpuExtent, overlapping};
use crate::region::{Budget, BudgetCharge, Region, page, whole_pages};
use vgpu_engine::{CopyAccount, EngineError, MAX_COPIES};

/// Bytes that are copied between two questions whether the work is cancelled: a millisecond.
pub(super) const COPIED_AT_ONCE: u64 = 4 << 20;

/// The alignment of tensors. Places of bytes in memory and in their buffer are equal modulo this,
/// so that a tensor in a segment is aligned as in one region.
pub(super) const ALIGN: u64 = 256;

/// The state of a buffer for weights.
#[derive(Default)]
pub(super) struct WeightRegionState {
    pub(super) is_frozen: bool,
    /// Something was written after freezing.
    pub(super) is_written: bool,
    /// How often addresses of bytes have changed.
    pub(super) moves: u64,
    /// Bytes that [`gather`](WeightRegionState::gather) has copied, in all its calls since the
    /// buffer was made: a byte that was copied twice counts twice, one that stayed at its address
    /// does not count. Never reset. A cancelled call adds nothing.
    pub(super) gathered: u64,
    /// The bytes that are not in the base, by first byte. Disjoint.
    pub(super) segments: BTreeMap<u64, Segment>,
    /// The extents that are offered, by first byte. Disjoint, and disjoint from `segments`.
    pub(super) offered: BTreeMap<u64, Arc<CpuExtent>>,
}

/// Bytes of a buffer that are not in its base.
pub(super) struct Segment {
    pub(super) len: u64,
    pub(super) backing: Backing,
}

/// The memory of a [`Segment`].
pub(super) enum Backing {
    /// In the base of this or another buffer, read-only.
    Shared(Arc<CpuExtent>),
    /// In a region of their own, from byte `lead` on.
    Own {
        region: Region,
        lead: u64,
        _charge: CopyCharge,
    },
}

/// What the regions of a buffer besides its base are charged to.
pub(super) struct CopyBudget {
    /// The memory of the engine.
    budget: Arc<Budget>,
    /// The guest.
    account: OnceLock<Arc<dyn CopyAccount>>,
}

/// The charges for one such region.
pub(super) struct CopyCharge {
    of_engine: BudgetCharge,
    /// Given back after the memory of the engine.
    _of_guest: Option<Box<dyn Any + Send + Sync>>,
}

impl CopyBudget {
    /// A budget without an account.
    pub(super) fn new(budget: &Arc<Budget>) -> CopyBudget {
        CopyBudget {
            budget: Arc::clone(budget),
            account: OnceLock::new(),
        }
    }

    pub(super) fn set_account(&self, account: Arc<dyn CopyAccount>) {
        // A second account is dropped.
        let _ = self.account.set(account);
    }

    /// Charges `bytes`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] with the figures of the account, or of the engine.
    fn take(&self, bytes: u64) -> Result<CopyCharge, EngineError> {
        let mut of_engine = None;
        let mut allocate = || {
            of_engine = Some(BudgetCharge::take(&self.budget, bytes)?);
            Ok(())
        };
        let of_guest = match self.account.get() {
            Some(account) => Some(account.charge(bytes, &mut allocate)?),
            None => allocate().map(|()| None)?,
        };
        let of_engine = of_engine.ok_or_else(|| self.budget.out_of_memory(bytes))?;
        Ok(CopyCharge {
            of_engine,
            _of_guest: of_guest,
        })
    }
}

impl CopyCharge {
    /// The error for a mapping that failed although there was memory for it.
    fn refused(self) -> EngineError {
        self.of_engine.refused()
    }
}

impl WeightRegionState {
    /// The segments that overlap `range`.
    pub(super) fn touched(&self, range: &Range<u64>) -> impl Iterator<Item = (&u64, &Segment)> {
        overlapping(&self.segments, range, |start, segment| start + segment.len)
    }

    /// The address of the bytes of `range`, if they are contiguous.
    pub(super) fn find(&self, base: &BaseRegion, range: &Range<u64>) -> Option<*mut u8> {
        let mut touched = self.touched(range);
        match touched.next() {
            None => Some(base.at(range.start)),
            Some((&start, segment)) => (start <= range.start && range.end <= start + segment.len)
                .then(|| segment.at(range.start - start)),
        }
    }

    /// Withdraws the offered extents that overlap `range`. Those that no one else has end here.
    /// Returns the others, which keep their bytes.
    pub(super) fn withdraw(&mut self, range: &Range<u64>) -> Vec<Arc<CpuExtent>> {
        let touched = overlapping(&self.offered, range, |_, extent| extent.end());
        let touched: Vec<u64> = touched.map(|(&start, _)| start).collect();
        let withdrawn = { touched.iter() }.filter_map(|start| self.offered.remove(start));
        withdrawn
            .filter_map(|extent| Arc::try_unwrap(extent).err())
            .collect()
    }

    /// Offers extents again that were withdrawn for something that has failed.
    pub(super) fn offer_again(&mut self, withdrawn: Vec<Arc<CpuExtent>>) {
        let withdrawn = withdrawn.into_iter();
        self.offered
            .extend(withdrawn.map(|extent| (extent.offset, extent)));
    }

    /// The number of regions of their own outside of `range`.
    fn copies_outside(&self, range: &Range<u64>) -> usize {
        let outside = self.segments.iter().filter(|(at, _)| !range.contains(at));
        let is_copy = |segment: &Segment| matches!(segment.backing, Backing::Own { .. });
        outside.filter(|(_, segment)| is_copy(segment)).count()
    }

    /// Whether [`gather`](WeightRegionState::gather) may have to copy bytes for `range`.
    pub(super) fn may_copy(&self, base: &BaseRegion, range: &Range<u64>) -> bool {
        match self.touched(range).next() {
            None => base.uses().extents_in(range).next().is_some(),
            Some((&start, segment)) => {
                let is_own = matches!(segment.backing, Backing::Own { .. });
                !is_own || range.start < start || start + segment.len < range.end
            }
        }
    }

    /// The address of exclusive, contiguous memory with the bytes of `range`. A buffer has at most
    /// [`MAX_COPIES`] regions of its own besides the base: instead of one more, it gets one for all
    /// its bytes. The buffer gets that one, too, once [`gathered`](WeightRegionState::gathered)
    /// would exceed the bytes that it has: neighbours that are merged one after the other would be
    /// copied again with each of them. So all copies for a graph have at most four times the bytes
    /// of the buffer.
    ///
    /// Asks `is_cancelled` before each 4 MiB that are copied. After an error each byte is where it
    /// was, and extents in use are still offered.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if memory is needed and the guest, the engine or the machine
    /// has none;
    /// [`EngineError::Cancelled`] once `is_cancelled` has returned `true`.
    pub(super) fn gather(
        &mut self,
        base: &BaseRegion,
        copies: &CopyBudget,
        range: Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<*mut u8, EngineError> {
        // Offers that no buffer has taken end here. An extent in use keeps its bytes.
        let in_use = self.withdraw(&range);
        let gathered = self.gather_unoffered(base, copies, range, is_cancelled);
        if gathered.is_err() {
            self.offer_again(in_use);
        }
        gathered
    }

    /// As [`gather`](WeightRegionState::gather), for bytes that are not offered.
    ///
    /// # Errors
    /// As [`gather`](WeightRegionState::gather).
    fn gather_unoffered(
        &mut self,
        base: &BaseRegion,
        copies: &CopyBudget,
        range: Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<*mut u8, EngineError> {
        if let Some((&start, segment)) = self.touched(&range).next()
            && matches!(segment.backing, Backing::Own { .. })
            && start <= range.start
            && range.end <= start + segment.len
        {
            return Ok(segment.at(range.start - start));
        }
        let uses = base.uses();
        let mut all = range.clone();
        loop {
            let mut more = all.clone();
            let segments = self.touched(&all).map(|(&start, p)| (start, start + p.len));
            let extents = uses.extents_in(&all).map(|(&start, &end)| (start, end));
            for (start, end) in segments.chain(extents) {
                more = more.start.min(start)..more.end.max(end);
            }
            if more == all {
                break;
            }
            all = more;
        }
        let is_free = uses.extents_in(&all).next().is_none();
        let size = base.region.len() as u64;
        let copies_too_much = self.gathered.saturating_add(all.end - all.start) > size;
        if !is_free && (copies_too_much || self.copies_outside(&all) >= MAX_COPIES) {
            all = 0..size;
        }
        let is_in_base = self.touched(&all).next().is_none();
        drop(uses);
        if is_in_base && is_free {
            base.touch(&range);
            return Ok(base.at(range.start));
        }
        let (to, backing) = if is_free {
            base.touch(&all);
            (base.at(all.start), None)
        } else {
            let lead = all.start % ALIGN;
            let len = lead + all.end - all.start;
            let charge = copies.take(whole_pages(len))?;
            match Region::for_budget(charge.of_engine.budget(), len as usize) {
                None => return Err(charge.refused()),
                Some(region) => (
                    region.as_ptr().wrapping_add(lead as usize),
                    Some(Backing::Own {
                        region,
                        lead,
                        _charge: charge,
                    }),
                ),
            }
        };
        self.gathered += self.copy_to(to, base, &all, is_cancelled)?;
        self.segments.retain(|start, _| !all.contains(start));
        self.moves += 1;
        if let Some(backing) = backing {
            let len = all.end - all.start;
            self.segments.insert(all.start, Segment { len, backing });
            let unneeded = self.pages_under(base, &all);
            base.release(unneeded);
        }
        Ok(to.wrapping_add((range.start - all.start) as usize))
    }

    /// Copies the bytes of `all` to `to`, which has room for them: it is the address of their first
    /// byte in the base, or in a new region. Returns the number of bytes that were copied, which
    /// are those that are elsewhere. No segment and no extent of `base` overlaps the ends of `all`,
    /// and no extent overlaps `all` if `to` is in the base.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`] once `is_cancelled` has returned `true`.
    fn copy_to(
        &self,
        to: *mut u8,
        base: &BaseRegion,
        all: &Range<u64>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, EngineError> {
        let mut copied = 0;
        let mut copy = |from: *mut u8, range: Range<u64>| {
            let to = to.wrapping_add((range.start - all.start) as usize);
            let mut done = 0;
            while from != to && done < range.end - range.start {
                if is_cancelled() {
                    return Err(EngineError::Cancelled);
                }
                let len = (range.end - range.start - done).min(COPIED_AT_ONCE);
                let (from, to) = (
                    from.wrapping_add(done as usize),
                    to.wrapping_add(done as usize),
                );
                // SAFETY: `from` has `len` bytes of the base or of a segment, and `to` has the
                // bytes of `range` of the base or of a new region. The two ranges do not overlap:
                // `from` is in another region than `to`; or `from` is the same byte of the base,
                // which the loop excludes; or `from` is in an extent of this base, and `to` is in
                // `all`, which no extent overlaps if `to` is in the base.
                unsafe { to.copy_from_nonoverlapping(from, len as usize) };
                (done, copied) = (done + len, copied + len);
            }
            Ok(())
        };
        let mut at = all.start;
        for (&start, segment) in self.touched(all) {
            copy(base.at(at), at..start)?;
            copy(segment.at(0), start..start + segment.len)?;
            at = start + segment.len;
        }
        copy(base.at(at), at..all.end)?;
        Ok(copied)
    }

    /// The pages of `base` that are not needed when the bytes of `range` are in a segment: all
    /// pages that overlap `range`, except a page at either end whose other bytes are not all zero.
    pub(super) fn pages_under(&self, base: &BaseRegion, range: &Range<u64>) -> Range<u64> {
        let is_zero = |part: Range<u64>| {
            let len = part.end.saturating_sub(part.start) as usize;
            let mut copy = vec![0; len];
            // SAFETY: `part` is inside the base, whose mapping outlives this call.
            unsafe { Bytes::from_raw(base.at(part.start), len) }.copy_to(&mut copy);
            copy.iter().all(|&byte| byte == 0)
        };
        let is_empty = |part: Range<u64>| {
            let mut at = part.start;
            for (&start, segment) in self.touched(&part) {
                if !is_zero(at..start) {
                    return false;
                }
                at = start + segment.len;
            }
            is_zero(at..part.end)
        };
        let len = base.region.len() as u64;
        let (first, last) = (
            range.start - range.start % page(),
            range.end.next_multiple_of(page()).min(len),
        );
        let start = match is_empty(first..range.start) {
            true => first,
            false => first + page(),
        };
        let end = match is_empty(range.end..last) {
            true => last,
            false => range.end - range.end % page(),
        };
        start..end.max(start)
    }
}

impl Segment {
    /// The extent that the segment is, if it is one.
    pub(super) fn shared(&self) -> Option<&Arc<CpuExtent>> {
        match &self.backing {
            Backing::Shared(extent) => Some(extent),
            Backing::Own { .. } => None,
        }
    }

    /// The address of byte `offset` of the segment.
    pub(super) fn at(&self, offset: u64) -> *mut u8 {
        match &self.backing {
            Backing::Shared(extent) => extent.base.at(extent.offset + offset),
            Backing::Own { region, lead, .. } => {
                region.as_ptr().wrapping_add((lead + offset) as usize)
            }
        }
    }
}
