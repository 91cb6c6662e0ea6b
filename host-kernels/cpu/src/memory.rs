//! Memory of the CPU engine: regions, charged to a budget.
//!
//! A region is anonymous memory, or a file that a guest maps too. In the second case any byte can
//! change at any time, and neither this module nor the kernels rely on the contents of memory: see
//! "Memory that a guest maps" in `docs/SECURITY.md`.

use std::any::Any;
use std::fs;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::UncheckedAdvice;
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::memfd;

use super::region::{Budget, BudgetCharge, Region, whole_pages};
use super::weights::{CpuExtent, WeightRegion};
use vgpu_engine::{CopyAccount, EngineError, Extent, Memory, SharedMemory, check_range};

/// Granularity of memory files: the smallest page size. Larger page sizes are multiples.
const PAGE: usize = 4096;

/// One zeroed allocation, aligned to pages and so to the alignment of every kernel.
pub(super) struct CpuMemory {
    size: u64,
    kind: CpuMemoryKind,
    /// Shared with the memory that takes the place of this memory, or that this memory replaces.
    charge: Arc<BudgetCharge>,
}

/// The kind of memory.
enum CpuMemoryKind {
    /// No bytes.
    Empty,
    Private(Region),
    /// A file that another process may map.
    Shared(Region),
    /// Weights, which buffers of this process may share.
    Weights(WeightRegion),
}

impl CpuMemory {
    /// Private memory of this process.
    pub(super) fn new(size: u64, budget: &Arc<Budget>) -> Result<CpuMemory, EngineError> {
        if size == 0 {
            return Ok(CpuMemory {
                size,
                kind: CpuMemoryKind::Empty,
                charge: Arc::new(BudgetCharge::take(budget, whole_pages(0))?),
            });
        }
        CpuMemory::mapped(size, budget, |len| {
            Region::for_budget(budget, len).map(CpuMemoryKind::Private)
        })
    }

    /// Memory for weights that takes the place of this memory, with the same charge. `None` if
    /// there are no bytes.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the kernel refuses the mapping.
    pub(super) fn for_weights(&self) -> Result<Option<CpuMemory>, EngineError> {
        let size = self.size;
        if size == 0 {
            return Ok(None);
        }
        let budget = self.charge.budget();
        let region = usize::try_from(size)
            .ok()
            .map(|len| WeightRegion::create(len, budget));
        let Some(region) = region.flatten() else {
            return Err(budget.out_of_memory(size));
        };
        Ok(Some(CpuMemory {
            size,
            kind: CpuMemoryKind::Weights(region),
            charge: Arc::clone(&self.charge),
        }))
    }

    /// Memory for weights; `size > 0`.
    #[cfg(test)]
    pub(super) fn weights(size: u64, budget: &Arc<Budget>) -> Result<CpuMemory, EngineError> {
        CpuMemory::mapped(size, budget, |len| {
            WeightRegion::create(len, budget).map(CpuMemoryKind::Weights)
        })
    }

    /// Memory that a guest may map too; `size > 0`.
    pub(super) fn shared(size: u64, budget: &Arc<Budget>) -> Result<SharedMemory, EngineError> {
        let mut sealed = None;
        let memory = CpuMemory::mapped(size, budget, |len| {
            let pages = len.checked_next_multiple_of(PAGE)?;
            let file = memfd::sealed("vgpu-buffer", pages).ok()?;
            let region = Region::shared_for_budget(budget, file.as_fd(), len)?;
            sealed = Some((file, pages as u64));
            Some(CpuMemoryKind::Shared(region))
        })?;
        let Some((file, size)) = sealed else {
            unreachable!("`mapped` has called the closure, or failed");
        };
        Ok(SharedMemory {
            memory: Arc::new(memory),
            file,
            size,
        })
    }

    fn mapped(
        size: u64,
        budget: &Arc<Budget>,
        map: impl FnOnce(usize) -> Option<CpuMemoryKind>,
    ) -> Result<CpuMemory, EngineError> {
        let charge = BudgetCharge::take(budget, whole_pages(size))?;
        match usize::try_from(size).ok().and_then(map) {
            Some(kind) => Ok(CpuMemory {
                size,
                kind,
                charge: Arc::new(charge),
            }),
            None => Err(charge.refused()),
        }
    }

