//! Memory for weights: pages of files that several buffers map, copy-on-write by the kernel.
//!
//! A buffer for weights is a file in memory of its own, which nobody outside this process ever gets. As long as it is
//! filled, the file is mapped shared and writes go into it. Freezing replaces that mapping, at the same address, by a
//! private one: the file does not change any more, and a later write makes the kernel copy the page it hits. So the
//! whole pages of a frozen range (an *extent*) can be mapped by other buffers, too, which neither see each other's
//! writes nor have to know of each other.
//!
//! Pages go when nobody needs them: those under an adopted extent at once, those of a buffer that is gone unless an
//! extent lies in them.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FallocateFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};

use vgpu_transport::bytes::Bytes;
use vgpu_transport::window::memory::sealed_file_named;

use super::memory::Budget;
use crate::engine::{EngineError, Extent, check_range};

/// Bytes copied at once where pages cannot be mapped.
const PIECE: usize = 256 << 10;

/// Bytes from which on a system call is worth it.
const WORTH_A_CALL: usize = 16 << 10;

/// Bytes of a page.
pub(super) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// The pages of a buffer for weights.
pub(super) struct WeightPages {
    file: Arc<PageFile>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_frozen: bool,
    /// Something was written after freezing, or freezing has failed half-way.
    is_written: bool,
    /// What is mapped of other files: whole pages, as offsets in the buffer.
    adopted: Vec<(Range<u64>, Arc<CpuExtent>)>,
    /// Extents of this file. They stay for as long as the buffer, whether others map them or not.
    own: Vec<Arc<CpuExtent>>,
}

/// A file in memory, and who needs which of its pages.
struct PageFile {
    file: File,
    /// Whole pages.
    len: u64,
    uses: Mutex<Uses>,
}

struct Uses {
    /// The buffer that the file was made for is there.
    has_owner: bool,
    /// First byte of an extent to one past its last. They are disjoint.
    extents: BTreeMap<u64, u64>,
}

/// A frozen range of a file.
pub(super) struct CpuExtent {
    file: Arc<PageFile>,
    offset: u64,
    len: u64,
}

