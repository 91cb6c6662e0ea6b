//! Graphs that would run for minutes or years: other guests keep their share of the device, and the
//! graph ends with its guest and with the executor.

mod common;
#[path = "common/counting_engine.rs"]
mod counting_engine;
#[path = "common/endless.rs"]
mod endless;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::scripted_engine::{Act, HOLLOW_SIZE, ScriptedEngine};
use common::{Guest, Host, TIMEOUT, add, bytes};
use counting_engine::CountingEngine;
use endless::{
    BUFFER, GRAPH, LATE, LONG_PARTS, OPERATORS, attack, ends_promptly, engine, host, host_on,
    stats, wait_for_turns,
};
use vgpu_engine::Engine;
use vgpu_executor::Limits;
use vgpu_transport::ir::{BufferId, Graph, OpKind};
use vgpu_transport::wire::{GraphId, Reply, Request};

/// The operators that an engine has.
fn every_operator() -> impl Iterator<Item = OpKind> {
    let all = OpKind::ALL.iter().copied();
    all.filter(|kind| *kind != OpKind::FlashAttnBack)
}

/// Starts graphs of `attack` for each of `kinds`, beside which another guest computes. Each ends
/// with its guest.
fn others_run_beside(kinds: &[OpKind], graph: fn(OpKind, [BufferId; 3]) -> Graph) {
    for &kind in kinds {
        let name = kind.ggml_name();
        ends_promptly(name, || ends_with_its_guest(kind, graph));
    }
}

/// Checks that no more than one turn of the graph begins once its guest has gone: one that it was
/// about to have. Returns how long the graph goes on without its guest.
fn ends_with_its_guest(kind: OpKind, graph: fn(OpKind, [BufferId; 3]) -> Graph) -> Duration {
    let engine = CountingEngine::new(engine());
    let host = host_on(Arc::clone(&engine) as Arc<dyn Engine>);
    let name = kind.ggml_name();
    let attacker = attack(&host, |buffers| graph(kind, buffers));
    let mut other = host.guest_of(2);
    let [x, y] = [0; 2].map(|_| other.alloc_with(&bytes(&[1.0, 2.0])));
    let sum = other.alloc(8);
    other.graph(GRAPH, &add(2, sum, x, y));
    for _ in 0..5 {
        other.submit(GRAPH);
        assert_eq!(other.read_f32(sum, 2), [2.0, 4.0], "{name}");
    }
    assert_eq!(stats(&host, 1).graphs_run, 0, "{name} is not endless");
    // The first plan is the attacker's.
    let turns = || engine.begun(0);
    assert!(turns() > 0, "{name} has had no turn");
    let dropped = Instant::now();
    drop(attacker);
    let before = turns();
    while host.server.sessions().len() > 1 {
        let goes_on = dropped.elapsed();
        assert!(goes_on < LATE, "{name} goes on without its guest");
        thread::yield_now();
    }
    let ended = dropped.elapsed();
    for _ in 0..5 {
        other.submit(GRAPH);
        assert_eq!(other.read_f32(sum, 2), [2.0, 4.0], "{name}");
    }
    let more = turns() - before;
    assert!(more <= 1, "{name}: {more} turns without its guest");
    ended
}

#[test]
fn others_run_beside_an_endless_graph_which_ends_with_its_guest() {
    others_run_beside(&OPERATORS, endless::endless);
    others_run_beside(&LONG_PARTS, endless::endless_with_long_parts);
}

#[test]
fn a_long_graph_of_any_operator_ends_with_its_guest() {
    let others: Vec<OpKind> = every_operator()
        .filter(|kind| !OPERATORS.contains(kind))
        .collect();
    others_run_beside(&others, endless::endless);
}

#[test]
fn fills_and_copies_of_any_length_end_with_their_guest_and_others_run() {
    for is_copy in [false, true] {
        let host = Host::new(ScriptedEngine::new());
        let mut guest = host.guest_of(1);
        let [buffer, src] = [0; 2].map(|_| guest.alloc(HOLLOW_SIZE));
        guest.send(&match is_copy {
            false => Request::Fill {
                buffer,
                offset: 0,
                len: HOLLOW_SIZE,
                value: 1,
            },
            true => Request::Copy {
                dst: buffer,
                dst_offset: 0,
                src,
                src_offset: 0,
                len: HOLLOW_SIZE,
            },
        });
        wait_for_turns(&host, 1, 2);
        let mut other = host.guest_of(2);
        let x = other.alloc(8);
        other.graph(GRAPH, &add(2, x, x, x));
        other.submit(GRAPH);
        other.fence();
        assert!(stats(&host, 1).busy > Duration::ZERO, "nobody pays");
        drop((guest, other));
        host.wait_until_empty();
    }
}