    /// The weights.
    ///
    /// # Errors
    /// [`EngineError::ForeignMemory`] for memory of another kind.
    pub(super) fn as_weights(&self) -> Result<&WeightRegion, EngineError> {
        match &self.kind {
            CpuMemoryKind::Weights(weights) => Ok(weights),
            _ => Err(EngineError::ForeignMemory),
        }
    }

    /// The address of `len` contiguous bytes, for reading. The address is valid until
    /// [`moves`](CpuMemory::moves) changes.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`] if the range does not lie inside. For weights that have to be
    /// copied: [`EngineError::OutOfMemory`], and [`EngineError::Cancelled`] once `is_cancelled`,
    /// which is asked before each 4 MiB, has returned `true`.
    pub(super) fn locate(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<*mut u8, EngineError> {
        self.address(offset, len, |weights, range| {
            weights.locate(range, is_cancelled)
        })
    }

    /// As [`locate`](CpuMemory::locate), for writing.
    ///
    /// # Errors
    /// As [`locate`](CpuMemory::locate).
    pub(super) fn own(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<*mut u8, EngineError> {
        self.address(offset, len, |weights, range| {
            weights.own(range, is_cancelled)
        })
    }

    /// The address of `len` contiguous bytes, which `of_weights` returns for weights.
    fn address(
        &self,
        offset: u64,
        len: u64,
        of_weights: impl FnOnce(&WeightRegion, Range<u64>) -> Result<*mut u8, EngineError>,
    ) -> Result<*mut u8, EngineError> {
        check_range(offset, len, self.size)?;
        match &self.kind {
            CpuMemoryKind::Empty => Ok(NonNull::dangling().as_ptr()),
            CpuMemoryKind::Private(region) | CpuMemoryKind::Shared(region) => {
                Ok(region.as_ptr().wrapping_add(offset as usize))
            }
            CpuMemoryKind::Weights(weights) => of_weights(weights, offset..offset + len),
        }
    }

    /// How often addresses of bytes have changed.
    pub(super) fn moves(&self) -> u64 {
        self.as_weights().map_or(0, WeightRegion::moves)
    }

    /// Calls `each` with the address and length of each contiguous part of the bytes, in order.
    fn each_part(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(*mut u8, usize),
    ) -> Result<(), EngineError> {
        match &self.kind {
            CpuMemoryKind::Weights(weights) => {
                check_range(offset, len, self.size)?;
                let parts = weights.parts(offset..offset + len);
                parts
                    .into_iter()
                    .for_each(|(address, len)| each(address, len));
            }
            _ => each(self.locate(offset, len, &|| false)?, len as usize),
        }
        Ok(())
    }
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        if let CpuMemoryKind::Shared(region) = &self.kind {
            // SAFETY: the memory is dropped, so this process no longer uses its bytes. The pages
            // are removed from the file, which a guest may keep, because they are no longer
            // charged.
            unsafe { region.discard(0..self.size, UncheckedAdvice::Remove) };
        }
    }
}

impl Memory for CpuMemory {
    fn size(&self) -> u64 {
        self.size
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        let to = self.own(offset, data.len() as u64, &|| false)?;
        // SAFETY: `own` returns the address of `data.len()` writable bytes, to which no reference
        // exists.
        unsafe { BytesMut::from_raw(to, data.len()) }.copy_from(data);
        Ok(())
    }

    fn read(&self, offset: u64, out: BytesMut<'_>) -> Result<(), EngineError> {
        let mut rest = out;
        let mut done = 0;
        self.each_part(offset, rest.len() as u64, |from, len| {
            // SAFETY: the lengths of all parts add up to the length of `out`, so `out` has `len`
            // bytes from `done` on.
            let to = unsafe { BytesMut::from_raw(rest.as_mut_ptr().wrapping_add(done), len) };
            // SAFETY: `each_part` returns the address of `len` readable bytes.
            { to }.copy_from(unsafe { Bytes::from_raw(from, len) });
            done += len;
        })
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        let to = self.own(offset, len, &|| false)?;
        // SAFETY: `own` returns the address of `len` writable bytes, to which no reference exists.
        unsafe { to.write_bytes(value, len as usize) };
        Ok(())
    }

