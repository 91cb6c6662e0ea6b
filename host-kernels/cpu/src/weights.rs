//! Memory for weights that buffers of several guests share.
//!
//! A buffer for weights begins with a region of its own, its *base*, like any other buffer. Once it
//! is frozen, parts of it can be offered to other buffers as *extents*. A buffer that attaches an
//! extent records that these bytes are elsewhere, and the pages of its own base under them stay
//! untouched or are freed. This needs no further mappings and no page faults, and weights keep
//! their huge pages.
//!
//! Plans ask for the [address](WeightRegion::locate) of a tensor when they are compiled. A write to
//! bytes that others may read first gets memory of its own: copy-on-write, by extents. When the
//! address of any byte changes, [`moves`](WeightRegion::moves) changes, and plans that were
//! compiled before do not run again.
//!
//! An extent may outlive the buffer that it was offered from. Pages of a base are freed when
//! neither its buffer nor an extent needs them, and the base itself with the last of these.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::UncheckedAdvice;
use vgpu_transport::bytes::{Bytes, BytesMut};

use super::region::{Budget, Charge, Region, page};
use vgpu_engine::{EngineError, Extent, check_range};

/// The memory of a buffer for weights.
pub(super) struct WeightRegion {
    base: Arc<BaseRegion>,
    budget: Arc<Budget>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_frozen: bool,
    /// Something was written after freezing.
    is_written: bool,
    /// How often addresses of bytes have changed.
    moves: u64,
    /// The bytes that are not in the base, by first byte. Disjoint.
    pieces: BTreeMap<u64, Piece>,
    /// The extents that are offered. Disjoint, and disjoint from `pieces`.
    offered: Vec<Arc<CpuExtent>>,
}

/// Bytes of a buffer that are not in its base.
struct Piece {
    len: u64,
    place: Backing,
}

enum Backing {
    /// In the base of this or another buffer, read-only.
    Shared(Arc<CpuExtent>),
    /// In a region of their own.
    Own { region: Region, _charge: Charge },
}

/// The first region of a buffer for weights.
struct BaseRegion {
    region: Region,
    uses: Mutex<Uses>,
}

struct Uses {
    /// The buffer exists.
    has_owner: bool,
    /// First byte of an extent to one past its last. Disjoint.
    extents: BTreeMap<u64, u64>,
}

/// Bytes of a base that do not change while the extent exists.
pub(super) struct CpuExtent {
    base: Arc<BaseRegion>,
    offset: u64,
    len: u64,
}

