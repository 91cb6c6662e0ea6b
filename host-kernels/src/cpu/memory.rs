//! Memory of the CPU engine: mappings, counted against a budget.
//!
//! A mapping is anonymous, or of a file that a guest maps too. In the second case any byte can change at any time,
//! and nothing here or in the kernels relies on what memory holds: see "Memory that the guest maps" in
//! `docs/ARCHITECTURE.md`.

use std::any::Any;
use std::ffi::c_void;
use std::fs;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vgpu_transport::bytes::{Bytes, BytesMut};
use vgpu_transport::window::memory::sealed_file_named;

use super::extents::{CpuExtent, WeightPages};
use crate::engine::{EngineError, Extent, Memory, MemoryInfo, SharedMemory, check_range};

/// Files have whole pages. (Of the smallest size there is; larger ones are multiples.)
const PAGE: usize = 4096;

/// How much the engine may hand out, and how much it has.
pub(super) struct Budget {
    total: u64,
    used: AtomicU64,
    /// Ranges of files that are mapped into buffers for weights. Linux limits a process's mappings.
    mappings: AtomicU64,
    most_mappings: u64,
}

impl Budget {
    /// A budget of `limit` bytes, or of what the machine and its control group have.
    pub(super) fn new(limit: Option<u64>) -> Budget {
        let total = limit.unwrap_or_else(|| physical_memory().min(cgroup_limit()));
        Budget {
            total,
            used: AtomicU64::new(0),
            mappings: AtomicU64::new(0),
            // Each may cut another in two, and others need some.
            most_mappings: max_map_count() / 4,
        }
    }

    /// Counts a range mapped into a buffer. `false` if there are too many.
    pub(super) fn take_mapping(&self) -> bool {
        let fits = |count: u64| (count < self.most_mappings).then_some(count + 1);
        self.mappings
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .is_ok()
    }

