//! A suballocator for device memory.
//!
//! `cuMemAlloc` is slow, and `cuMemFree` waits for all work of the device. So small allocations are
//! parts of large chunks that stay allocated (best fit), and only large allocations go to the
//! driver. Freed memory can be reused at once: the device works in order, so its next user comes
//! after the last one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::device::{Address, Device};
use crate::lock::Rank;
use vgpu_engine::{EngineError, MemoryInfo};
use vgpu_transport::lock::{Guard, lock, lock_at};

/// Bytes of a chunk.
const CHUNK: u64 = 64 << 20;

/// The largest allocation in bytes that is a part of a chunk.
const MAX_PART: u64 = 16 << 20;

/// The alignment of parts in bytes.
const ALIGN: u64 = 256;

/// Bytes of the blocks that the driver divides the memory of a GPU into.
const BLOCK: u64 = 2 << 20;

/// The number of unused chunks that are kept.
const SPARE_CHUNKS: usize = 2;

/// Allocates memory of a device.
pub(crate) struct Allocator {
    device: Arc<dyn Device>,
    state: Mutex<FreeGaps>,
    /// Bytes of the free memory that are kept for buffers for weights.
    reserved: AtomicU64,
    /// Held from the look at the free memory until an allocation is taken from it, so that two
    /// allocations do not find the same bytes free.
    admission: Mutex<()>,
}

/// The gaps of all chunks. Guests choose how many there are, and all wait for this: no operation
/// looks at all of them.
#[derive(Debug, Default, PartialEq)]
struct FreeGaps {
    /// The chunks: the address and length of each gap.
    chunks: BTreeMap<Address, Gaps>,
    /// The same gaps of all chunks by length: length and address.
    by_length: BTreeSet<(u64, Address)>,
    /// The sum of the lengths.
    bytes: u64,
}

type Gaps = BTreeMap<Address, u64>;

impl Allocator {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Allocator {
        Allocator {
            device: Arc::clone(device),
            state: Mutex::default(),
            reserved: AtomicU64::new(0),
            admission: Mutex::new(()),
        }
    }

    /// The device.
    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Whether an allocation of this size is a part of a chunk.
    fn is_part(&self, size: u64) -> bool {
        size <= MAX_PART && self.device.prefers_suballocation()
    }

    /// The bytes that an allocation of `size` bytes takes. An allocation without bytes counts as
    /// the smallest part.
    pub(crate) fn allocation_size(&self, size: u64) -> u64 {
        let unit = match size > MAX_PART && self.device.prefers_suballocation() {
            true => BLOCK,
            false => ALIGN,
        };
        size.max(1)
            .checked_next_multiple_of(unit)
            .unwrap_or(u64::MAX)
    }

