//! The memory that a node accesses, and whether a result is dead.
//!
//! A fused kernel does not store results that only its own nodes read. The graph does not say what
//! else reads them: a guest can read any tensor after a run, and a scheduler may have cut the graph
//! out of a larger one. So a result counts as dead only if the graph itself proves it: later nodes
//! overwrite all of its bytes, and no node reads them before. ggml's allocator reuses the memory of
//! intermediates, so nearly all intermediates of a model qualify.

use std::ops::Range;

use vgpu_transport::ir::{Graph, Node, Op, Tensor};

use super::budget::Budget;
use crate::byte_range::ByteRange;

/// The most parts of a result that are not overwritten yet, while the graph is searched for the
/// nodes that overwrite them.
const MAX_HOLES: usize = 64;

/// The bytes that a node reads.
pub fn reads<'g>(graph: &'g Graph, node: &'g Node) -> impl Iterator<Item = ByteRange> + 'g {
    let sources = node.src.as_slice().iter().flatten();
    sources.map(|&source| ByteRange::of(&graph.tensors[source as usize]))
}

/// The bytes that a node writes.
pub fn writes<'g>(graph: &'g Graph, node: &'g Node) -> impl Iterator<Item = ByteRange> + 'g {
    { node.written_tensors() }.map(|tensor| ByteRange::of(&graph.tensors[tensor]))
}

/// Whether a node writes every byte between the first and the last of its destination.
fn covers(graph: &Graph, node: &Node) -> bool {
    let is_partial = matches!(node.op, Op::SetRows {} | Op::Set { .. } | Op::Acc { .. });
    !is_partial && graph.dst(node).shape.is_contiguous()
}

/// Whether only the nodes of `group` read the result of node `of`. Other nodes may read the part
/// `live` of it. `false` also if the budget is spent.
pub(super) fn is_dead(
    graph: &Graph,
    of: usize,
    group: &[usize],
    live: Option<&Tensor>,
    budget: &Budget<'_>,
) -> bool {
    let whole = ByteRange::of(graph.dst(&graph.nodes[of]));
    let mut left = vec![whole.bytes.clone()];
    let remains = |left: &[Range<u64>], span: &ByteRange| {
        let bytes = &span.bytes;
        span.buffer == whole.buffer && { left.iter() }
            .any(|l| l.start < bytes.end && bytes.start < l.end)
    };
    for (at, node) in graph.nodes.iter().enumerate().skip(of + 1) {
        if !budget.spend() || left.len() > MAX_HOLES {
            return false;
        }
        let sources = node.src.as_slice().iter().flatten();
        let mut sources = sources.map(|&source| &graph.tensors[source as usize]);
        let is_read =
            |source: &Tensor| remains(&left, &ByteRange::of(source)) && live != Some(source);
        if !group.contains(&at) && sources.any(is_read) {
            return false;
        }
        for span in writes(graph, node) {
            if !remains(&left, &span) {
                continue;
            }
            if !covers(graph, node) {
                return false;
            }
            let Range { start, end } = span.bytes;
            left = { left.into_iter() }
                .flat_map(|l| [l.start..l.end.min(start), l.start.max(end)..l.end])
                .filter(|l| l.start < l.end)
                .collect();
        }
        if left.is_empty() {
            return true;
        }
    }
    false
}

/// Whether node `at` can run before node `first` instead: no node between them reads or writes what
/// it writes, or writes what it reads. `skipped` are nodes between them that move along.
pub(super) fn can_move_up(
    graph: &Graph,
    at: usize,
    first: usize,
    skipped: &[usize],
    budget: &Budget<'_>,
) -> bool {
    can_pass(graph, at, first..at, skipped, budget)
}

/// Whether node `at` can run just before node `last` instead.
pub(super) fn can_move_down(
    graph: &Graph,
    at: usize,
    last: usize,
    skipped: &[usize],
    budget: &Budget<'_>,
) -> bool {
    can_pass(graph, at, at + 1..last, skipped, budget)
}

