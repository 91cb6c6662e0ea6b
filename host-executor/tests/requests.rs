//! Valid use of every request.

mod common;

use std::sync::mpsc;
use std::time::Duration;

use common::scripted_engine::{Act, ScriptedEngine, UNREADABLE_SIZE};
use common::{Guest, Host, MEMORY, PAGE, add, bytes, cpu, floats, get_rows, image};
use vgpu_executor::Limits;
use vgpu_transport::ir::{BufferId, OpKind, patch};
use vgpu_transport::size::shown;
use vgpu_transport::wire::{
    DeviceCount, GraphId, HostVersions, MAX_PAYLOAD, Offer, ProtocolVersion, Reply, Request,
    VersionRange,
};

const GRAPH: GraphId = GraphId(7);

#[test]
fn hello_reply_contains_identity_and_capabilities_of_the_host() {
    let host = Host::new(cpu());
    let Reply::Welcome {
        protocol,
        served,
        session,
        engine,
        description,
        memory_total,
        memory_free,
        capabilities,
        devices,
    } = host.connect().hello()
    else {
        unreachable!("hello() has checked it")
    };
    assert_eq!(protocol, ProtocolVersion::CURRENT);
    assert_eq!(served, HostVersions(VersionRange::SERVED));
    assert_eq!(session, 1);
    assert_eq!(engine, "cpu");
    assert_eq!(description, host.engine.description());
    assert_eq!((memory_total, memory_free), (MEMORY, MEMORY));
    assert_eq!(&capabilities, host.engine.capabilities());
    assert_eq!(devices, DeviceCount(1));
    assert!(capabilities.rules().iter().any(|r| r.op == OpKind::MulMat));

    let Reply::Welcome { session, .. } = host.connect().hello() else {
        unreachable!("hello() has checked it")
    };
    assert_eq!(session, 2);
}

/// Everything that a guest does, with the messages of each version, beside a guest of another one.
#[test]
fn guests_of_every_served_version_compute() {
    let host = Host::new(cpu());
    let mut guests = Vec::new();
    for version in ProtocolVersion::ALL {
        let mut guest = host.connect();
        let Reply::Welcome {
            protocol, served, ..
        } = guest.hello_with(Offer::only(version))
        else {
            unreachable!("hello_with() has checked it")
        };
        assert_eq!(protocol, version);
        let expected = match version {
            ProtocolVersion::V3 => VersionRange::only(version),
            ProtocolVersion::V4 => VersionRange::SERVED,
        };
        assert_eq!(served, HostVersions(expected));
        guests.push(guest);
    }
    for guest in &mut guests {
        let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
        guest.graph(GRAPH, &add(2, a, a, a));
        guest.submit(GRAPH);
        assert_eq!(guest.read_f32(a, 2), [2.0, 4.0]);
        let freed = guest.alloc(64);
        guest.send(&Request::Free { buffer: freed });
        guest.fence();
    }
    let sessions = host.server.status_handle().status().sessions;
    let versions: Vec<_> = sessions.iter().map(|session| session.protocol).collect();
    assert_eq!(versions, [Some(3), Some(4)]);
}

#[test]
fn memory_is_zeroed_written_read_filled_copied_and_freed() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let a = guest.alloc(1 << 20);
    let b = guest.alloc(64);
    assert_eq!(guest.read(a, 0, 1 << 20), vec![0; 1 << 20]);

    guest.write(a, 100, b"tensor");
    guest.send(&Request::Fill {
        buffer: a,
        offset: 106,
        len: 4,
        value: b'!',
    });
    guest.send(&Request::Copy {
        dst: b,
        dst_offset: 1,
        src: a,
        src_offset: 99,
        len: 12,
    });
    assert_eq!(guest.read(b, 0, 14), b"\0\0tensor!!!!\0\0");
    // Overlapping ranges of one buffer.
    guest.send(&Request::Copy {
        dst: b,
        dst_offset: 4,
        src: b,
        src_offset: 2,
        len: 10,
    });
    assert_eq!(guest.read(b, 0, 14), b"\0\0tetensor!!!!");

    let memory = |guest: &mut common::Guest| match guest.ask(&Request::Memory {}) {
        Reply::Memory { total, free, .. } => (total, free),
        other => panic!("{other:?}"),
    };
    assert_eq!(memory(&mut guest), (MEMORY, MEMORY - (1 << 20) - PAGE));
    guest.send(&Request::Free { buffer: a });
    assert_eq!(memory(&mut guest), (MEMORY, MEMORY - PAGE));
}

