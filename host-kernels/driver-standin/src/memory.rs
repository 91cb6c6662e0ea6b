//! The memory of all GPUs, and host memory that they may access.
//!
//! The address of device memory is that of memory of this process: kernels run here. A page that
//! nothing may access follows each allocation.

use std::collections::{BTreeMap, HashMap};
use std::ptr;
use std::sync::{LazyLock, Mutex, MutexGuard};

use crate::codes::{Answer, Code};
use crate::lock::lock;

/// What `cuMemAlloc` aligns to.
const ALIGNMENT: u64 = 512;

/// The unit of physical memory that address ranges are mapped to.
pub(crate) const GRANULARITY: u64 = 2 << 20;

const PAGE: usize = 4096;

/// Allocations of at most so many bytes begin with content that is no number.
const MAX_FILLED: u64 = 16 << 20;

/// The memory of all GPUs.
#[derive(Default)]
pub(crate) struct Memory {
    /// Allocations, by their addresses.
    blocks: BTreeMap<u64, Block>,
    /// Address ranges, by their addresses: their sizes.
    reserved: BTreeMap<u64, u64>,
    /// Physical memory, by its handle.
    physical: HashMap<u64, Physical>,
    /// Mapped physical memory, by the address.
    mapped: BTreeMap<u64, Mapping>,
    /// Host memory that is registered, by its address.
    registered: BTreeMap<u64, Registered>,
    /// Bytes in use, by GPU.
    used: HashMap<usize, u64>,
    last_handle: u64,
}

struct Block {
    size: u64,
    context: u64,
    device: usize,
    mapping: (usize, usize),
}

struct Physical {
    size: u64,
    device: usize,
    is_released: bool,
    mappings: u32,
}

struct Mapping {
    size: u64,
    handle: u64,
    is_accessible: bool,
}

struct Registered {
    size: u64,
    context: u64,
    flags: u32,
}

/// The memory of all GPUs.
pub(crate) fn memory() -> MutexGuard<'static, Memory> {
    static MEMORY: LazyLock<Mutex<Memory>> = LazyLock::new(Mutex::default);
    lock(&MEMORY)
}

/// The entry of `map` that contains the `len` bytes at `at`, and its address.
fn around<T>(
    map: &BTreeMap<u64, T>,
    size: impl Fn(&T) -> u64,
    at: u64,
    len: u64,
) -> Option<(u64, &T)> {
    let (start, found) = map.range(..=at).next_back()?;
    let end = at.checked_add(len)?;
    (end <= start + size(found)).then_some((*start, found))
}

/// Whether the `len` bytes at `at` overlap an entry.
fn overlaps<T>(map: &BTreeMap<u64, T>, size: impl Fn(&T) -> u64, at: u64, len: u64) -> bool {
    let before = map.range(..at.saturating_add(len)).next_back();
    before.is_some_and(|(start, found)| start + size(found) > at)
}

/// New pages. None: there are none left.
fn map_pages(len: usize, protection: i32) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new private mapping overlaps nothing.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
    (start != libc::MAP_FAILED).then_some(start as usize)
}

/// Makes pages accessible, or not.
///
/// # Safety
/// The pages are those of a mapping of [`map_pages`].
unsafe fn protect(at: u64, len: u64, protection: i32) -> Answer {
    // SAFETY: the caller guarantees that the pages are of a mapping of this module.
    match unsafe { libc::mprotect(at as *mut libc::c_void, len as usize, protection) } {
        0 => Ok(()),
        _ => Err(Code::CUDA_ERROR_OUT_OF_MEMORY),
    }
}

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

impl Memory {
    /// The bytes in use on a GPU.
    pub(crate) fn used(&self, device: usize) -> u64 {
        self.used.get(&device).copied().unwrap_or(0)
    }

    fn take(&mut self, device: usize, size: u64, limit: u64) -> Answer {
        let used = self.used.entry(device).or_default();
        if size > limit - (*used).min(limit) {
            return Err(Code::CUDA_ERROR_OUT_OF_MEMORY);
        }
        *used += size;
        Ok(())
    }

    fn give_back(&mut self, device: usize, size: u64) {
        if let Some(used) = self.used.get_mut(&device) {
            *used -= size;
        }
    }

    /// Allocates memory of a GPU that has `limit` bytes, with unknown content.
    ///
    /// # Errors
    /// `INVALID_VALUE` for 0 bytes, `OUT_OF_MEMORY`.
    pub(crate) fn alloc(
        &mut self,
        context: u64,
        device: usize,
        size: u64,
        limit: u64,
    ) -> Answer<u64> {
        if size == 0 {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let room = size.checked_next_multiple_of(ALIGNMENT);
        let room = room.filter(|room| *room < limit);
        let room = room.ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)?;
        self.take(device, room, limit)?;
        let len = (room as usize).next_multiple_of(PAGE) + PAGE;
        let Some(start) = map_pages(len, READ_WRITE) else {
            self.give_back(device, room);
            return Err(Code::CUDA_ERROR_OUT_OF_MEMORY);
        };
        let guard = (start + len - PAGE) as u64;
        // SAFETY: the mapping was just made.
        unsafe { protect(guard, PAGE as u64, libc::PROT_NONE) }?;
        let address = guard - room;
        if room <= MAX_FILLED {
            // SAFETY: the bytes are before the guard page, in the mapping that was just made.
            unsafe { (address as *mut u8).write_bytes(0xff, room as usize) };
        }
        let block = Block {
            size: room,
            context,
            device,
            mapping: (start, len),
        };
        self.blocks.insert(address, block);
        Ok(address)
    }