    pub(super) fn give_mapping_back(&self) {
        self.mappings.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn info(&self) -> MemoryInfo {
        let left = self.total.saturating_sub(self.used.load(Ordering::Relaxed));
        MemoryInfo {
            total: self.total,
            free: left.min(available_memory()),
        }
    }

    fn take(&self, size: u64) -> Result<(), EngineError> {
        let MemoryInfo { total, free } = self.info();
        let fits = |used: u64| {
            used.checked_add(size)
                .filter(|&used| used <= total && size <= free)
        };
        match self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
        {
            Ok(_) => Ok(()),
            Err(_) => Err(EngineError::OutOfMemory {
                wanted: size,
                free,
                total,
            }),
        }
    }

    fn give_back(&self, size: u64) {
        self.used.fetch_sub(size, Ordering::Relaxed);
    }
}

/// One zeroed allocation. Page-aligned, so that any alignment a kernel wants holds.
pub(super) struct CpuMemory {
    ptr: NonNull<u8>,
    size: usize,
    budget: Arc<Budget>,
    kind: Kind,
}

/// What is behind a mapping.
enum Kind {
    Private,
    /// A file that another process may map.
    Shared,
    /// Files that other buffers of this process may map.
    Weights(WeightPages),
}

// SAFETY: the mapping belongs to this value alone and may be used from any thread; the order of
// accesses is the caller's contract (see `Memory`). A guest that maps the same file may break it; its accesses
// are another process's, to memory of which no reference exists.
unsafe impl Send for CpuMemory {}
// SAFETY: as above.
unsafe impl Sync for CpuMemory {}

impl CpuMemory {
    /// Memory of this process alone.
    pub(super) fn new(size: u64, budget: &Arc<Budget>) -> Result<CpuMemory, EngineError> {
        if size == 0 {
            return Ok(CpuMemory {
                ptr: NonNull::dangling(),
                size: 0,
                budget: Arc::clone(budget),
                kind: Kind::Private,
            });
        }
        CpuMemory::mapped(size, budget, |len| {
            // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
            let mapping = unsafe {
                mmap_anonymous(
                    std::ptr::null_mut(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE,
                )
            };
            Some((mapping.ok()?, Kind::Private))
        })
    }

    /// Memory for weights. `size` is not 0.
    pub(super) fn weights(size: u64, budget: &Arc<Budget>) -> Result<CpuMemory, EngineError> {
        CpuMemory::mapped(size, budget, |len| {
            let (pages, mapping) = WeightPages::create(len)?;
            Some((mapping, Kind::Weights(pages)))
        })
    }

    /// Memory that a guest may map too. `size` is not 0.
    pub(super) fn shared(size: u64, budget: &Arc<Budget>) -> Result<SharedMemory, EngineError> {
        let mut sealed = None;
        let memory = CpuMemory::mapped(size, budget, |len| {
            let pages = len.checked_next_multiple_of(PAGE)?;
            let file = sealed_file_named("vgpu-buffer", pages).ok()?;
            // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists. The file is
            // sealed: no access to its pages can fault because somebody has shrunk it.
            let mapping = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    &file,
                    0,
                )
            };
            sealed = Some((file, pages as u64));
            Some((mapping.ok()?, Kind::Shared))
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
        map: impl FnOnce(usize) -> Option<(*mut c_void, Kind)>,
    ) -> Result<CpuMemory, EngineError> {
        budget.take(size)?;
        let refused = || {
            let MemoryInfo { total, free } = budget.info();
            budget.give_back(size);
            EngineError::OutOfMemory {
                wanted: size,
                free,
                total,
            }
        };
        let len = usize::try_from(size).map_err(|_| refused())?;
        let (ptr, kind) = map(len)
            .and_then(|(ptr, kind)| Some((NonNull::new(ptr.cast::<u8>())?, kind)))
            .ok_or_else(refused)?;
        // Large pages save most TLB misses of a weight matrix; without them everything still works.
        // SAFETY: the range is the mapping just made; the advice does not change its contents.
        let _ = unsafe { madvise(ptr.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(CpuMemory {
            ptr,
            size: len,
            budget: Arc::clone(budget),
            kind,
        })
    }

    /// The first byte. Dangling when the size is 0.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// What is behind it, if it is for weights.
    pub(super) fn weight_pages(&self) -> Option<&WeightPages> {
        match &self.kind {
            Kind::Weights(pages) => Some(pages),
            Kind::Private | Kind::Shared => None,
        }
    }

    /// Somebody is about to write, here or in a plan.
    pub(super) fn will_be_written(&self) -> Result<(), EngineError> {
        match self.weight_pages() {
            Some(pages) => pages.write(|| self.budget.take(self.size as u64)),
            None => Ok(()),
        }
    }

    /// The address of `len` bytes from `offset`, if they lie inside.
    fn range(&self, offset: u64, len: u64) -> Result<*mut u8, EngineError> {
        check_range(offset, len, self.size as u64)?;
        Ok(self.as_ptr().wrapping_add(offset as usize))
    }
}

impl Drop for CpuMemory {
    fn drop(&mut self) {
        if matches!(self.kind, Kind::Shared) {
            // A guest may keep the file: what this process has counted must not stay in it.
            // SAFETY: our own mapping, of which no reference exists; its pages become zero.
            let removed =
                unsafe { madvise(self.ptr.as_ptr().cast(), self.size, Advice::LinuxRemove) };
            debug_assert!(removed.is_ok(), "giving back shared pages: {removed:?}");
        }
        if self.size > 0 {
            // SAFETY: the mapping was made in `mapped` with this size; nothing uses it after its owner.
            let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), self.size) };
            debug_assert!(unmapped.is_ok(), "munmap of our own mapping: {unmapped:?}");
        }
        if let Kind::Weights(pages) = &self.kind {
            if pages.has_copies() {
                self.budget.give_back(self.size as u64);
            }
            pages.close(&self.budget);
        }
        self.budget.give_back(self.size as u64);
    }
}

impl Memory for CpuMemory {
    fn size(&self) -> u64 {
        self.size as u64
    }

    fn write(&self, offset: u64, data: Bytes<'_>) -> Result<(), EngineError> {
        let to = self.range(offset, data.len() as u64)?;
        self.will_be_written()?;
        let is_done = self
            .weight_pages()
            .is_some_and(|pages| pages.write_through(offset, data));
        if !is_done {
            // SAFETY: `range` keeps the bytes inside our mapping, of which no reference exists.
            unsafe { BytesMut::from_raw(to, data.len()) }.copy_from(data);
        }
        Ok(())
    }

    fn read(&self, offset: u64, mut out: BytesMut<'_>) -> Result<(), EngineError> {
        let from = self.range(offset, out.len() as u64)?;
        // SAFETY: `range` keeps the bytes inside our mapping.
        out.copy_from(unsafe { Bytes::from_raw(from, out.len()) });
        Ok(())
    }

    fn fill(&self, offset: u64, len: u64, value: u8) -> Result<(), EngineError> {
        let to = self.range(offset, len)?;
        self.will_be_written()?;
        // SAFETY: `range` keeps the bytes inside our mapping, of which no reference exists.
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
        let from = source.range(source_offset, len)?;
        let to = self.range(offset, len)?;
        self.will_be_written()?;
        // SAFETY: both ranges lie inside their mappings; they may overlap, which `copy` allows.
        unsafe { std::ptr::copy(from, to, len as usize) };
        Ok(())
    }

    fn freeze(&self) -> Result<bool, EngineError> {
        let Some(pages) = self.weight_pages() else {
            return Ok(false);
        };
        // SAFETY: our own mapping, of which no reference exists; that nobody writes is the contract of `Memory`.
        unsafe { pages.freeze(self.as_ptr(), self.size as u64) }?;
        Ok(true)
    }