#[test]
fn fills_and_copies_above_64_kib_take_a_turn_on_the_cpu() {
    const SHORT: u64 = 64 << 10;
    let host = Host::new(engine());
    let mut guest = host.guest_of(1);
    let buffer = guest.alloc(4 * SHORT);
    for (len, turns) in [(SHORT, 0), (SHORT + 1, 2)] {
        let (offset, value) = (0, 1);
        guest.send(&Request::Fill {
            buffer,
            offset,
            len,
            value,
        });
        guest.send(&Request::Copy {
            dst: buffer,
            dst_offset: 2 * SHORT,
            src: buffer,
            src_offset: 0,
            len,
        });
        guest.fence();
        assert_eq!(stats(&host, 1).turns, turns, "{len} bytes");
    }
}

#[test]
fn shutdown_cancels_an_endless_graph_and_tells_the_guest() {
    for kind in every_operator() {
        let name = kind.ggml_name();
        ends_promptly(name, || {
            let host = host();
            let attacker = attack(&host, |buffers| endless::endless(kind, buffers));
            let begin = Instant::now();
            host.server.shutdown();
            assert_eq!(attacker.ended(), "the host is shutting down", "{name}");
            begin.elapsed()
        });
    }
}

#[test]
fn the_longest_turn_is_longer_than_a_node_that_no_turn_ends_in() {
    let node_time = Some(Duration::from_secs(1000));
    let turn_time = |engine: &dyn Engine| {
        let limits = Limits::default().with_times(engine, node_time, None);
        limits.turn_time
    };
    // Both engines have memory of the host.
    let scripted = ScriptedEngine::new();
    assert_eq!(turn_time(&*scripted), Some(Duration::from_secs(2000)));
    assert_eq!(turn_time(&*engine()), Some(Duration::from_secs(300)));
}

#[test]
fn a_node_that_would_take_hours_is_refused_with_its_numbers_and_the_session_goes_on() {
    let host = Host::new(engine());
    let mut guest = host.guest_of(1);
    let buffers = [0; 3].map(|_| guest.alloc(BUFFER));
    guest.graph(GRAPH, &endless::endless(OpKind::Pool2d, buffers));
    let Reply::Failed { reason, .. } = guest.receive().0 else {
        panic!("the graph is refused");
    };
    let steps = 3585u64.pow(2) * 512u64.pow(2);
    for words in [
        "node 0 (POOL_2D)",
        &format!("{steps} steps"),
        "the limit is 3600s",
    ] {
        assert!(reason.contains(words), "{words:?} is not in {reason:?}");
    }
    let submit = guest.submit(GRAPH);
    let (reply, _) = guest.receive();
    assert!(
        matches!(&reply, Reply::Failed { request, .. } if *request == submit),
        "{reply:?}"
    );
    let x = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GraphId(2), &add(2, x, x, x));
    guest.submit(GraphId(2));
    assert_eq!(guest.read_f32(x, 2), [2.0, 4.0]);
}

#[test]
fn the_limit_of_a_node_is_that_of_the_configuration() {
    let limits = Limits {
        node_time: Some(Duration::from_nanos(1)),
        ..Limits::default()
    };
    let host = Host::limited(engine(), limits, 64);
    let mut guest = host.guest();
    let x = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.graph(GRAPH, &add(2, x, x, x));
    let (reply, _) = guest.receive();
    assert!(
        matches!(&reply, Reply::Failed { reason, .. } if reason.contains("the limit is 1ns")),
        "{reply:?}"
    );
}

/// A host whose engine compiles the next graph until it is cancelled, and a guest that has sent the
/// graph.
fn compiling() -> (Host, Guest) {
    let engine = ScriptedEngine::new();
    let host = Host::new(Arc::clone(&engine) as Arc<dyn Engine>);
    let mut guest = host.guest();
    let x = guest.alloc_with(&bytes(&[1.0, 2.0]));
    guest.fence();
    let (began, compiles) = mpsc::channel();
    engine.next(Act::CompilesUntilCancelled(began));
    guest.graph(GRAPH, &add(2, x, x, x));
    compiles.recv_timeout(TIMEOUT).expect("compilation begins");
    (host, guest)
}

#[test]
fn compilation_ends_with_its_guest() {
    let (host, guest) = compiling();
    drop(guest);
    host.wait_until_empty();
}

#[test]
fn shutdown_cancels_a_compilation_and_tells_the_guest() {
    let (host, guest) = compiling();
    host.server.shutdown();
    assert_eq!(guest.ended(), "the host is shutting down");
}
