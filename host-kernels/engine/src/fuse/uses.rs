//! How often results are read, for backends of ggml, which fuse nodes themselves.
//!
//! ggml fuses a node with its readers if the graph has no other reader of the result, and then does
//! not store the result. ggml's graphs count the readers; the IR's do not, and a guest may read any
//! tensor after a run.

use vgpu_transport::ir::{Graph, Op, Tensor};

use super::budget::Budget;
use super::liveness::{is_dead, reads, writes};
use crate::byte_range::ByteRange;

/// The most nodes between a node and the last one that it may be fused with. The longest group of
/// `ggml-cuda` has 13 nodes.
const WINDOW: usize = 16;

/// For each node: how many sources of later nodes its result is, if the result need not be stored
/// as long as these nodes are computed together with it. `None` if anything else may read it, or if
/// one of these nodes writes to memory that the node reads.
///
/// Only the last result of a group is stored: ggml's groups with a stored result in their middle
/// have nodes for views there, which the IR does not have.
///
/// `None` also for products with a demand for sums in F32: a kernel of `ggml-cuda` that adds a bias
/// reads the demand from the sum's node (`mmvf.cu`).
pub fn uses(graph: &Graph, is_cancelled: &dyn Fn() -> bool) -> Vec<Option<u32>> {
    let budget = Budget::of(graph, is_cancelled);
    let mut uses: Vec<Option<u32>> = vec![None; graph.nodes.len()];
    // The last node that each node may be computed together with.
    let mut ends: Vec<usize> = (0..graph.nodes.len()).collect();
    for at in (0..graph.nodes.len()).rev() {
        let Some((count, readers)) = readers(graph, at) else {
            continue;
        };
        if has_demand(&graph.nodes[at].op) {
            continue;
        }
        let end = readers.iter().map(|&reader| ends[reader]).max();
        let end = end.unwrap_or(at);
        if end - at <= WINDOW
            && is_dead(graph, at, &readers, None, &budget)
            && keeps_sources(graph, at, end)
        {
            (uses[at], ends[at]) = (Some(count), end);
        }
    }
    uses
}

fn has_demand(op: &Op) -> bool {
    match op {
        Op::MulMat { accumulator, .. } | Op::MulMatId { accumulator, .. } => {
            accumulator.needs_f32_range()
        }
        _ => false,
    }
}

/// Whether both tensors are the same elements.
pub fn is_same(one: &Tensor, other: &Tensor) -> bool {
    let place = |tensor: &Tensor| {
        (
            tensor.buffer,
            tensor.offset,
            tensor.shape.with_plain_strides(),
        )
    };
    place(one) == place(other)
}

/// How many sources of nodes soon after node `at` are its result, and the indices of these nodes.
/// `None` if there is none, or if such a node reads a part of the result, or the result with
/// another shape.
fn readers(graph: &Graph, at: usize) -> Option<(u32, Vec<usize>)> {
    let dst = graph.dst(&graph.nodes[at]);
    let result = ByteRange::of(dst);
    let (mut count, mut readers) = (0, Vec::new());
    for (later, node) in graph.nodes.iter().enumerate().skip(at + 1).take(WINDOW) {
        let whole = node.src.as_slice().iter().flatten();
        let whole = whole.filter(|&&source| is_same(&graph.tensors[source as usize], dst));
        let whole = whole.count();
        if whole > 0 {
            count += whole as u32;
            readers.push(later);
        }
        let all = reads(graph, node).filter(|bytes| bytes.overlaps(&result));
        if all.count() > whole {
            return None;
        }
        if writes(graph, node).any(|bytes| bytes.overlaps(&result)) {
            break;
        }
    }
    (count > 0).then_some((count, readers))
}

