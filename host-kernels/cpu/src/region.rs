//! Memory mappings of this process, and the budget that they are charged to.

use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw, UncheckedAdvice};

use super::resident::{MappedRegion, MappedRegions, ResidentBytes};
use super::system_memory::SystemMemory;
use super::topology::memory_nodes;
use vgpu_engine::{EngineError, MemoryInfo};
use vgpu_transport::lock::lock;

/// The page size in bytes.
pub(super) fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// The bytes of the pages that an allocation of `size` bytes takes. An allocation without bytes
/// counts as a page, for what is stored about it.
pub(super) fn whole_pages(size: u64) -> u64 {
    let pages = size.max(1).checked_next_multiple_of(page());
    pages.unwrap_or(u64::MAX)
}

/// The most memory of the machine that is not allocated, for its other programs and for what this
/// process needs besides. Smaller machines keep a 64th.
const MAX_RESERVE: u64 = 256 << 20;

/// How long an allocation that fits relies on what the machine has said before: reading the files
/// takes more time than a small allocation.
const MAX_READING_AGE: Duration = Duration::from_millis(1);

/// The memory of the machine at one time, in bytes.
#[derive(Debug, Clone, Copy)]
struct SystemNow {
    /// What may still be used, without the reserve.
    available: u64,
    /// What the engine has mapped.
    mapped: u64,
    /// What of that somebody has touched.
    touched: u64,
}

/// How the touched pages of the engine are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Count {
    /// As they were counted last: there may be more.
    Last,
    /// As they were counted last, unless that is long ago.
    Recent,
    /// They are counted now.
    #[cfg(test)]
    Now,
}

/// The memory that the engine may allocate, and the memory that it has allocated.
pub(super) struct Budget {
    total: u64,
    /// What is left to the machine.
    reserve: u64,
    used: AtomicU64,
    /// What the machine has left. `None`: enough for the budget.
    system: Option<SystemMemory>,
    /// The last reading of `system`, and when it began.
    reading: Mutex<Option<(Instant, SystemNow)>>,
    /// What is mapped of `used`.
    regions: Arc<MappedRegions>,
    /// Whether each allocation lies between two pages without access.
    pub(super) has_guards: bool,
}

impl Budget {
    /// A budget of `limit` bytes; `None` for the memory of the machine or the limit of its control
    /// group.
    pub(super) fn new(limit: Option<u64>) -> Budget {
        Budget::of(limit, SystemMemory::of_this_machine())
    }

    fn of(limit: Option<u64>, system: SystemMemory) -> Budget {
        let of_system = system.total();
        Budget {
            total: limit.unwrap_or(of_system),
            reserve: MAX_RESERVE.min(of_system / 64),
            used: AtomicU64::new(0),
            system: Some(system),
            reading: Mutex::default(),
            regions: Arc::default(),
            has_guards: false,
        }
    }

    /// A budget of `total` bytes, which the machine is taken to have.
    pub(super) fn fixed(total: u64) -> Budget {
        Budget {
            total,
            reserve: 0,
            used: AtomicU64::new(0),
            system: None,
            reading: Mutex::default(),
            regions: Arc::default(),
            has_guards: false,
        }
    }

    /// The memory of the budget. The machine reports allocated pages as available until somebody
    /// touches them, so what the engine has allocated and nobody has touched is not free.
    pub(super) fn info(&self) -> MemoryInfo {
        let used = self.used.load(Ordering::Relaxed);
        MemoryInfo {
            total: self.total,
            free: self.free(used, self.system_now(Count::Recent)),
        }
    }

