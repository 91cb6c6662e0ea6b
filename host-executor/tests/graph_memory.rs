//! Graphs are charged to the tenant: images, decoded graphs, plans, working memory.

mod common;

use std::sync::{Arc, mpsc};

use common::scripted_engine::{Act, ScriptedEngine};
use common::{Build, Guest, Host, MEMORY, add, cpu, image};
use vgpu_engine::Engine;
use vgpu_transport::ir::{BufferId, Graph, GraphCounts, IR_VERSION};
use vgpu_transport::wire::{GraphId, Reply, Request};

/// A graph of `nodes` sums on two floats.
fn sums(buffer: BufferId, nodes: usize) -> Graph {
    let mut graph = add(2, buffer, buffer, buffer);
    let node = graph.nodes[0].clone();
    graph.nodes = vec![node; nodes];
    graph
}

fn free(guest: &mut Guest) -> u64 {
    match guest.ask(&Request::Memory {}) {
        Reply::Memory { free, .. } => free,
        other => panic!("{other:?}"),
    }
}

/// The reason of the failure that must be the next reply.
fn failure(guest: &mut Guest) -> String {
    match guest.receive().0 {
        Reply::Failed { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn graphs_are_charged_and_given_back() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let buffer = guest.alloc(4096);
    let before = free(&mut guest);
    let graph = sums(buffer, 1000);
    let words = image(&graph);

    // While the image arrives, it and the words that are made of it are charged.
    guest.send_with(
        &Request::Graph {
            graph: GraphId(1),
            offset: 0,
            total: words.len() as u64,
        },
        &words[..100],
    );
    let arriving = before - free(&mut guest);
    assert!(arriving >= 2 * words.len() as u64, "{arriving}");
    guest.send_with(
        &Request::Graph {
            graph: GraphId(1),
            offset: 100,
            total: words.len() as u64,
        },
        &words[100..],
    );
    let stored = before - free(&mut guest);
    assert!(stored > words.len() as u64 + 1000 * 100, "{stored}");
    assert!(stored < words.len() as u64 + 1000 * 4096, "{stored}");
    // A second one with a few other words, and the same again under the number of the first.
    guest.send(&Request::Patch {
        graph: GraphId(2),
        base: GraphId(1),
    });
    let both = before - free(&mut guest);
    assert!(both.abs_diff(2 * stored) < 4096, "{both}, {stored} for one");
    guest.graph(GraphId(1), &graph);
    assert_eq!(before - free(&mut guest), both);
    guest.send(&Request::Forget { graph: GraphId(1) });
    guest.send(&Request::Forget { graph: GraphId(2) });
    assert_eq!(free(&mut guest), before);

    // The next allocation gets what is left, and no graph.
    let rest = guest.alloc(before - 8192);
    guest.graph(GraphId(3), &graph);
    for what in [
        failure(&mut guest),
        {
            guest.submit(GraphId(3));
            failure(&mut guest)
        },
        {
            let base = GraphId(3);
            guest.send(&Request::Patch {
                graph: GraphId(4),
                base,
            });
            failure(&mut guest)
        },
    ] {
        assert!(what.contains("out of memory"), "{what}");
        assert!(what.contains(&format!("8192 of {MEMORY} free")), "{what}");
    }
    guest.send(&Request::Free { buffer: rest });
    guest.graph(GraphId(3), &graph);
    guest.submit(GraphId(3));
    guest.fence();
    assert_eq!(before - free(&mut guest), stored, "the refused one is gone");
    drop(guest);
    host.wait_until_empty();
    assert_eq!(host.engine.memory().free, MEMORY);
}

#[test]
fn copies_of_a_plan_are_charged_before_they_are_allocated() {
    let engine = ScriptedEngine::new();
    let host = Host::new(Arc::clone(&engine) as Arc<dyn Engine>);
    let mut guest = host.guest();
    let buffer = guest.alloc(4096);
    let (allocated, allocations) = mpsc::channel();
    engine.next(Act::Copies(2 * MEMORY, allocated.clone()));
    guest.graph(GraphId(1), &sums(buffer, 1));
    let reason = failure(&mut guest);
    assert!(reason.contains("out of memory"), "{reason}");
    assert!(allocations.try_recv().is_err(), "memory was allocated");
    let before = free(&mut guest);
    engine.next(Act::Copies(MEMORY / 2, allocated));
    guest.graph(GraphId(2), &sums(buffer, 1));
    let charged = before - free(&mut guest);
    assert!(charged >= MEMORY / 2, "{charged}");
    assert!(allocations.try_recv().is_ok());
}

#[test]
fn a_small_image_cannot_announce_a_large_graph() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let buffer = guest.alloc(4096);
    // Two words for a node, of which each takes some hundred bytes when it is decoded: with the
    // limit of nodes for one graph the memory of this engine is too small.
    let nodes = 1 << 20;
    let mut words = sums(buffer, 1).encode();
    words[4] = nodes;
    words.resize(words.len() + 2 * nodes as usize, 0);
    let counts = GraphCounts::of_image(&words).expect("a head");
    let engine: &dyn Engine = host.engine.as_ref();
    assert!(counts.decoded_bytes() > MEMORY);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    guest.image(GraphId(1), &bytes);
    let reason = failure(&mut guest);
    let wanted = counts.decoded_bytes() + engine.compile_bytes(&counts);
    assert!(
        reason.contains(&format!("out of memory: {wanted} bytes wanted")),
        "{reason}"
    );

    // One more node, and the limit is broken before anything is decoded.
    words[4] = nodes + 1;
    words.resize(words.len() + 2, 0);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    guest.image(GraphId(2), &bytes);
    let reason = guest.ended();
    assert!(
        reason.contains("1048577 nodes, the limit is 1048576"),
        "{reason}"
    );
}

#[test]
fn counts_of_an_image_fit_the_image_together() {
    let head = |buffers, tensors, nodes, words: usize| {
        let magic = Graph::default().encode()[0];
        let mut image = vec![magic, IR_VERSION, buffers, tensors, nodes];
        image.resize(words, 0);
        GraphCounts::of_image(&image)
    };
    assert!(head(10, 1, 10, 5 + 20 + 20 + 20).is_ok());
    // Each of them fits, but not all together.
    assert!(head(10, 1, 10, 5 + 20 + 20 + 19).is_err());
    assert!(head(u32::MAX, u32::MAX, u32::MAX, 1000).is_err());
    let mut build = Build::default();
    build.0.buffers = vec![BufferId(7), BufferId(u64::MAX - 1)];
    let image = build.0.encode();
    let counts = GraphCounts::of_image(&image).expect("a head");
    assert_eq!(counts.buffers_of(&image), build.0.buffers);
}