    fn copy_from(
        &self,
        offset: u64,
        source: &dyn Memory,
        source_offset: u64,
        len: u64,
    ) -> Result<(), EngineError> {
        let source = source
            .as_any()
            .downcast_ref::<CpuMemory>()
            .ok_or(EngineError::ForeignMemory)?;
        check_range(source_offset, len, source.size)?;
        check_range(offset, len, self.size)?;
        let overlap = std::ptr::eq(self, source) && offset.abs_diff(source_offset) < len;
        if overlap {
            // In contiguous memory, `std::ptr::copy` handles the overlap.
            let first = offset.min(source_offset);
            let len_of_both = offset.max(source_offset) + len - first;
            let all = self.own(first, len_of_both, &|| false)?;
            let at = |offset: u64| all.wrapping_add((offset - first) as usize);
            // SAFETY: `all` has the bytes of both ranges, contiguous and writable, to which no
            // reference exists.
            unsafe { std::ptr::copy(at(source_offset), at(offset), len as usize) };
            return Ok(());
        }
        let mut to = self.own(offset, len, &|| false)?;
        source.each_part(source_offset, len, |from, len| {
            // SAFETY: `each_part` returns the address of `len` readable bytes, and `own` the
            // address of the writable bytes of all parts. Both ranges are disjoint, as checked
            // above.
            unsafe { to.copy_from_nonoverlapping(from, len) };
            to = to.wrapping_add(len);
        })
    }

    fn freeze(&self) -> bool {
        self.as_weights().map(WeightRegion::freeze).is_ok()
    }

    fn extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        Ok(self.as_weights()?.extent(offset, len)?)
    }