    /// What the machine says now. `None`: it has enough for the budget.
    fn system_now(&self, count: Count) -> Option<SystemNow> {
        let system = self.system.as_ref()?;
        let start = Instant::now();
        // Before the machine is asked what is available: pages that are touched meanwhile are not
        // available any more, and not touched by this count, either.
        let ResidentBytes {
            mapped,
            private,
            shared,
        } = match count {
            Count::Last => self.regions.last(),
            Count::Recent => self.regions.recent(),
            #[cfg(test)]
            Count::Now => self.regions.count(),
        };
        let now = SystemNow {
            mapped,
            touched: private.min(system.anonymous()) + shared,
            available: system.available().saturating_sub(self.reserve),
        };
        *lock(&self.reading) = Some((start, now));
        Some(now)
    }

    /// What the machine has said less than [`MAX_READING_AGE`] before `time`, or says now, with the
    /// pages that were counted last. Memory of this process that has been allocated or touched
    /// since counts as it does in [`system_now`](Budget::system_now), and freed memory counts as
    /// used.
    fn system_at(&self, time: Instant) -> Option<SystemNow> {
        let reading = *lock(&self.reading);
        let is_recent = |start| time.saturating_duration_since(start) < MAX_READING_AGE;
        match reading {
            Some((start, now)) if is_recent(start) => Some(now),
            _ => self.system_now(Count::Last),
        }
    }

    /// Whether so many bytes are left of the budget, whatever the machine says.
    fn has(&self, bytes: u64) -> bool {
        let sum = self.used.load(Ordering::Relaxed).checked_add(bytes);
        sum.is_some_and(|sum| sum <= self.total)
    }

    /// What is free when `used` bytes are allocated.
    fn free(&self, used: u64, now: Option<SystemNow>) -> u64 {
        let left = self.total.saturating_sub(used);
        let of_system = now.map_or(u64::MAX, |now| {
            // An allocation is charged before it is mapped, and unmapped before its charge ends.
            let untouched = used.max(now.mapped).saturating_sub(now.touched);
            now.available.saturating_sub(untouched)
        });
        left.min(of_system)
    }

    /// Allocated bytes.
    #[cfg(test)]
    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Counts `bytes` as used if they are free by what the machine has said.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if they are not.
    fn charge(&self, bytes: u64, now: Option<SystemNow>) -> Result<(), EngineError> {
        // Other threads may charge meanwhile: what is free depends on what they have charged.
        let fits = |used: u64| {
            let sum = used.checked_add(bytes)?;
            (sum <= self.total && bytes <= self.free(used, now)).then_some(sum)
        };
        let charged = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        charged.map_err(|used| EngineError::OutOfMemory {
            wanted: bytes,
            free: self.free(used, now),
            total: self.total,
        })?;
        Ok(())
    }

    /// The error of an allocation of `wanted` bytes that fails.
    pub(super) fn out_of_memory(&self, wanted: u64) -> EngineError {
        let MemoryInfo { total, free } = self.info();
        EngineError::OutOfMemory {
            wanted,
            free,
            total,
        }
    }
}

/// Bytes charged to a budget until the value is dropped.
pub(super) struct BudgetCharge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl BudgetCharge {
    /// Charges `bytes`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the budget has fewer.
    pub(super) fn take(budget: &Arc<Budget>, bytes: u64) -> Result<BudgetCharge, EngineError> {
        // The machine may have freed memory since: only what it says now is a reason to refuse.
        budget
            .charge(bytes, budget.system_at(Instant::now()))
            .or_else(|refused| match budget.has(bytes) {
                // At most a twentieth of the time is spent counting, however often a guest asks.
                true => budget.charge(bytes, budget.system_now(Count::Recent)),
                // Nothing that the machine says changes that.
                false => Err(refused),
            })?;
        Ok(BudgetCharge {
            budget: Arc::clone(budget),
            bytes,
        })
    }

    /// What the bytes are charged to.
    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// The error for a mapping that failed although the budget allowed it.
    pub(super) fn refused(self) -> EngineError {
        let BudgetCharge { budget, bytes } = &self;
        let (budget, bytes) = (Arc::clone(budget), *bytes);
        drop(self);
        budget.out_of_memory(bytes)
    }
}