#[test]
fn size_zero_is_accepted_by_every_request() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let empty = guest.alloc(0);
    guest.write(empty, 0, &[]);
    assert_eq!(guest.read(empty, 0, 0), Vec::<u8>::new());
    guest.send(&Request::Fill {
        buffer: empty,
        offset: 0,
        len: 0,
        value: 1,
    });
    guest.send(&Request::Copy {
        dst: empty,
        dst_offset: 0,
        src: empty,
        src_offset: 0,
        len: 0,
    });
    guest.send(&Request::Free { buffer: empty });
    guest.fence();
}

#[test]
fn largest_payload_is_written_and_read() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let data: Vec<u8> = (0..MAX_PAYLOAD).map(|i| (i * 7 + i / 256) as u8).collect();
    let buffer = guest.alloc_with(&data);
    assert_eq!(guest.read(buffer, 0, MAX_PAYLOAD as u64), data);
}

#[test]
fn a_graph_is_sent_once_and_runs_as_often_as_submitted() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let a = guest.alloc_with(&bytes(&[1.0, 2.0, 3.0, 4.0]));
    let b = guest.alloc_with(&bytes(&[0.5; 4]));
    guest.graph(GRAPH, &add(4, a, a, b));
    for _ in 0..3 {
        guest.submit(GRAPH);
    }
    assert_eq!(guest.read_f32(a, 4), [2.5, 3.5, 4.5, 5.5]);

    let session = &host.server.sessions()[0];
    assert_eq!(session.guest.as_deref(), Some("test"));
    assert_eq!(session.stats.graphs_run, 3);
    assert_eq!(session.stats.nodes_run, 3);
    assert_eq!((session.stats.buffers, session.stats.graphs), (2, 1));
    assert_eq!(session.stats.buffer_bytes, 32);
    assert!(session.stats.busy > Duration::ZERO);
    let submits = session
        .stats
        .requests_by_kind()
        .find(|(k, _)| *k == "SUBMIT");
    assert_eq!(submits, Some(("SUBMIT", 3)));
}

#[test]
fn graph_parts_may_have_any_size_and_interleave_with_other_requests() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let a = guest.alloc_with(&bytes(&[1.0, 2.0]));
    let b = guest.alloc_with(&bytes(&[10.0, 20.0]));
    let image = image(&add(2, a, a, b));
    let mut offset = 0;
    for part in image.chunks(13) {
        let total = image.len() as u64;
        guest.send_with(
            &Request::Graph {
                graph: GRAPH,
                offset,
                total,
            },
            part,
        );
        offset += part.len() as u64;
        guest.fence();
    }
    guest.submit(GRAPH);
    assert_eq!(guest.read_f32(a, 2), [11.0, 22.0]);
}

#[test]
fn a_graph_is_replaced_by_one_of_the_same_name_and_forgotten_on_request() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let a = guest.alloc_with(&bytes(&[1.0]));
    let b = guest.alloc_with(&bytes(&[10.0]));
    guest.graph(GRAPH, &add(1, a, a, a));
    guest.graph(GRAPH, &add(1, a, a, b));
    guest.submit(GRAPH);
    assert_eq!(guest.read_f32(a, 1), [11.0]);
    assert_eq!(host.server.sessions()[0].stats.graphs, 1);
    guest.send(&Request::Forget { graph: GRAPH });
    // A guest cannot know which graphs the host has dropped with a buffer.
    guest.send(&Request::Forget { graph: GRAPH });
    guest.fence();
    assert_eq!(host.server.sessions()[0].stats.graphs, 0);
    guest.submit(GRAPH);
    assert!(
        guest
            .ended()
            .contains("graph 7, which was never sent, was forgotten")
    );
}

#[test]
fn requests_retire_in_order_without_a_message() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let a = guest.alloc_with(&bytes(&[1.0]));
    guest.graph(GRAPH, &add(1, a, a, a));
    let last = (0..50).map(|_| guest.submit(GRAPH)).last().unwrap();
    guest.end.wait_retired(last).unwrap();
    assert!(guest.end.retired() >= last);
    assert_eq!(guest.end.try_receive(&mut Vec::new()), Ok(false));
}