    fn begin_extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size)?;
        Ok(self.as_weights()?.begin_extent(offset, len)?)
    }

    fn append(&self, extent: &Arc<dyn Extent>, data: Bytes<'_>) -> Result<(), EngineError> {
        self.as_weights()?.append(&of_this_engine(extent)?, data)
    }

    fn is_untouched(&self, offset: u64, len: u64) -> bool {
        check_range(offset, len, self.size).is_ok()
            && self
                .as_weights()
                .is_ok_and(|weights| weights.is_untouched(offset..offset + len))
    }

    fn bytes_in_use(&self) -> u64 {
        self.as_weights()
            .map_or(self.size, |weights| weights.bytes_in_use())
    }

    fn unshare(
        &self,
        offset: u64,
        len: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), EngineError> {
        check_range(offset, len, self.size)?;
        match &self.kind {
            CpuMemoryKind::Weights(weights) => weights.unshare(offset..offset + len, is_cancelled),
            CpuMemoryKind::Empty | CpuMemoryKind::Private(_) | CpuMemoryKind::Shared(_) => Ok(()),
        }
    }

    fn attach(
        &self,
        offset: u64,
        extent: &Arc<dyn Extent>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, EngineError> {
        check_range(offset, extent.size(), self.size)?;
        { self.as_weights()? }.attach(offset, &of_this_engine(extent)?, is_cancelled)
    }

    fn hold(&self, lease: Box<dyn Any + Send + Sync>) {
        if let Ok(weights) = self.as_weights() {
            weights.hold(lease);
        }
    }

    fn charge_copies(&self, account: Arc<dyn CopyAccount>) {
        if let Ok(weights) = self.as_weights() {
            weights.charge_copies(account);
        }
    }

    fn is_unmodified(&self) -> bool {
        self.as_weights().is_ok_and(WeightRegion::is_unmodified)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The extent as this engine's type.
///
/// # Errors
/// [`EngineError::ForeignMemory`] if it belongs to another engine.
fn of_this_engine(extent: &Arc<dyn Extent>) -> Result<Arc<CpuExtent>, EngineError> {
    let extent = Arc::clone(extent).into_any().downcast::<CpuExtent>();
    extent.map_err(|_| EngineError::ForeignMemory)
}

/// The size of the largest buffer that is shared, in bytes. Linux backs memory files with huge
/// pages only if configured to, and without them the first access to a page costs ten times as much
/// per byte: too much for weights, which are written once. Buffers that are accessed with every
/// token are smaller.
pub(super) fn max_shared() -> u64 {
    const WITHOUT_LARGE_PAGES: u64 = 64 << 20;
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let setting = setting.unwrap_or_default();
    let has_large_pages = ["[always]", "[advise]", "[within_size]", "[force]"]
        .iter()
        .any(|chosen| setting.contains(chosen));
    match has_large_pages {
        true => u64::MAX,
        false => WITHOUT_LARGE_PAGES,
    }
}

/// The processor's name from `/proc/cpuinfo`, with the vector extensions that the kernels can use.
pub(super) fn processor_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or("CPU", |(_, name)| name).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_counted_and_freed() {
        let budget = Arc::new(Budget::new(Some(1 << 20)));
        let memory = CpuMemory::new(1 << 19, &budget).unwrap();
        assert_eq!(memory.locate(0, 1, &|| false).unwrap() as usize % 256, 0);
        let mut bytes = vec![1u8; 1 << 19];
        memory.read(0, bytes.as_mut_slice().into()).unwrap();
        assert!(bytes.iter().all(|&b| b == 0));
        assert!(matches!(
            CpuMemory::new((1 << 19) + 1, &budget),
            Err(EngineError::OutOfMemory {
                wanted: 528_384, // whole pages
                ..
            })
        ));
        drop(memory);
        assert_eq!(budget.used(), 0);
        assert!(CpuMemory::new(1 << 20, &budget).is_ok());
        assert!(CpuMemory::new(u64::MAX, &budget).is_err());
    }

    #[test]
    fn shared_memory_is_visible_to_both_sides_until_it_is_freed() {
        let budget = Arc::new(Budget::new(Some(1 << 20)));
        let SharedMemory { memory, file, size } = CpuMemory::shared(5000, &budget).unwrap();
        assert_eq!((memory.size(), size), (5000, 8192));
        // SAFETY: the file has 8192 bytes and is sealed against shrinking.
        let mut guest = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        guest[4990..5000].fill(7);
        let mut seen = [0; 10];
        memory.read(4990, (&mut seen[..]).into()).unwrap();
        assert_eq!(seen, [7; 10]);
        assert!(memory.read(4991, (&mut seen[..]).into()).is_err());
        // A guest that keeps its mapping does not keep the pages.
        assert_eq!(budget.used(), 8192);
        drop(memory);
        assert_eq!(budget.used(), 0);
        assert_eq!(guest[4990..5000], [0; 10]);
        let blocks = rustix::fs::fstat(&file).unwrap().st_blocks;
        assert!(blocks <= 8, "{blocks} blocks: only the page just read");
        // Nobody can take pages away under the executor.
        for size in [0, 4096, 12288] {
            rustix::fs::ftruncate(&file, size).unwrap_err();
        }
    }

    #[test]
    fn a_guest_can_neither_resize_nor_seal_the_file_of_a_buffer() {
        use rustix::fs::{FallocateFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate};

        let budget = Arc::new(Budget::new(Some(1 << 20)));
        let SharedMemory { memory, file, size } = CpuMemory::shared(8192, &budget).unwrap();
        for size in [0, 1, size - 1, size + 1, 2 * size] {
            ftruncate(&file, size).unwrap_err();
        }
        fallocate(&file, FallocateFlags::empty(), size, 4096).unwrap_err();
        fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096).unwrap_err();
        // A seal against writes would fail the writes of the executor.
        for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
            fcntl_add_seals(&file, seal).unwrap_err();
        }
        // Holes of both kinds: of the file, and of a mapping of it.
        memory.write(0, (&[7; 8192][..]).into()).unwrap();
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, hole, 0, 4096).unwrap();
        // SAFETY: the file has 8192 bytes and is sealed against shrinking.
        let guest = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        // SAFETY: nobody has a reference to bytes of the mapping, and nobody needs its second page.
        unsafe { guest.unchecked_advise_range(UncheckedAdvice::Remove, 4096, 4096) }.unwrap();
        let mut seen = [1; 8192];
        memory.read(0, (&mut seen[..]).into()).unwrap();
        assert_eq!(seen, [0; 8192]);
        memory.write(4000, (&[9; 200][..]).into()).unwrap();
        assert_eq!(guest[4000..4200], [9; 200]);
    }

    #[test]
    fn accesses_outside_the_buffer_are_refused() {
        let budget = Arc::new(Budget::new(Some(1 << 20)));
        let memory = CpuMemory::new(100, &budget).unwrap();
        memory.write(90, (&[7u8; 10][..]).into()).unwrap();
        assert!(memory.write(91, (&[7u8; 10][..]).into()).is_err());
        assert!(memory.fill(u64::MAX, 2, 0).is_err());
        memory.copy_from(85, &memory, 90, 10).unwrap();
        let mut tail = [0u8; 15];
        memory.read(85, (&mut tail[..]).into()).unwrap();
        assert_eq!(tail, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
        let empty = CpuMemory::new(0, &budget).unwrap();
        empty.write(0, (&[][..]).into()).unwrap();
    }
}