impl Drop for BudgetCharge {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A mapping with one owner, readable and writable. Unmapped when dropped.
pub(super) struct Region {
    /// The place among the mappings of a budget, which ends before the mapping does.
    counted: Option<MappedRegion>,
    /// The bytes, and the guard pages around them if there are any.
    mapping: MmapRaw,
    /// The offset of the first byte in the mapping: 0, or a guard page.
    start: usize,
    /// The requested size in bytes.
    len: usize,
}

impl Region {
    /// A private mapping of `len > 0` zero bytes; `None` if the kernel refuses it.
    pub(super) fn private(len: usize) -> Option<Region> {
        let mapping = MmapMut::map_anon(len).ok()?;
        Some(Region::new(mapping.into(), 0, len))
    }

    /// As [`private`](Region::private), between two pages that nobody can access. The kernel ends
    /// a process that accesses a byte before the first page of the region or beyond the last one.
    pub(super) fn guarded(len: usize) -> Option<Region> {
        let mapping = between_guard_pages(len)?;
        Some(Region::new(mapping.into(), page() as usize, len))
    }

    /// A private mapping with or without guard pages, as this budget has it.
    pub(super) fn for_budget(budget: &Budget, len: usize) -> Option<Region> {
        let region = match budget.has_guards {
            true => Region::guarded(len),
            false => Region::private(len),
        };
        Some(region?.counted_by(budget, false))
    }

    /// A shared mapping with or without guard pages, as this budget has it. As
    /// [`shared`](Region::shared) otherwise.
    pub(super) fn shared_for_budget(
        budget: &Budget,
        file: BorrowedFd<'_>,
        len: usize,
    ) -> Option<Region> {
        let region = match budget.has_guards {
            true => Region::shared_guarded(file, len),
            false => Region::shared(file, len),
        };
        Some(region?.counted_by(budget, true))
    }

    /// The same region, whose touched pages the budget counts.
    fn counted_by(mut self, budget: &Budget, is_shared: bool) -> Region {
        let start = self.as_ptr() as usize;
        self.counted = Some(budget.regions.add(start, self.len, is_shared));
        self
    }

    /// A shared mapping of the first `len > 0` bytes of a file that cannot shrink, so that no
    /// access can fault; `None` if the kernel refuses it.
    pub(super) fn shared(file: BorrowedFd<'_>, len: usize) -> Option<Region> {
        let mapping = MmapOptions::new().len(len).map_raw(&file).ok()?;
        Some(Region::new(mapping, 0, len))
    }

    /// As [`shared`](Region::shared), between two pages as those of [`guarded`](Region::guarded).
    pub(super) fn shared_guarded(file: BorrowedFd<'_>, len: usize) -> Option<Region> {
        let mapping = between_guard_pages(len)?;
        let start = page() as usize;
        let at = mapping.as_ptr().wrapping_add(start).cast_mut();
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
        );
        // SAFETY: the pages from `at` on, `len` bytes and the rest of the last page, lie between
        // the guard pages of a mapping that this function has made, and of which nobody has
        // another pointer or reference. The file takes their place.
        let mapped = unsafe { libc::mmap(at.cast(), len, access, flags, file.as_raw_fd(), 0) };
        if mapped != at.cast() {
            // The kernel may have removed the pages already, and another mapping may be there now.
            std::mem::forget(mapping);
            return None;
        }
        Some(Region::new(mapping.into(), start, len))
    }

    fn new(mapping: MmapRaw, start: usize, len: usize) -> Region {
        // Huge pages save most TLB misses of a weight matrix. Without them everything still works.
        let _ = mapping.advise(Advice::HugePage);
        if nodes().len() > 1 {
            interleave(&mapping, nodes());
        }
        Region {
            counted: None,
            mapping,
            start,
            len,
        }
    }

