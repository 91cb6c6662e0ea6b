//! Graphs are charged to the tenant: images, decoded graphs, plans, working memory.

mod common;

use std::sync::{Arc, mpsc};

use common::scripted_engine::{Act, ScriptedEngine};
use common::{Build, Guest, Host, MEMORY, add, cpu, image};
use vgpu_engine::Engine;
use vgpu_transport::ir::{BufferId, Graph, GraphCounts, IR_VERSION};
use vgpu_transport::size::shown;
use vgpu_transport::wire::{GraphId, MAX_PAYLOAD, Reply, Request};

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
        assert!(
            what.contains(&format!("8.0 KiB of {} free", shown(MEMORY))),
            "{what}"
        );
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
        reason.contains(&format!("out of memory: {} wanted", shown(wanted))),
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

/// Set in the process of the test below, whose address space is limited.
const LIMITED: &str = "VGPU_TEST_ADDRESS_SPACE";

/// Limits the address space of this process to `more` bytes beyond what it has. `None`: no limit.
fn limit_address_space(more: Option<u64>) {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = pages.split(' ').next().and_then(|n| n.parse::<u64>().ok());
    let has = pages.expect("a number") * rustix::param::page_size() as u64;
    let current = more.map(|more| has + more);
    let limit = rustix::process::Rlimit {
        current,
        maximum: None,
    };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).expect("at most the maximum");
}

fn images_beyond_the_address_space() {
    let engine = vgpu_cpu::CpuEngine::new(1, Some(1 << 30)).expect("an engine");
    let host = Host::new(Arc::new(engine));
    let mut guest = host.guest();
    let buffer = guest.alloc_with(&common::bytes(&[1.0, 2.0]));
    guest.graph(GraphId(1), &sums(buffer, 1));
    let image = vec![0; 48 << 20];
    let parts: Vec<&[u8]> = image.chunks(MAX_PAYLOAD).collect();
    // There is no room for the bytes of the image, or none for its words.
    for (i, before) in [0, parts.len() - 1].into_iter().enumerate() {
        for (part, bytes) in parts.iter().enumerate() {
            if part == before {
                guest.fence();
                limit_address_space(Some(24 << 20));
            }
            let request = Request::Graph {
                graph: GraphId(9),
                offset: (part * MAX_PAYLOAD) as u64,
                total: image.len() as u64,
            };
            guest.send_with(&request, bytes);
        }
        guest.submit(GraphId(9));
        // Of the graph, and of its run.
        let reasons = [failure(&mut guest), failure(&mut guest)];
        limit_address_space(None);
        for reason in reasons {
            assert!(reason.contains("out of host memory"), "{reason}");
        }
        guest.submit(GraphId(1));
        let sum = f32::from(2u8 << i);
        assert_eq!(guest.read_f32(buffer, 2), [sum, 2.0 * sum]);
    }
    // Nor is there room for a copy of the base of a patch, or for its compilation.
    guest.graph(GraphId(2), &sums(buffer, 20_000));
    let patch = |graph| Request::Patch {
        graph,
        base: GraphId(2),
    };
    // With more room the graph is decoded.
    for room in [3 << 19, 4 << 20, 8 << 20, 12 << 20, 16 << 20, 20 << 20] {
        guest.fence();
        limit_address_space(Some(room));
        guest.send(&patch(GraphId(3)));
        guest.submit(GraphId(3));
        let reasons = [failure(&mut guest), failure(&mut guest)];
        limit_address_space(None);
        for reason in reasons {
            assert!(reason.contains("out of host memory"), "{reason}");
        }
    }
    guest.send(&patch(GraphId(4)));
    guest.submit(GraphId(4));
    guest.fence();
    // With room, the same bytes are no graph, and that ends the session.
    guest.image(GraphId(9), &image);
    assert!(guest.ended().contains("the graph image begins with"));
}

/// A process without memory for an image refuses it, and serves its other guests.
#[test]
fn an_image_for_which_the_process_has_no_memory_is_refused() {
    if std::env::var_os(LIMITED).is_some() {
        return images_beyond_the_address_space();
    }
    let output = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "an_image_for_which_the_process_has_no_memory_is_refused",
        ])
        .env(LIMITED, "1")
        // An arena of a thread has 64 MiB of addresses from its start.
        .env("MALLOC_ARENA_MAX", "1")
        // What is freed is no room for the next one.
        .env("MALLOC_MMAP_THRESHOLD_", "65536")
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{output:?}"
    );
}