#[test]
fn an_allocation_over_the_budget_is_refused_and_the_session_goes_on() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    for (size, wanted) in [(MEMORY + 1, MEMORY + PAGE), (u64::MAX, u64::MAX)] {
        let buffer = guest.new_buffer();
        let reply = guest.ask(&Request::Alloc { buffer, size });
        let Reply::Refused { reason, .. } = reply else {
            panic!("{reply:?}")
        };
        assert!(
            reason.contains(&format!("{} wanted", shown(wanted))),
            "{reason}"
        );
    }
    let buffer = guest.alloc(MEMORY / 2);
    assert_eq!(guest.read(buffer, MEMORY / 2 - 4, 4), [0; 4]);
}

/// A guest that counts up leaves a gap for each refused request.
#[test]
fn any_number_of_refused_allocations_leaves_the_session_usable() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    for _ in 0..20_000 {
        guest.refusal(MEMORY + 1);
        let buffer = guest.alloc(0);
        guest.send(&Request::Free { buffer });
    }
    let last = guest.alloc_with(&bytes(&[3.0]));
    assert_eq!(last, BufferId(40_001));
    guest.graph(GRAPH, &add(1, last, last, last));
    guest.submit(GRAPH);
    assert_eq!(guest.read_f32(last, 1), [6.0]);
    // The ids end where they end, and the host does not count beyond.
    let last = BufferId(u64::MAX);
    guest.alloc_mapped(last, 4);
    guest.write(last, 0, &bytes(&[5.0]));
    assert_eq!(guest.read_f32(last, 1), [5.0]);
}

#[test]
fn one_buffer_too_many_is_refused_and_the_session_goes_on() {
    let limits = Limits {
        buffers: 3,
        ..Limits::default()
    };
    let host = Host::limited(cpu(), limits, 1);
    let mut guest = host.guest();
    let first = guest.alloc(8);
    guest.alloc(8);
    guest.alloc(8);
    let buffer = BufferId(100);
    let reply = guest.ask(&Request::Alloc { buffer, size: 8 });
    let Reply::Refused { reason, .. } = reply else {
        panic!("{reply:?}")
    };
    assert!(reason.contains("3 buffers"), "{reason}");
    guest.send(&Request::Free { buffer: first });
    // The id of the refused buffer is still unused.
    guest.alloc_mapped(buffer, 8);
}

#[test]
fn an_index_out_of_range_fails_the_graph_and_the_session_goes_on() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let table = guest.alloc_with(&bytes(&[1.0, 2.0, 3.0, 4.0]));
    let ids = guest.alloc(8);
    let dst = guest.alloc(16);
    guest.graph(GRAPH, &get_rows(2, dst, (table, 2), (ids, 2)));
    for bad in [2i32, -1, i32::MIN, i32::MAX] {
        guest.write(ids, 4, &bad.to_le_bytes());
        let request = guest.submit(GRAPH);
        let (reply, _) = guest.receive();
        let Reply::Failed {
            request: of,
            reason,
        } = reply
        else {
            panic!("{reply:?}")
        };
        assert_eq!(of, request);
        assert!(
            reason.contains("GET_ROWS") && reason.contains(&format!("index {bad} ")),
            "{reason}"
        );
    }
    guest.write(ids, 0, &[1, 0, 0, 0, 0, 0, 0, 0]);
    guest.submit(GRAPH);
    assert_eq!(floats(&guest.read(dst, 0, 16)), [3.0, 4.0, 1.0, 2.0]);
}

#[test]
fn a_failure_arrives_before_its_request_retires() {
    let engine = ScriptedEngine::new();
    let host = Host::new(engine.clone());
    let mut guest = host.guest();
    let a = guest.alloc(4);
    engine.next(Act::KernelPanics);
    guest.graph(GRAPH, &add(1, a, a, a));
    let request = guest.submit(GRAPH);
    guest.end.wait_retired(request).unwrap();
    let mut message = Vec::new();
    assert_eq!(guest.end.try_receive(&mut message), Ok(true));
    let reply = Reply::decode(guest.protocol, &message).unwrap();
    let Reply::Failed {
        request: of,
        reason,
    } = reply
    else {
        panic!("{reply:?}")
    };
    assert_eq!(of, request);
    assert!(reason.contains("told to fail"), "{reason}");
    guest.fence();
}