impl WeightRegion {
    /// `size > 0` zero bytes; `None` if the mapping fails.
    pub(super) fn create(size: usize, budget: &Arc<Budget>) -> Option<WeightRegion> {
        let uses = Uses {
            has_owner: true,
            extents: BTreeMap::new(),
        };
        Some(WeightRegion {
            base: Arc::new(BaseRegion {
                region: Region::private(size)?,
                uses: Mutex::new(uses),
            }),
            budget: Arc::clone(budget),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
            // Plans that write were compiled without copy-on-write.
            state.moves += 1;
        }
    }

    /// The address of the bytes of `range`, contiguous, for reading. The range lies inside.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the bytes are in several places and cannot be merged.
    pub(super) fn locate(&self, range: Range<u64>) -> Result<*mut u8, EngineError> {
        let mut state = self.state();
        if let Some(place) = state.find(&self.base, &range) {
            return Ok(place);
        }
        state.gather(self, range)
    }

    /// As [`locate`](WeightRegion::locate), for writing: no other buffer shares the bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if shared bytes cannot be copied.
    pub(super) fn own(&self, range: Range<u64>) -> Result<*mut u8, EngineError> {
        let mut state = self.state();
        let place = state.gather(self, range)?;
        state.is_written |= state.is_frozen;
        Ok(place)
    }

    /// The addresses and lengths of the contiguous parts of `range`, in order. The range lies
    /// inside.
    pub(super) fn parts(&self, range: Range<u64>) -> Vec<(*mut u8, usize)> {
        let state = self.state();
        let mut parts = Vec::new();
        let mut at = range.start;
        let mut part = |place: *mut u8, len: u64| {
            if len > 0 {
                parts.push((place, len as usize));
            }
        };
        for (&start, piece) in state.touched(&range) {
            let (from, to) = (start.max(range.start), (start + piece.len).min(range.end));
            part(self.base.at(at), from - at);
            part(piece.at(from - start), to - from);
            at = to;
        }
        part(self.base.at(at), range.end - at);
        parts
    }

    /// Part of the frozen contents as an extent. The range lies inside.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the memory is not frozen, was written since, or if the range is
    /// empty or overlaps another extent.
    pub(super) fn extent(&self, offset: u64, len: u64) -> Result<Arc<CpuExtent>, EngineError> {
        let mut state = self.state();
        let range = offset..offset + len;
        let mut uses = self.base.uses();
        let fits = state.is_frozen
            && !state.is_written
            && len > 0
            && state.touched(&range).next().is_none()
            && uses.touched(&range).next().is_none();
        if !fits {
            let size = self.size();
            return Err(EngineError::OutOfBounds { offset, len, size });
        }
        uses.extents.insert(range.start, range.end);
        let extent = Arc::new(CpuExtent {
            base: Arc::clone(&self.base),
            offset,
            len,
        });
        state.offered.push(Arc::clone(&extent));
        Ok(extent)
    }

    /// Replaces the bytes at `offset` by those of `extent`; they lie inside. Returns the number of
    /// bytes that are now shared. Frozen memory already has the same bytes there.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if overlapping pieces cannot be merged.
    pub(super) fn attach(&self, offset: u64, extent: &Arc<CpuExtent>) -> Result<u64, EngineError> {
        let range = offset..offset + extent.len;
        let mut state = self.state();
        if state.is_written || Arc::ptr_eq(&extent.base, &self.base) {
            return Ok(0);
        }
        let is_inside = |(&start, piece): (&u64, &Piece)| {
            range.start <= start && start + piece.len <= range.end
        };
        if !state.touched(&range).all(is_inside) {
            // Bytes that were merged for a plan stay contiguous.
            let is_frozen = state.is_frozen;
            let to = state.gather(self, range)?;
            if !is_frozen {
                // SAFETY: `gather` has returned the address of as many bytes, which only this
                // buffer uses.
                unsafe { BytesMut::from_raw(to, extent.len as usize) }.copy_from(extent.bytes());
            }
            return Ok(0);
        }
        state.forget_offers(&range);
        state.pieces.retain(|&start, _| !range.contains(&start));
        let piece = Piece {
            len: extent.len,
            place: Backing::Shared(Arc::clone(extent)),
        };
        state.pieces.insert(offset, piece);
        state.moves += 1;
        let unneeded = state.pages_under(&self.base, &range);
        self.base.release(unneeded);
        Ok(extent.len)
    }
}

impl Drop for WeightRegion {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.offered.clear();
        self.base.uses().has_owner = false;
        self.base.release(0..self.base.region.len() as u64);
    }
}

impl State {
    /// The pieces that overlap `range`.
    fn touched(&self, range: &Range<u64>) -> impl Iterator<Item = (&u64, &Piece)> {
        overlapping(&self.pieces, range, |start, piece| start + piece.len)
    }

    /// The address of the bytes of `range`, if they are contiguous.
    fn find(&self, base: &BaseRegion, range: &Range<u64>) -> Option<*mut u8> {
        let mut touched = self.touched(range);
        match touched.next() {
            None => Some(base.at(range.start)),
            Some((&start, piece)) => (start <= range.start && range.end <= start + piece.len)
                .then(|| piece.at(range.start - start)),
        }
    }

    /// Withdraws the offered extents that overlap `range`.
    fn forget_offers(&mut self, range: &Range<u64>) {
        self.offered
            .retain(|extent| range.end <= extent.offset || extent.end() <= range.start);
    }

