//! Thread-local memory for operands that a product prepares.

use std::cell::Cell;
use std::thread::LocalKey;

use crate::gemm::limits::MAX_PREPARED;

/// A cache line, so that the memory is aligned to one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// A buffer of each thread.
pub(super) struct Scratch(&'static LocalKey<Cell<Vec<Line>>>);

/// The prepared activations of a product.
pub(super) static PREPARED: Scratch = Scratch(&PREPARED_CELL);
/// The decoded weights of a product, or its intermediate sums.
pub(super) static DECODED: Scratch = Scratch(&DECODED_CELL);

thread_local! {
    static PREPARED_CELL: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    static DECODED_CELL: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

impl Scratch {
    /// At least `bytes` bytes of initialised memory with arbitrary contents, aligned to a cache
    /// line. Memory that is not passed to [`Scratch::give_back`] is freed.
    pub(super) fn take(&self, bytes: usize) -> Vec<Line> {
        let mut memory = self.0.take();
        let lines = bytes.div_ceil(64);
        if memory.len() < lines {
            memory.resize(lines, Line([0; 64]));
        }
        memory
    }

    /// Keeps the memory for this thread's next call, or frees it if it is larger than
    /// [`MAX_PREPARED`].
    pub(super) fn give_back(&self, memory: Vec<Line>) {
        if memory.len() * size_of::<Line>() <= MAX_PREPARED {
            self.0.set(memory);
        }
    }
}
