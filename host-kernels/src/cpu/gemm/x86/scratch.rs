//! Memory for prepared activations, kept for each thread.

use std::cell::Cell;

/// A cache line, so that the memory is aligned to one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

thread_local! {
    static SPARE: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// At least `bytes` of initialised, line-aligned memory with arbitrary contents. What is not given back
/// is freed.
pub(super) fn take(bytes: usize) -> Vec<Line> {
    let mut memory = SPARE.take();
    let lines = bytes.div_ceil(64);
    if memory.len() < lines {
        memory.resize(lines, Line([0; 64]));
    }
    memory
}

/// Keeps the memory for this thread's next call.
pub(super) fn give_back(memory: Vec<Line>) {
    SPARE.set(memory);
}