/// A guest with a graph that is in flight, and then succeeds or fails.
fn guest_with_a_launch(
    fails: bool,
) -> (Host, Guest, BufferId, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let engine = ScriptedEngine::new();
    let host = Host::new(engine.clone());
    let mut guest = host.guest();
    let a = guest.alloc_with(&[1; 4]);
    let (running, runs) = mpsc::channel();
    let (go, go_on) = mpsc::channel();
    engine.next(Act::Launches {
        running,
        go_on,
        fails,
    });
    guest.graph(GRAPH, &add(1, a, a, a));
    (host, guest, a, runs, go)
}

#[test]
fn read_after_a_graph_is_started_before_the_host_waits() {
    let (_host, mut guest, a, runs, go) = guest_with_a_launch(false);
    let read = Request::Read {
        buffer: a,
        offset: 0,
        len: 4,
    };
    for _ in 0..2 {
        guest.write(a, 0, &[1; 4]);
        let submit = guest.submit(GRAPH);
        runs.recv().unwrap();
        let request = guest.send(&read);
        go.send(()).unwrap();
        // The plan writes 9 when the host waits for the plan. A read value of 9 shows that the host
        // has waited.
        assert_eq!(guest.receive(), (Reply::Data { request }, vec![1; 4]));
        guest.end.wait_retired(submit).unwrap();
        assert_eq!(guest.read(a, 0, 4), [9; 4]);
    }
    // Without a READ behind the graph, the host waits for the graph first.
    guest.submit(GRAPH);
    runs.recv().unwrap();
    guest.write(a, 0, &[2; 2]);
    go.send(()).unwrap();
    assert_eq!(guest.read(a, 0, 4), [2, 2, 9, 9]);
}

#[test]
fn a_graph_that_fails_while_it_is_read_fails_before_the_answer() {
    let (_host, mut guest, a, runs, go) = guest_with_a_launch(true);
    let submit = guest.submit(GRAPH);
    runs.recv().unwrap();
    let read = guest.send(&Request::Read {
        buffer: a,
        offset: 0,
        len: 4,
    });
    go.send(()).unwrap();
    let (reply, _) = guest.receive();
    let Reply::Failed { request, reason } = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(request, submit);
    assert!(reason.contains("told to fail"), "{reason}");
    let data = Reply::Data { request: read };
    assert_eq!(guest.receive(), (data, vec![9; 4]));
    guest.fence();
}

#[test]
fn violation_during_a_running_graph_ends_the_session() {
    let (host, mut guest, a, runs, go) = guest_with_a_launch(false);
    guest.submit(GRAPH);
    runs.recv().unwrap();
    guest.send(&Request::Read {
        buffer: a,
        offset: 1,
        len: 4,
    });
    go.send(()).unwrap();
    let (reply, _) = guest.receive();
    assert!(matches!(reply, Reply::Ended { .. }), "{reply:?}");
    host.wait_until_empty();
}

#[test]
fn a_graph_that_the_engine_cannot_compile_fails_each_time_and_the_session_goes_on() {
    let engine = ScriptedEngine::new();
    let host = Host::new(engine.clone());
    let mut guest = host.guest();
    let a = guest.alloc(4);
    engine.next(Act::CompileFails);
    guest.graph(GRAPH, &add(1, a, a, a));
    guest.submit(GRAPH);
    for kind in ["GRAPH", "SUBMIT"] {
        let (reply, _) = guest.receive();
        let Reply::Failed { reason, .. } = reply else {
            panic!("{reply:?}")
        };
        assert!(reason.starts_with(&format!("{kind} 7 failed")), "{reason}");
    }
    guest.fence();
}

#[test]
fn operations_that_a_device_cannot_do_fail_and_the_session_goes_on() {
    let host = Host::new(ScriptedEngine::new());
    let mut guest = host.guest();
    let buffer = guest.alloc(UNREADABLE_SIZE);
    guest.send(&Request::Fill {
        buffer,
        offset: 0,
        len: 1,
        value: 1,
    });
    guest.send(&Request::Copy {
        dst: buffer,
        dst_offset: 0,
        src: buffer,
        src_offset: 0,
        len: 1,
    });
    for kind in ["FILL", "COPY"] {
        let (reply, _) = guest.receive();
        let Reply::Failed { reason, .. } = reply else {
            panic!("{reply:?}")
        };
        assert!(reason.starts_with(&format!("{kind} 1 failed")), "{reason}");
    }
    guest.fence();
}

