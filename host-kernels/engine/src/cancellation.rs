//! Ends long work whose result is no longer wanted.

use crate::error::EngineError;

/// Nodes between two questions whether a compilation is cancelled. A node takes some microseconds.
const NODES: usize = 2048;

/// Asks now and then whether a compilation is cancelled.
pub struct Cancellation<'a> {
    is_cancelled: &'a dyn Fn() -> bool,
    next: usize,
}

impl Cancellation<'_> {
    /// Nothing has been asked yet.
    pub fn new(is_cancelled: &dyn Fn() -> bool) -> Cancellation<'_> {
        let next = 0;
        Cancellation { is_cancelled, next }
    }

    /// To be called before node `at` is compiled. Asks at the first node, and once in 2048 nodes.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`] if the compilation is cancelled.
    pub fn check(&mut self, at: usize) -> Result<(), EngineError> {
        if at < self.next {
            return Ok(());
        }
        self.next = at.saturating_add(NODES);
        match (self.is_cancelled)() {
            true => Err(EngineError::Cancelled),
            false => Ok(()),
        }
    }
}
