//! The memory in which a thread prepares the operands of a product.
//!
//! A run lends each thread its memory ([`KeptThreadMemory::lend`]), so that the engine owns it, and
//! no thread of a session. The run also says how much a product may prepare: what its plan has
//! announced, for which the tenant is charged.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use vgpu_transport::lock::lock_at;

use crate::gemm::limits::MAX_KEPT;
use crate::kernel::OutOfMemory;
use crate::lock::Rank;

/// A cache line, so that the memory is aligned to one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; 64]);

/// One of the buffers of a thread, by its index in `ThreadMemory`.
pub(super) struct Scratch(usize);

/// The prepared activations of a product.
pub(super) const PREPARED: Scratch = Scratch(0);
/// The decoded weights of a product, or its intermediate sums.
pub(super) const DECODED: Scratch = Scratch(1);

/// The memory of one thread.
struct ThreadMemory {
    buffers: [Vec<Line>; 2],
    /// The most bytes that a product may take of one buffer.
    limit: usize,
}

impl ThreadMemory {
    /// No memory yet, and no limit.
    const fn new() -> ThreadMemory {
        ThreadMemory {
            buffers: [Vec::new(), Vec::new()],
            limit: usize::MAX,
        }
    }

    /// Exchanges this memory and that of the thread. Products of this thread use `limit` bytes of
    /// each buffer at most, until the next exchange.
    fn swap(&mut self, limit: usize) {
        self.limit = limit;
        let own = THREAD.replace(std::mem::take(self));
        *self = own;
    }

    /// Fills both buffers, for tests.
    fn fill(&mut self, filler: u8) {
        for buffer in &mut self.buffers {
            buffer.fill(Line([filler; 64]));
        }
    }

    /// Bytes of both buffers.
    fn bytes(&self) -> usize {
        let lines = self.buffers.iter().map(Vec::capacity);
        lines.sum::<usize>() * size_of::<Line>()
    }
}

impl Default for ThreadMemory {
    fn default() -> ThreadMemory {
        ThreadMemory::new()
    }
}

/// The memory of one thread of an engine, which is kept between runs.
#[derive(Default)]
pub(crate) struct KeptThreadMemory {
    memory: Mutex<ThreadMemory>,
    /// Its bytes at the end of the last run.
    bytes: AtomicUsize,
}

impl KeptThreadMemory {
    /// Calls `work` while this thread has the memory. Products use `limit` bytes of each buffer at
    /// most.
    pub(crate) fn lend(&self, limit: usize, work: impl FnOnce()) {
        let mut memory = lock_at(Rank::ThreadMemory, &self.memory);
        memory.swap(limit);
        work();
        memory.swap(usize::MAX);
        self.bytes.store(memory.bytes(), Ordering::Relaxed);
    }

    /// Its bytes at the end of the last run. Waits for no run.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Fills it, for tests.
    pub(crate) fn fill(&self, filler: u8) {
        lock_at(Rank::ThreadMemory, &self.memory).fill(filler);
    }
}

thread_local! {
    static THREAD: Cell<ThreadMemory> = const { Cell::new(ThreadMemory::new()) };
}

impl Scratch {
    /// At least `bytes` bytes of initialised memory with arbitrary contents, aligned to a cache
    /// line. Memory that is not passed to [`Scratch::give_back`] is freed.
    ///
    /// # Panics
    /// Unwinds with [`OutOfMemory`], which fails the run and nothing else, if the machine has not
    /// that much, or if it is more than the plan has announced.
    pub(super) fn take(&self, bytes: usize) -> Vec<Line> {
        let mut all = THREAD.take();
        let limit = all.limit;
        let mut memory = std::mem::take(&mut all.buffers[self.0]);
        THREAD.set(all);
        let lines = bytes.div_ceil(size_of::<Line>());
        let more = lines.saturating_sub(memory.len());
        debug_assert!(bytes <= limit, "{bytes} bytes, {limit} are announced");
        if bytes > limit || memory.try_reserve_exact(more).is_err() {
            resume_unwind(Box::new(OutOfMemory { bytes }));
        }
        if more > 0 {
            memory.resize(lines, Line([0; 64]));
        }
        memory
    }

    /// Keeps the memory for the next call, or frees it if it is larger than [`MAX_KEPT`].
    pub(super) fn give_back(&self, memory: Vec<Line>) {
        if memory.capacity() * size_of::<Line>() <= MAX_KEPT {
            let mut all = THREAD.take();
            all.buffers[self.0] = memory;
            THREAD.set(all);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    /// What `take` unwinds with.
    fn refused(bytes: usize) -> usize {
        let payload = catch_unwind(|| PREPARED.take(bytes))
            .err()
            .expect("refused");
        payload.downcast_ref::<OutOfMemory>().expect("typed").bytes
    }

    #[test]
    fn memory_that_does_not_exist_unwinds_with_its_size() {
        assert_eq!(refused(usize::MAX / 2), usize::MAX / 2);
        PREPARED.give_back(PREPARED.take(100));
    }

    #[test]
    fn small_memory_is_kept_and_goes_with_the_exchange() {
        let kept = KeptThreadMemory::default();
        kept.lend(MAX_KEPT + 64, || {
            PREPARED.give_back(PREPARED.take(MAX_KEPT));
            DECODED.give_back(DECODED.take(MAX_KEPT + 64));
        });
        assert_eq!(kept.bytes(), MAX_KEPT, "the larger one was freed");
    }
}