    fn extent(&self, offset: u64, len: u64) -> Result<Arc<dyn Extent>, EngineError> {
        check_range(offset, len, self.size as u64)?;
        let pages = self.weight_pages().ok_or(EngineError::ForeignMemory)?;
        Ok(pages.extent(offset, len)?)
    }

    fn adopt(&self, offset: u64, extent: &Arc<dyn Extent>) -> Result<u64, EngineError> {
        check_range(offset, extent.size(), self.size as u64)?;
        let pages = self.weight_pages().ok_or(EngineError::ForeignMemory)?;
        let extent = Arc::clone(extent).into_any().downcast::<CpuExtent>();
        let extent = extent.map_err(|_| EngineError::ForeignMemory)?;
        // SAFETY: our own mapping, of which no reference exists, and the range is inside. That nobody writes, and that
        // frozen memory holds the extent's bytes, is the contract of `Memory`.
        unsafe { pages.adopt(self.as_ptr(), offset, &extent, &self.budget) }
    }

    fn is_pristine(&self) -> bool {
        self.weight_pages().is_some_and(WeightPages::is_pristine)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The largest buffer worth sharing. Linux gives files in memory large pages only if it is told to, and without them
/// the first touch of a page costs ten times what it costs in large ones: too much for weights, which are written
/// once. What goes back and forth with every token is smaller.
pub(super) fn most_shared() -> u64 {
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

/// The processor's name as the kernel gives it, with the vector extensions the kernels can use.
pub(super) fn processor_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or("CPU", |(_, name)| name).trim().to_owned()
}

/// Bytes of a `/proc/meminfo` line, which counts KiB.
fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim()
        .strip_suffix(" kB")?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// Mappings that a process may have.
fn max_map_count() -> u64 {
    let count = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    count
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(65_530)
}

fn physical_memory() -> u64 {
    meminfo("MemTotal").unwrap_or(0)
}

fn available_memory() -> u64 {
    meminfo("MemAvailable").unwrap_or(u64::MAX)
}

/// The memory limit of our control group (version 2), if it has one.
fn cgroup_limit() -> u64 {
    let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = group
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .unwrap_or("/");
    fs::read_to_string(format!("/sys/fs/cgroup{path}/memory.max"))
        .ok()
        .and_then(|limit| limit.trim().parse().ok())
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_counted_and_given_back() {
        let budget = Arc::new(Budget::new(Some(1 << 20)));
        let memory = CpuMemory::new(1 << 19, &budget).unwrap();
        assert_eq!(memory.as_ptr() as usize % 256, 0);
        let mut bytes = vec![1u8; 1 << 19];
        memory.read(0, bytes.as_mut_slice().into()).unwrap();
        assert!(bytes.iter().all(|&b| b == 0));
        assert!(matches!(
            CpuMemory::new((1 << 19) + 1, &budget),
            Err(EngineError::OutOfMemory {
                wanted: 524_289,
                ..
            })
        ));
        drop(memory);
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
        assert!(CpuMemory::new(1 << 20, &budget).is_ok());
        assert!(CpuMemory::new(u64::MAX, &budget).is_err());
    }

    #[test]
    fn shared_memory_is_the_same_for_both_and_gone_when_it_is_freed() {
        use std::os::fd::AsFd;
        use vgpu_transport::window::memory::Window;
        let budget = Arc::new(Budget::new(Some(1 << 20)));
        let SharedMemory { memory, file, size } = CpuMemory::shared(5000, &budget).unwrap();
        assert_eq!((memory.size(), size), (5000, 8192));
        let guest = Window::map_foreign(file.as_fd(), size).unwrap();
        guest.bytes_mut(4990..5000).copy_from((&[7; 10][..]).into());
        let mut seen = [0; 10];
        memory.read(4990, (&mut seen[..]).into()).unwrap();
        assert_eq!(seen, [7; 10]);
        assert!(memory.read(4991, (&mut seen[..]).into()).is_err());
        // What is freed is not kept alive by a guest that holds on to it.
        assert_eq!(budget.used.load(Ordering::Relaxed), 5000);
        drop(memory);
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
        guest.bytes(4990..5000).copy_to(&mut seen);
        assert_eq!(seen, [0; 10]);
        let blocks = rustix::fs::fstat(&file).unwrap().st_blocks;
        assert!(blocks <= 8, "{blocks} blocks: only the page just read");
        // Nobody can take pages away under the executor.
        for size in [0, 4096, 12288] {
            rustix::fs::ftruncate(&file, size).unwrap_err();
        }
    }

    #[test]
    fn accesses_stay_inside() {
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