/// Whether the results are the same if node `at` runs before or after the nodes of `others`, except
/// those in `skipped`. `false` also if the budget is spent.
fn can_pass(
    graph: &Graph,
    at: usize,
    mut others: Range<usize>,
    skipped: &[usize],
    budget: &Budget<'_>,
) -> bool {
    let node = &graph.nodes[at];
    let (written, read): (Vec<_>, Vec<_>) =
        (writes(graph, node).collect(), reads(graph, node).collect());
    others.all(|other| {
        if !budget.spend() {
            return false;
        }
        if skipped.contains(&other) || graph.dst(&graph.nodes[other]).shape.is_empty() {
            return true;
        }
        let other = &graph.nodes[other];
        let theirs: Vec<ByteRange> = writes(graph, other).collect();
        let mut touched = reads(graph, other).chain(theirs.iter().cloned());
        !touched.any(|span| written.iter().any(|w| w.overlaps(&span)))
            && !theirs.iter().any(|t| read.iter().any(|r| r.overlaps(t)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::{BufferId, Shape, Sources, Type};

    /// A graph of sums: each of a destination and two sources, given as first element and number of
    /// elements.
    fn sums(nodes: &[[(u64, u64); 3]]) -> Graph {
        let mut graph = Graph {
            buffers: vec![BufferId(1)],
            ..Graph::default()
        };
        for places in nodes {
            let first = graph.tensors.len() as u32;
            graph.tensors.extend(places.map(|(at, n)| Tensor {
                shape: Shape::contiguous(Type::F32, [n, 1, 1, 1]).unwrap(),
                buffer: 0,
                offset: 4 * at,
            }));
            graph.nodes.push(Node {
                op: Op::Add {},
                dst: first,
                src: Sources::new([Some(first + 1), Some(first + 2)]),
            });
        }
        graph
    }

    const OTHER: (u64, u64) = (900, 8);

    fn is_dead_in(graph: &Graph, of: usize, group: &[usize], live: Option<&Tensor>) -> bool {
        is_dead(graph, of, group, live, &Budget::of(graph, &|| false))
    }

    fn up_in(graph: &Graph, at: usize, first: usize, skipped: &[usize]) -> bool {
        can_move_up(graph, at, first, skipped, &Budget::of(graph, &|| false))
    }

    fn down_in(graph: &Graph, at: usize, last: usize, skipped: &[usize]) -> bool {
        can_move_down(graph, at, last, skipped, &Budget::of(graph, &|| false))
    }

    #[test]
    fn results_are_dead_after_they_are_overwritten() {
        let make = (0, 8);
        let used = [(100, 8), make, OTHER];
        // Not overwritten: the guest may read it after the run.
        assert!(!is_dead_in(
            &sums(&[[make, OTHER, OTHER], used]),
            0,
            &[1],
            None
        ));
        // Overwritten in two parts.
        let first = [(0, 4), OTHER, OTHER];
        let second = [(4, 4), OTHER, OTHER];
        let graph = sums(&[[make, OTHER, OTHER], used, first, second]);
        assert!(is_dead_in(&graph, 0, &[1], None));
        // Overwritten only in part.
        assert!(!is_dead_in(
            &sums(&[[make, OTHER, OTHER], used, first]),
            0,
            &[1],
            None
        ));
        // Another node reads the part that is not yet overwritten.
        let reads_left = [(200, 4), (4, 4), OTHER];
        let graph = sums(&[[make, OTHER, OTHER], used, first, reads_left, second]);
        assert!(!is_dead_in(&graph, 0, &[1], None));
        // Another node reads the part that was overwritten before.
        let reads_gone = [(200, 4), (0, 4), OTHER];
        let graph = sums(&[[make, OTHER, OTHER], used, first, reads_gone, second]);
        assert!(is_dead_in(&graph, 0, &[1], None));
        // In place: the reader itself overwrites it.
        let graph = sums(&[[make, OTHER, OTHER], [make, make, OTHER]]);
        assert!(is_dead_in(&graph, 0, &[1], None));
        assert!(!is_dead_in(&graph, 1, &[], None));
    }

    #[test]
    fn writing_some_rows_does_not_overwrite_all() {
        let make = (0, 8);
        let mut graph = sums(&[
            [make, OTHER, OTHER],
            [(100, 8), make, OTHER],
            [make, (300, 8), (400, 8)],
        ]);
        assert!(is_dead_in(&graph, 0, &[1], None));
        graph.nodes[2].op = Op::SetRows {};
        assert!(!is_dead_in(&graph, 0, &[1], None));
    }

    #[test]
    fn nodes_move_past_independent_nodes() {
        let far = [(500, 8), (510, 8), (520, 8)];
        let node = [(0, 8), (100, 8), (200, 8)];
        let moves = |between| {
            let up = up_in(&sums(&[between, node]), 1, 0, &[]);
            let down = down_in(&sums(&[node, between, far]), 0, 2, &[]);
            assert_eq!(up, down, "{between:?}");
            up
        };
        assert!(moves(far));
        assert!(moves([(500, 8), (100, 8), (200, 8)]), "both read the same");
        assert!(!moves([(4, 1), (510, 8), (520, 8)]), "writes the result");
        assert!(!moves([(500, 8), (7, 2), (520, 8)]), "reads the result");
        assert!(!moves([(104, 1), (510, 8), (520, 8)]), "writes a source");
        let overlapping = sums(&[[(4, 1), OTHER, OTHER], node]);
        assert!(up_in(&overlapping, 1, 0, &[0]), "moves along");
        assert!(!up_in(&overlapping, 1, 0, &[]));
    }
}
