//! Independent guests on one host.

mod common;

use std::thread;
use std::time::Duration;

use common::scripted_engine::{Act, ScriptedEngine};
use common::{Guest, Host, MEMORY, PAGE, TIMEOUT, add, bytes, cpu};
use vgpu_executor::{Limits, inproc};
use vgpu_transport::ir::BufferId;
use vgpu_transport::link::GuestEnd;
use vgpu_transport::wire::{DeviceIndex, GraphId, MAX_PAYLOAD, Offer, Reply, Request};

const GRAPH: GraphId = GraphId(1);

/// A guest that keeps to the protocol. The guest adds 1 to its numbers repeatedly, and checks the
/// result.
fn work(host: &Host, tenant: usize, rounds: usize) {
    const COUNT: u64 = 1000;
    let mut guest = host.guest();
    let first: Vec<f32> = (0..COUNT)
        .map(|i| (tenant * 10_000) as f32 + i as f32)
        .collect();
    let numbers = guest.alloc_with(&bytes(&first));
    let ones = guest.alloc_with(&bytes(&[1.0; COUNT as usize]));
    guest.graph(GRAPH, &add(COUNT, numbers, numbers, ones));
    for round in 1..=rounds {
        guest.submit(GRAPH);
        let expected: Vec<f32> = first.iter().map(|n| n + round as f32).collect();
        assert_eq!(
            guest.read_f32(numbers, COUNT),
            expected,
            "tenant {tenant}, round {round}"
        );
    }
}

/// A guest that violates the protocol or disconnects. `round` selects the fault.
fn misbehave(host: &Host, round: usize) {
    let mut guest = host.connect();
    match round % 6 {
        0 => {
            guest.send_raw(&[0xab; 100], &[]);
        }
        1 => {
            guest.send(&Request::Fence {});
        }
        2 => {
            guest.hello();
            guest.send_raw(&[round as u8; 1000], &[round as u8; MAX_PAYLOAD]);
        }
        3 => {
            guest.hello();
            guest.send(&Request::Free {
                buffer: BufferId(round as u64),
            });
        }
        4 => {
            guest.hello();
            let buffer = guest.alloc(4096);
            guest.image(GRAPH, &vec![round as u8; 4096]);
            guest.submit(GRAPH);
            guest.send(&Request::Free { buffer });
        }
        // The guest disconnects while a graph runs.
        _ => {
            guest.hello();
            guest.alloc(1 << 20);
            let request = Request::Graph {
                graph: GRAPH,
                offset: 0,
                total: 1 << 20,
            };
            guest.send_with(&request, &[0; 4096]);
            return;
        }
    }
    let reason = guest.ended();
    assert!(reason.contains("broke the protocol"), "{reason}");
}

#[test]
fn hostile_guests_do_not_affect_other_guests() {
    let host = Host::new(cpu());
    thread::scope(|scope| {
        for tenant in 0..4 {
            let host = &host;
            scope.spawn(move || work(host, tenant, 200));
        }
        scope.spawn(|| (0..60).for_each(|round| misbehave(&host, round)));
    });
    host.wait_until_empty();
    assert_eq!(
        host.engine.memory().free,
        MEMORY,
        "a session has left memory behind"
    );
}

#[test]
fn memory_of_one_tenant_is_zero_for_the_next() {
    let host = Host::new(cpu());
    // More than half of the memory, so that the next tenant gets the same memory.
    let size = MEMORY / 4 * 3;
    let mut first = host.guest();
    let secret = first.alloc(size);
    first.send(&Request::Fill {
        buffer: secret,
        offset: 0,
        len: size,
        value: 0x5e,
    });
    assert_eq!(first.read(secret, size - 4, 4), [0x5e; 4]);
    drop(first);
    host.wait_until_empty();

    let mut second = host.guest();
    let buffer = second.alloc(size);
    for offset in (0..size).step_by(MAX_PAYLOAD) {
        let part = second.read(buffer, offset, MAX_PAYLOAD as u64);
        assert!(part.iter().all(|&b| b == 0), "a byte of another tenant");
    }
}