    /// The address of the first byte.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_mut_ptr().wrapping_add(self.start)
    }

    /// The requested size in bytes; the mapping has whole pages.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Frees the pages of `range`, which are zero afterwards.
    ///
    /// # Safety
    /// The contents of `range` are not needed, and no thread accesses them during the call. `range`
    /// begins and ends at a page boundary, or ends at the end of the region.
    pub(super) unsafe fn discard(&self, range: Range<u64>, advice: UncheckedAdvice) {
        debug_assert!(range.start.is_multiple_of(page()) && range.end <= self.len() as u64);
        if range.start < range.end {
            // Before the pages are free, so that no more are counted than there are, and after
            // that: another thread may have counted them meanwhile.
            let forget = || {
                if let Some(counted) = &self.counted {
                    counted.discard(&range);
                }
            };
            forget();
            let at = self.start + range.start as usize;
            let len = (range.end - range.start) as usize;
            // SAFETY: the range lies in the mapping and begins at a page. The caller guarantees
            // that no thread accesses the pages and that their contents are not needed.
            let discarded = unsafe { self.mapping.unchecked_advise_range(advice, at, len) };
            debug_assert!(discarded.is_ok(), "discarding pages: {discarded:?}");
            forget();
        }
    }
}

/// A private mapping of the pages of `len > 0` bytes, between two pages that nobody can access;
/// `None` if the kernel refuses it.
fn between_guard_pages(len: usize) -> Option<MmapMut> {
    let page = page() as usize;
    let pages = len.checked_next_multiple_of(page)?;
    let mapping = MmapMut::map_anon(pages.checked_add(2 * page)?).ok()?;
    let start = mapping.as_ptr().cast_mut();
    for at in [start, start.wrapping_add(page + pages)] {
        // SAFETY: `at` is the first or the last page of a mapping that this function has made, and
        // of which nobody has another pointer or reference.
        let outcome = unsafe { libc::mprotect(at.cast(), page, libc::PROT_NONE) };
        if outcome != 0 {
            return None;
        }
    }
    Some(mapping)
}

/// The NUMA nodes of this machine.
fn nodes() -> &'static [usize] {
    static NODES: OnceLock<Vec<usize>> = OnceLock::new();
    NODES.get_or_init(memory_nodes)
}