    fn state(&self) -> Guard<'_, FreeGaps> {
        lock(&self.state)
    }

    /// The device's memory in bytes. Gaps in chunks count as free, and what is reserved does not.
    pub(crate) fn memory(&self) -> MemoryInfo {
        self.memory_besides(self.reserved())
    }

    /// The same, of which `reserved` bytes do not count as free.
    fn memory_besides(&self, reserved: u64) -> MemoryInfo {
        let gaps = self.state().bytes;
        let MemoryInfo { total, free } = self.device.memory();
        MemoryInfo {
            total,
            free: (free + gaps).min(total).saturating_sub(reserved),
        }
    }

    fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Keeps `bytes` of the free memory from other allocations, until
    /// [`give_up`](Allocator::give_up). The bytes may be in use now.
    pub(crate) fn reserve(&self, bytes: u64) {
        self.reserved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Gives up a reservation, or a part of one.
    pub(crate) fn give_up(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Allocates `size` zero bytes, at least 1. `from` bytes of a reservation may be used for them.
    /// They are given up if the allocation succeeds, and no other allocation gets them before.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if neither the chunks nor the device have that much besides
    /// what is reserved for others.
    pub(crate) fn alloc(&self, size: u64, from: u64) -> Result<Address, EngineError> {
        let address = {
            let _admitted = lock_at(Rank::Admission, &self.admission);
            let of_others = self.reserved().saturating_sub(from);
            if of_others > 0 {
                let MemoryInfo { total, free } = self.memory_besides(of_others);
                if free < size {
                    return Err(EngineError::OutOfMemory {
                        wanted: size,
                        free,
                        total,
                    });
                }
            }
            let address = match self.is_part(size) {
                true => self.part(size.next_multiple_of(ALIGN))?,
                false => self.alloc_or_trim(|| self.device.alloc(size), size)?,
            };
            self.give_up(from);
            address
        };
        if !self.is_part(size) {
            return Ok(address);
        }
        // SAFETY: the part lies in a chunk of this allocator and has no other user.
        match unsafe { self.device.fill(address, size, 0) } {
            Ok(()) => Ok(address),
            Err(error) => {
                self.reserve(from);
                self.give_back(address, size);
                Err(error)
            }
        }
    }

    /// Allocates a part of a chunk, of a new one if need be.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if the device has no memory for a new chunk.
    fn part(&self, size: u64) -> Result<Address, EngineError> {
        if let Some(address) = self.state().take(size) {
            return Ok(address);
        }
        let chunk = self.alloc_or_trim(|| self.device.alloc(CHUNK), size)?;
        let mut state = self.state();
        state.add_chunk(chunk);
        Ok({ state.take(size) }.expect("a chunk has room for a part"))
    }

    /// Calls `alloc`, and again without spare chunks if there is no memory. The error names the
    /// bytes `wanted`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if `alloc` fails again without the spare chunks; other errors
    /// of `alloc` unchanged.
    fn alloc_or_trim(
        &self,
        alloc: impl Fn() -> Result<Address, EngineError>,
        wanted: u64,
    ) -> Result<Address, EngineError> {
        match alloc() {
            Err(EngineError::OutOfMemory { .. }) => {}
            outcome => return outcome,
        }
        self.trim(0);
        alloc().map_err(|error| match error {
            EngineError::OutOfMemory { .. } => {
                let MemoryInfo { total, free } = self.memory();
                EngineError::OutOfMemory {
                    wanted,
                    free,
                    total,
                }
            }
            error => error,
        })
    }

    /// Frees memory.
    ///
    /// # Safety
    /// `address` is from [`Allocator::alloc`] with this size, and no work that is asked for later
    /// uses it.
    pub(crate) unsafe fn free(&self, address: Address, size: u64) {
        if !self.is_part(size) {
            // SAFETY: `is_part` is a function of the size, so `alloc` has taken `address` from the
            // device with this `size`. The caller guarantees that no later work uses the memory.
            return unsafe { self.device.free(address, size) };
        }
        self.give_back(address, size);
        self.trim(SPARE_CHUNKS);
    }

    fn give_back(&self, address: Address, size: u64) {
        self.state().put(address, size.next_multiple_of(ALIGN));
    }

    /// Frees unused chunks, all but `spare`.
    fn trim(&self, spare: usize) {
        loop {
            let Some(chunk) = self.state().remove_unused(spare) else {
                return;
            };
            // SAFETY: `chunk` was allocated with this size. The chunk has no parts, and was removed
            // from the table, so it gets no new ones.
            unsafe { self.device.free(chunk, CHUNK) };
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        self.trim(0);
    }
}

impl FreeGaps {
    /// Adds a chunk without parts.
    fn add_chunk(&mut self, chunk: Address) {
        self.chunks.insert(chunk, Gaps::new());
        self.insert(chunk, chunk, CHUNK);
    }

    /// Removes the last one of the chunks without parts, if there are more than `spare`.
    fn remove_unused(&mut self, spare: usize) -> Option<Address> {
        // No gap is longer than a chunk.
        let mut unused = self.by_length.range((CHUNK, 0)..).rev();
        unused.clone().nth(spare)?;
        let &(_, chunk) = unused.next()?;
        self.remove(chunk, chunk, CHUNK);
        self.chunks.remove(&chunk);
        Some(chunk)
    }

    fn insert(&mut self, chunk: Address, at: Address, len: u64) {
        if let Some(gaps) = self.chunks.get_mut(&chunk) {
            gaps.insert(at, len);
            self.by_length.insert((len, at));
            self.bytes += len;
        }
    }

    fn remove(&mut self, chunk: Address, at: Address, len: u64) {
        if let Some(gaps) = self.chunks.get_mut(&chunk) {
            gaps.remove(&at);
            self.by_length.remove(&(len, at));
            self.bytes -= len;
        }
    }

    /// The chunk that `at` lies in.
    fn chunk_of(&self, at: Address) -> Address {
        let chunk = self.chunks.range(..=at).next_back();
        *chunk.expect("parts and gaps lie in chunks").0
    }

    /// Takes memory from the smallest gap that is large enough.
    fn take(&mut self, size: u64) -> Option<Address> {
        let &(len, at) = self.by_length.range((size, 0)..).next()?;
        let chunk = self.chunk_of(at);
        self.remove(chunk, at, len);
        if len > size {
            self.insert(chunk, at + size, len - size);
        }
        Some(at)
    }

    /// Returns a part, and merges it with the gaps beside it.
    fn put(&mut self, mut at: Address, mut len: u64) {
        let chunk = self.chunk_of(at);
        debug_assert!(at + len <= chunk + CHUNK);
        let gaps = &self.chunks[&chunk];
        let before = { gaps.range(..at).next_back() }.map(|(&before, &length)| (before, length));
        let behind = gaps.get(&(at + len)).copied();
        if let Some(length) = behind {
            self.remove(chunk, at + len, length);
            len += length;
        }
        if let Some((before, length)) = before
            && before + length == at
        {
            self.remove(chunk, before, length);
            (at, len) = (before, len + length);
        }
        self.insert(chunk, at, len);
    }
}

#[cfg(test)]
mod tests {
    use vgpu_gguf::Rng;

    use super::*;

    const AT: Address = 1 << 40;

    fn one_chunk() -> FreeGaps {
        let mut state = FreeGaps::default();
        state.add_chunk(AT);
        state
    }

    #[test]
    fn parts_do_not_overlap_and_merge_when_freed() {
        let mut state = one_chunk();
        let mut random = Rng::new(12345, 0);
        let mut held: Vec<(Address, u64)> = Vec::new();
        for _ in 0..2000 {
            let choice = random.below(1 << 31);
            if choice.is_multiple_of(3) && !held.is_empty() {
                let (at, len) = held.swap_remove(choice as usize / 3 % held.len());
                state.put(at, len);
            } else if let Some(at) = state.take((choice % 4096 + 1) * ALIGN) {
                held.push((at, (choice % 4096 + 1) * ALIGN));
            }
            let mut all = held.clone();
            all.extend(state.chunks[&AT].iter().map(|(&at, &len)| (at, len)));
            all.sort_unstable();
            let mut end = AT;
            for (at, len) in all {
                assert_eq!(at, end, "parts and gaps fill the chunk");
                end = at + len;
            }
            assert_eq!(end, AT + CHUNK);
        }
        for (at, len) in held {
            state.put(at, len);
        }
        assert_eq!(state, one_chunk());
    }

    /// The gaps of some chunks without order: what [`FreeGaps`] does, by looking at all of them.
    #[derive(Default)]
    struct NaiveGaps(Vec<(Address, Address, u64)>);

    impl NaiveGaps {
        fn take(&mut self, size: u64) -> Option<Address> {
            let fitting = self.0.iter().filter(|&&(_, _, len)| len >= size);
            let &(chunk, at, len) = fitting.min_by_key(|&&(_, at, len)| (len, at))?;
            self.0.retain(|gap| gap.1 != at);
            if len > size {
                self.0.push((chunk, at + size, len - size));
            }
            Some(at)
        }

        fn put(&mut self, chunk: Address, at: Address, len: u64) {
            let (mut start, mut end) = (at, at + len);
            self.0.retain(|&(of, at, len)| {
                let is_beside = of == chunk && (at + len == start || at == end);
                if is_beside {
                    (start, end) = (start.min(at), end.max(at + len));
                }
                !is_beside
            });
            self.0.push((chunk, start, end - start));
        }

        fn remove_unused(&mut self, spare: usize) -> Option<Address> {
            let unused = self.0.iter().filter(|&&(_, _, len)| len == CHUNK);
            let mut unused: Vec<Address> = unused.map(|&(chunk, ..)| chunk).collect();
            unused.sort_unstable();
            let chunk = unused.pop().filter(|_| unused.len() >= spare)?;
            self.0.retain(|&(of, ..)| of != chunk);
            Some(chunk)
        }
    }

    #[test]
    fn gaps_of_several_chunks_are_those_of_a_search_of_all() {
        let mut random = Rng::new(6789, 0);
        let mut state = FreeGaps::default();
        let mut naive = NaiveGaps::default();
        let mut held: Vec<(Address, u64)> = Vec::new();
        let mut removed = 0;
        for step in 0..8000 {
            // Mostly parts come for a while, then mostly parts go.
            let takes = if step / 1000 % 2 == 0 { 7 } else { 2 };
            let size = match random.below(4) {
                0 => MAX_PART - random.below(1000) * ALIGN,
                _ => (random.below(40) + 1) * ALIGN,
            };
            if random.below(10) < takes {
                let taken = state.take(size);
                assert_eq!(taken, naive.take(size), "step {step}: {size} bytes");
                match taken {
                    Some(at) => held.push((at, size)),
                    // Chunks may be neighbours; gaps of two are not merged.
                    None if state.chunks.len() < 6 => {
                        let free = (0..6).map(|i| AT + i * CHUNK);
                        let chunk = { free.into_iter() }
                            .find(|chunk| !state.chunks.contains_key(chunk))
                            .unwrap();
                        state.add_chunk(chunk);
                        naive.0.push((chunk, chunk, CHUNK));
                    }
                    None => {}
                }
            } else if !held.is_empty() {
                let which = random.below(held.len() as u64) as usize;
                let (at, len) = held.swap_remove(which);
                let chunk = AT + (at - AT) / CHUNK * CHUNK;
                state.put(at, len);
                naive.put(chunk, at, len);
                let spare = random.below(3) as usize;
                let unused = state.remove_unused(spare);
                assert_eq!(unused, naive.remove_unused(spare), "step {step}");
                removed += u32::from(unused.is_some());
            }
            let mut of_chunks: Vec<(Address, Address, u64)> = { state.chunks.iter() }
                .flat_map(|(&chunk, gaps)| gaps.iter().map(move |(&at, &len)| (chunk, at, len)))
                .collect();
            naive.0.sort_unstable();
            assert_eq!(of_chunks, naive.0, "step {step}");
            assert_eq!(state.bytes, naive.0.iter().map(|gap| gap.2).sum::<u64>());
            of_chunks.sort_unstable_by_key(|&(_, at, len)| (len, at));
            let by_length = of_chunks.iter().map(|&(_, at, len)| (len, at));
            assert!(state.by_length.iter().copied().eq(by_length), "step {step}");
        }
        assert!(removed > 10, "{removed} chunks were removed");
    }

    #[test]
    fn smallest_sufficient_gap_is_used() {
        let mut state = one_chunk();
        let parts: Vec<_> = { [8, 2, 4, 2, 1].iter() }
            .map(|&n| (state.take(n * ALIGN).unwrap(), n * ALIGN))
            .collect();
        state.put(parts[0].0, parts[0].1);
        state.put(parts[2].0, parts[2].1);
        assert_eq!(state.take(3 * ALIGN), Some(parts[2].0));
        assert_eq!(state.take(5 * ALIGN), Some(parts[0].0));
        assert_eq!(state.take(CHUNK), None);
    }
}
