//! What memory a node touches, and when what lies there is of no use any more.
//!
//! A fused launch leaves results out that only its own nodes read. The graph does not say who else may want them: a guest
//! can read any tensor after a run, and a scheduler may have cut the graph out of a larger one. So a result counts as
//! dead only if the graph itself proves it: later nodes write over all of its bytes, and nobody reads them before. Memory
//! for intermediates is used again and again, so that in graphs of models nearly all results are.

use std::ops::Range;

use vgpu_transport::ir::{Graph, Node, Op, Tensor};

/// Bytes of a buffer of the graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    buffer: u32,
    bytes: Range<u64>,
}

impl Span {
    /// From the first to one past the last byte of a tensor.
    pub fn of(tensor: &Tensor) -> Span {
        let extent = tensor.shape.extent();
        let extent = extent.expect("a validated tensor has a size");
        Span {
            buffer: tensor.buffer,
            bytes: tensor.offset..tensor.offset + extent,
        }
    }

    /// Whether the two share a byte.
    pub fn meets(&self, other: &Span) -> bool {
        self.buffer == other.buffer
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

/// What a node reads.
pub fn reads<'g>(graph: &'g Graph, node: &'g Node) -> impl Iterator<Item = Span> + 'g {
    let sources = node.src.as_slice().iter().flatten();
    sources.map(|&source| Span::of(&graph.tensors[source as usize]))
}

/// What a node writes: its destination; optimisers also what they keep in their sources.
pub fn writes<'g>(graph: &'g Graph, node: &'g Node) -> impl Iterator<Item = Span> + 'g {
    let is_optimiser = matches!(node.op, Op::OptStepAdamw {} | Op::OptStepSgd {});
    let sources = reads(graph, node).filter(move |_| is_optimiser);
    std::iter::once(Span::of(graph.dst(node))).chain(sources)
}

/// Whether a node writes every byte between the first and the last of its destination.
fn covers(graph: &Graph, node: &Node) -> bool {
    let is_partial = matches!(node.op, Op::SetRows {} | Op::Set { .. } | Op::Acc { .. });
    !is_partial && graph.dst(node).shape.is_contiguous()
}

/// Whether nobody wants what node `of` has written, apart from the nodes of `group`; and apart from the part `kept` of it,
/// which others may read.
pub(super) fn is_dead(graph: &Graph, of: usize, group: &[usize], kept: Option<&Tensor>) -> bool {
    let whole = Span::of(graph.dst(&graph.nodes[of]));
    let mut left = vec![whole.bytes.clone()];
    let remains = |left: &[Range<u64>], span: &Span| {
        let bytes = &span.bytes;
        span.buffer == whole.buffer && { left.iter() }
            .any(|l| l.start < bytes.end && bytes.start < l.end)
    };
    for (at, node) in graph.nodes.iter().enumerate().skip(of + 1) {
        let sources = node.src.as_slice().iter().flatten();
        let mut sources = sources.map(|&source| &graph.tensors[source as usize]);
        let is_read = |source: &Tensor| remains(&left, &Span::of(source)) && kept != Some(source);
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

/// Whether node `at` can as well run before node `first`: no node from there to it reads or writes what it writes, or
/// writes what it reads. `skipped` are nodes in between that move along.
pub(super) fn can_move_up(graph: &Graph, at: usize, first: usize, skipped: &[usize]) -> bool {
    can_pass(graph, at, first..at, skipped)
}

/// Whether node `at` can as well run just before node `last`.
pub(super) fn can_move_down(graph: &Graph, at: usize, last: usize, skipped: &[usize]) -> bool {
    can_pass(graph, at, at + 1..last, skipped)
}

/// Whether it makes no difference if node `at` runs before or after the nodes of a range, apart from those `skipped`.
fn can_pass(graph: &Graph, at: usize, mut others: Range<usize>, skipped: &[usize]) -> bool {
    let node = &graph.nodes[at];
    let (written, read): (Vec<_>, Vec<_>) =
        (writes(graph, node).collect(), reads(graph, node).collect());
    others.all(|other| {
        if skipped.contains(&other) || graph.dst(&graph.nodes[other]).shape.is_empty() {
            return true;
        }
        let other = &graph.nodes[other];
        let theirs: Vec<Span> = writes(graph, other).collect();
        let mut touched = reads(graph, other).chain(theirs.iter().cloned());
        !touched.any(|span| written.iter().any(|w| w.meets(&span)))
            && !theirs.iter().any(|t| read.iter().any(|r| r.meets(t)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::{BufferId, Shape, Sources, Type};

    /// A graph of sums: each of a destination and two sources, given as first element and number of elements.
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

    #[test]
    fn results_are_dead_when_all_of_them_is_written_over() {
        let make = (0, 8);
        let used = [(100, 8), make, OTHER];
        // Not written over at all: somebody may read it after the run.
        assert!(!is_dead(
            &sums(&[[make, OTHER, OTHER], used]),
            0,
            &[1],
            None
        ));
        // Written over in two parts.
        let first = [(0, 4), OTHER, OTHER];
        let second = [(4, 4), OTHER, OTHER];
        let graph = sums(&[[make, OTHER, OTHER], used, first, second]);
        assert!(is_dead(&graph, 0, &[1], None));
        // Only in part.
        assert!(!is_dead(
            &sums(&[[make, OTHER, OTHER], used, first]),
            0,
            &[1],
            None
        ));
        // Read by somebody else before; of the part that is left.
        let reads_left = [(200, 4), (4, 4), OTHER];
        let graph = sums(&[[make, OTHER, OTHER], used, first, reads_left, second]);
        assert!(!is_dead(&graph, 0, &[1], None));
        // What was written over in between is somebody else's.
        let reads_gone = [(200, 4), (0, 4), OTHER];
        let graph = sums(&[[make, OTHER, OTHER], used, first, reads_gone, second]);
        assert!(is_dead(&graph, 0, &[1], None));
        // In place: the reader itself writes over it.
        let graph = sums(&[[make, OTHER, OTHER], [make, make, OTHER]]);
        assert!(is_dead(&graph, 0, &[1], None));
        assert!(!is_dead(&graph, 1, &[], None));
    }

    #[test]
    fn writing_some_rows_is_not_writing_over() {
        let make = (0, 8);
        let mut graph = sums(&[
            [make, OTHER, OTHER],
            [(100, 8), make, OTHER],
            [make, (300, 8), (400, 8)],
        ]);
        assert!(is_dead(&graph, 0, &[1], None));
        graph.nodes[2].op = Op::SetRows {};
        assert!(!is_dead(&graph, 0, &[1], None));
    }

    #[test]
    fn nodes_move_past_those_that_do_not_mind() {
        let far = [(500, 8), (510, 8), (520, 8)];
        let node = [(0, 8), (100, 8), (200, 8)];
        let moves = |between| {
            let up = can_move_up(&sums(&[between, node]), 1, 0, &[]);
            let down = can_move_down(&sums(&[node, between, far]), 0, 2, &[]);
            assert_eq!(up, down, "{between:?}");
            up
        };
        assert!(moves(far));
        assert!(moves([(500, 8), (100, 8), (200, 8)]), "both read the same");
        assert!(!moves([(4, 1), (510, 8), (520, 8)]), "writes the result");
        assert!(!moves([(500, 8), (7, 2), (520, 8)]), "reads the result");
        assert!(!moves([(104, 1), (510, 8), (520, 8)]), "writes a source");
        let overlapping = sums(&[[(4, 1), OTHER, OTHER], node]);
        assert!(can_move_up(&overlapping, 1, 0, &[0]), "moves along");
        assert!(!can_move_up(&overlapping, 1, 0, &[]));
    }
}
