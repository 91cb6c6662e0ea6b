//! Which entries of a list run, and the steps of each.

/// The entries of a list that run.
#[derive(Clone, Copy)]
pub struct Selection<'a> {
    /// The first entry that runs.
    pub first: usize,
    /// Whether the entry of this name runs.
    pub takes: &'a dyn Fn(&str) -> bool,
}

impl Default for Selection<'_> {
    /// All entries.
    fn default() -> Self {
        Selection {
            first: 0,
            takes: &|_| true,
        }
    }
}

impl Selection<'_> {
    /// Whether an entry runs.
    pub(crate) fn has(&self, index: usize, name: &str) -> bool {
        index >= self.first && (self.takes)(name)
    }
}

/// A step of an entry. A process that ends in the middle of an entry has reported which one.
#[derive(Debug)]
pub enum Step<'a, T> {
    /// The entry begins: its graph is compiled on the engine.
    Begins {
        /// Place in the list, of the entries that do not run, too.
        index: usize,
        /// Name of the entry.
        name: &'a str,
    },
    /// The graph is compiled and runs with these kernels, if they have names.
    Runs {
        /// The kernels of the plan.
        kernels: &'a [&'static str],
    },
    /// The entry has ended.
    Ends(&'a T),
}