    /// The address of exclusive, contiguous memory with the bytes of `range`.
    fn gather(
        &mut self,
        weights: &WeightRegion,
        range: Range<u64>,
    ) -> Result<*mut u8, EngineError> {
        let base = &weights.base;
        // Extents without a user are withdrawn. Extents in use keep their bytes.
        self.forget_offers(&range);
        if let Some((&start, piece)) = self.touched(&range).next()
            && matches!(piece.place, Backing::Own { .. })
            && start <= range.start
            && range.end <= start + piece.len
        {
            return Ok(piece.at(range.start - start));
        }
        let uses = base.uses();
        let mut all = range.clone();
        loop {
            let mut more = all.clone();
            let pieces = self.touched(&all).map(|(&start, p)| (start, start + p.len));
            let extents = uses.touched(&all).map(|(&start, &end)| (start, end));
            for (start, end) in pieces.chain(extents) {
                more = more.start.min(start)..more.end.max(end);
            }
            if more == all {
                break;
            }
            all = more;
        }
        let is_home = self.touched(&all).next().is_none();
        let is_free = uses.touched(&all).next().is_none();
        drop(uses);
        if is_home && is_free {
            return Ok(base.at(range.start));
        }
        let (to, place) = if is_free {
            (base.at(all.start), None)
        } else {
            let len = all.end - all.start;
            let charge = Charge::take(&weights.budget, len)?;
            match Region::private(len as usize) {
                None => return Err(charge.refused()),
                Some(region) => (
                    region.as_ptr(),
                    Some(Backing::Own {
                        region,
                        _charge: charge,
                    }),
                ),
            }
        };
        let mut at = all.start;
        let copy = |place: *mut u8, range: Range<u64>| {
            let to = to.wrapping_add((range.start - all.start) as usize);
            if range.start < range.end && place != to {
                let len = (range.end - range.start) as usize;
                // SAFETY: both have as many bytes. Pieces are in other regions than the copy, or at
                // the same address, which is excluded above.
                unsafe { to.copy_from_nonoverlapping(place, len) };
            }
        };
        for (&start, piece) in self.touched(&all) {
            copy(base.at(at), at..start);
            copy(piece.at(0), start..start + piece.len);
            at = start + piece.len;
        }
        copy(base.at(at), at..all.end);
        self.pieces.retain(|start, _| !all.contains(start));
        self.moves += 1;
        if let Some(place) = place {
            let len = all.end - all.start;
            self.pieces.insert(all.start, Piece { len, place });
        }
        Ok(to.wrapping_add((range.start - all.start) as usize))
    }

