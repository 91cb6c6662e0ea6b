//! The entry points of the driver that the engine uses, and those that belong to them.
//!
//! Handles are the numbers of [`new_handle`](crate::context::new_handle), not addresses: a wrong
//! one is an error here, where the real driver may crash.

mod context;
mod entry;
mod graph;
mod launch;
mod memory;
mod stream;

/// The names of the entry points of the driver.
pub fn entries() -> impl Iterator<Item = &'static str> {
    let all = [
        context::ENTRIES,
        launch::ENTRIES,
        stream::ENTRIES,
        memory::ENTRIES,
        graph::ENTRIES,
    ];
    all.into_iter().flatten().copied()
}