/// Whether no node behind `at` up to `end` writes to memory that node `at` reads. A result with
/// the elements of a source that `at` itself overwrites is right: kernels of a group read an
/// element before they write to its place.
fn keeps_sources(graph: &Graph, at: usize, end: usize) -> bool {
    let node = &graph.nodes[at];
    let result = graph.dst(node);
    let sources = node.src.as_slice().iter().flatten();
    let mut sources = sources.map(|&source| &graph.tensors[source as usize]);
    sources.all(|source| {
        let read = ByteRange::of(source);
        let is_in_place = is_same(source, result);
        graph.nodes[at + 1..=end].iter().all(|later| {
            let is_there = is_in_place && is_same(graph.dst(later), source);
            is_there || !writes(graph, later).any(|written| written.overlaps(&read))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::{BufferId, Node, Precision, Shape, Sources, Type};

    /// A graph of sums of tensors that are named by number: result and two sources. `places` has
    /// the first element of each tensor, of 8.
    fn sums(places: &[u64], nodes: &[[u32; 3]]) -> Graph {
        let tensor = |&at: &u64| Tensor {
            shape: Shape::contiguous(Type::F32, [8, 1, 1, 1]).unwrap(),
            buffer: 0,
            offset: 4 * at,
        };
        let node = |&[dst, a, b]: &[u32; 3]| Node {
            op: Op::Add {},
            dst,
            src: Sources::new([Some(a), Some(b)]),
        };
        Graph {
            buffers: vec![BufferId(1)],
            tensors: places.iter().map(tensor).collect(),
            nodes: nodes.iter().map(node).collect(),
        }
    }

    fn of(places: &[u64], nodes: &[[u32; 3]]) -> Vec<Option<u32>> {
        uses(&sums(places, nodes), &|| false)
    }

    /// Tensors 0 to 3 are apart from each other.
    const APART: [u64; 4] = [0, 8, 16, 24];

    #[test]
    fn results_that_are_read_and_then_overwritten_have_their_number_of_uses() {
        // t2 = t0 + t1; t3 = t2 + t2; t2 = t0 + t1, which the guest may read.
        let nodes = [[2, 0, 1], [3, 2, 2], [2, 0, 1]];
        assert_eq!(of(&APART, &nodes), [Some(2), None, None]);
        // In place: t2 = t0 + t1; t2 = t2 + t1; t2 = t2 + t1.
        let nodes = [[2, 0, 1], [2, 2, 1], [2, 2, 1]];
        assert_eq!(of(&APART, &nodes), [Some(1), Some(1), None]);
    }

    #[test]
    fn results_that_something_else_reads_have_none() {
        // A part of t2 is read: t4 begins in its middle.
        let places = [0, 8, 16, 32, 20];
        let nodes = [[2, 0, 1], [3, 2, 4], [2, 0, 1]];
        assert_eq!(of(&places, &nodes)[0], None);
        // The same elements under another number are the result.
        let places = [0, 8, 16, 32, 16];
        assert_eq!(of(&places, &nodes)[0], Some(2));
        // A reader behind the window.
        let mut nodes = vec![[2, 0, 1], [3, 2, 2]];
        nodes.extend([[3, 0, 1]; WINDOW]);
        nodes.extend([[3, 2, 2], [2, 0, 1]]);
        assert_eq!(of(&APART, &nodes)[0], None);
    }

    #[test]
    fn results_have_none_if_a_reader_overwrites_what_they_were_computed_from() {
        // t2 = t0 + t1; t0 = t2 + t2.
        let nodes = [[2, 0, 1], [0, 2, 2], [2, 1, 1]];
        assert_eq!(of(&APART, &nodes)[0], None);
        // The reader's reader does: t2 = t0 + t1; t3 = t2 + t1; t0 = t3 + t1.
        let nodes = [[2, 0, 1], [3, 2, 1], [0, 3, 1], [2, 1, 1], [3, 1, 1]];
        let uses = of(&APART, &nodes);
        assert_eq!(uses[..2], [None, Some(1)]);
    }

    #[test]
    fn products_with_a_demand_for_sums_have_none() {
        let product = |accumulator| Op::MulMat {
            accumulator,
            activation: Precision::Default,
            hadamard: false,
        };
        let mut graph = sums(&APART, &[[2, 0, 1], [3, 2, 1], [2, 0, 1]]);
        for (accumulator, expected) in [(Precision::F32, None), (Precision::Default, Some(1))] {
            graph.nodes[0].op = product(accumulator);
            assert_eq!(uses(&graph, &|| false)[0], expected);
        }
    }
}