/// Interleaves the pages of a mapping over all `nodes`, from their first access on (`mbind`,
/// `MPOL_INTERLEAVE`).
///
/// Otherwise, pages are on the node of the session thread that wrote them, and all reads of weights
/// go to one node. Rows near the threads that read them would be better still, but rows are taken
/// by the first thread that asks. If the kernel refuses, nothing changes.
fn interleave(mapping: &MmapRaw, nodes: &[usize]) -> bool {
    const WORDS: usize = 16;
    let mut mask = [0 as libc::c_ulong; WORDS];
    let bits = libc::c_ulong::BITS as usize;
    for &node in nodes.iter().filter(|&&node| node < WORDS * bits) {
        mask[node / bits] |= 1 << (node % bits);
    }
    let max_node = WORDS * bits;
    // SAFETY: the range is one mapping, whose contents do not change. `mask` has `max_node` bits.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.as_ptr(),
            mapping.len(),
            libc::MPOL_INTERLEAVE,
            mask.as_ptr(),
            max_node,
            0,
        )
    };
    outcome == 0
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use vgpu_engine::Memory as _;

    use super::*;
    use crate::memory::CpuMemory;
    use crate::system_memory::tests::Machine;

    const MIB: u64 = 1 << 20;

    /// What `/proc/self/status` says of a process with so many MiB of heap and windows.
    fn status(anonymous: u64, shared: u64) -> String {
        format!(
            "RssAnon: {} kB\nRssShmem: {} kB\n",
            anonymous << 10,
            shared << 10
        )
    }

    #[test]
    fn memory_that_is_allocated_and_not_touched_is_not_free() {
        let machine = Machine::new();
        let budget = Arc::new(Budget::of(None, SystemMemory::below(machine.0.path())));
        let free = || budget.info().free / MIB;
        // A 64th of the machine stays free.
        assert_eq!((budget.info().total / MIB, free()), (1000, 584));
        let charge = BudgetCharge::take(&budget, 400 * MIB).unwrap();
        assert_eq!(free(), 184);
        assert!(BudgetCharge::take(&budget, 185 * MIB).is_err());
        machine.available(500);
        assert_eq!(free(), 84);
        drop(charge);
        assert_eq!(free(), 484);
    }

    /// The heap, and windows that guests have touched, say nothing of the buffers.
    #[test]
    fn touched_memory_that_is_no_buffer_does_not_count_as_one() {
        let machine = Machine::new();
        machine.write("proc/self/status", &status(300, 256));
        let budget = Arc::new(Budget::of(None, SystemMemory::below(machine.0.path())));
        let memory = CpuMemory::new(64 * MIB, &budget).unwrap();
        assert_eq!(budget.info().free / MIB, 584 - 64);
        let refused = BudgetCharge::take(&budget, (584 - 63) * MIB).err();
        let Some(EngineError::OutOfMemory { free, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(free / MIB, 584 - 64);
        drop(memory);
        assert_eq!(budget.info().free / MIB, 584);
    }

    #[test]
    fn touched_pages_of_buffers_count_once() {
        const LEN: usize = 8 << 20;
        let machine = Machine::new();
        machine.write("proc/self/status", &status(100, 0));
        let budget = Arc::new(Budget::of(None, SystemMemory::below(machine.0.path())));
        let free = || {
            lock(&budget.reading).take();
            budget.free(budget.used(), budget.system_now(Count::Now)) / MIB
        };
        let memory = CpuMemory::new(LEN as u64, &budget).unwrap();
        assert_eq!(free(), 584 - 8);
        memory.write(0, vec![1; LEN][..].into()).unwrap();
        // The kernel counts the pages of the buffer now.
        assert_eq!(free(), 584);
        // A read touches pages, too, but takes no memory.
        let unread = CpuMemory::new(LEN as u64, &budget).unwrap();
        assert_eq!(free(), 584 - 8);
        machine.write("proc/self/status", &status(8, 0));
        unread.read(0, (&mut vec![0; LEN][..]).into()).unwrap();
        assert_eq!(free(), 584 - 8);
        drop(memory);
        drop(unread);
        // A guest may be who touches the pages of a file.
        let shared = CpuMemory::shared(LEN as u64, &budget).unwrap();
        machine.write("proc/self/status", &status(0, 0));
        assert_eq!(free(), 584 - 8);
        shared.memory.write(0, vec![1; LEN][..].into()).unwrap();
        assert_eq!(free(), 584);
    }

    /// An allocation that fits only because pages were touched since they were counted.
    #[test]
    fn pages_are_counted_before_a_refusal() {
        const LEN: usize = 8 << 20;
        let machine = Machine::new();
        machine.write("proc/self/status", &status(100, 0));
        let budget = Arc::new(Budget::of(None, SystemMemory::below(machine.0.path())));
        let memory = CpuMemory::new(LEN as u64, &budget).unwrap();
        memory.write(0, vec![1; LEN][..].into()).unwrap();
        assert_eq!(budget.regions.last().private, 0);
        BudgetCharge::take(&budget, 580 * MIB).expect("memory that is free");
        assert_eq!(budget.regions.last().private, LEN as u64);
    }

    #[test]
    fn the_machine_is_read_again_after_a_while_and_before_a_refusal() {
        let machine = Machine::new();
        let budget = Arc::new(Budget::of(None, SystemMemory::below(machine.0.path())));
        let free = |time| budget.free(0, budget.system_at(time)) / MIB;
        let start = Instant::now();
        assert_eq!(free(start), 584);
        machine.available(300);
        assert_eq!(free(start), 584);
        assert_eq!(free(Instant::now() + MAX_READING_AGE), 284);
        let full = SystemNow {
            available: 0,
            mapped: 0,
            touched: 0,
        };
        let later = Instant::now() + Duration::from_secs(3600);
        *lock(&budget.reading) = Some((later, full));
        assert_eq!(free(later), 0);
        BudgetCharge::take(&budget, 284 * MIB).expect("memory that the machine has now");
    }

    /// Both threads see the memory free before one has charged it.
    #[test]
    fn memory_is_not_promised_to_two_threads() {
        const THREADS: usize = 2;
        for _ in 0..200 {
            let machine = Machine::new();
            let budget = Arc::new(Budget::of(None, SystemMemory::below(machine.0.path())));
            let start = std::sync::Barrier::new(THREADS);
            let charges: Vec<_> = std::thread::scope(|scope| {
                let take = || {
                    start.wait();
                    BudgetCharge::take(&budget, 400 * MIB).ok()
                };
                let threads = [(); THREADS].map(|()| scope.spawn(take));
                let charges = threads.map(|thread| thread.join().unwrap());
                charges.into_iter().flatten().collect()
            });
            assert_eq!(charges.len(), 1);
        }
    }

    /// The policy of the page at `ptr`; `None` if the kernel refuses the system call.
    fn policy(ptr: *const u8) -> Option<libc::c_int> {
        const OF_ADDRESS: libc::c_int = 2; // MPOL_F_ADDR
        let mut mode: libc::c_int = -1;
        let none = std::ptr::null_mut::<libc::c_ulong>();
        // SAFETY: the kernel writes the policy to `mode`. The pointer of the mask is null.
        let outcome = unsafe {
            let mode = &raw mut mode;
            libc::syscall(libc::SYS_get_mempolicy, mode, none, 0, ptr, OF_ADDRESS)
        };
        (outcome == 0).then_some(mode)
    }

    #[test]
    fn guarded_regions_lie_between_two_pages_without_access() {
        let page = page() as usize;
        let file = vgpu_transport::memfd::sealed("vgpu-test", 2 * page).unwrap();
        let regions = [
            Region::guarded(page + 1).unwrap(),
            Region::shared_guarded(file.as_fd(), page + 1).unwrap(),
        ];
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        // The access to the page with this address, such as "rw-s".
        let access = |address: usize| {
            let mut lines = maps.lines().filter_map(|line| {
                let (range, rest) = line.split_once(' ')?;
                let (start, end) = range.split_once('-')?;
                let of = |text| usize::from_str_radix(text, 16).ok();
                (of(start)?..of(end)?)
                    .contains(&address)
                    .then_some(&rest[..4])
            });
            lines.next().unwrap_or_default()
        };
        for (region, inside) in regions.iter().zip(["rw-p", "rw-s"]) {
            let start = region.as_ptr() as usize;
            let pages = [start - page, start, start + page, start + 2 * page];
            assert_eq!(pages.map(access), ["---p", inside, inside, "---p"]);
            assert_eq!(region.len(), page + 1);
        }
    }

    #[test]
    fn pages_are_interleaved_across_all_numa_nodes() {
        let region = Region::private(10 * page() as usize).unwrap();
        let Some(before) = policy(region.as_ptr()) else {
            return; // a container that forbids it; nothing is changed there
        };
        match nodes().len() {
            1 => assert_ne!(before, libc::MPOL_INTERLEAVE, "nothing to choose from"),
            _ => assert_eq!(before, libc::MPOL_INTERLEAVE),
        }
        assert!(interleave(&region.mapping, nodes()));
        assert_eq!(policy(region.as_ptr()), Some(libc::MPOL_INTERLEAVE));
        // No node that this machine has.
        assert!(!interleave(&region.mapping, &[1000]));
    }
}
