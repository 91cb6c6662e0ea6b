//! The search for groups of nodes is bounded, and can be cancelled.

use std::cell::Cell;

use vgpu_engine::fuse::Arrangement;
use vgpu_transport::ir::{BufferId, Graph, Node, Op, Shape, Sources, Tensor, Type};

/// Triples of ADD, RMS_NORM and MUL whose results are never overwritten: to find out whether a norm
/// is dead, a search looks at all later nodes.
fn never_dead(triples: u32) -> Graph {
    let mut graph = Graph {
        buffers: vec![BufferId(1)],
        ..Graph::default()
    };
    for at in 0..=3 * triples {
        graph.tensors.push(Tensor {
            shape: Shape::contiguous(Type::F32, [32, 1, 1, 1]).expect("a row"),
            buffer: 0,
            offset: 128 * u64::from(at),
        });
    }
    for at in 0..3 * triples {
        let (op, src) = match at % 3 {
            0 => (Op::Add {}, [Some(at), Some(at)]),
            1 => (Op::RmsNorm { eps: 0.1 }, [Some(at), None]),
            _ => (Op::Mul {}, [Some(at), Some(0)]),
        };
        graph.nodes.push(Node {
            op,
            dst: at + 1,
            src: Sources::new(src),
        });
    }
    graph
}

/// How often a search asks whether it is cancelled: once for some thousand nodes that it looks at.
/// The search is cancelled at question `last`.
fn questions(graph: &Graph, last: u64) -> u64 {
    let asked = Cell::new(0);
    let arrangement = Arrangement::of(graph, u64::MAX, &|| {
        asked.set(asked.get() + 1);
        asked.get() == last
    });
    assert_eq!(arrangement.graph.nodes.len(), graph.nodes.len());
    asked.get()
}

#[test]
fn a_search_looks_at_a_number_of_nodes_proportional_to_the_graph() {
    let (few, many) = (never_dead(2 << 10), never_dead(16 << 10));
    let [few, many] = [&few, &many].map(|graph| questions(graph, u64::MAX));
    assert!(few > 8, "{few}");
    // 64 times as many if the search were not bounded.
    assert!(many <= 8 * few, "{few}, then {many}");
}

#[test]
fn a_cancelled_search_ends() {
    let graph = never_dead(2 << 10);
    assert_eq!(questions(&graph, 1), 1);
    assert_eq!(questions(&graph, 5), 5);
}