    fn drop_block(&mut self, block: &Block) {
        self.give_back(block.device, block.size);
        let (start, len) = block.mapping;
        // SAFETY: `alloc` has made the mapping, and the block is no longer in the table. A kernel
        // that uses it runs into what a GPU calls an illegal address.
        unsafe { libc::munmap(start as *mut libc::c_void, len) };
    }

    /// Frees an allocation of a context.
    ///
    /// # Errors
    /// `INVALID_VALUE` if there is no such allocation.
    pub(crate) fn free(&mut self, context: u64, address: u64) -> Answer {
        match self.blocks.get(&address) {
            Some(block) if block.context == context => {}
            _ => return Err(Code::CUDA_ERROR_INVALID_VALUE),
        }
        if let Some(block) = self.blocks.remove(&address) {
            self.drop_block(&block);
        }
        Ok(())
    }

    /// Frees all allocations of a context, and ends its registrations of host memory.
    pub(crate) fn free_all(&mut self, context: u64) {
        let of_context = { self.blocks.iter() }
            .filter(|(_, block)| block.context == context)
            .map(|(address, _)| *address);
        for address in of_context.collect::<Vec<_>>() {
            let _ = self.free(context, address); // it is there
        }
        self.registered.retain(|_, it| it.context != context);
    }

    /// Checks that a context may access the `len` bytes at `at`, as device memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` if not.
    pub(crate) fn check(&self, context: u64, at: u64, len: u64) -> Answer {
        let of_block = around(&self.blocks, |block| block.size, at, len);
        if of_block.is_some_and(|(_, block)| block.context == context) {
            return Ok(());
        }
        let host = around(&self.registered, |it| it.size, at, len);
        let is_mapped = |it: &Registered| it.flags & DEVICE_MAP != 0;
        if host.is_some_and(|(_, it)| is_mapped(it) && it.is_for(context)) {
            return Ok(());
        }
        // A range may consist of several mappings.
        let (mut at, end) = (
            at,
            at.checked_add(len).ok_or(Code::CUDA_ERROR_INVALID_VALUE)?,
        );
        loop {
            let found = around(&self.mapped, |mapping| mapping.size, at, 1);
            let usable = found.filter(|(_, mapping)| mapping.is_accessible);
            let (start, mapping) = usable.ok_or(Code::CUDA_ERROR_INVALID_VALUE)?;
            at = start + mapping.size;
            if at >= end {
                return Ok(());
            }
        }
    }

    /// Whether the `len` bytes of host memory at `at` are page-locked for a context.
    pub(crate) fn is_pinned(&self, context: u64, at: u64, len: u64) -> bool {
        let found = around(&self.registered, |it| it.size, at, len);
        found.is_some_and(|(_, it)| it.is_for(context))
    }