/// A guest need not unmap a buffer that it has freed.
#[test]
fn mapping_of_a_freed_buffer_reaches_no_later_one() {
    const SIZE: u64 = 1 << 20;
    let host = Host::new(cpu());
    let mut first = host.guest_of(1);
    let buffer = first.new_buffer();
    let kept = first.alloc_mapped(buffer, SIZE).expect("a shared buffer");
    let [secret, late] = [0x5e, 0x6f].map(|byte| vec![byte; SIZE as usize]);
    first.write(buffer, 0, &secret);
    first.fence();
    let mut seen = vec![0; SIZE as usize];
    kept.bytes(0..seen.len()).copy_to(&mut seen);
    assert!(seen == secret, "the guest maps its buffer");
    first.send(&Request::Free { buffer });
    first.fence();
    kept.bytes(0..seen.len()).copy_to(&mut seen);
    assert!(
        seen.iter().all(|&byte| byte == 0),
        "pages of a freed buffer"
    );

    let mut second = host.guest_of(2);
    let buffer = second.alloc(SIZE);
    kept.bytes_mut(0..late.len()).copy_from((&late[..]).into());
    let zeros = second.read(buffer, 0, SIZE);
    assert!(
        zeros.iter().all(|&byte| byte == 0),
        "a byte of another tenant"
    );
    second.write(buffer, 0, &secret);
    second.fence();
    kept.bytes(0..seen.len()).copy_to(&mut seen);
    assert!(seen == late, "the first guest sees another tenant's buffer");
}

#[test]
fn memory_freed_within_a_session_is_zero_again_too() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    for _ in 0..10 {
        let buffer = guest.alloc_with(&[0x5e; 8192]);
        guest.send(&Request::Free { buffer });
        let buffer = guest.alloc(8192);
        assert_eq!(guest.read(buffer, 0, 8192), [0; 8192]);
        guest.send(&Request::Free { buffer });
    }
}