    /// The pages of a base that are no longer needed once `range` is elsewhere: all pages that it
    /// touches, but at the ends only pages that otherwise hold zeros.
    fn pages_under(&self, base: &BaseRegion, range: &Range<u64>) -> Range<u64> {
        let is_zero = |part: Range<u64>| {
            let len = part.end.saturating_sub(part.start) as usize;
            let mut copy = vec![0; len];
            // SAFETY: the bytes lie in the base, and the lock excludes writes during the call.
            unsafe { Bytes::from_raw(base.at(part.start), len) }.copy_to(&mut copy);
            copy.iter().all(|&byte| byte == 0)
        };
        let is_empty = |part: Range<u64>| {
            let mut at = part.start;
            for (&start, piece) in self.touched(&part) {
                if !is_zero(at..start) {
                    return false;
                }
                at = start + piece.len;
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

impl Piece {
    fn at(&self, offset: u64) -> *mut u8 {
        match &self.place {
            Backing::Shared(extent) => extent.base.at(extent.offset + offset),
            Backing::Own { region, .. } => region.as_ptr().wrapping_add(offset as usize),
        }
    }
}

impl BaseRegion {
    fn at(&self, offset: u64) -> *mut u8 {
        self.region.as_ptr().wrapping_add(offset as usize)
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back the pages of a range, which begins and ends with pages, in which no extent lies.
    /// The buffer does not need them.
    fn release(&self, range: Range<u64>) {
        let uses = self.uses();
        let discard = |range: Range<u64>| {
            // SAFETY: by the caller's contract; and extents lie elsewhere.
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
    /// The extents with bytes of `range`.
    fn touched(&self, range: &Range<u64>) -> impl Iterator<Item = (&u64, &u64)> {
        overlapping(&self.extents, range, |_, &end| end)
    }
}

/// What of `all`, which is disjoint and by its first bytes, shares bytes with `range`. `end` says
/// where each ends.
fn overlapping<'m, T>(
    all: &'m BTreeMap<u64, T>,
    range: &Range<u64>,
    end: impl Fn(u64, &T) -> u64,
) -> impl Iterator<Item = (&'m u64, &'m T)> {
    let before = all.range(..range.start).next_back();
    let before = before.filter(|&(&start, of)| end(start, of) > range.start);
    before.into_iter().chain(all.range(range.clone()))
}

impl CpuExtent {
    fn end(&self) -> u64 {
        self.offset + self.len
    }

    fn bytes(&self) -> Bytes<'_> {
        // SAFETY: an extent lies in its base, and its bytes do not change while there is one.
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
        // An owner needs these pages, or gives them back when it goes.
        if !has_owner {
            let len = self.base.region.len() as u64;
            let start = self.offset - self.offset % page();
            self.base
                .release(start..self.end().next_multiple_of(page()).min(len));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::CpuMemory;
    use super::*;
    use vgpu_engine::Memory;

    const PAGES: u64 = 16;

    /// Different in every place.
    fn content(len: u64) -> Vec<u8> {
        (0..len as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect()
    }

    fn weights(budget: &Arc<Budget>, bytes: &[u8]) -> CpuMemory {
        let memory = CpuMemory::weights(bytes.len() as u64, budget).unwrap();
        memory.write(0, bytes.into()).unwrap();
        memory
    }

    fn read(memory: &dyn Memory, offset: u64, len: u64) -> Vec<u8> {
        let mut out = vec![0; len as usize];
        memory.read(offset, out.as_mut_slice().into()).unwrap();
        out
    }

    /// Bytes of memory that a base holds.
    fn held(base: &BaseRegion) -> u64 {
        let count = base.region.len().div_ceil(page() as usize);
        let mut resident = vec![0; count];
        // SAFETY: our own mapping, and a place for an answer about each of its pages.
        let asked = unsafe {
            let at = base.region.as_ptr().cast();
            libc::mincore(at, base.region.len(), resident.as_mut_ptr())
        };
        assert_eq!(asked, 0);
        resident.iter().filter(|&page| page & 1 != 0).count() as u64 * page()
    }

    fn base(memory: &CpuMemory) -> Arc<BaseRegion> {
        Arc::clone(&memory.as_weights().unwrap().base)
    }

    fn shared(one: &CpuMemory, offset: u64, len: u64) -> Arc<dyn Extent> {
        one.freeze();
        one.extent(offset, len).unwrap()
    }

    #[test]
    fn two_buffers_hold_bytes_once_and_do_not_see_each_other_write() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        // At another distance from a page in the second than in the first.
        let (offset, to, len) = (256, 512, PAGES * page() - 512);
        let extent = shared(&one, offset, len);
        let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
        assert_eq!(two.attach(to, &extent).unwrap(), len);
        let mut two_has = vec![0; (PAGES * page()) as usize];
        two_has[to as usize..].copy_from_slice(&bytes[256..][..len as usize]);
        assert_eq!(held(&base(&two)), 0);
        assert!(read(&two, 0, PAGES * page()) == two_has);
        assert_eq!(two.locate(to, len).unwrap(), one.locate(256, len).unwrap());

        // Each writes; neither sees the other's.
        two.write(3 * page(), (&[1; 10][..]).into()).unwrap();
        two.fill(5 * page(), 10, 2).unwrap();
        one.fill(7 * page(), page(), 3).unwrap();
        one.copy_from(9 * page(), &one, 0, 10).unwrap();
        two_has[3 * page() as usize..][..10].fill(1);
        two_has[5 * page() as usize..][..10].fill(2);
        assert!(read(&two, 0, PAGES * page()) == two_has);
        let mut one_has = bytes.clone();
        one_has[7 * page() as usize..][..page() as usize].fill(3);
        one_has.copy_within(..10, 9 * page() as usize);
        assert!(read(&one, 0, PAGES * page()) == one_has);
        let mut original = vec![0; len as usize];
        extent.read(0, &mut original).unwrap();
        assert!(original == bytes[256..][..len as usize]);
    }

    #[test]
    fn who_writes_first_leaves_the_others_what_was() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        let extent = shared(&one, page(), 4 * page());
        let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
        two.attach(page(), &extent).unwrap();
        drop(extent);
        let before = one.moves();
        one.fill(2 * page(), 1, !bytes[2 * page() as usize])
            .unwrap();
        assert_ne!(one.moves(), before, "others have it: the writer moves");
        let mut one_has = bytes.clone();
        one_has[2 * page() as usize] = !bytes[2 * page() as usize];
        assert!(read(&one, 0, PAGES * page()) == one_has);
        assert!(read(&two, page(), 4 * page()) == bytes[page() as usize..][..4 * page() as usize]);
        assert_eq!(budget.used(), (2 * PAGES + 4) * page());
        // A tensor over a border is put together.
        let at = one.locate(0, 2 * page()).unwrap();
        // SAFETY: the extent has as many bytes, which do not change.
        let there = unsafe { std::slice::from_raw_parts(at, 2 * page() as usize) };
        assert!(there == &one_has[..2 * page() as usize]);
        assert_eq!(at, one.own(0, 2 * page()).unwrap());
        assert!(read(&one, 0, PAGES * page()) == one_has);
        // The other one has the bytes for itself now, and can write in place when the first has
        // gone.
        drop(one);
        two.own(page(), 4 * page()).unwrap();
        assert_eq!(budget.used(), PAGES * page());
    }

    #[test]
    fn pages_live_as_long_as_somebody_needs_them() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        let first = shared(&one, 0, 4 * page());
        let second = one.extent(4 * page() + 256, 4 * page()).unwrap();
        let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
        two.attach(4 * page() + 256, &second).unwrap();
        drop(first);
        let base = base(&one);
        let pages = || held(&base) / page();
        assert_eq!(pages(), PAGES, "the owner has them all");
        drop(one);
        assert_eq!(pages(), 5, "those of the second extent");
        assert!(
            read(&two, 4 * page() + 256, 4 * page())
                == bytes[4 * page() as usize + 256..][..4 * page() as usize]
        );
        drop(two);
        assert_eq!(pages(), 5);
        drop(second);
        assert_eq!(pages(), 0);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_two_have_uploaded_is_merged() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let mut bytes = content(PAGES * page());
        // Two tensors, and zeros between them, as ggml leaves them where it rounds up.
        let (end, start) = (8 * page() + 100, 8 * page() + 128);
        bytes[end as usize..start as usize].fill(0);
        let (one, two) = (weights(&budget, &bytes), weights(&budget, &bytes));
        let ranges = [(0, end), (start, PAGES * page() - start)];
        let extents = ranges.map(|(offset, len)| shared(&one, offset, len));
        let own = ranges.map(|(offset, len)| shared(&two, offset, len));
        assert_eq!(held(&base(&two)), PAGES * page());
        let attach = |i: usize| two.attach(ranges[i].0, &extents[i]).unwrap();
        let before = two.moves();
        assert_eq!((attach(0), attach(1)), (ranges[0].1, ranges[1].1));
        assert_ne!(two.moves(), before);
        // Somebody may still hold what is held twice now; when not, it goes.
        assert_eq!(held(&base(&two)), PAGES * page());
        drop(own);
        attach(0);
        attach(1);
        assert_eq!(held(&base(&two)), 0, "the page with both, too");
        assert!(read(&two, 0, PAGES * page()) == bytes);
        // What has changed is not replaced by what it was.
        let three = weights(&budget, &bytes);
        three.freeze();
        three.fill(0, 1, !bytes[0]).unwrap();
        assert_eq!(three.attach(0, &extents[0]).unwrap(), 0);
        assert_eq!(read(&three, 0, 1), [!bytes[0]]);
    }

    #[test]
    fn pages_with_something_else_on_them_stay() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let (one, two) = (weights(&budget, &bytes), weights(&budget, &bytes));
        let extent = shared(&one, 100, PAGES * page() - 200);
        two.freeze();
        two.attach(100, &extent).unwrap();
        assert_eq!(held(&base(&two)), 2 * page());
        assert!(read(&two, 0, PAGES * page()) == bytes);
    }

    #[test]
    fn extents_over_others_are_copied_where_they_do_not_replace_them() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        let first = shared(&one, 0, 4 * page());
        let second = one.extent(4 * page(), 4 * page()).unwrap();
        let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
        two.attach(0, &first).unwrap();
        assert_eq!(two.attach(2 * page(), &second).unwrap(), 0);
        let mut two_has = vec![0; 6 * page() as usize];
        two_has[..2 * page() as usize].copy_from_slice(&bytes[..2 * page() as usize]);
        two_has[2 * page() as usize..]
            .copy_from_slice(&bytes[4 * page() as usize..][..4 * page() as usize]);
        assert!(read(&two, 0, 6 * page()) == two_has);
        assert_eq!(two.attach(0, &second).unwrap(), 4 * page());
        assert!(read(&two, 0, 4 * page()) == bytes[4 * page() as usize..][..4 * page() as usize]);
        assert!(two.attach((PAGES - 1) * page(), &first).is_err(), "no room");
        let plain = CpuMemory::new(PAGES * page(), &budget).unwrap();
        assert!(plain.attach(0, &first).is_err());
        assert!(!plain.freeze());
    }

    #[test]
    fn overlapping_copies_go_the_right_way_round() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        let extent = shared(&one, 4 * page(), 4 * page());
        for (to, from) in [(3 * page(), 2 * page() + 5), (page() + 5, 2 * page())] {
            let two = weights(&budget, &bytes);
            two.freeze();
            two.attach(4 * page(), &extent).unwrap();
            two.copy_from(to, &two, from, 5 * page()).unwrap();
            let mut expected = bytes.clone();
            expected.copy_within(from as usize..(from + 5 * page()) as usize, to as usize);
            assert!(read(&two, 0, PAGES * page()) == expected);
        }
        let mut out = vec![0; 4 * page() as usize];
        extent.read(0, &mut out).unwrap();
        assert!(out == bytes[4 * page() as usize..][..4 * page() as usize]);
    }

    #[test]
    fn copies_of_what_others_have_need_room() {
        let budget = Arc::new(Budget::new(Some(3 * PAGES * page())));
        let bytes = content(2 * PAGES * page());
        let one = weights(&budget, &bytes);
        let extent = shared(&one, 0, 2 * PAGES * page());
        assert!(matches!(
            one.fill(0, 1, 1),
            Err(EngineError::OutOfMemory { .. })
        ));
        assert!(one.is_unmodified());
        drop(extent);
        one.fill(0, 1, 1).unwrap();
        assert_eq!(
            budget.used(),
            2 * PAGES * page(),
            "no other thread had them"
        );
        drop(one);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn extents_do_not_overlap_and_are_frozen() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let one = weights(&budget, &content(PAGES * page()));
        assert!(one.extent(0, page()).is_err(), "not frozen yet");
        one.freeze();
        one.extent(page(), page()).unwrap();
        assert!(one.extent(0, page() + 1).is_err());
        assert!(one.extent(2 * page() - 1, 10).is_err());
        assert!(one.extent(0, 0).is_err());
        assert!(one.extent(u64::MAX, 2).is_err());
        assert!(one.extent((PAGES - 1) * page(), page() + 1).is_err());
        one.extent(0, page()).unwrap();
        one.fill(0, 1, 0).unwrap();
        assert!(one.extent(4 * page(), page()).is_err(), "written to");
    }
}
