//! Thread-local memory for operands that a product prepares.

use std::cell::Cell;
use std::thread::LocalKey;

/// A cache line, so that the memory is aligned to one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// A piece of memory of each thread.
pub(super) struct Scratch(&'static LocalKey<Cell<Vec<Line>>>);

/// For activations.
pub(super) static PREPARED: Scratch = Scratch(&PREPARED_CELL);
/// For decoded weights.
pub(super) static DECODED: Scratch = Scratch(&DECODED_CELL);

thread_local! {
    static PREPARED_CELL: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    static DECODED_CELL: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

impl Scratch {
    /// At least `bytes` of initialised, line-aligned memory with arbitrary contents. What is not
    /// given back is freed.
    pub(super) fn take(&self, bytes: usize) -> Vec<Line> {
        let mut memory = self.0.take();
        let lines = bytes.div_ceil(64);
        if memory.len() < lines {
            memory.resize(lines, Line([0; 64]));
        }
        memory
    }

    /// Keeps the memory for this thread's next call.
    pub(super) fn give_back(&self, memory: Vec<Line>) {
        self.0.set(memory);
    }
}
