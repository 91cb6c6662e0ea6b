//! A bound on the time that the search for groups takes.

use std::cell::Cell;

use vgpu_transport::ir::Graph;

/// Nodes that a search may look at for each node of the graph. In a graph of a language model,
/// whose memory is reused within a layer, a search looks at some tens.
const PER_NODE: u64 = 128;

/// Nodes that every search may look at.
const MIN_NODES: u64 = 1 << 20;

/// Nodes between two questions whether the search is cancelled.
const QUESTION: u64 = 1 << 16;

/// The nodes that a search may still look at. To prove that a result is dead, a search looks at all
/// nodes until the result is overwritten, so that the search in a graph of a hostile guest would
/// take a time proportional to the square of the number of nodes.
pub(super) struct Budget<'a> {
    left: Cell<u64>,
    is_cancelled: &'a dyn Fn() -> bool,
}

impl Budget<'_> {
    /// The budget for a graph, which is spent once `is_cancelled` returns `true`.
    pub(super) fn of<'a>(graph: &Graph, is_cancelled: &'a dyn Fn() -> bool) -> Budget<'a> {
        let nodes = graph.nodes.len() as u64;
        Budget {
            left: Cell::new(MIN_NODES + PER_NODE * nodes),
            is_cancelled,
        }
    }

    /// Takes one node out of the budget. Returns `false` if the budget is spent.
    pub(super) fn spend(&self) -> bool {
        let left = self.left.get();
        let is_over = left == 0 || left.is_multiple_of(QUESTION) && (self.is_cancelled)();
        self.left.set(if is_over { 0 } else { left - 1 });
        !is_over
    }

    pub(super) fn is_spent(&self) -> bool {
        self.left.get() == 0
    }
}