impl WeightPages {
    /// A file of zeros for `size` bytes, and a shared mapping of it.
    pub(super) fn create(size: usize) -> Option<(WeightPages, *mut c_void)> {
        let len = (size as u64).checked_next_multiple_of(page())?;
        let file = sealed_file_named("vgpu-weights", usize::try_from(len).ok()?).ok()?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists. The file is
        // sealed: no access to its pages can fault because somebody has shrunk it.
        let mapping = unsafe {
            mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let uses = Uses {
            has_owner: true,
            extents: BTreeMap::new(),
        };
        let pages = WeightPages {
            file: Arc::new(PageFile {
                file: File::from(file),
                len,
                uses: Mutex::new(uses),
            }),
            state: Mutex::default(),
        };
        Some((pages, mapping.ok()?))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_pristine(&self) -> bool {
        let state = self.state();
        state.is_frozen && !state.is_written
    }

    /// Somebody is about to write. The first time after freezing that may make a copy of every page, for which there
    /// has to be room: `room` is asked for it.
    pub(super) fn write(
        &self,
        room: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let mut state = self.state();
        if state.is_frozen && !state.is_written {
            room()?;
            state.is_written = true;
        }
        Ok(())
    }

    /// Writes through the file, as long as the mapping shows it. `false` where it does not, and nothing was written.
    ///
    /// A page that is written whole by the kernel needs no fault and is not zeroed before: half the time of a first
    /// write through a mapping of small pages. So only for pieces with many pages.
    pub(super) fn write_through(&self, offset: u64, data: Bytes<'_>) -> bool {
        let end = offset + data.len() as u64;
        let state = self.state();
        let is_ours =
            |(range, _): &(Range<u64>, Arc<CpuExtent>)| end <= range.start || range.end <= offset;
        if data.len() < WORTH_A_CALL || state.is_frozen || !state.adopted.iter().all(is_ours) {
            return false;
        }
        let mut done = 0;
        while done < data.len() {
            let (from, left) = (data.as_ptr().wrapping_add(done), data.len() - done);
            let Ok(at) = i64::try_from(offset + done as u64) else {
                return false;
            };
            // SAFETY: `Bytes` vouches for the bytes, of which no reference is made: the kernel copies them, whoever
            // changes them meanwhile.
            let written =
                unsafe { libc::pwrite(self.file.file.as_raw_fd(), from.cast(), left, at) };
            match usize::try_from(written) {
                Ok(written) if written > 0 => done += written,
                // The mapping does it, or says what is wrong.
                _ => return false,
            }
        }
        true
    }

    /// Whether a frozen buffer was written to, so that [`write`](WeightPages::write) has asked for room.
    pub(super) fn has_copies(&self) -> bool {
        let state = self.state();
        state.is_frozen && state.is_written
    }

    /// Keeps the file as it is from now on.
    ///
    /// # Safety
    ///
    /// `base` must be the mapping that came with these pages, of `size` bytes, to memory of which there is no
    /// reference, and which nobody writes during the call.
    pub(super) unsafe fn freeze(&self, base: *mut u8, size: u64) -> Result<(), EngineError> {
        let mut state = self.state();
        if state.is_frozen {
            return Ok(());
        }
        let mut adopted: Vec<Range<u64>> = state.adopted.iter().map(|(r, _)| r.clone()).collect();
        adopted.sort_unstable_by_key(|range| range.start);
        let end = size.next_multiple_of(page());
        adopted.push(end..end);
        let mut at = 0;
        for range in adopted {
            if at < range.start {
                // SAFETY: the caller's promise; the pages shown are the same as before.
                let mapped = unsafe { map_over(base, at..range.start, &self.file, at) };
                if let Err(error) = mapped {
                    return Err(EngineError::Device {
                        message: format!("mapping weights anew: {error}"),
                    });
                }
            }
            at = at.max(range.end);
        }
        state.is_frozen = true;
        Ok(())
    }

    /// A range of the file, for others to map.
    pub(super) fn extent(&self, offset: u64, len: u64) -> Result<Arc<CpuExtent>, EngineError> {
        let mut state = self.state();
        let range = offset..offset.saturating_add(len);
        let is_own = |other: &Range<u64>| other.end <= range.start || range.end <= other.start;
        let fits = state.is_frozen
            && !state.is_written
            && len > 0
            && range.end <= self.file.len
            && state.adopted.iter().all(|(other, _)| is_own(other))
            && state.own.iter().all(|other| is_own(&other.range()));
        if !fits {
            return Err(EngineError::OutOfBounds {
                offset,
                len,
                size: self.file.len,
            });
        }
        self.file.uses().extents.insert(range.start, range.end);
        let extent = Arc::new(CpuExtent {
            file: Arc::clone(&self.file),
            offset,
            len,
        });
        state.own.push(Arc::clone(&extent));
        Ok(extent)
    }

    /// Maps an extent's whole pages where its bytes belong, and copies the rest; or copies all, where the pages do
    /// not lie right or there are too many mappings. Returns the bytes mapped.
    ///
    /// # Safety
    ///
    /// As for [`freeze`](WeightPages::freeze); `offset` and the extent's length lie inside `size`. In frozen memory
    /// the bytes are those of the extent already.
    pub(super) unsafe fn adopt(
        &self,
        base: *mut u8,
        offset: u64,
        extent: &Arc<CpuExtent>,
        budget: &Budget,
    ) -> Result<u64, EngineError> {
        let mut state = self.state();
        if state.is_written || Arc::ptr_eq(&extent.file, &self.file) {
            return Ok(0);
        }
        let end = offset + extent.len;
        let is_in_phase = (offset ^ extent.offset).is_multiple_of(page());
        let mut pages = offset.next_multiple_of(page())..end - end % page();
        if !is_in_phase || pages.is_empty() || !budget.take_mapping() {
            pages = offset..offset;
        } else {
            let from = extent.offset + (pages.start - offset);
            // SAFETY: the caller's promise. The extent's pages never change, so in frozen memory the mapping shows
            // what it showed before, and in other memory nothing depends on it yet.
            let mapped = unsafe { map_over(base, pages.clone(), &extent.file, from) };
            if mapped.is_err() {
                budget.give_mapping_back();
                pages = offset..offset;
            }
        }
        if !state.is_frozen {
            for part in [offset..pages.start, pages.end..end] {
                // SAFETY: the caller's promise.
                unsafe { extent.copy_to(base, offset, part)? };
            }
        }
        if pages.is_empty() {
            return Ok(0);
        }
        let inside = |range: &Range<u64>| pages.start <= range.start && range.end <= pages.end;
        state.own.retain(|own| {
            let own = own.range();
            own.end <= offset || end <= own.start
        });
        state.adopted.retain(|(range, _)| {
            let is_covered = inside(range);
            if is_covered {
                budget.give_mapping_back();
            }
            !is_covered
        });
        self.file.release(pages.clone());
        let bytes = pages.end - pages.start;
        state.adopted.push((pages, Arc::clone(extent)));
        Ok(bytes)
    }

    /// The buffer goes: called when it is unmapped.
    pub(super) fn close(&self, budget: &Budget) {
        let mut state = self.state();
        state
            .adopted
            .drain(..)
            .for_each(|_| budget.give_mapping_back());
        state.own.clear();
        self.file.uses().has_owner = false;
        self.file.release(0..self.file.len);
    }
}

/// Shows whole pages of `file` at `range` of the mapping at `base`: what is there goes away.
///
/// # Safety
///
/// The range must be whole pages of a mapping of our own, to which there are no references; nobody relies on what it
/// held, unless the pages hold the same.
unsafe fn map_over(
    base: *mut u8,
    range: Range<u64>,
    file: &PageFile,
    from: u64,
) -> rustix::io::Result<()> {
    let len = (range.end - range.start) as usize;
    let at = base.wrapping_add(range.start as usize).cast::<c_void>();
    // SAFETY: the caller's promise. The file is never shrunk, and the range lies in it.
    unsafe {
        mmap(
            at,
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::FIXED,
            &file.file,
            from,
        )?;
        // Advice: without large pages everything still works.
        let _ = madvise(at, len, Advice::LinuxHugepage);
    }
    Ok(())
}

impl PageFile {
    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives back the pages of a range in which no extent lies.
    fn release(&self, range: Range<u64>) {
        let uses = self.uses();
        let first = uses.extents.range(..=range.start).next_back();
        let first = first.map_or(range.start, |(&start, _)| start);
        let mut at = range.start;
        for (&start, &end) in uses.extents.range(first..range.end) {
            self.punch(at..(start - start % page()).min(range.end));
            at = at.max(end.next_multiple_of(page()));
        }
        self.punch(at..range.end);
    }

    fn punch(&self, range: Range<u64>) {
        if range.start < range.end {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let len = range.end - range.start;
            let punched = rustix::fs::fallocate(&self.file, mode, range.start, len);
            debug_assert!(punched.is_ok(), "giving back pages: {punched:?}");
        }
    }
}

impl CpuExtent {
    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// Copies bytes `part` of a buffer at `base`, in which this extent begins at `offset`.
    ///
    /// # Safety
    ///
    /// The part lies in the buffer's mapping, to which there are no references.
    unsafe fn copy_to(
        &self,
        base: *mut u8,
        offset: u64,
        part: Range<u64>,
    ) -> Result<(), EngineError> {
        let mut piece = vec![0; PIECE.min((part.end - part.start) as usize)];
        let mut at = part.start;
        while at < part.end {
            let len = PIECE.min((part.end - at) as usize);
            self.read(at - offset, &mut piece[..len])?;
            // SAFETY: the caller's promise.
            unsafe {
                let to = base.wrapping_add(at as usize);
                std::ptr::copy_nonoverlapping(piece.as_ptr(), to, len);
            }
            at += len as u64;
        }
        Ok(())
    }
}

impl Extent for CpuExtent {
    fn size(&self) -> u64 {
        self.len
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), EngineError> {
        check_range(offset, out.len() as u64, self.len)?;
        let read = self.file.file.read_exact_at(out, self.offset + offset);
        read.map_err(|error| EngineError::Device {
            message: format!("reading weights: {error}"),
        })
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Drop for CpuExtent {
    fn drop(&mut self) {
        let has_owner = {
            let mut uses = self.file.uses();
            uses.extents.remove(&self.offset);
            uses.has_owner
        };
        // An owner still has these pages mapped as its own.
        if !has_owner {
            let Range { start, end } = self.range();
            let pages = start - start % page()..end.next_multiple_of(page());
            self.file.release(pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::CpuMemory;
    use super::*;
    use crate::engine::Memory;

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

    /// Bytes of memory that a buffer's own file holds.
    fn held(memory: &CpuMemory) -> u64 {
        let file = &memory.weight_pages().unwrap().file;
        512 * rustix::fs::fstat(&file.file).unwrap().st_blocks as u64
    }

    fn shared(one: &CpuMemory, offset: u64, len: u64) -> Arc<dyn Extent> {
        assert!(one.freeze().unwrap());
        one.extent(offset, len).unwrap()
    }

    #[test]
    fn two_buffers_hold_pages_once_and_do_not_see_each_other_write() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        let (offset, len) = (256, PAGES * page() - 512);
        let extent = shared(&one, offset, len);
        let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
        assert_eq!(
            two.adopt(offset, &extent).unwrap(),
            (PAGES - 2) * page(),
            "all but the first and the last page"
        );
        assert_eq!(read(&two, offset, len), bytes[256..][..len as usize]);
        assert_eq!(read(&two, 0, 256), [0; 256]);
        assert_eq!(held(&two), 2 * page());

        // Each writes; neither sees the other's.
        two.write(3 * page(), (&[1; 10][..]).into()).unwrap();
        two.fill(5 * page(), 10, 2).unwrap();
        one.fill(7 * page(), page(), 3).unwrap();
        one.copy_from(9 * page(), &one, 0, 10).unwrap();
        let mut two_has = bytes.clone();
        two_has[..256].fill(0);
        two_has[offset as usize + len as usize..].fill(0);
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
    fn pages_live_as_long_as_somebody_needs_them() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        let first = shared(&one, 0, 4 * page());
        let second = one.extent(4 * page() + 256, 4 * page()).unwrap();
        let two = CpuMemory::weights(PAGES * page(), &budget).unwrap();
        two.adopt(4 * page() + 256, &second).unwrap();
        drop(first);
        let file = Arc::clone(&one.weight_pages().unwrap().file);
        let pages = || rustix::fs::fstat(&file.file).unwrap().st_blocks as u64 * 512 / page();
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
        assert_eq!(budget.info().free, 64 << 20);
    }

    #[test]
    fn what_two_have_uploaded_is_merged() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let (one, two) = (weights(&budget, &bytes), weights(&budget, &bytes));
        let extent = shared(&one, 0, PAGES * page());
        let own = shared(&two, 0, PAGES * page());
        assert_eq!(held(&two), PAGES * page());
        assert_eq!(two.adopt(0, &extent).unwrap(), PAGES * page());
        // Somebody may still hold what is held twice now; when not, it goes.
        drop(own);
        two.adopt(0, &extent).unwrap();
        assert_eq!(held(&two), 0);
        assert!(read(&two, 0, PAGES * page()) == bytes);
        // What has changed is not replaced by what it was.
        let three = weights(&budget, &bytes);
        three.freeze().unwrap();
        three.fill(0, 1, !bytes[0]).unwrap();
        assert_eq!(three.adopt(0, &extent).unwrap(), 0);
        assert_eq!(read(&three, 0, 1), [!bytes[0]]);
    }

    #[test]
    fn bytes_that_lie_otherwise_are_copied() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let bytes = content(PAGES * page());
        let one = weights(&budget, &bytes);
        let extent = shared(&one, 0, PAGES * page());
        let two = CpuMemory::weights((PAGES + 1) * page(), &budget).unwrap();
        assert_eq!(two.adopt(256, &extent).unwrap(), 0);
        assert!(read(&two, 256, PAGES * page()) == bytes);
        assert!(two.adopt(2 * page(), &extent).is_err(), "it does not fit");
        let plain = CpuMemory::new(PAGES * page(), &budget).unwrap();
        assert!(plain.adopt(0, &extent).is_err());
        assert!(!plain.freeze().unwrap());
    }

    #[test]
    fn copies_of_written_pages_have_to_fit_the_budget() {
        let budget = Arc::new(Budget::new(Some(3 * PAGES * page())));
        let one = weights(&budget, &content(2 * PAGES * page()));
        one.freeze().unwrap();
        assert!(matches!(
            one.fill(0, 1, 1),
            Err(EngineError::OutOfMemory { .. })
        ));
        assert!(one.is_pristine());
        drop(one);
        let one = weights(&budget, &content(PAGES * page()));
        one.freeze().unwrap();
        one.fill(0, 1, 1).unwrap();
        assert_eq!(budget.info().free, PAGES * page());
        drop(one);
        assert_eq!(budget.info().free, 3 * PAGES * page());
    }

    #[test]
    fn extents_do_not_overlap_and_are_frozen() {
        let budget = Arc::new(Budget::new(Some(64 << 20)));
        let one = weights(&budget, &content(PAGES * page()));
        assert!(one.extent(0, page()).is_err(), "not frozen yet");
        one.freeze().unwrap();
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