#[test]
fn guest_that_allocates_all_memory_does_not_affect_existing_allocations() {
    let host = Host::new(cpu());
    let mut small_guest = host.guest();
    let kept = small_guest.alloc_with(b"mine");
    let mut large_guest = host.guest();
    large_guest.alloc(MEMORY - PAGE);
    let buffer = small_guest.new_buffer();
    let reply = small_guest.ask(&Request::Alloc { buffer, size: 1 });
    let Reply::Refused { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(
        reason.contains("out of memory: 4.0 KiB wanted, 0 B of 64.0 MiB free"),
        "{reason}"
    );
    assert_eq!(small_guest.read(kept, 0, 4), b"mine");
}

#[test]
fn disconnect_during_any_request_frees_all_resources() {
    let host = Host::new(cpu());
    let mut other_guest = host.guest();
    let kept = other_guest.alloc_with(b"mine");
    // The guest disconnects before HELLO, after HELLO, while a graph runs, and with graphs and
    // replies in flight.
    for stage in 0..4 {
        let mut guest = host.connect();
        if stage > 0 {
            guest.hello();
            let a = guest.alloc_with(&bytes(&[1.0; 1 << 16]));
            guest.graph(GRAPH, &add(1 << 16, a, a, a));
        }
        if stage > 1 {
            let request = Request::Graph {
                graph: GraphId(2),
                offset: 0,
                total: 100,
            };
            guest.send_with(&request, &[0; 50]);
        }
        if stage > 2 {
            for _ in 0..100 {
                guest.submit(GRAPH);
            }
            let read = Request::Read {
                buffer: BufferId(1),
                offset: 0,
                len: 1 << 18,
            };
            for _ in 0..8 {
                guest.send(&read);
            }
        }
        drop(guest);
        let start = std::time::Instant::now();
        while host.server.sessions().len() > 1 {
            assert!(
                start.elapsed() < TIMEOUT,
                "the session of stage {stage} goes on"
            );
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(host.engine.memory().free, MEMORY - PAGE, "stage {stage}");
        assert_eq!(other_guest.read(kept, 0, 4), b"mine");
    }
}

#[test]
fn guests_above_the_limit_are_refused_until_a_session_ends() {
    let host = Host::limited(cpu(), Limits::default(), 2);
    let first = host.guest();
    let second = host.guest();
    let reason = host.connect().ended();
    assert!(
        reason.contains("already serves 2 guests, its limit is 2"),
        "{reason}"
    );
    drop(first);
    let start = std::time::Instant::now();
    while host.server.sessions().len() > 1 {
        assert!(start.elapsed() < TIMEOUT);
        thread::sleep(Duration::from_millis(1));
    }
    host.guest().fence();
    drop(second);
}

#[test]
fn shutdown_completes_the_running_graph_and_notifies_every_guest() {
    let engine = ScriptedEngine::new();
    let host = Host::new(engine.clone());
    let idle = host.guest();
    let silent = host.connect();
    let mut busy = host.guest();
    let a = busy.alloc(4);
    let (running, is_running) = std::sync::mpsc::channel();
    let (go_on, goes_on) = std::sync::mpsc::channel();
    engine.next(Act::Waits(running, goes_on));
    busy.graph(GRAPH, &add(1, a, a, a));
    let submitted = busy.submit(GRAPH);
    let next = busy.submit(GRAPH);
    is_running.recv().expect("the graph runs");

    let Host { server, engine, .. } = host;
    let shutdown = thread::spawn(move || server.shutdown());
    for guest in [idle, silent] {
        assert_eq!(guest.ended(), "the host is shutting down");
    }
    assert!(!shutdown.is_finished(), "the graph still runs");
    assert!(busy.end.retired() < submitted);
    go_on.send(()).expect("the graph waits");
    busy.end
        .wait_retired(submitted)
        .expect("the graph is finished");
    shutdown.join().expect("no panic");
    assert!(
        busy.end.retired() < next,
        "a graph that was not running was begun"
    );
    assert_eq!(busy.ended(), "the host is shutting down");
    assert_eq!(engine.memory().free, MEMORY);
}

#[test]
fn control_characters_are_removed_from_guest_names() {
    let host = Host::new(cpu());
    let mut guest = host.connect();
    let welcome = guest.ask(&Request::Hello {
        offer: Offer::SERVED,
        name: format!("\x1b[2Jllama\r\n{}", "x".repeat(1000)),
        device: DeviceIndex(0),
    });
    assert!(matches!(welcome, Reply::Welcome { .. }));
    let name = host.server.sessions()[0]
        .guest
        .clone()
        .expect("it said hello");
    assert!(
        name.starts_with("[2Jllamaxxx") && name.len() == 200,
        "{name:?}"
    );
}

#[test]
fn in_process_executor_serves_and_ends_with_its_guest() {
    let engine = cpu();
    for round in 0..3 {
        let end = inproc::start(engine.clone()).expect("a thread and a window");
        let mut guest = Guest::new(Box::new(end));
        guest.hello();
        let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
        guest.graph(GRAPH, &add(2, a, a, a));
        guest.submit(GRAPH);
        assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
        if round == 2 {
            // The guest disconnects with requests in flight.
            for _ in 0..100 {
                guest.submit(GRAPH);
            }
        }
        drop(guest);
        assert_eq!(engine.memory().free, MEMORY, "the executor is still there");
    }
}

#[test]
fn in_process_executor_can_be_dropped_after_it_ended_a_session() {
    let mut end = inproc::start(cpu()).expect("a thread and a window");
    end.send(&[1, 2, 3], (&[][..]).into())
        .expect("the link is up");
    let mut guest = Guest::new(Box::new(end));
    let (reply, _) = guest.receive();
    assert!(matches!(reply, Reply::Ended { .. }), "{reply:?}");
    drop(guest);
}