#[test]
fn patched_graph_is_separate_and_its_base_is_kept() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let [a, b, sum] = [1.0f32, 10.0, 0.0].map(|x| guest.alloc_with(&bytes(&[x; 8])));
    let (small, large) = (add(4, sum, a, b), add(8, sum, a, b));
    guest.graph(GraphId(1), &small);
    let patch = patch::diff(&small.encode(), &large.encode(), 1000).expect("equal lengths");
    let patch: Vec<u8> = patch.iter().flat_map(|word| word.to_le_bytes()).collect();
    let request = Request::Patch {
        graph: GraphId(2),
        base: GraphId(1),
    };
    guest.send_with(&request, &patch);
    guest.submit(GraphId(1));
    assert_eq!(
        guest.read_f32(sum, 8),
        [11.0, 11.0, 11.0, 11.0, 0.0, 0.0, 0.0, 0.0]
    );
    guest.submit(GraphId(2));
    assert_eq!(guest.read_f32(sum, 8), [11.0; 8]);
    // A graph that was dropped with its buffer cannot be a base; a graph made from it is
    // independent.
    guest.send(&Request::Forget { graph: GraphId(1) });
    guest.submit(GraphId(2));
    guest.fence();
    let stats = host.server.sessions()[0].stats;
    assert_eq!((stats.full_graphs, stats.patches), (1, 1));
}

#[test]
fn a_shared_buffer_is_written_and_read_without_a_message() {
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let [a, b, sum] = [1, 2, 3].map(BufferId);
    let maps = [a, b, sum].map(|buffer| {
        let map = guest.alloc_mapped(buffer, 5000);
        map.expect("the CPU's memory can be mapped")
    });
    for (map, values) in maps.iter().zip([[1.0f32, 2.0], [10.0, 20.0]]) {
        map.bytes_mut(0..8).copy_from(bytes(&values)[..].into());
    }
    guest.graph(GRAPH, &add(2, sum, a, b));
    let request = guest.submit(GRAPH);
    guest.end.wait_retired(request).expect("it runs");
    let mut seen = [0; 8];
    maps[2].bytes(0..8).copy_to(&mut seen);
    assert_eq!(floats(&seen), [11.0, 22.0]);
    // Messages access the same memory.
    assert_eq!(guest.read_f32(sum, 2), [11.0, 22.0]);
    // Memory that a guest keeps mapped is not given to another guest.
    drop(guest);
    host.wait_until_empty();
    maps[2].bytes_mut(0..8).copy_from((&[7; 8][..]).into());
    let mut other = host.guest();
    let map = other.alloc_mapped(BufferId(1), 5000).expect("as before");
    map.bytes(0..8).copy_to(&mut seen);
    assert_eq!(seen, [0; 8]);
}

#[test]
fn buffers_are_shared_only_if_the_host_allows_it() {
    let limits = Limits {
        map_buffers: false,
        ..Limits::default()
    };
    let host = Host::limited(cpu(), limits, 1);
    let mut guest = host.guest();
    assert!(guest.alloc_mapped(BufferId(1), 5000).is_none());
}

/// A guest changes indices while the kernel reads them. Each index that the kernel uses is in
/// range, or the graph fails.
#[test]
fn write_during_a_graph_does_not_affect_other_guests() {
    const ROWS: u64 = 64;
    const COUNT: u64 = 50_000;
    let host = Host::new(cpu());
    let mut guest = host.guest();
    let (table, dst, ids) = (guest.alloc(ROWS * 16), guest.alloc(COUNT * 16), BufferId(3));
    let map = guest.alloc_mapped(ids, COUNT * 4).expect("as before");
    guest.graph(GRAPH, &get_rows(4, dst, (table, ROWS), (ids, COUNT)));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut failed = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let wild = [0u32, 63, 64, u32::MAX, 1 << 31, 12_345];
            let mut at = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                at = (at + 7919) % COUNT as usize;
                let id = wild[at % wild.len()].to_le_bytes();
                map.bytes_mut(4 * at..4 * at + 4).copy_from(id[..].into());
            }
        });
        for _ in 0..50 {
            let submitted = guest.submit(GRAPH);
            let fence = guest.send(&Request::Fence {});
            match guest.receive().0 {
                Reply::Failed { request, reason } => {
                    assert_eq!(request, submitted);
                    assert!(reason.contains("out of range"), "{reason}");
                    assert_eq!(guest.receive().0, Reply::Done { request: fence });
                    failed += 1;
                }
                reply => assert_eq!(reply, Reply::Done { request: fence }),
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(failed > 0, "the indices were never wrong");
}