    /// Registers host memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for no bytes, unknown flags, or memory that is not there;
    /// `HOST_MEMORY_ALREADY_REGISTERED`.
    pub(crate) fn register(&mut self, context: u64, at: u64, size: u64, flags: u32) -> Answer {
        if at == 0 || size == 0 || flags & !(PORTABLE | DEVICE_MAP) != 0 || !is_there(at, size) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        if overlaps(&self.registered, |it| it.size, at, size) {
            return Err(Code::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let registered = Registered {
            size,
            context,
            flags,
        };
        self.registered.insert(at, registered);
        Ok(())
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// `HOST_MEMORY_NOT_REGISTERED`.
    pub(crate) fn unregister(&mut self, at: u64) -> Answer {
        match self.registered.remove(&at) {
            Some(_) => Ok(()),
            None => Err(Code::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        }
    }

    /// The address for kernels of registered host memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` if it is not registered for the context, or not mapped.
    pub(crate) fn device_pointer(&self, context: u64, at: u64) -> Answer<u64> {
        let found = around(&self.registered, |it| it.size, at, 1);
        match found {
            Some((_, it)) if it.flags & DEVICE_MAP != 0 && it.is_for(context) => Ok(at),
            _ => Err(Code::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Reserves addresses.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the size is a multiple of [`GRANULARITY`]; `OUT_OF_MEMORY`.
    pub(crate) fn reserve(&mut self, size: u64) -> Answer<u64> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let len = size.checked_add(2 * GRANULARITY);
        let start = len.and_then(|len| map_pages(len as usize, libc::PROT_NONE));
        let start = start.ok_or(Code::CUDA_ERROR_OUT_OF_MEMORY)?;
        // What is before and behind it stays reserved, and guards it.
        let address = (start as u64 + 1).next_multiple_of(GRANULARITY);
        self.reserved.insert(address, size);
        Ok(address)
    }

    /// Gives addresses back.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless they were reserved so, and nothing is mapped there.
    pub(crate) fn unreserve(&mut self, at: u64, size: u64) -> Answer {
        let is_reserved = self.reserved.get(&at) == Some(&size);
        if !is_reserved || overlaps(&self.mapped, |mapping| mapping.size, at, size) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        self.reserved.remove(&at);
        Ok(())
    }

    /// Takes physical memory of a GPU, and returns its handle.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the size is a multiple of [`GRANULARITY`]; `OUT_OF_MEMORY`.
    pub(crate) fn create(&mut self, device: usize, size: u64, limit: u64) -> Answer<u64> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        self.take(device, size, limit)?;
        self.last_handle += 1;
        let physical = Physical {
            size,
            device,
            is_released: false,
            mappings: 0,
        };
        self.physical.insert(self.last_handle, physical);
        Ok(self.last_handle)
    }

    fn drop_unused(&mut self, handle: u64) {
        let unused = { self.physical.get(&handle) }.filter(|it| it.is_released && it.mappings == 0);
        if let Some(Physical { size, device, .. }) = unused {
            let (size, device) = (*size, *device);
            self.give_back(device, size);
            self.physical.remove(&handle);
        }
    }

    /// Releases a handle. Its memory lives until it is mapped nowhere.
    ///
    /// # Errors
    /// `INVALID_VALUE` if there is no such handle.
    pub(crate) fn release(&mut self, handle: u64) -> Answer {
        match self.physical.get_mut(&handle) {
            Some(physical) if !physical.is_released => physical.is_released = true,
            _ => return Err(Code::CUDA_ERROR_INVALID_VALUE),
        }
        self.drop_unused(handle);
        Ok(())
    }

    /// Maps physical memory into reserved addresses.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the whole memory is mapped, at addresses that are reserved and free.
    pub(crate) fn map(&mut self, at: u64, size: u64, offset: u64, handle: u64) -> Answer {
        let is_reserved = around(&self.reserved, |size| *size, at, size).is_some();
        let is_taken = overlaps(&self.mapped, |mapping| mapping.size, at, size);
        let is_aligned = at.is_multiple_of(GRANULARITY);
        match self.physical.get_mut(&handle) {
            Some(physical)
                if (physical.size, physical.is_released, offset) == (size, false, 0)
                    && is_reserved
                    && !is_taken
                    && is_aligned =>
            {
                physical.mappings += 1;
            }
            _ => return Err(Code::CUDA_ERROR_INVALID_VALUE),
        }
        let mapping = Mapping {
            size,
            handle,
            is_accessible: false,
        };
        self.mapped.insert(at, mapping);
        Ok(())
    }

    /// Lets a GPU read and write mapped memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the range is that of a mapping of memory of this GPU.
    pub(crate) fn set_access(&mut self, at: u64, size: u64, device: usize) -> Answer {
        let mapping = self.mapped.get_mut(&at).filter(|it| it.size == size);
        let mapping = mapping.ok_or(Code::CUDA_ERROR_INVALID_VALUE)?;
        let physical = self.physical.get(&mapping.handle);
        if physical.is_none_or(|physical| physical.device != device) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        if !mapping.is_accessible {
            mapping.is_accessible = true;
            // SAFETY: the pages are of a reservation, which is never unmapped.
            unsafe { protect(at, size, READ_WRITE) }?;
            if size <= MAX_FILLED {
                // SAFETY: the pages were just made accessible.
                unsafe { (at as *mut u8).write_bytes(0xff, size as usize) };
            }
        }
        Ok(())
    }

    /// Undoes a mapping.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless the range is that of a mapping.
    pub(crate) fn unmap(&mut self, at: u64, size: u64) -> Answer {
        if self.mapped.get(&at).is_none_or(|it| it.size != size) {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        }
        let Some(mapping) = self.mapped.remove(&at) else {
            return Err(Code::CUDA_ERROR_INVALID_VALUE);
        };
        // SAFETY: the pages are of a reservation, which is never unmapped. The driver's caller no
        // longer uses them.
        unsafe {
            libc::madvise(at as *mut libc::c_void, size as usize, libc::MADV_DONTNEED);
            protect(at, size, libc::PROT_NONE)?;
        }
        if let Some(physical) = self.physical.get_mut(&mapping.handle) {
            physical.mappings -= 1;
        }
        self.drop_unused(mapping.handle);
        Ok(())
    }
}

/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
const DEVICE_MAP: u32 = 2;

impl Registered {
    fn is_for(&self, context: u64) -> bool {
        self.context == context || self.flags & PORTABLE != 0
    }
}

/// Whether all pages of a range are mapped in this process.
fn is_there(at: u64, size: u64) -> bool {
    let start = at / PAGE as u64 * PAGE as u64;
    let len = (at + size - start) as usize;
    let mut resident = vec![0u8; len.div_ceil(PAGE)];
    // SAFETY: `mincore` reads no page; it writes a byte for each page, for which there is room.
    unsafe { libc::mincore(start as *mut libc::c_void, len, resident.as_mut_ptr()) == 0 }
}
